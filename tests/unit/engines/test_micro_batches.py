"""Micro-batches as pure values: every token is read once, whether rows are packed or padded."""

from __future__ import annotations

import itertools
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.micro_batches import MicroBatch, Sequences, Split, in_order, pack
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.errors import BatchError, ModelError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import Cost

rows_of_tokens = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=12)
COSTS = (None, Cost(1.0, 5.0), Cost(0.0, 1.0, window=3))


def counting(lengths: list[tuple[int, int]]) -> tuple[Ragged, Ragged]:
    """Prompts and responses; token k of row i is 100 * i + k."""
    prompts = [list(range(100 * i, 100 * i + p)) for i, (p, _) in enumerate(lengths)]
    responses = [list(range(100 * i + p, 100 * i + p + r)) for i, (p, r) in enumerate(lengths)]
    return Ragged.from_rows(prompts, torch.int64), Ragged.from_rows(responses, torch.int64)


def assert_sequences_are_rows(micro: MicroBatch, lengths: list[tuple[int, int]], multiple: int) -> None:
    """The packed row is the rows, whole and one after the other, then zeros of less than one multiple."""
    assert micro.sequences is not None
    assert micro.ids.shape == (1, micro.sequences.tokens)
    assert micro.sequences.offsets.tolist() == torch.tensor([0, *micro.sequences.lengths]).cumsum(0).tolist()
    assert micro.sequences.offsets.dtype == torch.int32
    parts = micro.ids[0].split(list(micro.sequences.lengths))
    found = {int(part[0]) // 100: part.tolist() for part in parts[: len(micro.rows)]}
    assert found == {row: list(range(100 * row, 100 * row + sum(lengths[row]))) for row in micro.rows.tolist()}
    assert torch.cat([torch.arange(len(part)) for part in parts]).equal(micro.positions[0])
    filler = parts[len(micro.rows) :]
    assert len(filler) <= 1
    assert all(len(part) < multiple or not len(micro.rows) for part in filler)
    assert not any(part.any() for part in filler)


@settings(max_examples=200, deadline=None)
@given(rows_of_tokens, st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from(COSTS))
@example(lengths=[(1, 1)] * 4, budget=60, multiple=1, at_least=3, packed=False, cost=None)
@example(lengths=[(1, 1)] * 4, budget=60, multiple=1, at_least=3, packed=True, cost=None)
def test_every_response_token_is_read_once(lengths, budget, multiple, at_least, packed, cost):
    prompts, responses = counting(lengths)
    split = Split(budget, multiple, at_least, packed=packed, cost=cost)
    micro_batches = split.micro_batches(prompts, responses)
    assert torch.cat([m.rows for m in micro_batches]).sort().values.tolist() == list(range(len(lengths)))
    assert len(micro_batches) >= min(at_least, max(1, len(lengths)))
    for micro in micro_batches:
        rows, width = micro.ids.shape
        assert width % multiple == 0
        assert rows * width <= budget or len(micro.rows) <= 1
        assert micro.lengths.tolist() == [lengths[i][1] for i in micro.rows.tolist()]
        assert micro.selected == int(micro.lengths.sum())
        assert len(micro.index) == max(1, micro.selected)
        if micro.selected:
            assert micro.targets.equal(micro.ids.flatten()[micro.index] + 1)
        assert micro.ids.t().flatten()[micro.position_major].equal(micro.ids.flatten()[micro.index])
        if packed:
            assert_sequences_are_rows(micro, lengths, multiple)
    for micro in split.micro_batches(prompts, responses, "own"):
        assert micro.ids.flatten()[micro.index][: micro.selected].equal(micro.targets)
    read = in_order(micro_batches, [micro.targets for micro in micro_batches])
    assert read.equal(responses)


SIZES = {"vocab_size": 50, "max_position_embeddings": 8, "hidden_size": 16, "num_attention_heads": 2}
SIZES |= {"num_hidden_layers": 1, "ffn_dim": 16, "intermediate_size": 16}
SPEC = TransformersSpec.of({"model_type": "llama", **SIZES})


def of_tokens() -> None:
    """A loss without a term of a sequence."""


of_tokens.by_sequence = False  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None)
@given(rows_of_tokens.filter(len), st.integers(1, 60), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data())
def test_units_stay_together(lengths, budget, multiple, at_least, packed, data):
    count = data.draw(st.integers(1, len(lengths)))
    named = [*range(count), *(data.draw(st.integers(0, count - 1)) for _ in lengths[count:])]
    named = torch.tensor(data.draw(st.permutations(named)))
    units = [(named == unit).nonzero()[:, 0] for unit in range(count)]
    tokens = torch.tensor([sum(row) for row in lengths])
    found = Split(budget, multiple, at_least, packed=packed).rows(tokens, units)
    assert torch.cat(found).sort().values.tolist() == list(range(len(lengths)))
    assert len(found) >= min(at_least, count)
    for rows in found:
        inside = named[rows].unique_consecutive().tolist()
        assert torch.cat([units[unit] for unit in inside]).equal(rows)
        count, width = (1, int(tokens[rows].sum())) if packed else (len(rows), int(tokens[rows].max()))
        assert count * -(-width // multiple) * multiple <= budget or len(inside) == 1


@settings(max_examples=100, deadline=None)
@given(rows_of_tokens.filter(len), st.integers(1, 60), st.booleans(), st.data())
def test_a_loss_of_sequences_gets_its_trajectories_as_rows(lengths, budget, packed, data):
    """In the order of the model's outputs; the mask in bools."""
    prompts, responses = counting(lengths)
    named = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))))
    order = torch.tensor(data.draw(st.permutations(range(len(lengths)))))
    columns = {"prompt_ids": prompts, "response_ids": responses, "trajectory_id": named, "row_id": order}
    batch = Batch(columns | {"response_mask": responses.map(torch.ones_like)})
    tokens = TokenOutputs("actor", SPEC, Split(budget, packed=packed), (0, 50), cast(dist.ProcessGroup, None))
    for loss in (lambda: None, of_tokens):
        seen = []
        for micro in tokens.micro_batches(batch, loss=loss):
            whole, rows = tokens.with_columns(micro, batch, loss), micro.rows
            assert whole.columns is not None
            assert whole.columns["response_ids"].values.equal(responses.index(rows).values)
            assert whole.columns["response_ids"].offsets.diff().equal(whole.lengths)
            assert whole.columns["response_mask"].dtype == torch.bool
            assert int(whole.lengths.sum()) == micro.selected
            inside = named[rows].unique_consecutive() if loss is not of_tokens else named[rows]
            assert whole.columns["trajectory_id"].equal(inside)
            seen.append(inside)
        if loss is not of_tokens:
            assert torch.cat(seen).unique().shape == torch.cat(seen).shape


