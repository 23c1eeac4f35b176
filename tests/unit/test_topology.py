"""RankGrid and GenerationGrid: the paper's printed groupings, and what must hold for every grid up to 1,024 ranks."""

from __future__ import annotations

import itertools
import pickle
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridflow.errors import PlacementError
from hybridflow.protocols.protocol import THREE_D_ALL_MICRO_DP
from hybridflow.topology import GenerationGrid, RankGrid, even_bounds

axes = st.lists(st.sampled_from(["p", "t", "d"]), unique=True, max_size=3)
generation_axes = st.lists(st.sampled_from(["p", "t", "micro", "d"]), unique=True, max_size=4)


@st.composite
def grids(draw):
    """Training grids up to 1,024 ranks; sizes are not only powers of two."""
    grid = RankGrid(p=draw(st.integers(1, 12)), t=draw(st.integers(1, 16)), d=draw(st.integers(1, 24)))
    assume(grid.size <= 1024)
    return grid


class Rows(list):
    """Rows that can be split and joined, as a protocol asks."""

    def split(self, parts):
        return [Rows(self[a:b]) for a, b in itertools.pairwise(even_bounds(len(self), parts))]

    @staticmethod
    def concat(parts):
        return Rows(row for part in parts for row in part)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def generation_grids(draw, rule=None):
    """Any rule; under the general one sizes have nothing to do with those of training."""
    train, rule = draw(grids()), rule or draw(st.sampled_from(["hybridflow", "vanilla", "general"]))
    p = draw(st.sampled_from(divisors(train.size if rule == "general" else train.p)))
    t = draw(st.sampled_from(divisors(train.size // p if rule == "general" else train.t)))
    return train.generation(p, t, rule)


def from_one(groups):
    """Groups with the ranks numbered from 1, as the paper prints them."""
    return [{rank + 1 for rank in group} for group in groups]


def meet(i: int, parts: int, j: int, others: int) -> bool:
    """Whether the i-th of `parts` equal parts of something and the j-th of `others` have anything in common."""
    return i * others < (j + 1) * parts and j * parts < (i + 1) * others


def without_overlap(grid: GenerationGrid) -> set[int]:
    """Devices whose generation weights contain nothing of their training weights."""
    out = set()
    for rank in range(grid.size):
        train, generate = grid.train.coords(rank), grid.coords(rank)
        stages = meet(train.p, grid.train.p, generate.p, grid.p)
        if not (stages and meet(train.t, grid.train.t, generate.t, grid.t)):
            out.add(rank + 1)
    return out


PAIRS = [{1, 2}, {3, 4}, {5, 6}, {7, 8}]
APART = [{1, 3}, {2, 4}, {5, 7}, {6, 8}]
FOURS = [{1, 2, 3, 4}, {5, 6, 7, 8}]
FIGURES = {
    "figure 7: 1-2-2, full replicas": ((1, 2, 2), (1, 1), "hybridflow", [{1}, {2}, {3}, {4}], PAIRS[:2], set()),
    "figure 8a: vanilla, weights that are not used": ((1, 4, 2), (1, 2), "vanilla", PAIRS, APART, {2, 3, 6, 7}),
    "figure 8b: at intervals": ((1, 4, 2), (1, 2), None, APART, PAIRS, set()),
    "two stages become one": ((2, 4, 1), (1, 2), None, APART, [{1, 2, 5, 6}, {3, 4, 7, 8}], set()),
    "four stages become two": ((4, 2, 1), (2, 1), None, [{n} for n in range(1, 9)], FOURS, set()),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_7_and_8_and_transitions_with_pipelines(figure: str):
    """As printed; hybridflow's grouping reuses training weights everywhere."""
    train, (p, t), rule, tensor, micro, unused = FIGURES[figure]
    grid = RankGrid(*train).generation(p, t, rule)
    assert from_one(grid.groups("t")) == tensor
    assert from_one(grid.groups("micro")) == micro
    assert without_overlap(grid) == unused
    assert (grid.micro, grid.replicas) == (len(micro[0]), grid.size // (p * t))
    if p > 1:
        assert from_one(grid.groups("p")) == [{1, 5}, {2, 6}, {3, 7}, {4, 8}]


def test_training_groups_of_figure_8():
    grid = RankGrid(p=1, t=4, d=2)
    assert from_one(grid.groups("t")) == FOURS
    assert from_one(grid.groups("d")) == [{1, 5}, {2, 6}, {3, 7}, {4, 8}]
    assert from_one(grid.groups("p")) == [{rank} for rank in range(1, 9)]


@settings(deadline=None)
@given(grids(), axes)
def test_groups_partition_all_ranks(grid, along):
    groups = grid.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    assert groups == sorted(groups)
    for group in groups[:5]:
        assert group == sorted(group)
        at = [grid.coords(rank) for rank in group]
        for axis in ("p", "t", "d"):
            values = [getattr(c, axis) for c in at]
            assert sorted(set(values)) == (list(range(getattr(grid, axis))) if axis in along else values[:1])
        assert all(grid.group(rank, *along) == group for rank in group[:3])


@settings(deadline=None)
@given(grids())
def test_coordinates_and_ranks_are_inverse(grid):
    for rank in range(grid.size):
        at = grid.coords(rank)
        assert grid.rank(at.p, at.t, at.d) == rank
    assert grid.rank(-1, -1, -1) == grid.size - 1
    assert grid.ranks() == list(range(grid.size))
    assert grid.ranks(p=-1, t=0) == [grid.rank(grid.p - 1, 0, d) for d in range(grid.d)]


@settings(deadline=None)
@given(generation_grids(), generation_axes)
def test_generation_groups_partition_all_ranks(grid, along):
    sizes = {"p": grid.p, "t": grid.t, "micro": grid.micro, "d": grid.d}
    groups = grid.groups(*along)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.size))
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)
    members = 1
    for axis in along:
        members *= sizes[axis]
    assert {len(group) for group in groups} == {members}
    for group in (groups[0], groups[-1]):
        assert all(grid.group(rank, *along) == group for rank in (group[0], group[-1]))
        order = [(c.d, c.micro, c.p, c.t) for c in map(grid.coords, group)]
        assert order == sorted(order)


@settings(deadline=None)
@given(generation_grids())
def test_generation_coordinates_and_ranks_are_inverse(grid):
    seen = set()
    for rank in range(grid.size):
        at = grid.coords(rank)
        assert grid.rank(at.p, at.t, at.micro, at.d) == rank
        assert 0 <= grid.replica(rank) < grid.replicas
        assert grid.rule == "general" or grid.train.coords(rank).d == at.d
        seen.add((grid.replica(rank), at.p, at.t))
    assert len(seen) == grid.size


@settings(deadline=None)
@given(generation_grids())
def test_replicas_partition_all_ranks_and_take_rows_in_order(grid):
    members = {}
    for rank in range(grid.size):
        members.setdefault(grid.replica(rank), []).append(rank)
    assert sorted(members) == list(range(grid.replicas))
    assert {len(ranks) for ranks in members.values()} == {grid.p * grid.t}
    for replica in (0, grid.replicas - 1):
        first = min(members[replica])
        assert grid.group(first, "p", "t") == sorted(members[replica], key=lambda rank: grid.coords(rank)[:2])
    assert sorted(map(sorted, grid.groups("p", "t"))) == sorted(members.values())


@settings(deadline=None)
@given(generation_grids(rule="general"))
def test_general_replicas_are_neighbours(grid):
    """Whatever training replicas they belong to."""
    replica = grid.p * grid.t
    assert [sorted(grid.group(first, "p", "t")) for first in range(0, grid.size, replica)] == [
        list(range(first, first + replica)) for first in range(0, grid.size, replica)
    ]
    assert (grid.d, grid.micro) == (1, grid.replicas)


@settings(deadline=None)
@given(grids(), st.data())
def test_the_rule_follows_from_the_sizes(train, data):
    p = data.draw(st.sampled_from(divisors(train.size)))
    t = data.draw(st.sampled_from(divisors(train.size // p)))
    grid = train.generation(p, t)
    assert grid.rule == ("hybridflow" if train.p % p == 0 and train.t % t == 0 else "general")


@settings(deadline=None)
@given(generation_grids(rule="hybridflow"))
def test_generation_shard_contains_training_shard(grid):
    """Section 5.3: what a device trains is part of what it generates with, so nothing is held twice."""
    train = grid.train
    for rank in range(grid.size):
        at, generation = train.coords(rank), grid.coords(rank)
        for index, size, g_index, g_size in (
            (at.p, train.p, generation.p, grid.p),
            (at.t, train.t, generation.t, grid.t),
        ):
            assert Fraction(g_index, g_size) <= Fraction(index, size)
            assert Fraction(index + 1, size) <= Fraction(g_index + 1, g_size)


@settings(deadline=None)
@given(generation_grids(rule="hybridflow"))
def test_micro_group_holds_exactly_one_generation_shard(grid):
    """The training shards of a micro data parallel group together are the generation shard of each member."""
    train, every_p, every_t = grid.train, grid.train.p // grid.p, grid.train.t // grid.t
    for group in grid.groups("micro"):
        at = grid.coords(group[0])
        held = {(c.p, c.t) for c in map(train.coords, group)}
        wanted = {(at.p * every_p + i, at.t * every_t + j) for i in range(every_p) for j in range(every_t)}
        assert held == wanted
        assert len(group) == len(wanted) == grid.micro


def test_equal_sizes_change_nothing():
    train = RankGrid(p=2, t=4, d=3)
    for rule in ("hybridflow", "vanilla"):
        grid = train.generation(2, 4, rule)
        assert grid.micro == 1
        assert [grid.coords(rank)[:2] for rank in range(24)] == [train.coords(rank)[:2] for rank in range(24)]


def test_thousand_ranks():
    grid = RankGrid(p=8, t=8, d=16)
    assert grid.size == 1024
    assert len(grid.groups("t")) == 128
    assert grid.groups("p", "t", "d") == [list(range(1024))]
    generation = grid.generation(2, 4)
    assert generation.replicas == 128
    assert len(generation.groups("p", "t")) == 128


@pytest.mark.parametrize("sizes", [{"p": 0}, {"t": -1}, {"d": 1.5}, {"t": True}])
def test_bad_training_sizes(sizes):
    with pytest.raises(PlacementError, match="whole number of at least 1"):
        RankGrid(**sizes)


@pytest.mark.parametrize(
    ("p", "t", "rule", "message"),
    [
        (1, 3, "vanilla", r"t_g=3 must divide .* t=4 under the vanilla rule. Use one of \[1, 2, 4\], or the general"),
        (4, 1, "hybridflow", r"p_g=4 must divide .* p=2 under the hybridflow rule. Use one of \[1, 2\]"),
        (1, 3, None, r"p_g=1, t_g=3 make replicas of 3 ranks.* 8, .*Use p_g\*t_g in \[1, 2, 4, 8\]"),
        (4, 4, None, "replicas of 16 ranks"),
        (0, 1, None, "p_g=0"),
        (1, 2.0, None, "t_g=2.0"),
        (1, 2.0, "general", "t_g=2.0"),
    ],
)
def test_bad_generation_sizes(p, t, rule, message):
    with pytest.raises(PlacementError, match=message):
        RankGrid(p=2, t=4).generation(p, t, rule)


@pytest.mark.parametrize(
    ("train", "p", "t", "tensor", "micro"),
    [
        ((1, 1, 4), 1, 4, [{1, 2, 3, 4}], [{1}, {2}, {3}, {4}]),  # one replica over four training replicas
        ((1, 2, 3), 1, 3, [{1, 2, 3}, {4, 5, 6}], [{1, 5}, {2, 6}, {3, 4}]),  # replicas that cut one in two
        ((2, 2, 2), 1, 4, [{1, 2, 3, 4}, {5, 6, 7, 8}], [{1, 5}, {2, 6}, {3, 7}, {4, 8}]),
        ((1, 4, 2), 4, 2, [{1, 3}, {2, 4}, {5, 7}, {6, 8}], [{n} for n in range(1, 9)]),
    ],
)
def test_sizes_that_do_not_divide(train, p, t, tensor, micro):
    grid = RankGrid(*train).generation(p, t)
    assert grid.rule == "general"
    assert from_one(grid.groups("t")) == tensor
    assert from_one(grid.groups("micro")) == micro


def test_the_grid_of_an_actor_knows_its_generation_sizes():
    grid = RankGrid(p=2, t=4, t_g=2)
    assert (grid.generation().p, grid.generation().t) == (2, 2)
    assert (grid.generation(p=1, t=1).p, grid.generation(p=1, t=1).t) == (1, 1)
    assert (RankGrid(p=2, t=4).generation().p, RankGrid(p=2, t=4).generation().t) == (2, 4)
    larger = RankGrid(p=2, t=4, p_g=4, t_g=2)
    assert larger.generation() == GenerationGrid(larger, 4, 2, "general")
    for wrong in ({"t_g": 3}, {"t_g": 0}, {"p_g": 3}, {"t_g": 8, "rule": "hybridflow"}, {"rule": "paper"}):
        with pytest.raises(PlacementError, match=r"must|divide|unknown"):
            RankGrid(p=2, t=4, **wrong)


@settings(deadline=None)
@given(generation_grids(), st.integers(0, 200))
def test_rows_are_handed_to_replicas_in_order_and_joined(grid, count):
    """What the protocol of generation does with an actor's grid, under every rule."""
    actor = RankGrid(grid.train.p, grid.train.t, grid.train.d, grid.p, grid.t, grid.rule)
    parts = THREE_D_ALL_MICRO_DP.split(actor, Rows(range(count)))
    for rank in range(grid.size):
        assert parts[rank] == parts[grid.group(rank, "p", "t")[0]]
    assert [*THREE_D_ALL_MICRO_DP.collect(actor, parts)] == list(range(count))


def test_the_grid_of_an_actor_knows_its_rule():
    grid = RankGrid(t=4, t_g=2, rule="vanilla")
    assert from_one(grid.generation().groups("t")) == [{1, 2}, {3, 4}]
    assert from_one(grid.generation(rule="hybridflow").groups("t")) == [{1, 3}, {2, 4}]


def test_bad_rule_and_rank():
    with pytest.raises(PlacementError, match=r"'vanila' is unknown. Did you mean 'vanilla'"):
        GenerationGrid(RankGrid(t=4), 1, 2, "vanila")
    for rank in (-1, 8):
        with pytest.raises(IndexError, match="grid of 8 ranks"):
            RankGrid(t=4, d=2).coords(rank)


@pytest.mark.parametrize(("axis", "at"), [("t", 4), ("t", -5), ("p", 1), ("d", 2)])
def test_coordinates_beyond_the_ends_are_refused(axis, at):
    grid = RankGrid(t=4, d=2)
    for ask in (grid.rank, grid.ranks):
        with pytest.raises(IndexError, match=f"{axis}={at} is not in a grid with {axis} of size"):
            ask(**{axis: at})


def test_grids_are_plain_values():
    grid = RankGrid(p=2, t=4, d=2).generation(1, 2)
    assert pickle.loads(pickle.dumps(grid)) == grid
    assert len({grid, RankGrid(p=2, t=4, d=2).generation(1, 2)}) == 1


def kept(grid: GenerationGrid, ranks: list[int]) -> Fraction:
    """Of a generation replica with these ranks, in the order of their positions: what their training shards have."""
    train, total = grid.train, Fraction(0)
    for at, rank in enumerate(ranks):
        own = train.coords(rank)
        shares = ((own.p, train.p, at // grid.t, grid.p), (own.t, train.t, at % grid.t, grid.t))
        both = [max(Fraction(0), min(Fraction(i + 1, n), Fraction(k + 1, m)) - max(Fraction(i, n), Fraction(k, m)))
                for i, n, k, m in shares]  # fmt: skip
        total += both[0] * both[1]
    return total


@given(generation_grids(rule="general"))
def test_general_replicas_are_numbered_so_that_the_fewest_bytes_move(grid):
    for replica in grid.array.reshape(-1, grid.p * grid.t).tolist():
        found = kept(grid, replica)
        assert found >= kept(grid, sorted(replica))
        if len(replica) <= 5:
            assert found == max(kept(grid, list(order)) for order in itertools.permutations(replica))


@pytest.mark.parametrize(
    ("train", "t_g", "moved"), [(RankGrid(t=2, d=4), 4, 0), (RankGrid(p=2, t=4), 8, Fraction(1, 2))]
)
def test_what_larger_replicas_receive(train, t_g, moved):
    """Counted through it would be half of the shards, and 7/8."""
    grid = train.generation(1, t_g)
    replicas = grid.array.reshape(-1, t_g).tolist()
    assert 1 - sum(kept(grid, replica) for replica in replicas) / len(replicas) == moved
