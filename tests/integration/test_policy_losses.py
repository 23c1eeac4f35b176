"""`update_actor` with every loss, options and functions of one's own, on real hosts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray._private.ray_logging import global_worker_stdstream_dispatcher as worker_output

import hybridflow as hf
from hybridflow.algorithms.losses.loss import Totals
from hybridflow.algorithms.registry import policy_loss
from hybridflow.errors import DivergenceError
from tests.tiny_models import cut_rows, make_rows

ROWS = 9


class Spoiled(hf.ActorWorker):
    """An actor whose first parameter can become nan."""

    def spoil(self) -> None:
        self.kept = {name: tensor.clone() for name, tensor in self.engine.storage().items()}
        self.engine.storage()[next(iter(self.kept))].fill_(math.nan)

    def mend(self) -> None:
        for name, tensor in self.kept.items():
            self.engine.storage()[name].copy_(tensor)


@pytest.fixture(scope="module")
def actor(keep, pool, policy):
    """Two replicas whose weights stay what they are."""
    return keep(
        Spoiled, pool[:2], name="losses", model=policy, train=hf.Megatron(micro_tokens=30), optim=hf.SGD(lr=0.0)
    )


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


def test_errors_of_a_replicas_rows_name_the_drivers(actor, rows):
    for row in (1, ROWS - 1):
        values = rows["response_mask"].values.to(torch.int64)
        values[rows["response_mask"].offsets[row]] = 2
        with pytest.raises(hf.errors.BatchError, match=rf"row {row} has 2; a token counts or does not"):
            actor.update_actor(rows.with_columns(response_mask=rows["response_mask"].with_values(values))).get()
        heat = torch.ones(ROWS)
        heat[row] = math.nan
        with pytest.raises(hf.errors.BatchError, match=rf"temperature: row {row} is nan"):
            actor.compute_log_prob(rows.with_columns(temperature=heat)).get()


def lengths(outputs, rows, totals):
    """Of the rows: each replica knows its own; one without rows knows no figure."""
    found = rows["response_ids"].lengths.to(torch.float32)
    share = outputs["log_probs"].values.sum() * 0.0
    return share, {"most": found.max(), "least": found.min(), "rows": torch.tensor(len(found) / totals.rows)}


lengths.metrics = {"most": "max", "least": "min"}


def test_figures_of_a_loss_are_joined_as_declared(actor, rows):
    for some in (rows, rows[[4]]):  # the second replica has no row
        counts = some["response_ids"].lengths
        found = actor.update_actor(some, loss=lengths).get()
        assert (found["most"], found["least"]) == (int(counts.max()), int(counts.min()))
        assert found["rows"] == pytest.approx(1.0)
    several = actor.update_actor(rows, loss=lengths, minibatches=3).get()
    counts = rows["response_ids"].lengths
    assert (several["most"], several["least"]) == (int(counts.max()), int(counts.min()))
    assert several["rows"] == pytest.approx(1.0)


def test_an_update_that_fails_later_says_which_steps_were_made(actor, rows):
    def refuses_two(outputs, rows, totals):
        if 2.0 in rows["rewards"].tolist():
            raise ValueError("no rewards of 2")
        return outputs["log_probs"].values.sum() * 0.0, {}

    marked = rows.with_columns(rewards=torch.tensor([0.0] * (ROWS - 1) + [2.0]))  # of the last mini-batch
    with pytest.raises(
        hf.errors.WorkerError, match=r"(?s)no rewards of 2.*mini-batch 3 of 3.*after the 2 optimizer steps"
    ):
        actor.update_actor(marked, loss=refuses_two, minibatches=3).get()


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_trajectories_of_several_rows_train_like_whole_ones(actor, rows, loss):
    """The same mini-batches on two replicas, counted in trajectories."""
    cut = cut_rows(rows)
    cut = cut.with_columns(num_tokens=cut["prompt_ids"].lengths + cut["response_ids"].lengths)
    wanted = actor.update_actor(rows, loss=loss, minibatches=3).get()
    found = actor.update_actor(cut, loss=loss, minibatches=3).get()
    assert cut.rows > rows.rows
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    with pytest.raises(hf.errors.ConfigError, match="9 trajectories, which would be 1 mini-batches of 3"):
        actor.update_actor(cut, loss=loss, minibatches=4)
    with pytest.raises(hf.errors.ConfigError, match="9 trajectories"):
        actor.update_actor(cut, loss=loss, minibatches=10, uneven=True)
    with pytest.raises(hf.errors.BatchError, match="trajectory_id"):
        actor.update_actor(cut[[1, 0, 2, 3]], loss=loss, minibatches=1).get()  # rows 1 and 2 are one


def test_every_loss_trains_and_reports_what_the_whole_batch_gives(actor, rows):
    def mine(log_probs, old_log_probs, advantages, mask, *, power=1.0):
        ratio = (log_probs.values - old_log_probs.values).clamp(-2, 2).exp()
        return -(ratio**power) * advantages.values

    batch = hf.BatchRef.from_batch(rows)
    log_probs = actor.compute_log_prob(batch).get()["old_log_probs"]
    reject = hf.algorithms.RolloutCorrection("geometric", mode="reject", high=1.05)
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("ppo", {"rollout_correction": "token", "kl_coef": 0.1}),
        ("gspo", {"rollout_correction": "sequence"}),
        (hf.algorithms.CISPO(aggregation="seq-mean-token-sum-norm"), {}),
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
    batch = hf.BatchRef.from_batch(rows)
    for options, message in (
        ({"loss": "gsp"}, "policy loss 'gsp' is unknown. Did you mean 'gspo'"),
        ({"dual_clip": 0.5}, r"dual_clip=0.5\): must be a finite number above 1"),
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


@pytest.fixture
def run_directory(cluster, tmp_path) -> Iterator[Path]:
    """The session's run directory, as a tracker would set it."""
    cluster.run_directory = tmp_path
    yield tmp_path
    cluster.run_directory = None


