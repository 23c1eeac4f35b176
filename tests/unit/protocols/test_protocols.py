"""Transfer protocols on grids of up to 1,024 ranks: every row arrives where it must, once per replica, in order."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.losses.loss import Loss, Totals
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, MissingColumnError, ProtocolError
from hybridflow.protocols.operation import operations, register
from hybridflow.protocols.protocol import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    ONE_TO_ONE,
    SKIP,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Protocol,
    join,
)
from hybridflow.topology import RankGrid, even_bounds
from tests.example_losses import AGGREGATIONS, LOSSES, made, make_loss

RANKS = 1024
thorough = settings(max_examples=60, deadline=None)


@dataclass(frozen=True)
class Numbered:
    """Rows that know their numbers, and which rank computed them."""

    rows: tuple[int, ...]
    rank: int = -1

    def split(self, parts: int) -> list[Numbered]:
        bounds = even_bounds(len(self.rows), parts)
        return [Numbered(self.rows[a:b]) for a, b in itertools.pairwise(bounds)]

    @staticmethod
    def concat(parts: list[Numbered]) -> Numbered:
        return Numbered(tuple(row for part in parts for row in part.rows))


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@st.composite
def grids(draw) -> RankGrid:
    """Sizes whose product is at most 1,024, with generation sizes that divide them."""
    p = draw(st.integers(1, 16))
    t = draw(st.integers(1, RANKS // p))
    d = draw(st.integers(1, RANKS // (p * t)))
    return RankGrid(p, t, d, p_g=draw(st.sampled_from(divisors(p))), t_g=draw(st.sampled_from(divisors(t))))


batches = st.integers(0, 3000).map(lambda rows: Numbered(tuple(range(rows))))
SPLITTING = {
    DP_PROTO: lambda grid: grid.size,
    THREE_D_PROTO: lambda grid: grid.d,
    THREE_D_ALL_MICRO_DP: lambda grid: grid.d * grid.p * grid.t // (grid.p_g * grid.t_g),
    THREE_D_PP_AS_DP: lambda grid: grid.p * grid.d,
}
"""How many parts each splitting protocol makes."""


@thorough
@given(grids(), batches, st.sampled_from(list(SPLITTING)))
def test_every_row_arrives_once_per_replica(grid: RankGrid, batch: Numbered, protocol: Protocol):
    inputs = protocol.split(grid, batch)
    parts = SPLITTING[protocol](grid)
    copies = grid.size // parts
    arrived = [row for part in inputs for row in part.rows]
    assert sorted(arrived) == sorted(batch.rows * copies)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, part in enumerate(inputs):
        holders.setdefault(part.rows, []).append(rank)
    full = [ranks for rows, ranks in holders.items() if rows]
    assert all(len(ranks) == copies for ranks in full)
    sizes = [len(part.rows) for part in inputs]
    assert max(sizes) - min(sizes) <= 1


@thorough
@given(grids(), batches, st.sampled_from(list(SPLITTING)))
def test_collect_restores_the_order_of_what_distribute_split(grid: RankGrid, batch: Numbered, protocol: Protocol):
    assert protocol.collect(grid, protocol.split(grid, batch)).rows == batch.rows


@thorough
@given(grids(), batches)
def test_which_rank_gets_which_rows(grid: RankGrid, batch: Numbered):
    """The definitions of the paper's table 3, by coordinates."""
    inputs = {protocol: protocol.split(grid, batch) for protocol in SPLITTING}
    over_d, over_pd, over_all = (batch.split(n) for n in (grid.d, grid.p * grid.d, grid.size))
    for rank in range(grid.size):
        at = grid.coords(rank)
        assert inputs[THREE_D_PROTO][rank].rows == over_d[at.d].rows
        assert inputs[THREE_D_PP_AS_DP][rank].rows == over_pd[at.d * grid.p + at.p].rows
        assert inputs[DP_PROTO][rank].rows == over_all[rank].rows


