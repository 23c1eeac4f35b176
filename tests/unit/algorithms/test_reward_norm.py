"""RunningNorm against numpy over everything that it was given."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow import Batch, Ragged
from hybridflow.algorithms import RunningNorm
from hybridflow.algorithms.advantage import compute_advantage
from hybridflow.cluster.controller_worker import ControllerWorker
from hybridflow.errors import BatchError, ConfigError

numbers = st.floats(-1e4, 1e4, width=32)


def normalised(batch: Batch, norm: RunningNorm) -> Any:
    """The rewards that an estimator gets."""
    seen = []

    def estimator(rewards: Ragged, batch: Batch) -> tuple[Ragged, Ragged]:
        seen.append(rewards)
        return rewards, rewards

    estimator.reads = ()  # type: ignore[attr-defined]
    out = compute_advantage(batch, estimator, reward_norm=norm)
    assert out["reward_norm_std"].tolist() == pytest.approx([norm.std] * len(batch))
    return seen[0]


def rows(rewards: list[float], lengths: list[int], mask: list[bool] | None = None) -> Batch:
    tokens = torch.ones(sum(lengths), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    return Batch({"rewards": torch.tensor(rewards), "response_mask": Ragged.from_lengths(tokens, lengths)})


@given(st.lists(st.lists(numbers, min_size=1, max_size=6), min_size=1, max_size=5), st.booleans())
def test_statistics_are_numpys_over_the_concatenation(batches, center):
    norm, everything = RunningNorm(center=center), np.zeros(0)
    for batch in batches:
        everything = np.concatenate([everything, np.array(batch)])
        found = normalised(rows(batch, [1] * len(batch)), norm).values
        std = everything.std(ddof=1) if len(everything) > 1 else 0.0
        scale = np.abs(everything).max() + 1.0
        assert norm.mean == pytest.approx(everything.mean(), abs=1e-9 * scale)
        assert norm.std == pytest.approx(std, abs=1e-6 * scale)
        if std > 1e-3 * scale:
            expected = (np.array(batch) - center * everything.mean()) / std
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)


@given(st.lists(st.tuples(numbers, st.lists(st.booleans(), max_size=3)), min_size=1, max_size=8), st.booleans())
def test_only_what_is_valid_counts(drawn, per_token):
    """Rows without a valid token, and masked tokens, of which a reward may be anything."""
    lengths, mask = [len(row) for _, row in drawn], [bit for _, row in drawn for bit in row]
    rewards = [value if any(row) else float("nan") for value, row in drawn]
    counted = [value for value, row in drawn if any(row)]
    batch = rows(rewards, lengths, mask)
    if per_token:
        tokens = torch.arange(float(len(mask)))
        counted = tokens[torch.tensor(mask, dtype=torch.bool)].tolist()
        batch = batch.with_columns(rewards=Ragged.from_lengths(tokens, lengths))
    norm = RunningNorm()
    found = normalised(batch, norm)
    assert norm.state[0] == len(counted)
    assert norm.mean == pytest.approx(np.mean(counted) if counted else 0.0, rel=1e-6, abs=1e-6)
    assert found.values[~batch["response_mask"].values].eq(0).all()


def test_a_trajectory_counts_once():
    batch = rows([1.0, 1.0, 5.0], [2, 1, 1]).with_columns(
        trajectory_id=torch.tensor([7, 7, 8]), row_id=torch.tensor([0, 1, 2])
    )
    norm = RunningNorm()
    assert "reward_norm_mean" in compute_advantage(batch, "reinforce", reward_norm=norm).columns
    assert (norm.state[0], norm.mean) == (2, 3.0)


def test_equal_rewards_are_not_divided_and_clip_bounds():
    for center, expected in ((True, 0.0), (False, 0.5)):
        found = normalised(rows([0.5] * 3, [1] * 3), RunningNorm(center=center))
        assert found.values.tolist() == [expected] * 3
    assert normalised(rows([0.0] * 9 + [1e4], [1] * 10), RunningNorm(clip=1.5)).values.max() == 1.5


def test_a_call_that_fails_teaches_nothing():
    norm = RunningNorm()
    normalised(rows([1.0, 2.0], [1, 1]), norm)
    before = norm.state
    with pytest.raises(BatchError, match="rewards"):
        normalised(rows([1.0, float("inf")], [1, 1]), norm)
    broken = rows([1.0, 2.0], [1, 1]).with_columns(values=Ragged.from_lengths(torch.full((2,), torch.nan), [1, 1]))
    with pytest.raises(BatchError):
        compute_advantage(broken, "gae", reward_norm=norm)
    assert norm.state == before


@pytest.mark.parametrize(
    ("estimator", "options", "says"),
    [
        ("remax", {"reward_norm": RunningNorm()}, "reads baseline, which reward_norm does not normalise"),
        ("gdpo", {"components": ("a",), "reward_norm": RunningNorm()}, "reads the components of rewards"),
        ("grpo", {"reward_norm": True}, r"reward_norm=True: give hf.algorithms.RunningNorm\(\)"),
        ("grpo", {"reward_norms": RunningNorm()}, "reward_norms"),
    ],
)
def test_what_would_have_no_effect_is_refused(estimator, options, says):
    with pytest.raises(ConfigError, match=says):
        compute_advantage(rows([1.0, 2.0], [1, 1]), estimator, **options)
    with pytest.raises(ConfigError, match="clip"):
        RunningNorm(clip=0.0)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1e6 / 3])
def test_equal_rewards_are_not_divided_by_their_rounding(center: bool, reward: float):
    norm, rewards = RunningNorm(center=center), torch.full((12,), reward, dtype=torch.float64)
    for _ in range(3):
        found = norm(rewards)
    assert norm.std == 0.0
    assert found.tolist() == pytest.approx([0.0 if center else reward] * 12, abs=1e-9)


def test_a_statistic_of_a_checkpoint_outlasts_a_call_that_fails():
    def advantages(worker: ControllerWorker, norm: RunningNorm, rewards: list[float]) -> None:
        worker.compute_advantage(rows(rewards, [3, 3]), "reinforce", None, None, {}, norm)

    saved, worker, norm = ControllerWorker(), ControllerWorker(), RunningNorm()
    for _ in range(5):
        advantages(saved, norm, [10.0, 12.0])
    worker.load_state(saved.state())
    continued = RunningNorm()
    with pytest.raises(BatchError):
        advantages(worker, pickle.loads(pickle.dumps(continued)), [10.0, float("nan")])
    assert worker.state() == saved.state()
    advantages(worker, continued, [10.0, 12.0])
    ((_, _, state),) = worker.state()
    assert state[0] == 12
