"""What dynamic sampling stands on: groups whose scores differ, and rows taken from a batch by reference."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.algorithms.advantages.prompt_groups import filter_groups
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import BatchError, ConfigError

quick = settings(max_examples=60, deadline=None)
SCORES = st.sampled_from((0.0, 1.0, 0.5, math.nan))


@quick
@given(st.lists(st.tuples(st.integers(0, 3), SCORES, st.integers(0, 2)), min_size=1, max_size=20))
def test_groups_are_kept_when_two_of_their_scores_differ(rows):
    """Groups may be scattered; rows without a valid token, and scores of NaN, take no part."""
    group_id, scores, valid = map(list, zip(*rows, strict=True))
    mask = Ragged.from_rows([[i < n for i in range(2)] for n in valid], torch.bool)
    found = filter_groups(
        hf.Batch({"rewards": torch.tensor(scores), "group_id": torch.tensor(group_id), "response_mask": mask}),
        "rewards",
    )
    counted = [s for s, n in zip(scores, valid, strict=True) if n and not math.isnan(s)]
    assert (found.rows, found.total) == (len(counted), sum(counted))
    members = {g: [i for i, other in enumerate(group_id) if other == g] for g in dict.fromkeys(group_id)}
    differs = {
        g: len({scores[i] for i in rows if valid[i] and not math.isnan(scores[i])}) > 1 for g, rows in members.items()
    }
    assert found.informative == [rows for g, rows in members.items() if differs[g]]
    assert found.degenerate == [rows for g, rows in members.items() if not differs[g]]


def test_token_rewards_are_summed_over_valid_tokens():
    rewards = Ragged.from_rows([[1.0, math.nan], [0.5, 0.5], [2.0], [1.0]], torch.float32)
    mask = Ragged.from_rows([[True, False], [True, True], [True], [True]], torch.bool)
    batch = hf.Batch({"rewards": rewards, "group_id": torch.tensor([7, 7, 3, 3]), "response_mask": mask})
    found = filter_groups(batch, "rewards")
    assert (found.degenerate, found.informative, found.total) == ([[0, 1]], [[2, 3]], 5.0)


def plain(rows: int) -> BatchRef:
    lengths = torch.arange(rows) % 3
    tokens = Ragged.from_lengths(torch.arange(int(lengths.sum())), lengths)
    return BatchRef.from_batch(hf.Batch({"x": torch.arange(rows) * 10, "tokens": tokens}))


@quick
@given(st.data())
def test_taken_rows_are_those_of_the_batch(data):
    """Whatever was done to the batch before and is done to the taken rows after: they stay references."""
    ref = plain(data.draw(st.integers(1, 12)))
    if data.draw(st.booleans()):
        ref = ref.repeat(data.draw(st.integers(1, 3)))
    if data.draw(st.booleans()):
        ref = BatchRef.concat([ref[: len(ref) // 2], ref[len(ref) // 2 :]])
    whole = ref.get()
    rows = data.draw(st.lists(st.integers(0, len(ref) - 1), unique=True, max_size=len(ref)))
    taken = ref.take(rows)
    assert len(taken) == len(rows)
    expected = whole.reorder(rows)
    assert same(taken.get(), expected)
    assert same(pickle.loads(pickle.dumps(taken)).get(), expected)
    start = data.draw(st.integers(0, len(rows)))
    assert same(taken[start:].get(), expected[start:])
    assert same(
        BatchRef.concat([taken[start:], taken[:start]]).get(),
        expected.reorder([*range(start, len(rows)), *range(start)]),
    )
    if rows:
        again = data.draw(st.lists(st.integers(0, len(rows) - 1), unique=True))
        assert same(taken.take(again).repeat(2).get(), expected.reorder(again).repeat(2))
        assert same(BatchRef.concat(taken.split(2)).get(), expected)


def same(a: hf.Batch, b: hf.Batch) -> bool:
    def equal(x, y):
        return x.equal(y) if isinstance(x, Ragged) else torch.equal(x, y)

    return a.rows == b.rows and set(a.columns) == set(b.columns) and all(equal(a[n], b[n]) for n in a.columns)


@pytest.mark.parametrize(("rows", "message"), [([0, 4], "0 to 3"), ([-1], "0 to 3"), ([1, 1], "named twice")])
def test_rows_that_are_not_there_are_refused(rows, message):
    with pytest.raises(BatchError, match=message):
        plain(4).take(rows)


def test_wrong_settings_are_refused_at_once():
    loader = hf.PromptLoader([{"prompt": "a"}], batch_size=1)
    for loaded, sample, settings_, message in (
        ([], len, {"rows": 4}, "takes a PromptLoader, got list"),
        (loader, None, {"rows": 4}, "must be a function"),
        (loader, len, {"rows": 0}, "rows=0 must be a whole number of at least 1"),
        (loader, len, {"rows": 4, "steps": 1.5}, r"steps=1\.5 must be"),
        (loader, len, {"rows": 4, "max_rounds": None}, "max_rounds=None must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            hf.dynamic_sampling(loaded, sample, **settings_)
