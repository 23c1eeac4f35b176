"""Which ranks a placement asks for where calls of a group have layouts of their own: the group's, and followers'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config import FSDP, VLLM, Megatron
from hybridflow.errors import PlacementError, nearest
from hybridflow.placement import Elsewhere, GroupPlacement, ranges
from hybridflow.planner.backends import Backend
from hybridflow.planner.plans import CallPlan, Mesh, Parallel
from hybridflow.protocols import Operation, kind_of, operations
from hybridflow.workers.as_planned import as_planned


@dataclass(frozen=True)
class Part:
    """Ranks of `worker_class` on `devices` that run calls of another group."""

    worker_class: type
    devices: tuple[int, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Parts:
    """`settings` of the group itself, and its `followers`; `schedule` as `LayoutsGroup` takes it."""

    settings: Mapping[str, Any]
    followers: tuple[Part, ...] = ()
    schedule: Mapping[str, tuple[int | None, ...]] | None = None


def divided(worker_class: type, where: GroupPlacement, settings: Mapping[str, Any], name: str) -> Parts:
    """What `where` asks for of a group of this class with these settings, which are resolved.

    Errors: PlacementError for a method that the class has not, or that runs with the group's own ranks only.
    """
    known, followers, schedule = operations(worker_class), list[Part](), dict[str, tuple[int | None, ...]]()
    for one in where.elsewhere:
        if one.method not in known:
            hint = nearest(one.method, known)
            raise PlacementError(f"{name} is placed with a layout for {one.method!r}, and has no such method.{hint}")
        number = None
        if not _at_home(where, one, known[one.method]):
            part = _part(worker_class, where, one, known[one.method], settings, name)
            followers += [part] if part not in followers else []
            number = followers.index(part)
        schedule[one.method] = (*schedule.get(one.method, ()), number)
    generating = [method for method in known if kind_of(known[method]) == "generation"]
    home = as_planned(where, settings)
    if generating and all(method in schedule and None not in schedule[method] for method in generating):
        home = worker_class.without_generation(home)  # type: ignore[attr-defined]  those that generate have it
    return Parts(home, tuple(followers), schedule)


def follows(worker_class: type, settings: Mapping[str, Any]) -> bool:
    """Whether every call of such a group but training may have a layout of its own."""
    of_class = getattr(worker_class, "follower", None)
    kinds = {kind_of(operation) for operation in operations(worker_class).values()} - {"training"}
    if settings.get("generate") is None:
        kinds.discard("generation")
    return of_class is not None and all(of_class(kind, settings) is not None for kind in kinds)


def _at_home(where: GroupPlacement, one: Elsewhere, operation: Operation) -> bool:
    """The group's own ranks have this layout, or get there inside their processes."""
    if one.devices != where.devices:
        return False
    p, t = getattr(where.train, "pp", 1), getattr(where.train, "tp", 1)
    sizes = p, t, len(where.devices) // (p * t)
    home = Backend.of(where.train).parallel(*sizes)
    if home is not None and kind_of(operation) == "generation" and where.generate == one.sizes[:2]:
        mesh = Mesh(where.devices)
        return CallPlan(mesh, Parallel(*one.sizes)).within(CallPlan(mesh, home))
    return one.sizes == sizes


def _part(
    worker_class: type,
    where: GroupPlacement,
    one: Elsewhere,
    operation: Operation,
    settings: Mapping[str, Any],
    name: str,
) -> Part:
    kind, of_class = kind_of(operation), getattr(worker_class, "follower", None)
    found = of_class(kind, settings) if of_class is not None else None
    if found is None:
        why = "it steps the weights" if kind == "training" else "this group gives its weights to no other ranks"
        raise PlacementError(
            f"{name}.{one.method} is placed with a layout of its own, {'-'.join(map(str, one.sizes))} (p-t-d) on "
            f"devices {ranges(one.devices)}, and {why}. Leave it out, or plan with hf.OneLayout({name!r})."
        )
    p, t, d = one.sizes
    if p * t * d != len(one.devices):
        raise PlacementError(f"{name}.{one.method} asks for p*t*d = {p * t * d} devices, and has {len(one.devices)}.")
    train, generate = where.train, (p, t)
    if isinstance(train, Megatron):
        shared = train.sequence_parallel and t > 1
        train = replace(train, pp=p, tp=t, dp=d, stage_layers=None, sequence_parallel=shared)
    elif isinstance(train, FSDP):
        train = replace(train, tp=t, dp=d)
    follower, own = found
    generates = isinstance(own.get("generate"), VLLM)
    share = where.memory_fraction if generates else None
    at = GroupPlacement(one.devices, where.nodes, train, generate if generates else None, memory_fraction=share)
    return Part(follower, one.devices, as_planned(at, own))
