"""RunningNorm against numpy over everything that it was given; trajectories of several rows count once."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow import Batch
from hybridflow.algorithms import RunningNorm
from hybridflow.algorithms.advantage import compute_advantage
from hybridflow.batch.ragged import Ragged
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


@st.composite
def forked(draw) -> tuple[hf.Batch, hf.Batch, list[list[int]]]:
    """Trajectories as one row each, the same cut into rows, and the rows of each trajectory."""
    count = draw(st.integers(2, 5))
    pieces = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in range(count)]
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    lengths = [sum(each) for each in pieces]
    tokens = sum(lengths)
    mask = torch.rand(tokens, generator=generator) < 0.7
    last = torch.tensor(lengths).cumsum(0) - 1
    mask[last] = True
    flat = {
        "response_mask": mask,
        **{name: torch.randn(tokens, generator=generator) for name in ("values", "old_log_probs", "ref_log_probs")},
    }
    rewards, groups = torch.randn(count, generator=generator), torch.tensor([0, 0, *([1] * (count - 2))])
    whole = {name: Ragged.from_lengths(value, lengths) for name, value in flat.items()}
    cut = [length for each in pieces for length in each]
    parts = {name: Ragged.from_lengths(value, cut) for name, value in flat.items()}
    of_row = torch.tensor([key for key, each in enumerate(pieces) for _ in each])
    is_last = [k == len(each) - 1 for each in pieces for k in range(len(each))]
    seen = torch.where(torch.tensor(is_last), rewards[of_row], 100.0)  # only the last row's reward counts
    rows = [[r for r, key in enumerate(of_row.tolist()) if key == want] for want in range(count)]
    return (
        hf.Batch({**whole, "rewards": rewards, "group_id": groups}),
        hf.Batch({**parts, "rewards": seen, "group_id": groups[of_row], "trajectory_id": of_row + 7}),
        rows,
    )


@pytest.mark.parametrize(
    ("estimator", "options"),
    [
        ("gae", {"gamma": 0.9, "lam": 0.8}),
        ("gae", {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1}),
        ("grpo", {}),
        ("rloo", {}),
        ("reinforce_plus_plus", {}),
    ],
)
@given(given_batches=forked(), seed=st.integers(0, 1000))
def test_a_cut_trajectory_counts_once(estimator, options, given_batches, seed):
    whole, cut, rows = given_batches
    wanted = compute_advantage(whole, estimator, **options)
    found = compute_advantage(cut, estimator, **options)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    index = [r for key in order for r in rows[key]]  # trajectories in another order
    moved = compute_advantage(cut.reorder(index), estimator, **options)
    for name in ("advantages", "returns"):
        assert torch.equal(found[name].values, wanted[name].values)
        joined = [torch.cat([found[name].row(r) for r in each]).tolist() for each in rows]
        assert joined == wanted[name].tolist()
        again = [torch.cat([moved[name].row(index.index(r)) for r in each]).tolist() for each in rows]
        for one, other in zip(again, joined, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    if "kl" in wanted:
        assert [found["kl"][each[0]].item() for each in rows] == wanted["kl"].tolist()


def test_rows_of_a_trajectory_need_not_be_adjacent():
    mask = Ragged.from_lengths(torch.ones(4, dtype=torch.bool), [1, 1, 1, 1])
    rewards, groups = torch.tensor([9.0, 9.0, 1.0, 3.0]), torch.zeros(4, dtype=torch.int64)
    batch = hf.Batch({"response_mask": mask, "rewards": rewards, "group_id": groups})
    batch = batch.with_columns(trajectory_id=torch.tensor([5, 6, 5, 6]))
    found = compute_advantage(batch, "rloo")
    assert found["advantages"].values.tolist() == [-2.0, 2.0, -2.0, 2.0]


def test_rows_that_contradict_each_other_are_refused():
    mask = Ragged.from_lengths(torch.ones(3, dtype=torch.bool), [1, 1, 1])
    batch = hf.Batch({"response_mask": mask, "rewards": torch.zeros(3), "trajectory_id": torch.tensor([5, 5, 6])})
    ids, groups = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 1])
    with pytest.raises(hf.errors.BatchError, match="trajectory 5 has the row 1 twice"):
        compute_advantage(batch.with_columns(row_id=ids, group_id=torch.zeros(3, dtype=torch.int64)), "rloo")
    with pytest.raises(hf.errors.BatchError, match="trajectory 5 has rows of different groups"):
        compute_advantage(batch.with_columns(group_id=groups), "rloo")


def test_rows_are_joined_in_the_order_of_their_ids():
    mask = Ragged.from_lengths(torch.ones(3, dtype=torch.bool), [1, 1, 1])
    batch = hf.Batch(
        {"response_mask": mask, "rewards": torch.tensor([4.0, 2.0, 9.0]), "values": mask.map(torch.Tensor.float)}
    )
    batch = batch.with_columns(trajectory_id=torch.tensor([5, 5, 6]), row_id=torch.tensor([8, 3, 1]))
    found = compute_advantage(batch, "gae", gamma=0.5, lam=1.0)
    assert found["returns"].values.tolist() == [4.0, 2.0, 9.0]  # the row with id 8 is the last
