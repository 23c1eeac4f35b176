"""RankGrid: topology is arithmetic.

Ranks of a 3D-parallel group are laid out with tensor parallelism fastest, then pipeline, then data parallelism
(the paper's order, section 5): `rank = (d_i * p + p_i) * t + t_i`. Every group of ranks is a slice of that array.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from hybridflow.errors import PlacementError, nearest

Axis = Literal["p", "t", "d"]
GenerationAxis = Literal["p", "t", "micro", "d"]
GroupingRule = Literal["hybridflow", "vanilla", "general"]


class Coords(NamedTuple):
    """Position of a rank in the grid."""

    p: int
    t: int
    d: int


class GenerationCoords(NamedTuple):
    """Position of a rank in the generation grid: `micro` in 0..d_g-1 within training replica `d`.

    Under the general rule generation replicas do not lie within training replicas: `d` is 0 and `micro` counts them.
    """

    p: int
    t: int
    micro: int
    d: int


@dataclass(frozen=True)
class RankGrid:
    """The ranks of one group: pipeline, tensor and data parallel *sizes* p, t, d.

    An actor's grid also knows the sizes `p_g`, `t_g` of its generation groups (those of training when it has none)
    and the `rule` that forms them (None: see `generation`).
    Errors: PlacementError when a size is below one, and those of `GenerationGrid`.
    """

    p: int = 1
    t: int = 1
    d: int = 1
    p_g: int | None = None
    t_g: int | None = None
    rule: GroupingRule | None = None

    def __post_init__(self) -> None:
        for name, size in (("p", self.p), ("t", self.t), ("d", self.d)):
            if type(size) is not int or size < 1:
                raise PlacementError(f"parallel size {name}={size!r} must be a whole number of at least 1.")
        if (self.p_g, self.t_g, self.rule) != (None, None, None):
            self.generation()

    @property
    def size(self) -> int:
        return self.p * self.t * self.d

    def coords(self, rank: int) -> Coords:
        self._check(rank)
        rest, t_i = divmod(rank, self.t)
        d_i, p_i = divmod(rest, self.p)
        return Coords(p_i, t_i, d_i)

    def rank(self, p: int = 0, t: int = 0, d: int = 0) -> int:
        """Rank at these coordinates; negative indices count from the end, as in Python.

        Errors: IndexError beyond the ends.
        """
        p, t, d = (_index(axis, at, getattr(self, axis)) for axis, at in (("p", p), ("t", t), ("d", d)))
        return (d * self.p + p) * self.t + t

    def ranks(self, p: int | None = None, t: int | None = None, d: int | None = None) -> list[int]:
        """All ranks whose given coordinates match, ascending; an omitted coordinate runs over its whole axis.

        Errors: IndexError for a coordinate beyond the ends of its axis.
        """
        axes = (("p", p, self.p), ("t", t, self.t), ("d", d, self.d))
        pick = [range(size) if at is None else (_index(axis, at, size),) for axis, at, size in axes]
        return [self.rank(p_i, t_i, d_i) for d_i in pick[2] for p_i in pick[0] for t_i in pick[1]]

    def group(self, rank: int, *axes: Axis) -> list[int]:
        """Ranks that differ from `rank` only along `axes`: `group(r, "t")` is r's tensor parallel group."""
        at = self.coords(rank)
        fixed = {axis: getattr(at, axis) for axis in ("p", "t", "d") if axis not in axes}
        return self.ranks(**fixed)

    def groups(self, *axes: Axis) -> list[list[int]]:
        """All groups along `axes`, ordered by their first rank."""
        first = dict.fromkeys(axes, 0)
        return [self.group(rank, *axes) for rank in self.ranks(**first)]

    def generation(
        self, p: int | None = None, t: int | None = None, rule: GroupingRule | None = None
    ) -> GenerationGrid:
        """The generation grid over the same ranks (paper, section 5.3 and figure 8); sizes default to p_g, t_g.

        Without a rule, here or in the grid, it is the paper's where t_g divides t and p_g divides p, and the general
        one otherwise.
        """
        p = p if p is not None else self.p_g if self.p_g is not None else self.p
        t = t if t is not None else self.t_g if self.t_g is not None else self.t
        divide = all(type(n) is int and n > 0 and whole % n == 0 for n, whole in ((p, self.p), (t, self.t)))
        return GenerationGrid(self, p, t, rule or self.rule or ("hybridflow" if divide else "general"))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is not in a grid of {self.size} ranks")