@pytest.fixture
def said() -> Iterator[Callable[..., str]]:
    """Waits until a line of the hosts' output has all the texts, and returns it; hosts may still write what an earlier
    test made them say. A capture of the console would lose what Ray's thread writes while it is read."""
    lines: list[str] = []
    worker_output.add_handler("test", lambda data: lines.extend(data["lines"]))

    def said(*texts: str) -> str:
        deadline = time.monotonic() + 60
        found: list[str] = []
        while not found and time.monotonic() < deadline:
            found = [line for line in lines if all(text in line for text in texts)]
            time.sleep(0.05)
        return found[0] if found else f"no line of {lines!r} has {texts!r}"

    yield said
    worker_output.remove_handler("test")


def test_a_step_that_is_skipped_is_counted_and_said(actor, rows, said, run_directory):
    old = rows["old_log_probs"]
    bad = torch.where(torch.arange(len(old.values)) < len(old.values) - 1, old.values, math.nan)
    batch = hf.BatchRef.from_batch(rows.with_columns(old_log_probs=old.with_values(bad)))
    found = actor.update_actor(batch, minibatches=3, epochs=2).get()
    assert found["actor/skipped"] == 2
    assert all(math.isfinite(value) for value in found.values())  # means over the four steps that were made
    line = said("losses.update_actor skipped step 3 of 6")
    assert "no weight and no optimizer state has changed: old_log_probs: row " in line, line
    assert " is nan on rank " in line, line
    assert "no line" not in said("losses.update_actor skipped step 6 of 6")
    written = [json.loads(line) for line in (run_directory / "skipped.jsonl").read_text().splitlines()]
    assert [(one["role"], one["method"], one["step"]) for one in written] == [("losses", "update_actor", None)] * 2
    assert [one["minibatch"] for one in written] == [3, 6]
    for one in written:  # of both data parallel ranks
        assert sorted(one["row_ids"]) == rows["row_id"][6:9].tolist()
        assert one["reason"].startswith("old_log_probs: row ")
    none = actor.update_actor(batch).get()
    assert none.pop("actor/skipped") == 1
    assert all(math.isnan(value) for value in none.values())