def test_a_model_that_computes_rows_alone_has_no_whole_trajectories():
    with pytest.raises(ModelError, match="token-mean"):
        Split(8, single=True).rows(torch.tensor([3, 4]), [torch.tensor([0, 1])])


@settings(max_examples=50, deadline=None)
@given(rows_of_tokens, st.integers(1, 60), st.booleans())
def test_scores_are_read_at_the_last_token(lengths, budget, packed):
    prompts, responses = counting(lengths)
    for micro in Split(budget, packed=packed).micro_batches(prompts, responses, "last"):
        found = micro.ids.flatten()[micro.index][: micro.selected]
        assert found.tolist() == [100 * i + sum(lengths[i]) - 1 for i in micro.rows.tolist()]


def test_rows_that_fit_into_one_micro_batch_keep_their_order():
    """So that a loss is given the mini-batch as it is, without a copy."""
    for packed in (True, False):
        (micro,) = Split(100, packed=packed).micro_batches(*counting([(3, 4), (1, 1), (5, 2)]))
        assert micro.rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_without_rows_reads_nothing(packed):
    micro = Split(100, multiple=4, packed=packed).empty()
    assert micro.ids.tolist() == [[0] * 4]
    assert (micro.selected, len(micro.rows), micro.index.tolist()) == (0, 0, [0])


def test_packing_needs_no_more_tokens_than_there_are():
    lengths = [(3, i % 9) for i in range(40)]
    tokens = sum(map(sum, lengths))
    packed = Split(48).micro_batches(*counting(lengths))
    assert sum(micro.ids.numel() for micro in packed) == tokens
    padded = Split(48, packed=False).micro_batches(*counting(lengths))
    assert sum(micro.ids.numel() for micro in padded) > tokens


def test_rows_need_a_prompt_and_a_partner():
    one, none = Ragged.from_rows([[1]]), Ragged.from_rows([[]], torch.int64)
    with pytest.raises(BatchError, match="row 0 has an empty prompt"):
        Split(10).micro_batches(none, one)
    with pytest.raises(BatchError, match="1 prompts and 2 responses"):
        Split(10).micro_batches(one, Ragged.from_rows([[1], [2]]))


def test_token_ids_are_whole_numbers():
    whole, floats = Ragged.from_rows([[0], [1, 2]]), Ragged.from_rows([[0.0], [1.0, float("nan")]])
    with pytest.raises(BatchError, match="response_ids are float32: token ids are whole numbers"):
        Split(10, vocab=56).micro_batches(whole, floats)


@pytest.mark.parametrize("wrong", [56, -1])
def test_token_ids_are_in_the_vocabulary(wrong):
    inside, outside = Ragged.from_rows([[0], [1, 55]]), Ragged.from_rows([[2], [3, wrong]])
    assert Split(10, vocab=56).micro_batches(inside, inside)
    for prompts, responses, name in ((outside, inside, "prompt_ids"), (inside, outside, "response_ids")):
        says = rf"row 1 has the token id {wrong} in {name}, the model's vocabulary is 0\.\.55"
        for at in ("before", "last"):
            with pytest.raises(BatchError, match=says):
                Split(10, vocab=56).micro_batches(prompts, responses, at)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_rows_longer_than_the_positions_that_a_model_has_learned(family: str):
    spec = TransformersSpec.of({"model_type": family, **SIZES})
    tokens = TokenOutputs("actor", spec, Split(64), (0, 50), cast(dist.ProcessGroup, None))
    for length in (8, 9):
        lengths = [(2, 1), (3, length - 3)]
        prompts, responses = (ids.map(torch.zeros_like) for ids in counting(lengths))
        batch = Batch({"prompt_ids": prompts, "response_ids": responses})
        if length > 8 and family != "llama":
            with pytest.raises(BatchError, match=f"row 1 has 9 tokens, this {family} model has learned 8 pos"):
                tokens.check(batch, ("log_probs",))
        else:
            tokens.check(batch, ("log_probs",))
    for output in ("logits", "ref_logits"):
        with pytest.raises(ModelError, match=f"asked for {output!r}, which only a loss gets"):
            tokens.check(batch, (output,), without_loss=True)


row_sizes = st.lists(st.integers(1, 30), max_size=24)


@settings(max_examples=300, deadline=None)
@given(row_sizes, st.integers(1, 60), st.integers(1, 5), st.booleans())
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
