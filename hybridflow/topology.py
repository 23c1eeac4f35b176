"""RankGrid: topology is arithmetic.

Ranks of a 3D-parallel group are laid out with tensor parallelism fastest, then pipeline, then data parallelism
(the paper's order, section 5): `rank = (d_i * p + p_i) * t + t_i`. Every group of ranks is a slice of that array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from hybridflow.errors import PlacementError, nearest

GroupingRule = Literal["hybridflow", "vanilla", "general"]


class Coords(NamedTuple):
    """Position of a rank in the grid."""

    p: int
    t: int
    d: int


class ExpertCoords(NamedTuple):
    """Position of a rank among those that share experts."""

    p: int
    edp: int
    ep: int
    etp: int


class GenerationCoords(NamedTuple):
    """Position of a rank in the generation grid: `micro` in 0..d_g-1 within training replica `d`.

    Under the general rule generation replicas do not lie within training replicas: `d` is 0 and `micro` counts them.
    """

    p: int
    t: int
    micro: int
    d: int


def check_sizes(owner: str, **sizes: object) -> None:
    """Errors: PlacementError unless each size is a whole number of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise PlacementError(f"{owner} {name}={size!r} must be a whole number of at least 1.")


def even_bounds(rows: int, parts: int) -> list[int]:
    """[parts + 1]: where each of `parts` contiguous ranges begins; sizes differ by at most one, larger ones first."""
    small, larger = divmod(rows, parts)
    return [part * small + min(part, larger) for part in range(parts + 1)]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def data_parallel(
    owner: Any, sizes: Mapping[str, int], dp: int | None, devices: int, replicate: int = 1, **others: int
) -> int:
    """Data parallel size, a multiple of `replicate`, of a strategy that shards its model by `sizes`; `others` are
    further settings for messages. Errors: PlacementError when the sizes do not fit on `devices` devices."""
    sizes = {name: size for name, size in sizes.items() if size > 1 or name != "cp"}
    model = math.prod(sizes.values())
    found = dp if dp is not None else max(1, devices // model)
    if model * found == devices:
        return found
    shown = {**sizes, **({"replicate": replicate} if replicate > 1 else {}), **others}
    name, given = type(owner).__name__, [f"{setting}={value}" for setting, value in shown.items()]
    least = model * replicate
    if devices < least or devices % least:
        fit = f"Use {name}({', '.join(given)}) on {least * max(1, round(devices / least))} devices"
    else:
        fit = f"Use {name}({', '.join([*given, f'dp={devices // model}'])})"
    asked = ", ".join(given if dp is None else [*given, f"dp={dp}"])
    product = f"{sizes.get('pp', 1)}*{sizes.get('tp', 1)}*{found}"
    raise PlacementError(
        f"{name}({asked}) needs p*t*d = {product} = {model * found} devices, the pool has {devices}. {fit} or other "
        f"sizes."
    )


class _RankArray:
    """An array of ranks with one named axis per coordinate, slowest first."""

    axes: ClassVar[tuple[str, ...]]
    array: NDArray[np.int64]

    @cached_property
    def coordinates(self) -> dict[str, NDArray[np.int64]]:
        """For each axis, the coordinate of every rank."""
        return dict(zip(self.axes, np.unravel_index(self.array.ravel().argsort(), self.array.shape), strict=True))

    def _at(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.array.size:
            raise IndexError(f"rank {rank} is not in a grid of {self.array.size} ranks")
        return {axis: int(of_rank[rank]) for axis, of_rank in self.coordinates.items()}

    def _slice(self, **at: int | None) -> list[int]:
        """Ranks at these coordinates; None runs over the whole axis, negative ones count from the end."""
        for (axis, i), size in zip(at.items(), self.array.shape, strict=True):
            if i is not None and not -size <= i < size:
                raise IndexError(f"{axis}={i} is not in a grid with {axis} of size {size}")
        return self.array[tuple(slice(None) if i is None else i for i in at.values())].ravel().tolist()

    def group(self, rank: int, *axes: str) -> list[int]:
        """Ranks that differ from `rank` only along `axes`, slowest axis first: `group(r, "t")` is r's tensor parallel
        group."""
        return self._slice(**{axis: None if axis in axes else i for axis, i in self._at(rank).items()})

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along `axes`, ordered by their smallest rank."""
        order = sorted(range(self.array.ndim), key=lambda i: self.axes[i] in axes)
        sizes = [size for axis, size in zip(self.axes, self.array.shape, strict=True) if axis in axes]
        return sorted(self.array.transpose(order).reshape(-1, int(np.prod(sizes))).tolist(), key=min)


@dataclass(frozen=True)
class RankGrid(_RankArray):
    """The ranks of one group: pipeline, tensor and data parallel *sizes* p, t, d.

    An actor's grid also knows the sizes `p_g`, `t_g` of its generation groups (those of training when it has none)
    and the `rule` that forms them (None: see `generation`). `ep` and `etp` are those of `experts`.
    Errors: PlacementError when a size is below one, and those of `GenerationGrid` and `ExpertGrid`.
    """

    p: int = 1
    t: int = 1
    d: int = 1
    p_g: int | None = None
    t_g: int | None = None
    rule: GroupingRule | None = None
    ep: int = 1
    etp: int | None = None
    axes: ClassVar[tuple[str, ...]] = ("d", "p", "t")

    def __post_init__(self) -> None:
        check_sizes("parallel size", p=self.p, t=self.t, d=self.d)
        _ = self.experts
        if (self.p_g, self.t_g, self.rule) != (None, None, None):
            self.generation()

    @property
    def size(self) -> int:
        return self.p * self.t * self.d

    @cached_property
    def array(self) -> NDArray[np.int64]:  # type: ignore[override]
        return np.arange(self.size).reshape(self.d, self.p, self.t)

    @cached_property
    def experts(self) -> ExpertGrid:
        """The same ranks by their parts of experts, which without ep and etp are cut as other layers are."""
        etp = self.etp if self.etp is not None else (self.t if self.ep == 1 else 1)
        return ExpertGrid(self.p, self.t, self.d, self.ep, etp)

    def coords(self, rank: int) -> Coords:
        """Errors: IndexError for a rank beyond the grid."""
        return Coords(**self._at(rank))

    def rank(self, p: int = 0, t: int = 0, d: int = 0) -> int:
        """Rank at these coordinates; negative ones count from the end. Errors: IndexError beyond the ends."""
        return self._slice(d=d, p=p, t=t)[0]

    def ranks(self, p: int | None = None, t: int | None = None, d: int | None = None) -> list[int]:
        """All ranks whose given coordinates match, ascending; an omitted coordinate runs over its whole axis.

        Errors: IndexError for a coordinate beyond the ends of its axis.
        """
        return self._slice(d=d, p=p, t=t)

    def generation(
        self, p: int | None = None, t: int | None = None, rule: GroupingRule | None = None
    ) -> GenerationGrid:
        """The generation grid over the same ranks (paper, section 5.3 and figure 8); sizes default to p_g, t_g.

        The default rule is the paper's where t_g divides t and p_g divides p, otherwise the general one.
        """
        p = p if p is not None else self.p_g if self.p_g is not None else self.p
        t = t if t is not None else self.t_g if self.t_g is not None else self.t
        divide = all(type(n) is int and n > 0 and whole % n == 0 for n, whole in ((p, self.p), (t, self.t)))
        return GenerationGrid(self, p, t, rule or self.rule or ("hybridflow" if divide else "general"))


@dataclass(frozen=True)
class ExpertGrid(_RankArray):
    """The ranks of a group as a mixture of experts sees them: on each pipeline stage the d * t ranks, data parallel
    slowest, are (edp, ep, etp). `ep` ranks share the experts, `etp` ranks the columns of each, `edp` hold the same.

    Errors: PlacementError when ep * etp does not divide d * t.
    """

    p: int
    t: int
    d: int
    ep: int
    etp: int
    axes: ClassVar[tuple[str, ...]] = ("p", "edp", "ep", "etp")

    def __post_init__(self) -> None:
        check_sizes("parallel size", ep=self.ep, etp=self.etp)
        if self.d * self.t % (self.ep * self.etp):
            raise PlacementError(
                f"ep*etp = {self.ep}*{self.etp} does not divide the t*d = {self.t}*{self.d} ranks of a pipeline stage. "
                f"Use ep*etp in {divisors(self.t * self.d)}."
            )

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.d * self.t // (self.ep * self.etp)

    @cached_property
    def array(self) -> NDArray[np.int64]:  # type: ignore[override]
        ranks = np.arange(self.d * self.p * self.t).reshape(self.d, self.p, self.t)
        return ranks.transpose(1, 0, 2).reshape(self.p, self.edp, self.ep, self.etp)

    def coords(self, rank: int) -> ExpertCoords:
        """Errors: IndexError for a rank beyond the grid."""
        return ExpertCoords(**self._at(rank))


@dataclass(frozen=True)
class GenerationGrid(_RankArray):
    """Generation groups (p_g, t_g, d_g, d) over the ranks of a training grid (paper, section 5.3).

    With `rule="hybridflow"` generation TP and PP groups take ranks at intervals of t/t_g and p/p_g and micro data
    parallel groups are neighbouring ranks, so each device's generation shard contains its training shard. With
    `rule="vanilla"` ranks of a training replica are simply counted through with the smaller sizes.

    `rule="general"` takes any sizes: the ranks of the whole group are counted through, so a generation replica may be
    larger than a training replica or span two, and a device's generation shard need not contain its training shard. Its
    ranks are numbered so that as much as possible of their generation shards is in their training shards.

    Errors: PlacementError for an unknown rule or sizes that it does not allow: t_g must divide t and p_g must divide p,
    or (general) p_g*t_g must divide the number of ranks.
    """

    train: RankGrid
    p: int = 1
    t: int = 1
    rule: GroupingRule = "hybridflow"
    axes: ClassVar[tuple[str, ...]] = ("d", "micro", "p", "t")

    def __post_init__(self) -> None:
        if self.rule not in (rules := get_args(GroupingRule)):
            raise PlacementError(f"grouping rule {self.rule!r} is unknown.{nearest(str(self.rule), rules)}")
        check_sizes("generation size", p_g=self.p, t_g=self.t)
        ranks, replica = self.train.size, self.p * self.t
        if self.rule == "general" and ranks % replica:
            raise PlacementError(
                f"generation sizes p_g={self.p}, t_g={self.t} make replicas of {replica} ranks, and the group has "
                f"p*t*d = {ranks}, which does not divide by that. Use p_g*t_g in {divisors(ranks)}."
            )
        for name, size, whole in (("p_g", self.p, self.train.p), ("t_g", self.t, self.train.t)):
            if self.rule != "general" and whole % size:
                raise PlacementError(
                    f"generation size {name}={size} must divide the training size {name[0]}={whole} under the "
                    f"{self.rule} rule. Use one of {divisors(whole)}, or the general rule."
                )

    @property
    def d(self) -> int:
        """Parts of the group with their own generation replicas: the training replicas (1 under the general rule)."""
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

    @cached_property
    def array(self) -> NDArray[np.int64]:  # type: ignore[override]
        shape = (self.d, self.micro, self.p, self.t)
        ranks = np.arange(self.size)
        if self.rule == "general" and self.p * self.t > 1:
            return np.concatenate([_numbered(self, part) for part in ranks.reshape(-1, self.p * self.t)]).reshape(shape)
        if self.rule != "hybridflow":
            return ranks.reshape(shape)
        every_p, every_t = self.train.p // self.p, self.train.t // self.t
        return ranks.reshape(self.d, self.p, every_p, self.t, every_t).transpose(0, 2, 4, 1, 3).reshape(shape)

    def coords(self, rank: int) -> GenerationCoords:
        """Errors: IndexError for a rank beyond the grid."""
        return GenerationCoords(**self._at(rank))

    def replica(self, rank: int) -> int:
        """Index of the rank's generation replica in 0..replicas-1; replicas take rows in this order."""
        at = self.coords(rank)
        return at.d * self.micro + at.micro

    def rank(self, p: int = 0, t: int = 0, micro: int = 0, d: int = 0) -> int:
        """The rank at these generation coordinates."""
        return self._slice(d=d, micro=micro, p=p, t=t)[0]


def _numbered(grid: GenerationGrid, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranks of a generation replica by their position there (p, then t): a linear assignment by the overlap of
    shards, as shares of layers times shares of each layer. Of equally good numberings one near the given order."""
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    train, position = grid.train, np.arange(grid.p * grid.t)
    stages = _overlaps(ranks // train.t % train.p, train.p, position // grid.t, grid.p)
    parts = _overlaps(ranks % train.t, train.t, position % grid.t, grid.t)
    shared = stages * parts * (len(ranks) + 1) + np.eye(len(ranks), dtype=np.int64)
    return ranks[linear_sum_assignment(shared.T, maximize=True)[1]]


def _overlaps(of_rank: NDArray[np.int64], sizes: int, at: NDArray[np.int64], others: int) -> NDArray[np.int64]:
    """[rank, position]: the part that interval i of `sizes` equal ones and interval k of `others` share."""
    starts = np.maximum.outer(of_rank * others, at * sizes)
    return np.maximum(0, np.minimum.outer((of_rank + 1) * others, (at + 1) * sizes) - starts)
