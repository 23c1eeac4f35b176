"""References to rows, without a cluster: small columns lie in their manifests, so parts are written and read in place.

A simulated rank reads what a protocol gave it and writes a part of its own, as a host process does.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.backend import node_numbers
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.row_refs import (
    CallOrigin,
    ColumnRef,
    Concat,
    Gather,
    RankOutput,
    SplitSpec,
    locate,
    sliced,
    stretches,
)
from hybridflow.cluster.session import Session
from hybridflow.cluster.store import Reader, write
from hybridflow.errors import BatchError, MissingColumnError, WorkerError
from hybridflow.protocols.protocol import DP_PROTO, THREE_D_ALL_MICRO_DP, THREE_D_PP_AS_DP, THREE_D_PROTO, Protocol
from hybridflow.topology import RankGrid

quick = settings(max_examples=60, deadline=None)
GRIDS = st.builds(
    RankGrid, st.integers(1, 2), st.sampled_from((1, 2)), st.integers(1, 5), p_g=st.just(1), t_g=st.just(1)
)
SPLITTING = (DP_PROTO, THREE_D_PROTO, THREE_D_ALL_MICRO_DP, THREE_D_PP_AS_DP)


def batch_of(rows: int, seed: int = 0) -> Batch:
    """Rows with an id, tokens of skewed lengths, and groups of one to four adjacent rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(rows, generator=generator) ** 3 * 8).long()
    sizes = torch.randint(1, 5, (rows,), generator=generator)
    return Batch(
        {
            "row_id": torch.arange(rows),
            "tokens": Ragged.from_lengths(torch.arange(int(lengths.sum()), dtype=torch.int32), lengths),
            "num_tokens": lengths + 1,
            "group_id": torch.arange(rows).repeat_interleave(sizes)[:rows],
        }
    )


def compute(ref: BatchRef, rank: int) -> BatchRef:
    """What a rank does: read its rows, write `twice` of each row, and where the row was computed."""
    batch = Reader(1.0).read(ref.to_rank())
    assert batch.rows == ref.rows
    out = Batch({"twice": batch["row_id"] * 2, "rank": torch.full((batch.rows,), rank)})
    return BatchRef.of_output(
        RankOutput(write(out), out.rows, CallOrigin("simulated", rank, "compute")), out.columns, ref.part
    )


class How(NamedTuple):
    """How an operation declares that its rows are split."""

    balance: str | None = None
    groups: bool = False
    chunks: int = 1

    def applied(self, ref: BatchRef) -> BatchRef:
        refs = ref.column_refs
        weights = refs.get(self.balance) if self.balance else None
        return replace(ref, split_spec=SplitSpec(weights, refs["group_id"] if self.groups else None, self.chunks))


def call(ref: BatchRef, protocol: Protocol, grid: RankGrid, how: How) -> tuple[BatchRef, list[BatchRef]]:
    inputs = protocol.split(grid, how.applied(ref))
    return protocol.collect(grid, [compute(part, rank) for rank, part in enumerate(inputs)]), inputs


splittings = st.builds(How, st.sampled_from((None, "num_tokens", "tokens", "absent")), st.booleans(), st.integers(1, 4))


@quick
@given(st.integers(1, 60), GRIDS, GRIDS, st.sampled_from(SPLITTING), splittings, splittings)
def test_rows_come_back_in_order_through_two_calls(rows, first, second, protocol, one, two):
    """Over any protocols, data parallel sizes, balancing, groups and mini-batches, one after the other."""
    ref = BatchRef.from_batch(batch_of(rows, seed=rows))
    made, _ = call(ref, protocol, first, one)
    assert made.get()["twice"].tolist() == [2 * row for row in range(rows)]
    again, _ = call((ref | made).without("row_id").rename(twice="row_id"), protocol, second, two)
    assert again.get()["twice"].tolist() == [4 * row for row in range(rows)]


