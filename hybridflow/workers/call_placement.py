"""Applies a placement to a group: sizes for its settings, and replicas for calls with other layouts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config import VLLM, TrainStrategy
from hybridflow.errors import PlacementError, nearest
from hybridflow.placement import CallPlacement, GroupPlacement, ranges
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.protocols import Operation, kind_of, operations

logger = logging.getLogger(__name__)
PRICED = ("micro_tokens", "recompute", "sequence_parallel")
"""Further settings that decide time and memory: taken from the placement where the driver left their defaults."""


@dataclass(frozen=True)
class ReplicaPlacement:
    """Ranks of `worker_class` on `devices` that run calls of another group."""

    worker_class: type
    devices: tuple[int, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class DividedGroup:
    """`settings` of the group itself, and its `replicas`; `schedule` as `WorkerGroup` takes it."""

    settings: Mapping[str, Any]
    replicas: tuple[ReplicaPlacement, ...] = ()
    schedule: Mapping[str, tuple[int | None, ...]] | None = None


def divided(worker_class: type, where: GroupPlacement, settings: Mapping[str, Any], name: str) -> DividedGroup:
    """Settings and replicas that `where` requires of a group with these resolved settings.

    Errors: PlacementError for an unknown method or one that only the group's own ranks can run.
    """
    known, replicas, schedule = operations(worker_class), list[ReplicaPlacement](), dict[str, tuple[int | None, ...]]()
    for one in where.elsewhere:
        if one.method not in known:
            hint = nearest(one.method, known)
            raise PlacementError(f"{name} is placed with a layout for {one.method!r}, and has no such method.{hint}")
        number = None
        if not _is_primary(where, one, known[one.method]):
            part = _part(worker_class, where, one, known[one.method], settings, name)
            replicas += [part] if part not in replicas else []
            number = replicas.index(part)
        schedule[one.method] = (*schedule.get(one.method, ()), number)
    generating = [method for method in known if kind_of(known[method]) == "generation"]
    primary = apply_placement(where, settings)
    if generating and all(method in schedule and None not in schedule[method] for method in generating):
        primary = worker_class.without_generation(primary)  # type: ignore[attr-defined]  generation is on the replicas
    return DividedGroup(primary, tuple(replicas), schedule)


def can_replicate(worker_class: type, settings: Mapping[str, Any]) -> bool:
    """Whether every call of such a group except training may have its own layout."""
    of_class = getattr(worker_class, "replica", None)
    kinds = {kind_of(operation) for operation in operations(worker_class).values()} - {"training"}
    if settings.get("generate") is None:
        kinds.discard("generation")
    return of_class is not None and all(of_class(kind, settings) is not None for kind in kinds)


def _is_primary(where: GroupPlacement, one: CallPlacement, operation: Operation) -> bool:
    """Whether the group's own ranks have this layout or reach it by their transition."""
    if one.devices != where.devices:
        return False
    p, t = getattr(where.train, "pp", 1), getattr(where.train, "tp", 1)
    sizes = p, t, len(where.devices) // (p * t)
    own = Backend.of(where.train).parallel(*sizes)
    if own is not None and kind_of(operation) == "generation" and where.generate == one.sizes[:2]:
        mesh = Mesh(where.devices)
        return CallPlan(mesh, Parallel(*one.sizes)).within(CallPlan(mesh, own))
    return one.sizes == sizes


def _part(
    worker_class: type,
    where: GroupPlacement,
    one: CallPlacement,
    operation: Operation,
    settings: Mapping[str, Any],
    name: str,
) -> ReplicaPlacement:
    kind, of_class = kind_of(operation), getattr(worker_class, "replica", None)
    found = of_class(kind, settings) if of_class is not None else None
    if found is None:
        why = "it steps the weights" if kind == "training" else "this group gives its weights to no other ranks"
        raise PlacementError(
            f"{name}.{one.method} is placed with a layout of its own, {'-'.join(map(str, one.sizes))} (p-t-d) on "
            f"devices {ranges(one.devices)}, and {why}. Leave it out, or plan with hf.planner.OneLayout({name!r})."
        )
    p, t, d = one.sizes
    if p * t * d != len(one.devices):
        raise PlacementError(f"{name}.{one.method} asks for p*t*d = {p * t * d} devices, and has {len(one.devices)}.")
    replica, own = found
    generates = isinstance(own.get("generate"), VLLM)
    at = GroupPlacement(
        one.devices,
        where.nodes,
        where.train and Backend.of(where.train).sized(Parallel(p, t, d)),
        (p, t) if generates else None,
        memory_fraction=where.memory_fraction if generates else None,
    )
    return ReplicaPlacement(replica, one.devices, apply_placement(at, own))


def apply_placement(where: GroupPlacement, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the sizes of `where` in `train` and `generate`. `PRICED` and the memory fraction of generation
    are taken from `where` where they have default values; the driver's other settings stay."""
    out = dict(settings)
    if where.train is not None and isinstance(given := settings.get("train"), TrainStrategy):
        out["train"] = _train(where.train, given)
    if where.generate is not None and isinstance(given := settings.get("generate"), VLLM):
        share = chosen(given, "memory_fraction") or where.memory_fraction or given.memory_fraction
        out["generate"] = replace(given, pp=where.generate[0], tp=where.generate[1], memory_fraction=share)
    return out


def chosen(strategy: Any, name: str) -> Any:
    """The strategy's setting if it is not the default, else None."""
    value = getattr(strategy, name, None)
    return None if value == getattr(type(strategy), name, None) else value


def _train(found: Any, given: Any) -> Any:
    """The strategy `given` with the sizes of the one that was found."""
    alike = type(found) is type(given)
    if not alike:
        logger.warning("%s is placed as %s was found for, whose times are those of other sizes.", given, found)
    kept = {name for name in PRICED if not alike or not hasattr(found, name) or chosen(given, name) is not None}
    priced = {name: getattr(found, name) for name in PRICED if name not in kept}
    own, p, t = Backend.of(given), getattr(found, "pp", 1), getattr(found, "tp", 1)
    if (p > 1 and not own.pipeline) or (t > 1 and not own.tensor):
        p = t = 1
    return replace(own.sized(Parallel(p, t, 1)), dp=found.dp if own.pipeline else None, **priced)