@thorough
@given(grids(), st.integers(1, 4))
def test_generation_replicas_are_the_papers_groups(grid: RankGrid, rows_each: int):
    """Ranks of one replica stand t/t_g and p/p_g apart inside one training replica (section 5.3)."""
    parts = SPLITTING[THREE_D_ALL_MICRO_DP](grid)
    batch = Numbered(tuple(range(parts * rows_each)))
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, part in enumerate(THREE_D_ALL_MICRO_DP.split(grid, batch)):
        holders.setdefault(part.rows, []).append(rank)
    assert len(holders) == parts
    for ranks in holders.values():
        at = [grid.coords(rank) for rank in ranks]
        assert len({c.d for c in at}) == 1
        assert len({c.t % (grid.t // grid.t_g) for c in at}) == 1
        assert len({c.p % (grid.p // grid.p_g) for c in at}) == 1
        assert len({(c.p, c.t) for c in at}) == grid.p_g * grid.t_g


@thorough
@given(grids())
def test_outputs_come_from_the_documented_ranks(grid: RankGrid):
    """Rank numbers as outputs show whose output is used."""

    class One(list):
        concat = staticmethod(lambda parts: One(item for part in parts for item in part))

    def picked(protocol: Protocol) -> list[tuple[int, int, int]]:
        return [grid.coords(rank) for rank in protocol.collect(grid, [One([rank]) for rank in range(grid.size)])]

    assert picked(THREE_D_PROTO) == [(grid.p - 1, 0, d) for d in range(grid.d)]
    assert picked(THREE_D_PP_AS_DP) == [(p, 0, d) for d in range(grid.d) for p in range(grid.p)]
    assert [grid.rank(*at) for at in picked(DP_PROTO)] == list(range(grid.size))
    stages = THREE_D_PP_ONLY.collect(grid, list(range(grid.size)))
    assert [grid.coords(rank) for rank in stages] == [(p, 0, 0) for p in range(grid.p)]
    generation = grid.generation()
    replicas = [generation.coords(grid.rank(*at)) for at in picked(THREE_D_ALL_MICRO_DP)]
    assert replicas == [(0, 0, micro, d) for d in range(grid.d) for micro in range(generation.micro)]


@thorough
@given(grids(), batches)
def test_protocols_that_do_not_split(grid: RankGrid, batch: Numbered):
    ranks = list(range(grid.size))
    assert ONE_TO_ALL.split(grid, batch) == [batch] * grid.size
    assert ONE_TO_ALL.collect(grid, ranks) == ranks
    assert THREE_D_PP_ONLY.split(grid, batch) == [batch] * grid.size
    to_one = ONE_TO_ONE.split(grid, batch)
    assert to_one[0] is batch
    assert all(part is SKIP for part in to_one[1:])
    assert ONE_TO_ONE.collect(grid, ranks) == 0
    assert ALL_TO_ALL.prepared
    assert ALL_TO_ALL.split(grid, tuple(ranks)) == ranks
    assert ALL_TO_ALL.collect(grid, ranks) == ranks


@pytest.mark.parametrize("items", [[1, 2, 3], "abcd", 4, {1, 2, 3, 4}])
def test_a_prepared_list_has_one_item_per_rank(items):
    with pytest.raises(ProtocolError, match=r"one item per rank \(4\), got"):
        ALL_TO_ALL.split(RankGrid(t=2, d=2), items)


def test_fewer_rows_than_ranks_leaves_the_last_ranks_empty():
    inputs = DP_PROTO.split(RankGrid(d=5), Numbered((7, 8)))
    assert [part.rows for part in inputs] == [(7,), (8,), (), (), ()]


# The user-defined protocol: sequence parallel replicas, where both p and t count as data parallel.
def deal(grid, rows):
    parts = rows.split(grid.size // 2)
    return [parts[rank // 2] for rank in range(grid.size)]


def gather_even_ranks(grid, outputs):
    return join(outputs[::2])


PAIRS = Protocol("PAIRS", deal, gather_even_ranks)


@thorough
@given(grids().filter(lambda grid: grid.size % 2 == 0), batches)
def test_a_protocol_of_ones_own(grid: RankGrid, batch: Numbered):
    lines = sum(len(inspect.getsource(part).splitlines()) for part in (deal, gather_even_ranks))
    assert lines + 1 <= 15
    inputs = PAIRS.split(grid, batch)
    assert sorted(row for part in inputs for row in part.rows) == sorted(batch.rows * 2)
    assert all(a == b for a, b in zip(inputs[::2], inputs[1::2]))
    assert PAIRS.collect(grid, inputs).rows == batch.rows


def test_a_protocol_that_forgets_ranks_is_told_so():
    careless = Protocol("CARELESS", lambda grid, rows: rows.split(grid.d), lambda grid, outputs: outputs)
    with pytest.raises(ProtocolError, match=r"CARELESS.distribute returned 2 inputs for 8 ranks"):
        careless.split(RankGrid(2, 2, 2), Numbered((1, 2)))


def test_protocols_are_values():
    """They travel to other processes, and a skipped rank stays the one SKIP."""
    assert pickle.loads(pickle.dumps(THREE_D_PROTO)) == THREE_D_PROTO
    assert pickle.loads(pickle.dumps(SKIP)) is SKIP
    assert repr(THREE_D_PROTO) == "Protocol(name='THREE_D_PROTO', prepared=False)"


def test_join_needs_outputs():
    with pytest.raises(ProtocolError, match="no outputs"):
        join([])
    assert join([1, 2]) == [1, 2]


# Operations


class Judge:
    """Declares one operation of every kind of `reads`."""

    @register(DP_PROTO, reads=("prompt_ids|prompt", "hint?"), writes=("score",))
    def score(self, batch): ...

    @register(DP_PROTO, reads=lambda settings, call: (settings["column"], *call["extra"]), writes=("y",))
    def chosen(self, batch, extra=()): ...

    @register(DP_PROTO, reads=None, writes=lambda settings, call: [f"{settings['column']}_copy"])
    def everything(self, batch): ...

    @register(DP_PROTO, reads=("x",), balance="num_tokens")
    def balanced(self, batch): ...


class StrictJudge(Judge):
    @register(ONE_TO_ALL)
    def reset(self): ...

    @register(DP_PROTO, reads=("prompt_ids",), writes=("score", "reason"))
    def score(self, batch): ...


def read(name: str, available: tuple[str, ...], worker=Judge, settings=None, call=None) -> tuple[str, ...]:
    return operations(worker)[name].columns_read(settings or {}, call or {}, available)


def test_alternatives_and_optional_columns():
    assert read("score", ("prompt", "other")) == ("prompt",)
    assert read("score", ("prompt", "prompt_ids", "hint")) == ("prompt_ids", "hint")
    with pytest.raises(MissingColumnError, match="score reads 'prompt_ids'; no call has written it") as caught:
        read("score", ("hint",))
    assert caught.value.column == "prompt_ids"


def test_columns_that_depend_on_settings():
    assert read("chosen", ("a", "b", "c"), settings={"column": "b"}, call={"extra": ("c",)}) == ("b", "c")
    assert read("everything", ("b", "a")) == ("b", "a")
    assert operations(Judge)["everything"].columns_written({"column": "x"}, {}) == ("x_copy",)


def test_the_balance_column_travels_where_there_is_one():
    assert read("balanced", ("x", "num_tokens")) == ("x", "num_tokens")
    assert read("balanced", ("x",)) == ("x",)


def test_operations_are_inherited_and_overridden():
    assert set(operations(StrictJudge)) == {"score", "chosen", "everything", "balanced", "reset"}
    assert operations(StrictJudge)["score"].writes == ("score", "reason")
    assert operations(Judge)["score"].writes == ("score",)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: register("DP_PROTO"), "takes a Protocol first"),
        (lambda: register(lambda self: None), "takes a Protocol first"),
        (lambda: register(DP_PROTO, reads="prompt"), r"reads='prompt'.*\('prompt',\)"),
        (lambda: register(DP_PROTO, writes="score"), r"writes='score'.*\('score',\)"),
    ],
)
def test_declarations_that_mean_something_else(declare, message):
    with pytest.raises(ConfigError, match=message):
        declare()


ROWS = 13


def rollout(seed: int) -> tuple[Batch, dict[str, Ragged]]:
    """Responses of 0 to 24 tokens with holes; one row has no valid token, one no token at all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (ROWS,), generator=generator)
    lengths[5] = 0
    mask = Ragged.from_lengths(torch.rand(int(lengths.sum()), generator=generator) < 0.8, lengths)
    mask.row(3).fill_(False)
    return made(mask, seed, torch.float32)


def added_up(loss: Loss, batch: Batch, outputs: dict[str, Ragged], micro_batches: Sequence[torch.Tensor]):
    """Loss, metrics and gradients of the mini-batch from its micro-batches, each the indices of its rows."""
    mask: Any = batch.peek("response_mask")
    totals = Totals(float(mask.values.sum()), float(len(mask)), longest=float(mask.lengths.max()))
    leaves = {name: outputs[name].values.clone().requires_grad_(True) for name in loss.outputs}
    figures: dict[str, float] = {}
    for rows in micro_batches:
        given = {name: outputs[name].with_values(leaf).index(rows) for name, leaf in leaves.items()}
        share, metrics = loss(given, batch.reorder(rows), totals)
        share.backward()
        for name, value in {"loss": share.detach(), **metrics}.items():
            figures[name] = figures.get(name, 0.0) + float(value)
    return figures, {name: leaf.grad for name, leaf in leaves.items()}


@st.composite
def partitions(draw) -> list[torch.Tensor]:
    """Rows in any order, dealt to 1, 2 or 4 ranks, and by each to micro-batches."""
    order, ranks = draw(st.permutations(range(ROWS))), draw(st.sampled_from([1, 2, 4]))
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=ranks - 1, max_size=ranks - 1)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    size = draw(st.integers(1, ROWS))
    return [torch.tensor(part[i : i + size]) for part in parts for i in range(0, len(part), size)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", LOSSES)
@settings(max_examples=10, deadline=None)
@given(partitions(), st.integers(0, 3), st.sampled_from([None, 100.0]))
def test_any_split_gives_the_same(case, aggregation, micro_batches, seed, norm):
    loss = make_loss(case, aggregation, norm)
    batch, outputs = rollout(seed)
    expected, whole = added_up(loss, batch, outputs, [torch.arange(ROWS)])
    found, parts = added_up(loss, batch, outputs, micro_batches)
    assert found.keys() == expected.keys()
    for name, figure in expected.items():
        assert found[name] == pytest.approx(figure, rel=1e-5, abs=1e-6), name
    for name, gradient in whole.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((parts[name] - gradient).abs().max()) < 1e-6 * max(largest, 1.0)
        assert torch.all(gradient[~batch["response_mask"].values] == 0)
