"""Execution plans: which devices each call runs on, and how its model is cut there (ReaL, section 4). Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hybridflow.errors import PlacementError
from hybridflow.topology import RankGrid


@dataclass(frozen=True)
class Mesh:
    """A set of devices, by their numbers in the cluster (node after node), ascending.

    Errors: PlacementError for no device, a negative number, or numbers that do not ascend.
    """

    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.devices
        if not given or given[0] < 0 or any(a >= b for a, b in itertools.pairwise(given)):
            raise PlacementError(f"Mesh({given!r}): give device numbers from 0 in ascending order, each once.")

    @classmethod
    def of(cls, start: int, size: int) -> Mesh:
        """The `size` neighbouring devices from `start`."""
        return cls(tuple(range(start, start + size)))

    @property
    def size(self) -> int:
        return len(self.devices)

    @cached_property
    def bits(self) -> int:
        """The set as one number, a bit for each device: meshes overlap where these have a bit in common."""
        first, last = self.devices[0], self.devices[-1]
        if last - first + 1 == self.size:
            return ((1 << self.size) - 1) << first
        return sum(1 << device for device in self.devices)

    def __hash__(self) -> int:
        return hash(self.bits)

    def overlaps(self, other: Mesh) -> bool:
        """Some device is in both, so calls on the two take turns."""
        return bool(self.bits & other.bits)

    def __str__(self) -> str:
        return ",".join(_runs(self.devices))


@dataclass(frozen=True)
class Parallel:
    """Pipeline, tensor and data parallel sizes. `micro_batches` per data parallel rank are those of another system's
    runs, for `calibrate`; searches leave None: the engines cut rows by `micro_tokens`, and are priced so.

    `shards` data parallel ranks, neighbours among these, share one copy of the parameters (FSDP, ZeRO 3); with 1 each
    has its own. Errors: PlacementError for a size below one, and for shards that do not divide d.
    """

    p: int = 1
    t: int = 1
    d: int = 1
    micro_batches: int | None = None
    shards: int = 1

    def __post_init__(self) -> None:
        sizes = (("p", self.p), ("t", self.t), ("d", self.d), ("micro_batches", self.micro_batches))
        sizes += (("shards", self.shards),)
        for name, size in sizes:
            if size is None and name == "micro_batches":
                continue
            if type(size) is not int or size < 1:
                raise PlacementError(f"Parallel({name}={size!r}): must be a whole number of at least 1.")
        if self.d % self.shards:
            raise PlacementError(f"Parallel(d={self.d}, shards={self.shards}): shards must divide d.")

    @property
    def size(self) -> int:
        return self.p * self.t * self.d

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.p, self.t, self.d

    @property
    def weights(self) -> tuple[int, int, int]:
        """Sizes (p, t, d) of how parameters lie: shards cut them as further tensor parallel ranks would."""
        return self.p, self.t * self.shards, self.d // self.shards

    @property
    def grid(self) -> RankGrid:
        return RankGrid(p=self.p, t=self.t, d=self.d)

    def __str__(self) -> str:
        return f"{self.p}-{self.t}-{self.d}" + (f" ({self.micro_batches} mb)" if self.micro_batches else "")


@dataclass(frozen=True)
class CallPlan:
    """Where one call runs and how. Errors: PlacementError when the sizes do not fill the mesh."""

    mesh: Mesh
    parallel: Parallel

    def __post_init__(self) -> None:
        if self.mesh.size != self.parallel.size:
            p = self.parallel
            raise PlacementError(
                f"p*t*d = {p.p}*{p.t}*{p.d} = {p.size} devices do not fill a mesh of {self.mesh.size} devices."
            )

    def alike(self, other: CallPlan) -> bool:
        """Weights lie the same way: micro-batches do not move them."""
        here, there = self.parallel, other.parallel
        return self.mesh == other.mesh and here.sizes == there.sizes and here.shards == there.shards

    def within(self, home: CallPlan) -> bool:
        """Weights that lie as in `home` get here inside the processes that have them: the same devices, and sizes that
        divide those (paper, section 5); any sizes where ranks share a copy of the parameters anyway."""
        here, there = self.parallel, home.parallel
        divide = not there.p % here.p and not there.t % here.t
        return self.mesh == home.mesh and here.shards == 1 and (divide or there.shards > 1)

    def __str__(self) -> str:
        return f"{self.parallel} on {self.mesh}"


ExecutionPlan = Mapping[str, CallPlan]  # by the name of the call


def _runs(devices: tuple[int, ...]) -> list[str]:
    """Neighbouring numbers as `first-last`."""
    found: list[list[int]] = []
    for device in devices:
        if found and device == found[-1][1] + 1:
            found[-1][1] = device
        else:
            found.append([device, device])
    return [f"{first}-{last}" if last > first else str(first) for first, last in found]
