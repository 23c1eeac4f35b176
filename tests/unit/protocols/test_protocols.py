"""Transfer protocols on grids of up to 1,024 ranks: every row arrives where it must, once per replica, in order."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_grids_reach_a_thousand_ranks():
    """The sizes above are not vacuous: the largest grid of the tests has 1,024 ranks."""
    grid = RankGrid(4, 8, 32, p_g=2, t_g=2)
    assert math.prod((grid.p, grid.t, grid.d)) == RANKS
    batch = Numbered(tuple(range(5000)))
    for protocol in SPLITTING:
        assert protocol.collect(grid, protocol.split(grid, batch)).rows == batch.rows
