"""Pinning: whether the sizes that a group is pinned to can be those of its model, in the nodes of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations

from hybridflow.errors import ModelError, PlacementError
from hybridflow.model_spec import ModelSpec
from hybridflow.planner.backends import Backend
from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.constraints import OneLayout, Pin
from hybridflow.planner.plans import CallPlan, Mesh, Parallel


def check_pin(pin: Pin, model: ModelSpec | None, backend: Backend, cluster: ClusterSpec, one_layout: bool) -> None:
    """`one_layout`: generation has sizes within those of training.

    Errors: PlacementError for sizes by which the model is not cut, that its strategy has not, or whose tensor parallel
    groups would lie across nodes.
    """
    for sizes in (pin.parallel, pin.generate):
        if sizes is not None:
            _check_model(pin, sizes, model)
            _check_nodes(pin, sizes, cluster)
    if model is None or pin.parallel is None:
        return
    if (own := backend.parallel(*pin.parallel.sizes)) is None:
        raise PlacementError(f"{pin} cannot be: {pin.group} trains with {backend.strategy}, which has no such sizes.")
    mesh = Mesh.of(0, own.size)
    if one_layout and pin.generate and not CallPlan(mesh, pin.generate).within(CallPlan(mesh, own)):
        raise PlacementError(
            f"{pin} and {OneLayout(pin.group)} contradict each other: generation sizes divide those of training where "
            "both have one layout."
        )


def _check_model(pin: Pin, sizes: Parallel, model: ModelSpec | None) -> None:
    if model is None:
        if sizes.p * sizes.t > 1:
            raise PlacementError(f"{pin} cannot be: {pin.group} runs functions, which are not cut. Pin p=1, t=1.")
        return
    try:
        model.check_parallel(sizes.p, sizes.t, pin.group)
    except ModelError as error:
        raise PlacementError(f"{pin} cannot be: {error}") from None


def _check_nodes(pin: Pin, sizes: Parallel, cluster: ClusterSpec) -> None:
    counts = [node.count for node in cluster.nodes]
    if pin.devices is not None:
        inside: Sequence[int] = list(cluster.counts(pin.devices).values())
    elif sizes.size <= max(counts):
        inside = [sizes.size]
    else:
        inside = counts
        if not any(b - a == sizes.size for a, b in combinations(accumulate([0, *counts]), 2)):
            raise PlacementError(
                f"{pin} cannot be: {sizes.size} devices are neither devices of one node nor whole nodes, which have "
                f"{_listed(counts)}. Use other sizes, or pin devices."
            )
    if any(count % sizes.t for count in inside):
        raise PlacementError(
            f"{pin} cannot be: tensor parallel groups of t={sizes.t} would lie across nodes, which have "
            f"{_listed(counts)} devices. Use a smaller t, or other devices."
        )


def _listed(counts: Sequence[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(counts)))
