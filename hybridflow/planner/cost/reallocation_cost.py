"""Reallocation: seconds in which a model's weights go from one layout to another (ReaL, section 5; the transition of
HybridFlow, section 5), and in which columns reach the nodes of the call that reads them. Pure.

Bytes come from the same weight plans that the 3D-HybridEngine executes, over a model in which the layers between two
neighbouring stage boundaries are one tensor, and the rows of a tensor the smallest part that any rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.planner.cost.hardware import Coefficients
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import HELPER, Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.describe.model_sizes import Sizes, Tower
from hybridflow.planner.describe.workload import Workload
from hybridflow.topology import GenerationGrid, RankGrid, even_bounds

Floats = NDArray[np.floating]
Grid = RankGrid | GenerationGrid
PTD = tuple[int, int, int]
Spans = Mapping[str, tuple[int, int]]


class Volume(NamedTuple):
    """Bytes that a change of layout moves."""

    inside: float
    """Received or sent inside a node by its busiest device, whichever is more."""
    between: float
    """Of the busiest node's network."""
    messages: int
    """Of the device that gets most."""
    received: float = 0.0
    """At most by a device; all of them receive `busy` times as many on average."""
    busy: float = 1.0

    def plus(self, other: Volume) -> Volume:
        both = [mine + theirs for mine, theirs in zip(self, other, strict=True)]
        return Volume(both[0], both[1], self.messages + other.messages, both[3], max(self.busy, other.busy))