def test_a_run_that_only_skips_steps_stops_on_all_ranks(place, pool, policy, rows, run_directory, cluster, settle):
    """The streak counts over calls, and a step that was made ends it."""
    old, batch = rows["old_log_probs"], hf.BatchRef.from_batch(rows)
    bad = hf.BatchRef.from_batch(rows.with_columns(old_log_probs=old.with_values(old.values * math.nan)))
    settings: dict[str, Any] = {"model": policy, "train": hf.Megatron(), "optim": hf.SGD(lr=0.0, max_skipped=3)}
    actor = place(hf.ActorWorker, pool[:2], name="streak", **settings)
    for given, skipped in ((bad, 2.0), (batch, 0.0), (bad, 2.0)):
        assert actor.update_actor(given, epochs=2).get()["actor/skipped"] == skipped
    cluster.iterations.begin()
    for part in (update := actor.update_actor(bad, epochs=2)).outputs:
        with pytest.raises(DivergenceError, match=r"streak skipped 3 optimizer steps in a row") as caught:
            type(update)((part,)).get()
        assert (caught.value.role, caught.value.step) == ("streak", 1)
    written = [json.loads(line) for line in (run_directory / "skipped.jsonl").read_text().splitlines()]
    assert [one["step"] for one in written] == [None] * 4 + [1]
    assert all(sorted(one["row_ids"]) == rows["row_id"].tolist() for one in written)
    with pytest.raises(hf.errors.CheckpointError, match=r"streak was not saved to .*: it has diverged"):
        actor.save(run_directory / "saved")
    assert actor.update_actor(batch).get()["actor/skipped"] == 0
    assert actor.save(run_directory / "saved")
    settle()


@pytest.mark.parametrize("train", [hf.Megatron(tp=2), hf.FSDP()], ids=["megatron", "fsdp"])
def test_a_learning_rate_that_breaks_the_model_stops_the_run(place, pool, policy, rows, train, cluster, settle):
    actor = place(hf.ActorWorker, pool[:2], name="broken", model=policy, train=train, optim=hf.Adam(lr=1e30))
    batch, steps = hf.BatchRef.from_batch(rows), 0

    def run() -> None:
        nonlocal steps
        for _ in range(20):
            cluster.iterations.begin()
            steps += 1
            actor.update_actor(batch)

    with pytest.raises(DivergenceError, match=r"Use a lower lr \(now 1e\+30\)"):
        run()
    assert steps <= 9  # 1 + 5, and those in flight
    settle()


def test_a_model_that_computes_nan_is_said_and_not_trained(actor, rows, said, tmp_path):
    batch = hf.BatchRef.from_batch(rows)
    actor.session.backend.ask(actor.ranks, "spoil")
    try:
        assert actor.compute_log_prob(batch).get()["old_log_probs"].values.isnan().all()
        assert "no line" not in said("losses.compute_log_prob: rank ", " computed old_log_probs: row 0 is nan")
        assert actor.update_actor(batch).get()["actor/skipped"] == 1
        assert "no line" not in said(
            "losses.update_actor ", "the model's log_probs and the loss are not finite on rank 0, 1"
        )
        with pytest.raises(hf.errors.CheckpointError, match="has weights that are not finite, in "):
            actor.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
    finally:
        actor.session.backend.ask(actor.ranks, "mend")
    assert actor.update_actor(batch).get()["actor/skipped"] == 0


@pytest.mark.parametrize("correction", [None, "token"])
def test_without_old_log_probs_an_update_takes_those_of_sampling(actor, rows, correction):
    sampled, options = rows.without("old_log_probs"), {"loss": "ppo", "rollout_correction": correction}
    found = actor.update_actor(sampled, **options).get()
    assert found == actor.update_actor(sampled.with_columns(old_log_probs=rows["log_probs"]), **options).get()
    assert found != actor.update_actor(rows, **options).get()
    with pytest.raises(hf.errors.MissingColumnError, match="reads 'old_log_probs'"):
        actor.update_actor(sampled.without("log_probs"), **options)


def test_without_old_log_probs_a_penalty_takes_those_of_sampling(cluster, rows):
    def advantages(batch: hf.Batch) -> Any:
        return hf.compute_advantage(batch | {"rewards": torch.ones(ROWS)}, "reinforce", kl_coef=0.1).get()["advantages"]

    sampled = rows.without("old_log_probs")
    expected = advantages(sampled.with_columns(old_log_probs=rows["log_probs"]))
    assert torch.equal(advantages(sampled).values, expected.values)
