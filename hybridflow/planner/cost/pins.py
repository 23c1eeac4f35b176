"""Pins that no search could keep: sizes that the model, its strategy or the nodes do not allow. Pure."""

from __future__ import annotations

from itertools import accumulate, combinations

from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import OneLayout, Pin
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel, divides
from hybridflow.planner.describe.model_sizes import Sizes


def check_pin(pin: Pin, graph: Graph, backend: Backend, cluster: ClusterSpec, *, one_layout: bool) -> None:
    """Errors: PlacementError for sizes by which the model is not cut, that its strategy has not, or whose tensor
    parallel groups would lie across nodes; for a model that never waits in host memory."""
    model = graph.models[pin.group]
    if pin.offload is not None and pin.group not in graph.offload:
        known = ", ".join(graph.offload) or "critics, reference and reward models"
        raise PlacementError(f"{pin} cannot be: only {known} can wait in host memory as a whole. Leave offload out.")
    for sizes, check in ((pin.parallel, backend.check), (pin.generate, check_split)):
        if sizes is None:
            continue
        if model is None and sizes.p * sizes.t > 1:
            raise PlacementError(f"{pin} cannot be: {pin.group} runs functions, which are not cut. Pin p=1, t=1.")
        try:
            if isinstance(model, ModelSpec):
                model.check_parallel(sizes.p, sizes.t, pin.group)
            if model is not None:
                check(model, sizes, pin.group)
        except ModelError as error:
            raise PlacementError(f"{pin} cannot be: {error}") from None
        _check_nodes(pin, sizes, cluster)
    if model is None or pin.parallel is None:
        return
    if (own := backend.parallel(*pin.parallel.cut)) is None:
        how = f"{pin.group} trains with {backend.strategy}"
        raise PlacementError(f"{pin} cannot be: {how}, which has no such sizes.")
    mesh = Mesh.of(0, own.size)
    if one_layout and pin.generate and not CallPlan(mesh, pin.generate).within(CallPlan(mesh, own)):
        raise PlacementError(
            f"{pin} and {OneLayout(pin.group)} contradict each other: generation sizes divide those of training "
            "where both have one layout."
        )


def check_split(model: Decoder, sizes: Parallel, role: str) -> None:
    """Errors: ModelError for sizes by which no engine can cut the model."""
    if not divides(model, sizes.t) or sizes.p > model.layers:
        raise ModelError(
            f"{role} cannot be split by p={sizes.p}, t={sizes.t}: it has {model.layers} layers, {model.heads} heads, "
            f"{model.kv_heads} kv-heads and {Sizes.of(model).intermediate:g} MLP columns."
        )


def _check_nodes(pin: Pin, sizes: Parallel, cluster: ClusterSpec) -> None:
    counts = [node.count for node in cluster.nodes]
    listed, inside = " or ".join(map(str, sorted(set(counts)))), counts
    if pin.devices is not None:
        inside = list(cluster.counts(pin.devices).values())
    elif sizes.size <= max(counts):
        inside = [sizes.size]
    elif not any(b - a == sizes.size for a, b in combinations(accumulate([0, *counts]), 2)):
        raise PlacementError(
            f"{pin} cannot be: {sizes.size} devices are neither devices of one node nor whole nodes, which have "
            f"{listed}. Use other sizes, or pin devices."
        )
    if any(count % sizes.t for count in inside):
        raise PlacementError(
            f"{pin} cannot be: tensor parallel groups of t={sizes.t} would lie across nodes, which have {listed} "
            "devices. Use a smaller t, or other devices."
        )