@dataclass(frozen=True)
class GenerationGrid:
    """Generation groups (p_g, t_g, d_g, d) over the ranks of a training grid (paper, section 5.3).

    With `rule="hybridflow"` generation TP and PP groups take ranks at intervals of t/t_g and p/p_g and micro data
    parallel groups are neighbouring ranks, so each device's generation shard contains its training shard. With
    `rule="vanilla"` ranks of a training replica are simply counted through with the smaller sizes.

    `rule="general"` takes any sizes: the ranks of the whole group are counted through, so a generation replica may be
    larger than a training replica or lie across two of them, and a device's generation shard need not contain what it
    trains.

    Errors: PlacementError for an unknown rule, and for sizes that it cannot group: t_g has to divide t and p_g to
    divide p, or (general) p_g*t_g the number of ranks.
    """

    train: RankGrid
    p: int = 1
    t: int = 1
    rule: GroupingRule = "hybridflow"

    def __post_init__(self) -> None:
        if self.rule not in (rules := get_args(GroupingRule)):
            raise PlacementError(f"grouping rule {self.rule!r} is unknown.{nearest(str(self.rule), rules)}")
        for name, size in (("p_g", self.p), ("t_g", self.t)):
            if type(size) is not int or size < 1:
                raise PlacementError(f"generation size {name}={size!r} must be a whole number of at least 1.")
        if self.rule == "general":
            self._check_general()
            return
        for name, size, whole in (("p_g", self.p, self.train.p), ("t_g", self.t, self.train.t)):
            if whole % size:
                raise PlacementError(
                    f"generation size {name}={size} must divide the training size {name[0]}={whole} under the "
                    f"{self.rule} rule. Use one of {_divisors(whole)}, or the general rule."
                )

    def _check_general(self) -> None:
        ranks = self.train.size
        if ranks % (self.p * self.t):
            raise PlacementError(
                f"generation sizes p_g={self.p}, t_g={self.t} make replicas of {self.p * self.t} ranks, and the group "
                f"has p*t*d = {ranks}, which does not divide by that. Use p_g*t_g in {_divisors(ranks)}."
            )

    @property
    def d(self) -> int:
        """Parts of the group that hold generation replicas of their own: the training replicas (1: general rule)."""
        return 1 if self.rule == "general" else self.train.d

    @property
    def micro(self) -> int:
        """d_g = p*t / (p_g*t_g): generation replicas within one training replica (general rule: within the group)."""
        return self.train.size // self.d // (self.p * self.t)

    @property
    def replicas(self) -> int:
        """All generation replicas, d * d_g."""
        return self.micro * self.d

    @property
    def size(self) -> int:
        return self.train.size

    def coords(self, rank: int) -> GenerationCoords:
        at = self.train.coords(rank)
        if self.rule != "hybridflow":
            d_i, within = divmod(rank, self.size // self.d)
            rest, t_i = divmod(within, self.t)
            micro, p_i = divmod(rest, self.p)
            return GenerationCoords(p_i, t_i, micro, d_i)
        every_p, every_t = self.train.p // self.p, self.train.t // self.t
        micro = (at.p % every_p) * every_t + at.t % every_t
        return GenerationCoords(at.p // every_p, at.t // every_t, micro, at.d)

    def replica(self, rank: int) -> int:
        """Index of the rank's generation replica in 0..replicas-1; it takes rows in that order."""
        at = self.coords(rank)
        return at.d * self.micro + at.micro

    def rank(self, p: int = 0, t: int = 0, micro: int = 0, d: int = 0) -> int:
        """The rank at these generation coordinates."""
        if self.rule != "hybridflow":
            return ((d * self.micro + micro) * self.p + p) * self.t + t
        every_p, every_t = self.train.p // self.p, self.train.t // self.t
        return self.train.rank(p * every_p + micro // every_t, t * every_t + micro % every_t, d)

    def group(self, rank: int, *axes: GenerationAxis) -> list[int]:
        """Ranks whose generation coordinates differ from `rank`'s only along `axes`, in (d, micro, p, t) order."""
        at, sizes = self.coords(rank), self._sizes()
        span = {axis: range(sizes[axis]) if axis in axes else (getattr(at, axis),) for axis in sizes}
        return [self.rank(p, t, micro, d) for d, micro, p, t in itertools.product(*span.values())]

    def groups(self, *axes: GenerationAxis) -> list[list[int]]:
        """All groups along `axes`, ordered by their smallest rank; `groups("micro")` are micro data parallel groups."""
        span = [(0,) if axis in axes else range(size) for axis, size in self._sizes().items()]
        firsts = [self.rank(p, t, micro, d) for d, micro, p, t in itertools.product(*span)]
        return sorted((self.group(rank, *axes) for rank in firsts), key=min)

    def _sizes(self) -> dict[GenerationAxis, int]:
        """Axes from slowest to fastest, as rows are handed out."""
        return {"d": self.d, "micro": self.micro, "p": self.p, "t": self.t}


def _index(axis: str, at: int, size: int) -> int:
    if not -size <= at < size:
        raise IndexError(f"{axis}={at} is not in a grid with {axis} of size {size}")
    return at % size


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
