"""What estimators are made of, estimators and losses as values, compute_advantage, batch metrics."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.algorithms import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    AdaptiveKL,
    GRPOPassK,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    Totals,
    policy_loss,
    value_loss,
)
from hybridflow.algorithms.advantage import AdvantageCall, compute_advantage
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.masked import whiten
from hybridflow.algorithms.metrics import METRIC_COLUMNS, batch_metrics
from hybridflow.algorithms.registry import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, find_estimator
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, EmptyBatchError

FLOAT = torch.float64


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=9))
def test_kl_estimators(differences):
    d = np.array(differences)
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}
    for kind, oracle in expected.items():
        found = kl_estimate(torch.tensor(d) - 1, torch.full((len(d),), -1.0, dtype=FLOAT), kind)
        np.testing.assert_allclose(found, oracle, atol=1e-12)


def test_unknown_kl_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="KL estimator 'k33' is unknown"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k33")


def test_adaptive_kl_steers_towards_its_target():
    kl = AdaptiveKL(init=0.1, target=6.0, horizon=1000)
    assert kl.state == 0.1
    assert kl.update(measured=6.6, rows=100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = kl.state
    assert kl.update(measured=60.0, rows=100) == pytest.approx(before * 1.02)  # the error is clipped to 0.2
    assert kl.update(measured=0.0, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert kl.update(measured=math.nan, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert kl.update(measured=0.0, rows=10_000_000) == 0.0
    for numbers in ((0.1, 0.0, 100), (-0.1, 1, 100), (0.1, math.nan, 100), (0.1, 1, "a")):
        with pytest.raises(ConfigError, match="must be a finite number"):
            AdaptiveKL(*numbers)


GIVEN = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MASK = Ragged.from_rows([[True, False, True], [True], [False], [True, True], []], dtype=torch.bool)
COLUMNS = {"response_mask": MASK, "group_id": torch.tensor([3, 3, 3, 3, 1]), "baseline": torch.full((5,), 0.25)}
EVERY_ESTIMATOR = [
    *(ReMax(gamma=0.5), Reinforce(gamma=0.5), ReinforcePlusPlus(gamma=0.5), ReinforcePlusPlusBaseline()),
    *(GRPO(), RLOO(), OPO(), GPG(), GRPOPassK(k=2), GDPO(components=["a", "b"])),
]


@pytest.mark.parametrize("dtype", GIVEN, ids=str)
def test_results_are_float64_whatever_the_inputs_are(dtype):
    """Integers and half precision, which the inputs may be, would round what comes out."""
    exact = torch.tensor([1, 50, 3, -3, 7, 4, -6], dtype=FLOAT)

    def results(given: torch.dtype) -> dict[str, Ragged]:
        x = MASK.with_values(exact.to(given))
        scores = torch.tensor([101, 103, 100, 104, 101]).to(given)
        batch = Batch({**COLUMNS, "rewards/a": scores, "rewards/b": scores.flip(0)})
        own = {
            "gae": gae(x, x, MASK, gamma=0.5, lam=0.5)[0],
            "to_go": rewards_to_go(x, MASK, 0.5),
            "whiten": whiten(x, MASK),
        }
        return own | {estimator.name: estimator(x, batch)[0] for estimator in EVERY_ESTIMATOR}

    for (name, found), expected in zip(results(dtype).items(), results(FLOAT).values(), strict=True):
        assert found.dtype == FLOAT, name
        torch.testing.assert_close(found.values, expected.values, atol=1e-6, rtol=1e-6)
        assert bool((expected.values != expected.values.round()).any()), name  # or nothing could have been lost


def test_float32_rewards_close_to_each_other_keep_their_digits():
    """As an intermediate result float32 would lose what whitening magnifies."""
    lengths = [7] * 50
    mask = Ragged.from_lengths(torch.ones(350, dtype=torch.bool), lengths)
    rewards = mask.with_values(14 + 1e-4 * torch.randn(350, generator=torch.Generator().manual_seed(1)))
    to_go = rewards.values.numpy().astype(np.float64).reshape(50, 7)[:, ::-1].cumsum(1)[:, ::-1]
    batch = Batch({"response_mask": mask, "baseline": torch.full((50,), 98.0)})
    found, _ = ReMax()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go - 98, atol=1e-5)
    to_go = to_go - to_go.mean()
    found, _ = ReinforcePlusPlus()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go / np.sqrt(to_go.var(ddof=1) + 1e-8), atol=1e-6)
    found, _ = Reinforce()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go, atol=1e-5)


NEEDED = {"gdpo": {"components": ("a",)}, "safe_rlhf": {"lagrange": 0.5}}
MAKERS = {
    **{name: (find_estimator, cls) for name, cls in ESTIMATORS.items()},
    **{f"{name} loss": (lambda loss, given: policy_loss(loss, **given), cls) for name, cls in POLICY_LOSSES.items()},
    **{f"{name} loss": (lambda loss, given: value_loss(loss, **given), cls) for name, cls in VALUE_LOSSES.items()},
}


@pytest.mark.parametrize("case", MAKERS)
def test_a_name_with_options_is_a_frozen_value(case):
    make, cls = MAKERS[case]
    name = case.removesuffix(" loss")
    options = NEEDED.get(name, {})
    value = cls(**options)
    assert make(name, options) == value == make(value, {})
    assert getattr(hf.algorithms, cls.__name__) is cls
    assert is_dataclass(value)
    for send in (pickle, cloudpickle):
        sent = send.loads(send.dumps(value))
        assert sent == value
        assert (sent.reads, repr(sent)) == (value.reads, repr(value))
    first = fields(value)[0].name if fields(value) else "reads"
    with pytest.raises(FrozenInstanceError):
        setattr(value, first, None)
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no setting 'no_such_option'"):
        make(name, {**options, "no_such_option": 1})
    with pytest.raises(ConfigError, match="is a class"):
        make(cls, {})
    with pytest.raises(ConfigError, match="has its options in it"):
        make(value, {"gamma": 1.0})


def test_a_value_of_another_kind_is_refused():
    for make in (lambda: find_estimator(hf.PPO(), {}), lambda: policy_loss(hf.GAE()), lambda: value_loss(hf.GAE())):
        with pytest.raises(ConfigError, match="of another kind"):
            make()


def rollout(rows: int = 12, seed: int = 0, masked: bool = True) -> Batch:
    """A batch as it is before compute_advantage; some rows have holes, one has no valid token."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (rows,), generator=g)
    n = int(lengths.sum())
    mask = torch.rand(n, generator=g) < 0.75 if masked else torch.ones(n, dtype=torch.bool)
    mask[: int(lengths[0])] = not masked
    columns = {"response_mask": Ragged.from_lengths(mask, lengths)}
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "values"):
        columns[name] = Ragged.from_lengths(torch.randn(n, generator=g), lengths)
    columns["response_ids"] = Ragged.from_lengths(torch.randint(9, (n,), generator=g), lengths)
    return Batch(
        {
            **columns,
            "rewards": torch.rand(rows, generator=g),
            "group_id": torch.arange(rows) // 3,
            "baseline": torch.rand(rows, generator=g),
            "row_id": torch.arange(rows),
        }
    )


