"""Estimators count trajectories: a trajectory of several rows gets what the same tokens in one row get."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.algorithms.advantage import compute_advantage
from hybridflow.batch.ragged import Ragged


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
