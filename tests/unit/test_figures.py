"""Figures 7 and 8 of the paper, and two transitions with pipelines, as printed: devices are numbered from 1."""

from __future__ import annotations

from hybridflow.topology import GenerationGrid, RankGrid


def printed(groups: list[list[int]]) -> list[list[int]]:
    return [[rank + 1 for rank in group] for group in groups]


def without_overlap(grid: GenerationGrid) -> list[int]:
    """Devices whose generation weights contain nothing of their training weights."""
    out = []
    for rank in range(grid.size):
        train, generate = grid.train.coords(rank), grid.coords(rank)
        stages = meet(train.p, grid.train.p, generate.p, grid.p)
        if not (stages and meet(train.t, grid.train.t, generate.t, grid.t)):
            out.append(rank + 1)
    return out


def meet(i: int, parts: int, j: int, others: int) -> bool:
    """Whether the i-th of `parts` equal parts of something and the j-th of `others` have anything in common."""
    return i * others < (j + 1) * parts and j * parts < (i + 1) * others


def test_figure_7_one_iteration_on_four_devices():
    """Training 1-2-2, generation 1-1-2-2: full replicas of weights are gathered in pairs, two per training replica."""
    train = RankGrid(p=1, t=2, d=2)
    assert printed(train.groups("t")) == [[1, 2], [3, 4]]
    assert printed(train.groups("d")) == [[1, 3], [2, 4]]
    generation = train.generation(1, 1)
    assert (generation.p, generation.t, generation.micro, train.d) == (1, 1, 2, 2)
    assert printed(generation.groups("t")) == [[1], [2], [3], [4]]
    assert printed(generation.groups("micro")) == [[1, 2], [3, 4]]
    assert generation.replicas == 4


def test_figure_8_training_groups():
    train = RankGrid(p=1, t=4, d=2)
    assert printed(train.groups("t")) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert printed(train.groups("d")) == [[1, 5], [2, 6], [3, 7], [4, 8]]


def test_figure_8a_the_vanilla_grouping_keeps_weights_that_generation_does_not_use():
    generation = RankGrid(p=1, t=4, d=2).generation(1, 2, "vanilla")
    assert (generation.p, generation.t, generation.micro, generation.train.d) == (1, 2, 2, 2)
    assert printed(generation.groups("t")) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert printed(generation.groups("micro")) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert without_overlap(generation) == [2, 3, 6, 7]


def test_figure_8b_hybridflow_groups_at_intervals_reuse_training_weights_everywhere():
    generation = RankGrid(p=1, t=4, d=2).generation(1, 2)
    assert (generation.p, generation.t, generation.micro, generation.train.d) == (1, 2, 2, 2)
    assert printed(generation.groups("t")) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert printed(generation.groups("micro")) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert without_overlap(generation) == []


def test_two_stages_become_one():
    """Training 2-4-1, generation 1-2-4-1."""
    generation = RankGrid(p=2, t=4, d=1).generation(1, 2)
    assert (generation.p, generation.t, generation.micro, generation.train.d) == (1, 2, 4, 1)
    assert printed(generation.groups("t")) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert printed(generation.groups("micro")) == [[1, 2, 5, 6], [3, 4, 7, 8]]
    assert without_overlap(generation) == []


def test_four_stages_become_two():
    """Training 4-2-1, generation 2-1-4-1."""
    generation = RankGrid(p=4, t=2, d=1).generation(2, 1)
    assert (generation.p, generation.t, generation.micro, generation.train.d) == (2, 1, 4, 1)
    assert printed(generation.groups("p")) == [[1, 5], [2, 6], [3, 7], [4, 8]]
    assert printed(generation.groups("micro")) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert without_overlap(generation) == []
