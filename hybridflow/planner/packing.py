"""Packing: where on a cluster sets of colocated models go, whose sizes are known. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.plans import Mesh

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