def test_token_rewards_are_taken_as_they_are():
    batch = rollout()
    tokens = batch["response_mask"].map(lambda m: torch.arange(len(m), dtype=torch.float32))
    out = compute_advantage(batch.with_columns(rewards=tokens), "reinforce")
    expected = [
        float(sum(t for t, m in zip(tokens.row(i).tolist(), batch["response_mask"].row(i).tolist()) if m))
        for i in range(len(batch))
    ]
    first = [int(m.nonzero()[0]) if m.any() else None for m in batch["response_mask"].rows()]
    for i, at in enumerate(first):
        assert at is None or float(out["returns"].row(i)[at]) == pytest.approx(expected[i])


def test_an_adaptive_coefficient_is_used_and_then_updated():
    batch, kl = rollout(), AdaptiveKL(init=0.2, target=0.001, horizon=100)
    out = compute_advantage(batch, "gae", kl_coef=kl)
    assert out["kl_coef"].tolist() == pytest.approx([0.2] * 12)
    error = min(max(float(out["kl"].mean()) / 0.001 - 1, -0.2), 0.2)
    assert kl.state == pytest.approx(0.2 * (1 + error * 12 / 100))
    fixed = compute_advantage(batch, "gae", kl_coef=0.2)
    assert fixed["advantages"].equal(out["advantages"])
    assert AdvantageCall(find_estimator("gae", {}), 0, "k3").reads == (
        "rewards",
        "response_mask",
        "values",
    )  # 0 asks for no penalty


def types_seen(rewards: Ragged, batch: Batch):
    assert (rewards.dtype, batch["response_mask"].dtype) == (torch.float32, torch.bool)
    return rewards, rewards


