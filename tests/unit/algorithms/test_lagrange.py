"""The Lagrangian multiplier, the overlong penalty, and figures of costs, components and engine mismatch."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import AdaptiveKL, Lagrange, SafeRLHF
from hybridflow.algorithms.advantage import compute_advantage
from hybridflow.algorithms.metrics import batch_metrics, metric_columns
from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.controller_worker import ControllerWorker
from hybridflow.errors import BatchError, ConfigError, MissingColumnError
from hybridflow.rewards.match import Overlong

quick = settings(max_examples=60, deadline=None)


def rollout(costs: list[float]) -> Batch:
    """One valid token per row and a masked one; the last row has none."""
    rows = len(costs)
    mask = Ragged.from_rows([[True, False]] * (rows - 1) + [[False, False]], dtype=torch.bool)
    zeros = mask.with_values(torch.zeros(2 * rows))
    same = {"values": zeros, "cost_values": zeros, "old_log_probs": zeros, "ref_log_probs": zeros.map(lambda z: z - 1)}
    return Batch({"response_mask": mask, "rewards": torch.ones(rows), "costs": torch.tensor(costs), **same})


@quick
@given(st.lists(st.floats(-2, 2), max_size=6), st.floats(0.1, 5), st.floats(0, 1), st.floats(-1, 1))
def test_the_multiplier_moves_in_log_space(costs, init, lr, limit):
    state, expected = Lagrange(limit, init=init, lr=lr), init
    for cost in costs:
        expected *= math.exp(min(max(lr * expected * (cost - limit), -1.0), 1.0))
        assert state.update(cost) == pytest.approx(expected, rel=1e-9)
    assert state.update(math.nan) == pytest.approx(expected, rel=1e-9)


def test_the_multiplier_has_bounds():
    state = Lagrange(limit=0.0, lr=10.0, maximum=5.0)
    assert [state.update(10.0) for _ in range(3)] == pytest.approx([math.e, 5.0, 5.0])
    free = Lagrange(limit=0.0, lr=10.0)
    for _ in range(100):
        assert free.update(1e6) < 1e9
    for _ in range(100):
        assert free.update(-1e6) > 1e-9


def test_the_multiplier_comes_back_from_a_long_violation():
    state = Lagrange(limit=0.25)
    for _ in range(40):
        high = state.update(1.0)
    for _ in range(40):
        low = state.update(0.0)
    assert high > 1e3
    assert 0.5 < low < 10  # it falls fast while it is large, and slowly once it is small


def test_wrong_multipliers_are_refused():
    for options, message in (
        ({"limit": math.nan}, "limit=nan"),
        ({"limit": 0.0, "init": 0.0}, "above 0"),
        ({"limit": 0.0, "lr": -0.1}, "at least 0"),
        ({"limit": 0.0, "maximum": 0.5}, "at least init"),
        ({"limit": "0"}, "finite number"),
        ({"limit": 0.0, "lr": True}, "lr=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            Lagrange(**options)


def test_a_batch_is_weighed_with_the_multiplier_after_its_own_update():
    """Its mean cost is that of rows with a valid token, before any KL penalty."""
    state = Lagrange(limit=0.25, init=2.0, lr=0.5)
    out = compute_advantage(rollout([1.0, 0.0, 1.0, math.nan]), "safe_rlhf", lagrange=state, kl_coef=0.2)
    expected = 2.0 * math.exp(0.5 * 2.0 * (2 / 3 - 0.25))
    assert state.multiplier == pytest.approx(expected)
    assert out["lagrange"].tolist() == pytest.approx([expected] * 4)
    # kl is 1 per valid token: half of the penalty is taken from the reward, half is added to the cost
    assert out["returns"].values[0::2].tolist() == pytest.approx([0.9, 0.9, 0.9, 0.0])
    assert out["cost_returns"].values[0::2].tolist() == pytest.approx([1.1, 0.1, 1.1, 0.0])
    weighed = [(0.9 - expected * cost) / (1 + expected) for cost in (1.1, 0.1, 1.1)]
    assert out["advantages"].values[0::2].tolist() == pytest.approx([*weighed, 0.0])
    assert batch_metrics(out)["lagrange/multiplier"] == pytest.approx(expected)


def nan_like(values: torch.Tensor) -> torch.Tensor:
    return torch.full_like(values, math.nan)


def test_what_is_learned_stays_when_the_call_fails():
    batch = rollout([1.0, 1.0, 0.0])
    lagrange, kl = Lagrange(limit=0.0), AdaptiveKL(init=0.5, target=0.1, horizon=10)
    for column in ("values", "cost_values", "costs", "rewards", "ref_log_probs"):
        found = batch[column]
        broken = found.map(nan_like) if isinstance(found, Ragged) else nan_like(found)
        with pytest.raises(BatchError, match=f"^{column}: row 0 is nan"):
            compute_advantage(batch.with_columns(**{column: broken}), "safe_rlhf", lagrange=lagrange, kl_coef=kl)
    for missing in ("values", "cost_values"):
        with pytest.raises(MissingColumnError):
            compute_advantage(batch.without(missing), "safe_rlhf", lagrange=lagrange, kl_coef=kl)

    def fails(rewards, batch, *, lagrange):
        lagrange.update(5.0)
        return rewards.map(lambda r: r / 0), rewards

    with pytest.raises(BatchError, match="of row 0"):
        compute_advantage(batch, fails, lagrange=lagrange, kl_coef=kl)
    assert (lagrange.multiplier, kl.state) == (1.0, 0.5)
    compute_advantage(batch, "safe_rlhf", lagrange=lagrange, kl_coef=kl)
    assert lagrange.multiplier > 1.0
    assert kl.state > 0.5


def test_the_helper_keeps_each_state_under_its_identity():
    helper, batch = ControllerWorker(), rollout([1.0, 1.0, 0.0])
    one, two = (Lagrange(limit=0.0, init=1.0, lr=0.1) for _ in range(2))
    kl = AdaptiveKL(init=0.5, target=0.1, horizon=10)

    def call(lagrange: Lagrange, kl_coef: AdaptiveKL | None = None) -> Batch:
        sent = pickle.loads(pickle.dumps((SafeRLHF(lagrange=lagrange), kl_coef)))  # as a call carries them
        return helper.compute_advantage(batch, sent[0], sent[1], None, {})

    first = math.exp(0.1)
    assert float(call(one)["lagrange"][0]) == pytest.approx(first)
    assert float(call(one)["lagrange"][0]) == pytest.approx(first * math.exp(0.1 * first))
    assert float(call(two)["lagrange"][0]) == pytest.approx(first)
    assert one.multiplier == 1.0  # what is kept is the copy of the helper
    for expected in (0.5, 0.5 * (1 + 0.2 * 3 / 10)):  # two states of one call
        out = call(one, kl)
        assert float(out["kl_coef"][0]) == pytest.approx(expected)
    assert float(out["lagrange"][0]) > first * math.exp(0.1 * first)


@quick
@given(st.lists(st.integers(0, 300), min_size=1, max_size=9), st.integers(1, 200), st.integers(1, 200))
def test_the_overlong_penalty(lengths, max_tokens, cache):
    cache = min(cache, max_tokens)
    found = Overlong(max_tokens, cache)([[0] * length for length in lengths])
    for length, penalty in zip(lengths, found, strict=True):
        if length <= max_tokens - cache:
            assert penalty == 0
        elif length <= max_tokens:
            assert penalty == pytest.approx((max_tokens - cache - length) / cache)
        else:
            assert penalty == -1


def test_wrong_overlong_penalties_are_refused():
    assert Overlong(np.int64(10), np.int32(2))([[0] * 9]) == [-0.5]  # type: ignore[arg-type]
    for max_tokens, cache in ((10, 0), (10, 11), (0, 1), (10, 2.5), (True, 1)):
        with pytest.raises(ConfigError, match="Overlong"):
            Overlong(max_tokens, cache)  # type: ignore[arg-type]


def test_figures_of_components_costs_and_failures():
    batch = Batch(
        {
            "rewards": torch.tensor([1.0, 3.0, 0.0]),
            "costs": torch.tensor([0.0, 1.0, 2.0]),
            "rewards/math": torch.tensor([1.0, math.nan, 0.0]),
            "rewards/never": torch.tensor([math.nan] * 3),
            "costs/rude": torch.tensor([0.5, 1.0, 0.0]),
            "reward_failure": Objects([None, None, "took longer than 5 s"]),
            "cost_failure": Objects([None, None, None]),
            "ground_truth": ["a", "b", "c"],
        }
    )
    figures = batch_metrics(batch)
    assert figures["reward/std"] == pytest.approx(math.sqrt(2))
    assert figures["reward/math/mean"] == 1.0
    assert (figures["reward/mean"], figures["reward/min"]) == (2.0, 1.0)
    assert (figures["cost/mean"], figures["cost/rude/mean"]) == (1.0, 0.5)
    assert figures["reward/failed"] == pytest.approx(1 / 3)
    assert figures["cost/failed"] == 0.0
    assert "reward/never/mean" not in figures
    assert metric_columns(batch.columns) == batch.columns[:-1]
    assert batch_metrics(batch[0:1])["reward/std"] == 0.0
    assert "reward/mean" not in batch_metrics(batch[2:])


def test_rows_without_a_valid_token_are_no_part_of_the_mean_reward():
    mask = Ragged.from_rows([[1, 1], [0, 0], [1], []])  # numbers in the place of True and False
    token_costs = Ragged.from_rows([[1.0, 2.0], [math.nan, 9.0], [4.0], []])
    rewards = torch.tensor([1.0, math.nan, 2.0, math.inf])
    figures = batch_metrics(Batch({"response_mask": mask, "rewards": rewards, "costs": token_costs}))
    assert (figures["reward/mean"], figures["reward/max"], figures["cost/mean"]) == (1.5, 2.0, 3.5)


@quick
@given(st.integers(0, 999), st.lists(st.lists(st.booleans(), max_size=6), min_size=1, max_size=6))
def test_figures_of_engine_mismatch(seed, rows):
    mask = Ragged.from_rows(rows, dtype=torch.bool)
    rng = np.random.default_rng(seed)
    sampled, trained = rng.normal(size=(2, len(mask.values)))
    columns = {"log_probs": sampled, "old_log_probs": trained}
    dirty = {
        name: mask.with_values(torch.where(mask.values, torch.tensor(values), math.nan))
        for name, values in columns.items()
    }
    figures = batch_metrics(Batch({"response_mask": mask, **dirty}))
    valid = mask.values.numpy()
    assert figures.pop("response/not_finite", 0.0) == (~valid).sum()
    if not valid.any():
        assert figures == {}
        return
    d = (sampled - trained)[valid]
    w = np.exp(-d)
    assert figures["rollout/kl"] == pytest.approx(d.mean())
    assert figures["rollout/kl_k3"] == pytest.approx((w - 1 + d).mean())
    assert figures["rollout/chi2"] == pytest.approx((w**2).mean() - 1)
    assert figures["rollout/ess"] == pytest.approx(w.mean() ** 2 / (w**2).mean())
    row = mask.row_index().numpy()
    means = [(sampled - trained)[valid & (row == i)] for i in range(len(mask)) if valid[row == i].any()]
    assert figures["rollout/ppl_ratio"] == pytest.approx(np.mean([math.exp(m.mean()) for m in means]))


def test_the_cost_critic_has_its_own_explained_variance():
    mask = Ragged.from_rows([[True, True], [True]], dtype=torch.bool)
    returns = mask.with_values(torch.tensor([0.0, 1.0, 2.0]))
    figures = batch_metrics(Batch({"response_mask": mask, "cost_values": returns, "cost_returns": returns}))
    assert figures["cost_critic/explained_variance"] == pytest.approx(1.0)
    assert "critic/explained_variance" not in figures
