"""Packing: where on a cluster sets of colocated models go, whose sizes are known. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import Mesh, Parallel

MANY_NODES = 16


def sizes(cluster: ClusterSpec) -> list[int]:
    """Numbers of devices that a set may get: any within a node, then whole neighbouring nodes.

    Of more than 16 equal nodes those numbers that differ by an eighth at most, and all but a power of two of them.
    """
    counts = [node.count for node in cluster.nodes]
    found = set(range(1, max(counts) + 1))
    if len(set(counts)) == 1 and len(counts) > MANY_NODES:
        return sorted(found | {counts[0] * nodes for nodes in _some(len(counts))})
    for first in range(len(counts)) if len(set(counts)) > 1 else [0]:
        total = 0
        for count in counts[first:]:
            total += count
            found.add(total)
    return sorted(found)


def _some(nodes: int) -> set[int]:
    found, step = {nodes}, 1
    for number in range(1, nodes):
        if number == step * MANY_NODES:
            step *= 2
        if number % step == 0:
            found.add(number)
        if number.bit_count() == 1:
            found.add(nodes - number)
    return found


def pack(cluster: ClusterSpec, asked: Sequence[int | Mesh]) -> list[Mesh] | None:
    """A mesh for each set, from its size or, pinned, the mesh itself; no two overlap. None where they do not fit."""
    return next(packings(cluster, asked), None)


def packings(cluster: ClusterSpec, asked: Sequence[int | Mesh]) -> Iterator[list[Mesh]]:
    """All ways to `pack`; of those that differ only in which of equal devices a set has, some."""
    pinned = [mesh for mesh in asked if isinstance(mesh, Mesh)]
    taken = 0
    for mesh in pinned:
        if taken & mesh.bits:
            return
        taken |= mesh.bits
    # large sets first: what is left of the nodes then takes the small ones
    order = sorted((i for i, n in enumerate(asked) if not isinstance(n, Mesh)), key=lambda i: -_size(asked[i]))
    found: dict[int, Mesh] = {i: mesh for i, mesh in enumerate(asked) if isinstance(mesh, Mesh)}
    for _ in _place(cluster, asked, order, taken, found):
        yield [found[i] for i in range(len(asked))]


def _place(
    cluster: ClusterSpec, asked: Sequence[int | Mesh], order: Sequence[int], taken: int, found: dict[int, Mesh]
) -> Iterator[None]:
    if not order:
        yield
        return
    for mesh in _candidates(cluster, _size(asked[order[0]]), taken):
        found[order[0]] = mesh
        yield from _place(cluster, asked, order[1:], taken | mesh.bits, found)


def _candidates(cluster: ClusterSpec, size: int, taken: int) -> Iterator[Mesh]:
    """Free meshes of a size that differ in what they leave: part of the node with least room first, or whole nodes."""
    free = [[d for d in cluster.devices_of(n) if not taken >> d & 1] for n in range(len(cluster.nodes))]
    unlike, tried = len(set(cluster.nodes)) > 1, set()
    for node in sorted((devices for devices in free if len(devices) >= size), key=len):
        at = cluster.node_of(node[0])
        whole = unlike and len(node) == cluster.nodes[at].count  # then it matters which nodes are beside it
        kind = (len(node), cluster.nodes[at], at if whole else None)
        if kind not in tried:
            tried.add(kind)
            yield Mesh(tuple(node[:size]))
    if size <= min(node.count for node in cluster.nodes):
        return
    whole = [len(devices) == cluster.nodes[n].count for n, devices in enumerate(free)]
    for first in range(len(free)):
        total, last = 0, first
        while last < len(free) and whole[last] and total < size:
            total += len(free[last])
            last += 1
        if total == size and last > first + 1:
            yield Mesh(tuple(d for devices in free[first:last] for d in devices))


def _size(asked: int | Mesh) -> int:
    return asked.size if isinstance(asked, Mesh) else asked


def meshes(cluster: ClusterSpec) -> list[Mesh]:
    """Meshes that calls may run on (ReaL, section 4): whole neighbouring nodes, or a slice of one node whose size is a
    power of two and which starts at a multiple of it.

    Beyond 16 nodes runs of nodes are as slices are: powers of two, aligned; and the whole cluster.
    """
    found: dict[tuple[int, ...], None] = {}
    for node in range(len(cluster.nodes)):
        devices = cluster.devices_of(node)
        for size in _powers(len(devices)):
            for start in range(0, len(devices) - size + 1, size):
                found[tuple(devices[start : start + size])] = None
    count = len(cluster.nodes)
    lengths = range(1, count + 1) if count <= MANY_NODES else [*_powers(count), count]
    for length in lengths:
        for start in range(0, count - length + 1, 1 if count <= MANY_NODES else length):
            first, last = cluster.devices_of(start), cluster.devices_of(start + length - 1)
            found[tuple(range(first[0], last[-1] + 1))] = None
    return [Mesh(devices) for devices in found]


def strategies(model: ModelSpec | None, size: int, node: int) -> list[Parallel]:
    """All p, t, d on `size` devices that the model can be cut by; tensor parallel groups lie within `node` neighbours.

    A group without a model (functions) is data parallel.
    """
    if model is None:
        return [Parallel(d=size)]
    found = []
    for t in _divisors(size):
        if node % t or not model.divides(t):
            continue
        for p in _divisors(size // t):
            if p <= model.layers:
                found.append(Parallel(p, t, size // t // p))
    return found


def generation_sizes(train: Parallel) -> list[Parallel]:
    """Generation layouts within a training layout (paper, section 5): p_g divides p and t_g divides t."""
    return [Parallel(p, t, train.size // (p * t)) for p in _divisors(train.p) for t in _divisors(train.t)]


def _powers(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