@dataclass(frozen=True)
class LayoutChange:
    """Both layouts by sizes and by positions in the union of both meshes."""

    size: Sizes
    source: PTD
    target: PTD
    source_at: tuple[int, ...]
    target_at: tuple[int, ...]
    nodes: tuple[int, ...]
    """Of the union."""
    regrouped: bool = True
    """Where sizes divide, groups of the target are those that keep what a rank holds."""

    @classmethod
    def of(
        cls, size: Sizes, cluster: ClusterSpec, source: CallPlan, target: CallPlan, experts: bool = False
    ) -> LayoutChange:
        before, after = (one.parallel.expert_weights if experts else one.parallel.weights for one in (source, target))
        if source.mesh == target.mesh:
            # where equal blocks of neighbours each hold the whole model in both layouts, every block finds in itself
            # what it needs, and the first one is priced; else all
            (p, t, d), (q, u, e), counts = before, after, tuple(cluster.counts(source.mesh.devices).values())
            ranks, node = sum(counts), counts[0]
            block = math.lcm(p * t, q * u, node if ranks % node == 0 else ranks)
            if block >= ranks or ranks % block or len(set(counts)) > 1:
                block = ranks
            parts, at = ranks // block, tuple(range(block))
            nodes = tuple(islice((n for n, count in enumerate(counts) for _ in range(count)), block))
            return cls(size, (p, t, d // parts), (q, u, e // parts), at, at, nodes, source.parallel.shards == 1)
        union = sorted({*source.mesh.devices, *target.mesh.devices})
        at = {device: i for i, device in enumerate(union)}
        first: dict[int, int] = {}
        nodes = tuple(first.setdefault(cluster.node_of(device), len(first)) for device in union)
        here, there = (tuple(at[device] for device in one.mesh.devices) for one in (source, target))
        return cls(size, before, after, here, there, nodes)

    @property
    def grids(self) -> tuple[Grid, Grid]:
        """On the same devices the target's groups are those of the paper's rule, which keep what a rank holds, where
        its sizes divide the source's."""
        (p, t, d), (q, u, e) = self.source, self.target
        source = RankGrid(p, t, d)
        if self.regrouped and self.source_at == self.target_at and p % q == 0 and t % u == 0:
            return source, source.generation(q, u, "hybridflow")
        return source, RankGrid(q, u, e)


@lru_cache(maxsize=65536)
def volume(change: LayoutChange, itemsize: int) -> Volume:
    """Counted without a plan: 1 where a rank (R) of a node (N) holds or needs a part (A) of a tensor."""
    size, (source, target) = change.size, change.grids
    rows, at_R = math.lcm(source.t, target.t), np.array(change.nodes)
    spans, weight = layer_spans(size, source.p, target.p)
    both = (source, change.source_at), (target, change.target_at)
    held_RA, needed_RA = (_held(spans, grid, at, rows, size.layers, len(at_R)) for grid, at in both)
    bytes_A = np.array([weight[name] / rows * itemsize for name in spans], dtype=np.float32).repeat(rows)
    on_NR: Floats = np.zeros((int(at_R.max()) + 1, len(at_R)), dtype=np.float32)
    on_NR[at_R, range(len(at_R))] = 1
    missing_RA = needed_RA * (1 - held_RA)
    held_NA, wanted_NA = on_NR @ held_RA, on_NR @ missing_RA
    enters_NA: Floats = ((wanted_NA > 0) & (held_NA == 0)).astype(np.float32)
    some_NA = np.maximum(wanted_NA, 1)

    gets_R = (missing_RA * (1 - (enters_NA / some_NA)[at_R])) @ bytes_A
    copies_NA = _copies(wanted_NA, held_NA)
    relays_NA = enters_NA * (wanted_NA - 1) / some_NA  # of what comes from outside, each rank passes on its share
    gives_R = (held_RA * copies_NA[at_R] + missing_RA * relays_NA[at_R]) @ bytes_A

    sent_A = _copies(enters_NA.sum(axis=0, dtype=np.float32), held_NA.sum(axis=0, dtype=np.float32))
    between = max(float((enters_NA @ bytes_A).max()), float((held_NA @ (bytes_A * sent_A)).max()))
    received_R, messages = missing_RA @ bytes_A, int(missing_RA.sum(axis=1).max())
    most = float(received_R.max())
    busy = min(1.0, float(received_R.mean()) / most) if most else 0.0
    return Volume(float(max(gets_R.max(), gives_R.max())), between, messages, most, busy)


def _copies(wanted: Floats, held: Floats) -> Floats:
    """Copies that each of the `held` holders sends to `wanted` others."""
    return np.where(held > 0, wanted / np.maximum(held, 1), 0).astype(np.float32)


def _held(spans: Spans, grid: Grid, at: Sequence[int], rows: int, layers: int, ranks: int) -> Floats:
    """[ranks, spans x rows] 1 where a rank holds rows of a span; rank i of the grid is rank `at[i]`."""
    of_stage = [spans_of_stage(spans, grid.p, stage, layers) for stage in range(grid.p)]
    stages = np.array([[name in inside for name in spans] for inside in of_stage], dtype=np.float32)
    parts = np.eye(grid.t, dtype=np.float32).repeat(rows // grid.t, axis=1)
    at_R = grid.coordinates
    out = np.zeros((ranks, len(spans) * rows), dtype=np.float32)
    out[list(at)] = (stages[at_R["p"]][:, :, None] * parts[at_R["t"]][:, None, :]).reshape(grid.size, -1)
    return out


def layer_spans(size: Sizes, *stages: int) -> tuple[dict[str, tuple[int, int]], dict[str, float]]:
    """Tensors by name: their first and last layer (the embedding lies before layer 0, the output after the last), and
    elements."""
    cuts = sorted({cut for p in stages for cut in even_bounds(size.layers, p)})
    spans = {f"layers {a}-{b}": (a, b) for a, b in pairwise(cuts)}
    weight = {name: float((b - a) * size.layer) for name, (a, b) in spans.items()}
    spans |= {"embedding": (0, 0), "output": (size.layers, size.layers)}
    weight |= {"embedding": float(size.embedding + size.tower.elements), "output": float(max(size.output, 1))}
    return spans, weight


def spans_of_stage(spans: Spans, p: int, stage: int, layers: int) -> list[str]:
    low, high = even_bounds(layers, p)[stage : stage + 2]
    inner = [name for name, (a, b) in spans.items() if a < b and low <= a and b <= high]
    return inner + ["embedding"] * (stage == 0) + ["output"] * (stage == p - 1)


# Measured on a host, see docs/benchmarks.md: seconds of a tensor that is packed, sent and unpacked, and how often the
# bytes of a move pass by in memory: packed and unpacked (beside the messages), and cleared and mapped before.
TENSOR_SECONDS, COPIED, FRESH = 50e-6, 4.0, 2.0


def reallocation(
    size: Sizes,
    cluster: ClusterSpec,
    source: CallPlan,
    target: CallPlan,
    itemsize: int,
    k: Coefficients,
    *,
    fresh: bool,
) -> tuple[float, float]:
    """Seconds, and the share of the devices that receive: the busiest device's messages inside its node, the busiest
    node's between nodes, or copies, whichever is more; then memory and work for every tensor and message.

    Host processes read each other's memory. `fresh`: the target's memory is allocated for the move. Errors:
    PlacementError when a mesh is not in the cluster."""
    if source.parallel.ep == target.parallel.ep == 1:
        moved = volume(LayoutChange.of(size, cluster, source, target), itemsize)
    else:
        rest, routed = (
            replace(size, layer=size.layer - size.expert),
            replace(size, layer=size.expert, embedding=0, output=0, tower=Tower()),
        )
        moved = volume(LayoutChange.of(rest, cluster, source, target), itemsize)
        moved = moved.plus(volume(LayoutChange.of(routed, cluster, source, target, experts=True), itemsize))
    if not moved.messages:
        return 0.0, 1.0
    node = cluster.node
    link = math.inf if node.device.name == "host" else node.bandwidth * k.link
    passed = moved.received / (node.device.bandwidth * k.memory)
    latency = k.latency + (cluster.latency if moved.between else node.latency)
    tensors = math.ceil(size.layers / target.parallel.p) * size.tensors + 2
    sent = max(moved.inside / link, moved.between / (cluster.bandwidth * k.network), COPIED * passed)
    return sent + FRESH * passed * fresh + tensors * TENSOR_SECONDS + moved.messages * latency, moved.busy


CONTROLLER = Mesh.of(0, 1)
"""Where the controller worker is, which has no device."""


class Read(NamedTuple):
    """Columns of `nbytes` in an iteration."""

    reader: str
    writer: str
    nbytes: float


def reads(graph: Graph, work: Workload) -> tuple[Read, ...]:
    """What calls on devices read. Columns whose size the graph does not know count as nothing."""
    found = list[Read]()
    for edge in graph.edges:
        known = [graph.widths[column] for column in edge.columns if column in graph.widths]
        row = sum(one.prompt * work.prompt.mean + one.response * work.response.mean + one.row for one in known)
        if row and (call := graph.call(edge.target)).group != HELPER:
            found.append(Read(edge.target, edge.source, row * work.rows * call.rows))
    return tuple(found)


def arrival(cluster: ClusterSpec, k: Coefficients, there: Mesh, here: Mesh) -> float:
    """Seconds of a byte that is spread over the nodes of `here`: over the network to a node that wrote none of it, else
    through host memory."""
    nodes = cluster.counts(here.devices)
    if nodes.keys() - cluster.counts(there.devices).keys():
        return 1 / len(nodes) / (cluster.bandwidth * k.network)
    return 1 / len(nodes) / cluster.node.device.host
