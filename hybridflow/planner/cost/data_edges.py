"""Data edges: seconds in which the columns that a call reads of others reach its nodes. Pure.

Columns whose size the graph does not know count as nothing."""

from __future__ import annotations

from typing import NamedTuple

from hybridflow.planner.cost.hardware import Coefficients
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import HELPER, Graph
from hybridflow.planner.describe.mesh import Mesh
from hybridflow.planner.describe.workload import Workload

CONTROLLER = Mesh.of(0, 1)
"""Where the controller worker is, which has no device."""


class Read(NamedTuple):
    """Columns of `nbytes` in an iteration."""

    reader: str
    writer: str
    nbytes: float


def reads(graph: Graph, work: Workload) -> tuple[Read, ...]:
    """What calls on devices read."""
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
    return 1 / len(nodes) / min(cluster.nodes[node].device.host for node in nodes)
