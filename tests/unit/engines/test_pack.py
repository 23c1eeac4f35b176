"""Packing and packed attention against their definitions: bins hold every row once, sequences never see each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.micro_batches import Sequences, pack
from hybridflow.errors import BatchError

sizes = st.lists(st.integers(1, 30), max_size=24)


@settings(max_examples=300, deadline=None)
@given(sizes, st.integers(1, 60), st.integers(1, 5), st.booleans())
def test_bins_hold_every_row_once_and_keep_to_the_budget(lengths, budget, count, quadratic):
    tokens = torch.tensor(lengths, dtype=torch.int64)
    bins = pack(tokens, budget, count, tokens.double().square() if quadratic else None)
    assert torch.cat([torch.arange(0), *bins]).sort().values.tolist() == list(range(len(lengths)))
    assert len(bins) >= min(count, len(lengths))
    for rows in bins:
        assert len(rows)
        assert rows.tolist() == sorted(rows.tolist())
        assert int(tokens[rows].sum()) <= budget or len(rows) == 1
    filled = sum(min(n, budget) for n in lengths) / budget
    assert len(bins) <= max(count, 2 * filled + 1), "first fit leaves at most one bin half empty"


def test_bins_are_as_few_as_they_can_be_where_that_is_known():
    assert len(pack(torch.tensor([6, 5, 5, 4, 3, 3, 2, 2]), 10)) == 3
    assert len(pack(torch.tensor([9, 8, 7, 3, 2, 1]), 10)) == 3


def test_bins_are_alike_in_cost_not_in_tokens():
    """One long row costs more than four short ones of as many tokens together."""
    tokens = torch.tensor([40, 10, 10, 10, 10, 10, 10])
    by_tokens, by_cost = pack(tokens, 70, 2), pack(tokens, 70, 2, tokens.double() ** 2)
    assert sorted(int(tokens[rows].sum()) for rows in by_tokens) == [50, 50]
    assert sorted(int(tokens[rows].sum()) for rows in by_cost) == [40, 60]


@pytest.mark.parametrize(("budget", "count"), [(0, 1), (1, 0)])
def test_a_budget_and_a_count_are_positive(budget, count):
    with pytest.raises(BatchError, match="both must be at least 1"):
        pack(torch.tensor([1]), budget, count)


def test_sequences_know_where_they_begin():
    sequences = Sequences.of([2, 2, 3, 1])
    assert sequences.offsets.tolist() == [0, 2, 4, 7, 8]
    assert sequences.positions.tolist() == [0, 1, 0, 1, 0, 1, 2, 0]
    assert (sequences.runs, sequences.longest, sequences.tokens) == (((2, 2), (1, 3), (1, 1)), 3, 8)
    for wrong in ([], [3, 0]):
        with pytest.raises(BatchError, match="at least one token each"):
            Sequences.of(wrong)


def by_definition(q, k, v, lengths, window, scale):
    """One softmax over a mask of all pairs of positions, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    at = torch.arange(len(of))
    distance = at[:, None] - at
    seen = (of[:, None] == of) & (distance >= 0) & (distance < (window or len(of)))
    scores = torch.einsum("snd,tnd->nst", q, k) * (scale or q.shape[-1] ** -0.5)
    return torch.einsum("nst,tnd->snd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([None, 1, 3, 100]),
    st.sampled_from([None, 0.3]),
)
def test_packed_attention_is_its_definition(lengths, heads, window, scale):
    generator = torch.Generator().manual_seed(sum(lengths))
    made = [torch.randn(sum(lengths), n, 8, generator=generator) for n in (heads[0], heads[1], heads[1], heads[0])]
    single, double = ([x.to(dtype).requires_grad_() for x in made[:3]] for dtype in (torch.float32, torch.float64))
    found = packed_attention(*single, Sequences.of(lengths), window, scale)
    want = by_definition(*double, lengths, window, scale)
    assert torch.allclose(found, want.float(), atol=1e-5)
    gradients = torch.autograd.grad(found, single, made[3])
    for gradient, expected in zip(gradients, torch.autograd.grad(want, double, made[3].double()), strict=True):
        assert torch.allclose(gradient, expected.float(), atol=1e-5)


def test_what_is_in_a_sequence_does_not_reach_its_neighbours():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 8, generator=generator) for _ in range(3))
    sequences = Sequences.of([3, 4, 5])
    before = packed_attention(q, k, v, sequences)
    for changed in (q, k, v):
        changed[3:7] = torch.nan
    after = packed_attention(q, k, v, sequences)
    assert after[:3].equal(before[:3])
    assert after[7:].equal(before[7:])


def test_padded_rows_attend_like_packed_ones():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 2, 5]
    q, k, v = (torch.randn(sum(lengths), n, 8, generator=generator) for n in (4, 2, 2))
    for window in (None, 2):
        packed = packed_attention(q, k, v, Sequences.of(lengths), window)
        rows = [torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in (q, k, v)]
        padded = causal_attention(*rows, window).transpose(1, 2)
        together = torch.cat([row[:n] for row, n in zip(padded, lengths, strict=True)])
        assert torch.allclose(packed, together, atol=1e-6)


def test_equal_lengths_share_a_call(monkeypatch):
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, *a, **k: calls.append(q.shape) or attend(q, *a, **k),
    )
    q = torch.randn(14, 2, 8)
    packed_attention(q, q, q, Sequences.of([4, 4, 3, 3]))
    assert [(shape[0], shape[2]) for shape in calls] == [(2, 4), (2, 3)]
    assert len(calls) == len(list(itertools.groupby([4, 4, 3, 3])))