@quick
@given(st.integers(1, 60), st.integers(1, 7), splittings)
def test_split_covers_every_row_once_and_concat_restores_them(rows, parts, splitting):
    batch = batch_of(rows, seed=rows)
    ref = splitting.applied(BatchRef.from_batch(batch))
    pieces = ref.split(parts)
    read = [piece.get() for piece in pieces]
    assert [len(piece) for piece in pieces] == [piece.rows for piece in read]
    assert sorted(row for piece in read for row in piece["row_id"].tolist()) == list(range(rows))
    assert all(a["tokens"].lengths.tolist() == (a["num_tokens"] - 1).tolist() for a in read)
    assert BatchRef.concat(pieces).get().equal(batch)


@quick
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_a_split_by_reference_is_the_split_of_the_batch(rows, parts, chunks, groups):
    """The controller's plan and `Batch.split` agree row by row, so tests may use either."""
    batch = batch_of(rows, seed=rows)
    how = {"balance": "num_tokens", "groups": groups, "chunks": chunks}
    for ref, expected in zip(BatchRef.from_batch(batch).split(parts, **how), batch.split(parts, **how)):
        got = ref.get()
        assert got.equal(expected)
        assert Reader(1.0).read(ref.to_rank()).chunk_rows == expected.chunk_rows or parts == 1


@st.composite
def edits(draw):
    """A chain of row operations, each with fractions that are turned into rows where it is applied."""
    kinds = st.sampled_from(("slice", "repeat", "split"))
    fraction = st.floats(0, 1)
    return draw(st.lists(st.tuples(kinds, fraction, fraction), max_size=6))


@quick
@given(st.integers(1, 20), edits())
def test_any_chain_of_edits_reads_like_a_batch(rows, chain):
    """Slicing, repeating and splitting by reference give what the same operations give on the data."""
    batch = batch_of(rows).select("row_id", "tokens", "num_tokens")
    ref = BatchRef.from_batch(batch)
    for kind, a, b in chain:
        low, high = sorted((round(a * len(ref)), round(b * len(ref))))
        if kind == "slice":
            batch, ref = batch[low:high], ref[low:high]
        elif kind == "repeat" and len(ref) < 60:
            batch, ref = batch.repeat(1 + round(2 * a)), ref.repeat(1 + round(2 * a))
        elif kind == "split" and len(ref):
            ref = BatchRef.concat(ref.split(1 + round(4 * a), balance="num_tokens" if b > 0.5 else None))
    assert len(ref) == batch.rows
    assert ref.get().equal(batch)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_fewer_rows_than_parts(parts):
    """Empty shards keep their columns and types, also when they are cut from several parts."""
    ref = BatchRef.from_batch(batch_of(2))
    joined, _ = call(ref, DP_PROTO, RankGrid(d=parts), How())
    assert joined.get()["twice"].tolist() == [0, 2]
    pieces = [piece.get() for piece in (ref | joined).split(4)]
    assert [piece.rows for piece in pieces] == [1, 1, 0, 0]
    assert {piece["twice"].dtype for piece in pieces} == {torch.int64}
    assert pieces[3]["tokens"].dtype == torch.int32


def test_slices_of_joined_rows_touch_only_the_parts_that_hold_them():
    parts = [RankOutput(None, 10, CallOrigin("w", rank, "m")) for rank in range(4)]
    node = Concat(tuple(parts), (10, 10, 10, 10))
    found = locate(sliced(node, 12, 18, 40), lambda order: [])
    assert found.outputs == [parts[1]]
    assert found.row.tolist() == list(range(2, 8))
    across = locate(sliced(node, 8, 32, 40), lambda order: [])
    assert across.outputs == parts
    assert across.runs == [(0, 8, 10), (1, 0, 10), (2, 0, 10), (3, 0, 2)]
    assert locate(sliced(node, 10, 10, 40), lambda order: []).runs == []


