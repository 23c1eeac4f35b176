"""Execution plans: which devices each call runs on, and how its model is cut there (ReaL, section 4). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hybridflow.errors import PlacementError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import ranges
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.topology import RankGrid, check_sizes, divisors

MANY_NODES = 16


@dataclass(frozen=True)
class Mesh:
    """A set of devices, by their numbers in the cluster (node after node), ascending. Errors: PlacementError for no
    device, a negative number, or numbers that do not ascend."""

    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        given = self.devices
        if not given or given[0] < 0 or any(a >= b for a, b in pairwise(given)):
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
        return bool(self.bits & other.bits)

    def __str__(self) -> str:
        return ranges(self.devices)


@dataclass(frozen=True)
class Parallel:
    """Pipeline, tensor and data parallel sizes. `shards` data parallel ranks, neighbours among these, share one copy of
    the parameters (FSDP, ZeRO 3); with 1 each has its own. `cp` data parallel ranks share their rows. `ep` and `etp`
    are those of `RankGrid`. Errors: PlacementError for a size below one, for shards and cp that do not divide d, and
    those of `ExpertGrid`."""

    p: int = 1
    t: int = 1
    d: int = 1
    shards: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        check_sizes("Parallel", p=self.p, t=self.t, d=self.d, shards=self.shards, cp=self.cp)
        for name in ("shards", "cp"):
            if self.d % getattr(self, name):
                raise PlacementError(f"Parallel(d={self.d}, {name}={getattr(self, name)}): {name} must divide d.")
        if self.ep != 1 or self.etp is not None:
            _ = self.grid

    @property
    def size(self) -> int:
        return self.p * self.t * self.d

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.p, self.t, self.d

    @property
    def cut(self) -> tuple[int, int, int, int, int]:
        return self.p, self.t, self.d, self.cp, self.ep

    @property
    def written(self) -> tuple[int, ...]:
        """As a placement has it."""
        return self.sizes if self.cp == self.ep == 1 else self.cut

    @classmethod
    def read(cls, sizes: Sequence[int]) -> Parallel:
        p, t, d, cp, ep = (*sizes, 1, 1)[:5]
        return cls(p, t, d, cp=cp, ep=ep)

    @property
    def columns(self) -> int:
        """Ranks that share the columns of an expert."""
        return self.etp or (self.t if self.ep == 1 else 1)

    @property
    def experts(self) -> int:
        """Ranks that share the routed experts of a stage."""
        return self.ep * self.columns

    @property
    def weights(self) -> tuple[int, int, int]:
        """Sizes (p, t, d) of how parameters lie: shards cut them as further tensor parallel ranks would."""
        return self.p, self.t * self.shards, self.d // self.shards

    @property
    def expert_shards(self) -> int:
        """Of the shards, ranks with the same experts."""
        return max(1, self.shards // self.ep)

    @property
    def expert_weights(self) -> tuple[int, int, int]:
        """`weights` of routed experts."""
        parts = self.experts * self.expert_shards
        return self.p, parts, self.t * self.d // parts

    @property
    def grid(self) -> RankGrid:
        return RankGrid(p=self.p, t=self.t, d=self.d, ep=self.ep, etp=self.etp)

    def __str__(self) -> str:
        more = {"cp": self.cp, "ep": self.ep}
        return "-".join(map(str, self.sizes)) + "".join(f" {name}={n}" for name, n in more.items() if n > 1)


@dataclass(frozen=True)
class CallPlan:
    """Mesh and sizes of one call. Errors: PlacementError when the sizes do not fill the mesh."""

    mesh: Mesh
    parallel: Parallel

    def __post_init__(self) -> None:
        if self.mesh.size != (p := self.parallel).size:
            asked = f"p*t*d = {p.p}*{p.t}*{p.d} = {p.size} devices"
            raise PlacementError(f"{asked} do not fill a mesh of {self.mesh.size} devices.")

    def within(self, home: CallPlan) -> bool:
        """Weights that lie as in `home` get here inside the processes that have them: the same devices, and sizes that
        divide those (paper, section 5); any sizes where ranks share a copy of the parameters anyway."""
        here, there = self.parallel, home.parallel
        divide = not there.p % here.p and not there.t % here.t
        return self.mesh == home.mesh and here.shards == 1 and (divide or there.shards > 1)

    def __str__(self) -> str:
        return f"{self.parallel} on {self.mesh}"


ExecutionPlan = Mapping[str, CallPlan]  # by the name of the call


def sizes(cluster: ClusterSpec) -> list[int]:
    """Numbers of devices that a set may get: any within a node, then whole neighbouring nodes.

    Of more than 16 nodes those numbers that differ by an eighth at most, and all but a power of two of them."""
    count, nodes, step = cluster.node.count, len(cluster.nodes), 1
    some = {nodes}
    for number in range(1, nodes):
        if number == step * MANY_NODES:
            step *= 2
        if number % step == 0:
            some.add(number)
        if number.bit_count() == 1:
            some.add(nodes - number)
    return sorted({*range(1, count + 1)} | {count * number for number in some})


def packings(cluster: ClusterSpec, asked: Sequence[int | Mesh]) -> Iterator[list[Mesh]]:
    """All ways to give each set a mesh, from its size or, pinned, the mesh itself, without overlap; of ways that differ
    only in which of equal devices a set has, some."""
    pinned = {i: mesh for i, mesh in enumerate(asked) if isinstance(mesh, Mesh)}
    taken = 0
    for mesh in pinned.values():
        if taken & mesh.bits:
            return
        taken |= mesh.bits

    def place(order: Sequence[tuple[int, int]], taken: int, found: Mapping[int, Mesh]) -> Iterator[list[Mesh]]:
        if not order:
            yield [found[i] for i in range(len(asked))]
            return
        (i, size), *rest = order
        for mesh in _candidates(cluster, size, taken):
            yield from place(rest, taken | mesh.bits, {**found, i: mesh})

    # large sets first: what is left of the nodes then takes the small ones
    yield from place(
        sorted([(i, n) for i, n in enumerate(asked) if isinstance(n, int)], key=lambda one: -one[1]), taken, pinned
    )


def _candidates(cluster: ClusterSpec, size: int, taken: int) -> Iterator[Mesh]:
    """Free meshes of a size that differ in what they leave: part of the node with least room first, or whole nodes."""
    free = [[d for d in cluster.devices_of(n) if not taken >> d & 1] for n in range(len(cluster.nodes))]
    fitting = {len(devices): devices for devices in reversed(free) if len(devices) >= size}  # the first of each length
    yield from (Mesh(tuple(fitting[left][:size])) for left in sorted(fitting))
    if size <= cluster.node.count:
        return
    whole = [len(devices) == cluster.node.count for devices in free]
    for first in range(len(free)):
        total, last = 0, first
        while last < len(free) and whole[last] and total < size:
            total += len(free[last])
            last += 1
        if total == size and last > first + 1:
            yield Mesh(tuple(d for devices in free[first:last] for d in devices))


def meshes(cluster: ClusterSpec) -> list[Mesh]:
    """Meshes that calls may run on (ReaL, section 4): whole neighbouring nodes, or a slice of one node whose size is a
    power of two and which starts at a multiple of it.

    Beyond 16 nodes runs of nodes are as slices are: powers of two, aligned; and the whole cluster."""
    found: dict[tuple[int, ...], None] = {}
    for node in range(len(cluster.nodes)):
        devices = cluster.devices_of(node)
        for size in powers(len(devices)):
            found |= {tuple(devices[i : i + size]): None for i in range(0, len(devices) - size + 1, size)}
    count = len(cluster.nodes)
    many = count > MANY_NODES
    for length in [*powers(count), count] if many else range(1, count + 1):
        for start in range(0, count - length + 1, length if many else 1):
            first, last = cluster.devices_of(start), cluster.devices_of(start + length - 1)
            found[tuple(range(first[0], last[-1] + 1))] = None
    return [Mesh(devices) for devices in found]


def divides(model: Decoder, t: int) -> bool:
    """Whether every layer can be cut into t equal parts; of families that only transformers describes, as vLLM cuts
    them."""
    if isinstance(model, ModelSpec):
        return model.divides(t)
    return not model.heads % t and (not model.kv_heads % t or not t % model.kv_heads)


def strategies(model: Decoder | None, size: int, node: int) -> list[Parallel]:
    """All p, t, d on `size` devices that the model can be cut by; tensor parallel groups lie within `node` neighbours.

    A group without a model (functions) is data parallel."""
    if model is None:
        return [Parallel(d=size)]
    tensor = (t for t in divisors(size) if node % t == 0 and divides(model, t))
    return [Parallel(p, t, size // t // p) for t in tensor for p in divisors(size // t) if p <= model.layers]


def generation_sizes(train: Parallel) -> list[Parallel]:
    """Generation layouts within a training layout (paper, section 5): p_g divides p and t_g divides t."""
    return [Parallel(p, t, train.size // (p * t)) for p in divisors(train.p) for t in divisors(train.t)]


def powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def busiest(seconds: Sequence[float], masks: Sequence[int]) -> float:
    """Seconds that the busiest device works, from those of each node and the devices that it takes."""
    loads: dict[int, float] = {}  # disjoint sets of devices
    for mask, took in zip(masks, seconds, strict=True):
        if not mask or not took:
            continue
        for other in list(loads):
            if common := other & mask:
                load = loads.pop(other)
                loads[common] = load + took
                if rest := other & ~mask:
                    loads[rest] = load
                mask &= ~common
                if not mask:
                    break
        if mask:
            loads[mask] = took
    return max(loads.values(), default=0.0)