def test_a_users_estimator():
    def centred(rewards: Ragged, batch: Batch, *, scale: float = 1.0):
        scores = rewards.row_sum()
        spread = rewards.with_values(rewards.expand(scale * (scores - scores.mean())))
        return spread, spread

    assert AdvantageCall(find_estimator(centred, {})).reads is None
    numbers = rollout().with_columns(response_mask=rollout()["response_mask"].to(torch.int64))
    whole = compute_advantage(rollout(), types_seen)
    assert compute_advantage(numbers, types_seen)["advantages"].equal(whole["advantages"])
    assert len(compute_advantage(rollout(), centred, scale=2.0)["advantages"]) == 12
    with pytest.raises(ConfigError, match="Did you mean 'scale'"):
        compute_advantage(rollout(), centred, scal=2.0)


def test_bad_rewards_are_refused():
    batch = rollout()
    rewards = batch["rewards"].clone()
    rewards[5] = math.nan
    with pytest.raises(BatchError, match="row 5 is nan"):
        compute_advantage(batch.with_columns(rewards=rewards), "gae")
    with pytest.raises(BatchError, match="do not fit"):
        compute_advantage(batch.with_columns(rewards=torch.zeros(12, 2)), "gae")
    short = Ragged.from_lengths(torch.zeros(12), [1] * 12)
    with pytest.raises(BatchError, match="same length"):
        compute_advantage(batch.with_columns(values=short), "gae")
    with pytest.raises(EmptyBatchError):
        compute_advantage(batch[0:0], "gae")


def trained(seed: int = 0) -> tuple[Batch, dict[str, Ragged]]:
    batch = rollout(rows=13, seed=seed)
    batch |= compute_advantage(batch, "gae", kl_coef=0.1)
    g = torch.Generator().manual_seed(seed + 1)
    noise = [torch.randn(len(batch["response_mask"].values), generator=g) * 0.3 for _ in range(3)]
    like = batch["response_mask"].with_values
    outputs = {
        "log_probs": like(batch["old_log_probs"].values + noise[0]),
        "values": like(batch["values"].values + noise[1]),
        "entropy": like(noise[2].abs()),
    }
    return batch, outputs


def totals(batch: Batch) -> Totals:
    return Totals(float(batch["response_mask"].values.sum()), float(len(batch)))


def test_pretraining_needs_no_mask():
    """Without `response_mask` every response token counts."""
    batch, outputs = trained()
    loss = policy_loss("pretrain")
    assert loss.reads == ("response_mask?",)
    everything = batch.with_columns(response_mask=batch["response_mask"].map(torch.ones_like))
    plain = Batch({"response_ids": batch["response_mask"].map(lambda mask: mask.to(torch.int64))})
    share, _ = loss(outputs, plain, totals(everything))
    assert float(share) == pytest.approx(-float(outputs["log_probs"].values.mean()), rel=1e-5)


def test_batch_metrics():
    batch, _ = trained()
    figures = batch_metrics(batch)
    valid = batch["response_mask"].values
    drift = (batch["log_probs"].values - batch["old_log_probs"].values)[valid].abs()
    counts = torch.stack([mask.any() for mask in batch["response_mask"].rows()])
    assert figures["reward/mean"] == pytest.approx(float(batch["rewards"][counts].mean()))
    assert figures["response/length_max"] == float(batch["response_ids"].lengths.max())
    assert figures["response/tokens"] == len(batch["response_ids"].values)
    assert figures["actor/rollout_log_prob_diff"] == pytest.approx(float(drift.mean()), rel=1e-5)
    assert figures["actor/rollout_log_prob_diff_max"] == pytest.approx(float(drift.max()), rel=1e-5)
    assert figures["advantage/mean"] == pytest.approx(0.0, abs=1e-5)
    assert figures["advantage/std"] == pytest.approx(1.0, abs=1e-3)
    assert figures["kl/coef"] == pytest.approx(0.1)
    assert figures["kl/ref_row"] == pytest.approx(float(batch["kl"].mean()), rel=1e-4, abs=1e-5)
    assert batch_metrics(batch.select("rewards")).keys() == {"reward/mean", "reward/std", "reward/min", "reward/max"}
    used = batch.select(*[name for name in METRIC_COLUMNS if name in batch])
    assert batch_metrics(used) == figures
    assert batch_metrics(batch[0:0]) == {}


def test_explained_variance():
    batch, _ = trained()
    perfect = batch_metrics(batch.with_columns(values=batch["returns"]))
    constant = batch_metrics(batch.with_columns(values=batch["returns"].map(torch.zeros_like)))
    assert perfect["critic/explained_variance"] == pytest.approx(1.0)
    assert constant["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