def test_slices_do_not_pile_up():
    part = RankOutput(None, 1000, CallOrigin("w", 0, "m"))
    node, rows = part, 1000
    for _ in range(100):
        node, rows = sliced(node, 1, rows - 1, rows), rows - 2
    assert isinstance(node, Gather)
    assert node.source is part
    assert np.array_equal(locate(node, lambda order: []).row, np.arange(100, 900))


@quick
@given(st.data())
def test_rows_side_by_side_are_found_as_stretches(data):
    """The same rows as one by one, merged where they go on; None where a selection has to be looked up."""
    outputs = [RankOutput(None, data.draw(st.integers(0, 5)), CallOrigin("a", i, "f")) for i in range(3)]
    node, rows, chosen = outputs[0], outputs[0].rows, False
    for step in range(data.draw(st.integers(0, 6))):
        how = data.draw(st.sampled_from(("slice", "join", "pick", "repeat")))
        if how == "slice":
            start = data.draw(st.integers(0, rows))
            stop = data.draw(st.integers(start, rows))
            node, rows = sliced(node, start, stop, rows), stop - start
        elif how == "join":
            other = outputs[step % 3]
            node, rows = Concat((node, other), (rows, other.rows)), rows + other.rows
        elif rows:
            chosen = True
            picked = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=4)), np.int64)
            node = Gather(node, picked) if how == "pick" else Gather(node, range(rows * 2), 2)
            rows = len(picked) if how == "pick" else rows * 2
    found, expected = stretches(node, rows), locate(node, lambda order: [])
    if found is None:
        assert chosen or not rows
        return
    mine = [(found.outputs[which], row) for which, start, stop in found.runs for row in range(start, stop)]
    theirs = [(expected.outputs[which], row) for which, row in zip(expected.which, expected.row, strict=True)]
    assert mine == theirs
    assert all(a[0] != b[0] or a[2] != b[1] for a, b in itertools.pairwise(found.runs))


def test_rows_are_repeated_by_numbers_of_their_own_as_in_a_batch():
    batch = batch_of(3).select("row_id", "tokens")
    ref = BatchRef.from_batch(batch).repeat([2, 1, 3])
    assert (
        ref.get()
        .select("row_id", "tokens", "group_id")
        .equal(batch.repeat([2, 1, 3]).select("row_id", "tokens", "group_id"))
    )
    again = ref.repeat(2).get()
    assert len(again["row_id"].unique()) == 12
    assert again["group_id"].tolist() == [0] * 4 + [1] * 2 + [2] * 6


def test_parts_of_one_split_are_joined_without_reading_anything(monkeypatch):
    """Which rows they are depends on data, which the driver must not wait for."""
    parts = BatchRef.from_batch(batch_of(9)).split(3, balance="num_tokens")
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", lambda *_: pytest.fail("the driver reads"))
        joined = BatchRef.concat(parts)
    assert joined.get()["row_id"].tolist() == list(range(9))


def test_copies_of_a_row_are_told_apart():
    batch = batch_of(3).select("row_id", "tokens")
    copies = BatchRef.from_batch(batch[[0, 0, 2, 0]]).apart().get()
    assert copies["group_id"].tolist() == [0, 0, 2, 0]
    assert copies["row_id"].tolist() == [0, 1 << 32, 2, 2 << 32]
    plain = BatchRef.from_batch(batch)
    assert plain.apart() is plain


