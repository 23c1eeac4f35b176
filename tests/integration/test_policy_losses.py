"""`update_actor` with every loss, options and functions of one's own, on real hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.algorithms.loss import policy_loss
from hybridflow.algorithms.totals import Totals
from tests import tiny_models
from tests.tiny_models import make_rows

ROWS = 9


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("policy"), tokenizer=False)


@pytest.fixture(scope="module")
def actor(pool, policy):
    """Two replicas whose weights stay what they are."""
    made = hf.ActorWorker.on(
        pool[:2], name="losses", model=policy, train=hf.Megatron(micro_tokens=30), optim=hf.SGD(lr=0.0)
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def rows() -> hf.Batch:
    rows, generator = make_rows(ROWS), torch.Generator().manual_seed(1)
    old = rows["old_log_probs"]

    def near(scale: float) -> hf.Ragged:
        return old.with_values(old.values + scale * torch.randn(len(old.values), generator=generator))

    return rows.with_columns(log_probs=near(0.3), ref_log_probs=near(0.5))


def expected(rows: hf.Batch, log_probs: hf.Ragged, loss: Any, options: dict[str, Any]) -> dict[str, float]:
    """The metrics of the whole batch in one piece, from the log-probabilities that the actor computes."""
    mask = rows["response_mask"]
    totals = Totals(float(mask.values.sum()), ROWS, longest=float(mask.lengths.max()))
    _, metrics = policy_loss(loss, **options)({"log_probs": log_probs}, rows, totals)
    return {name: float(value) for name, value in metrics.items()}


def test_every_loss_trains_and_reports_what_the_whole_batch_gives(actor, rows):
    def mine(log_probs, old_log_probs, advantages, mask, *, power=1.0):
        ratio = (log_probs.values - old_log_probs.values).clamp(-2, 2).exp()
        return -(ratio**power) * advantages.values

    batch = hf.BatchRef.from_batch(rows, actor.session)
    log_probs = actor.compute_log_prob(batch).get()["old_log_probs"]
    reject = hf.RolloutCorrection("geometric", mode="reject", high=1.05)
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("ppo", {"rollout_correction": "token", "kl_coef": 0.1}),
        ("gspo", {"rollout_correction": "sequence"}),
        ("cispo", {"aggregation": "seq-mean-token-sum-norm"}),
        ("geo_mean", {"rollout_correction": reject}),
        ("sapo", {"aggregation": "seq-mean-token-sum-norm", "norm": 12}),
        ("reinforce", {"rollout_correction": reject}),
        ("pretrain", {"coef": 0.5}),
        (mine, {"power": 0.5, "rollout_correction": "geometric"}),
    ]
    updates = [actor.update_actor(batch, loss=loss, **options) for loss, options in cases]
    for (loss, options), update in zip(cases, updates, strict=True):
        found, figures = update.get(), expected(rows, log_probs, loss, options)
        assert found.keys() == figures.keys() | {"actor/grad_norm", "actor/lr", "actor/skipped"}
        for name, value in figures.items():
            assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"{loss} {name}"
        assert found["actor/grad_norm"] > 0


def test_what_is_wrong_with_a_loss_is_said_by_the_call(actor, rows):
    batch = hf.BatchRef.from_batch(rows, actor.session)
    for options, message in (
        ({"loss": "gsp"}, "policy loss 'gsp' is unknown. Did you mean 'gspo'"),
        ({"dual_clip": 0.5}, "dual_clip=0.5 must be a finite number above 1"),
        ({"rollout_correction": "seq"}, "RolloutCorrection.level=.seq.. is unknown"),
    ):
        with pytest.raises(hf.errors.ConfigError, match=message):
            actor.update_actor(batch, **options)
    with pytest.raises(hf.errors.MissingColumnError, match="'log_probs'"):
        actor.update_actor(batch.without("log_probs"), rollout_correction="token")
    with pytest.raises(hf.errors.MissingColumnError, match="'ref_log_probs'"):
        actor.update_actor(batch.without("ref_log_probs"), loss="reinforce", kl_coef=0.1)
    actor.update_actor(batch.without("old_log_probs"), loss="reinforce").get()  # reads none

    def wrong(log_probs, mask):
        return log_probs.values.sum()

    with pytest.raises(hf.errors.WorkerError, match="one value per response token"):
        actor.update_actor(batch, loss=wrong).get()
    assert actor.update_actor(batch, loss="sapo").get()["actor/grad_norm"] > 0  # and the actor goes on