def test_joining_batches_with_equal_row_ids_gives_the_later_rows_others():
    """Rows of different origin, e.g. of two loaders, also where one of them is repeated."""
    batch = batch_of(3).select("row_id", "tokens")
    a, b = BatchRef.from_batch(batch), BatchRef.from_batch(batch)
    more, few, by = list(range(6)), [0, 1, 2], 1 << 32
    repeated = a.repeat(2).without("group_id")
    assert BatchRef.concat([repeated, b]).get()["row_id"].tolist() == [*more, *(by + one for one in few)]
    assert BatchRef.concat([b, repeated]).get()["row_id"].tolist() == [*few, *(by + one for one in more)]
    joined = BatchRef.concat([a, b]).repeat(2)
    assert joined.get()["group_id"].tolist() == [0, 0, 1, 1, 2, 2, *(by + one // 2 for one in more)]
    assert BatchRef.concat([a.repeat(2), b.repeat(2)]).get()["group_id"].tolist() == joined.get()["group_id"].tolist()


def test_columns():
    ref = BatchRef.from_batch(batch_of(4))
    assert ref["num_tokens"].get().tolist() == batch_of(4)["num_tokens"].tolist()
    assert len(ref["tokens"]) == 4
    assert ref.get("row_id").columns == ("row_id",)
    assert ref.get(["tokens", "row_id"]).columns == ("tokens", "row_id")
    assert ref.select("row_id").without("row_id").columns == ()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda ref: ref.get("tokns"), MissingColumnError, "Did you mean 'tokens'"),
        (lambda ref: ref.repeat(1.5), BatchError, r"repeat\(1.5\)"),
        (lambda ref: ref.split(0), BatchError, "at least 1"),
        (lambda ref: BatchRef.concat([ref, ref.without("tokens")]), BatchError, "cannot join"),
        (lambda ref: BatchRef.concat([]), BatchError, "at least one"),
        (lambda ref: list(ref), TypeError, r"iterate over .get\(\)"),
    ],
)
def test_what_a_reference_refuses(wrong, kind, message):
    with pytest.raises(kind, match=message):
        wrong(BatchRef.from_batch(batch_of(4)))


def test_metrics_need_a_session(monkeypatch):
    monkeypatch.setattr(Session, "_current", None)
    with pytest.raises(BatchError, match="no session"):
        BatchRef.from_batch(batch_of(4)).metrics()


def test_a_part_that_lacks_a_declared_column_names_its_writer():
    part = RankOutput(write(Batch({"a": torch.ones(2)})), 2, CallOrigin("scorer", 3, "score"))
    with pytest.raises(WorkerError, match=r"scorer.score on rank 3 declared the column 'b' and returned \['a'\]"):
        BatchRef(2, {"b": ColumnRef("b", part)}).get()


def test_a_part_with_other_rows_than_promised_names_its_writer():
    part = RankOutput(write(Batch({"a": torch.ones(2)})), 3, CallOrigin("scorer", 1, "score"))
    with pytest.raises(WorkerError, match=r"scorer.score on rank 1 returned 2 rows where 3 were due"):
        BatchRef(3, {"a": ColumnRef("a", part)}).get()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float16, torch.float8_e4m3fn, torch.uint8])
def test_types_survive_the_store(dtype):
    values = torch.tensor([0.0, 1.0, 1.5, -2.0]).to(dtype) if dtype is not torch.uint8 else torch.arange(4).to(dtype)
    ragged = Ragged.from_lengths(values, torch.tensor([3, 0, 1, 0]))
    batch = Batch({"dense": values, "matrix": values.reshape(4, 1).expand(4, 2), "ragged": ragged})
    got = BatchRef.from_batch(batch).get()
    for name in batch.columns:
        assert got[name].dtype == dtype
    assert torch.equal(got["dense"].view(torch.uint8), values.view(torch.uint8))
    assert got["matrix"].shape == (4, 2)
    assert got["ragged"].lengths.tolist() == [3, 0, 1, 0]


def test_small_columns_are_stored_without_the_buffer_behind_them():
    """A view of a large tensor must not drag it into every manifest."""
    large = torch.zeros(1_000_000)
    assert len(pickle.dumps(write(Batch({"few": large[:4]})))) < 2000


def test_machines_are_numbered_in_order_of_appearance():
    assert node_numbers(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert node_numbers([]) == ()
