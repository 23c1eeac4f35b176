"""Placing a class on a pool: its ranks, with the sizes of a placement, and replicas for calls in other layouts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import CallSchedule, WorkerGroup
from hybridflow.cluster.interactive import current_cell
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import VLLM, TrainStrategy, is_strategy
from hybridflow.data.tokenizer import other_token
from hybridflow.engines.worker_spec import spec_of
from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import CallPlacement, GroupPlacement, ranges
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.resident_memory import PlacedGroup, check_resident
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.protocols.operation import Operation, OperationKind, kind_of, operations
from hybridflow.settings import constructor_settings
from hybridflow.topology import RankGrid

logger = logging.getLogger(__name__)
PRICED = ("micro_tokens", "recompute", "sequence_parallel")
"""Further settings that decide time and memory: taken from the placement where the driver left their defaults."""


def place(
    worker_class: type,
    pool: ResourcePool | GroupPlacement,
    *,
    name: str | None = None,
    grid: RankGrid | None = None,
    **settings: Any,
) -> WorkerGroup:
    """Place any class with `@register` methods on every device of a pool or slice, or by a placement.

    Each rank builds `worker_class(**settings)` with `self.context` set. `grid` defaults to the class's own, or to data
    parallelism over all devices. Errors: ConfigError for an unknown setting (with the nearest one) or a class without
    operations; PlacementError; WorkerError when a rank cannot be built.
    """
    if not operations(worker_class):
        raise ConfigError(f"{worker_class.__name__} has no operations: mark methods with @register(protocol, ...).")
    planned_for = pool if isinstance(pool, GroupPlacement) else None
    if isinstance(pool, GroupPlacement):
        pool = ResourcePool.over(pool.nodes)
    if not isinstance(pool, ResourcePool):
        raise PlacementError(f"{worker_class.__name__} is placed on a ResourcePool, got {type(pool).__name__}.")
    pool.check_open()
    session = pool.session
    settings = constructor_settings(worker_class, settings)
    if (cell := current_cell()) is not None:
        session.replace_earlier(cell, name)
    role = name or session.unique(getattr(worker_class, "role", worker_class.__name__.lower()))
    if role in session.groups:
        raise ConfigError(f"a group named {role!r} exists already: close it or give another name=.")
    if cell is not None:
        session.cells[role] = cell
    if (ranks := session.backend.place(worker_class, pool, settings, role, grid)) is not None:
        return WorkerGroup(session, ranks)
    if planned_for is None and session.assignment is not None:
        planned_for = session.assignment.groups.get(role)
        session.assigned |= set() if planned_for is None else {role}
    if planned_for is not None:
        return _on_placement(worker_class, pool, planned_for, settings, role, grid)
    check_memory(pool, [ranks := ranks_on(worker_class, pool, settings, role, grid)])
    return WorkerGroup(session, ranks)


def _on_placement(
    worker_class: type,
    pool: ResourcePool,
    where: GroupPlacement,
    settings: Mapping[str, Any],
    name: str,
    grid: RankGrid | None,
) -> WorkerGroup:
    """The group on the devices of `where`, with replicas for calls with other layouts."""
    settings, others, schedule = divided(worker_class, where, spec_of(worker_class, settings).resolve(settings), name)
    ranks = [ranks_on(worker_class, pool.part(where.devices), settings, name, grid)]
    for of_class, devices, own in others:
        ranks.append(ranks_on(of_class, pool.part(devices), own, name, beside=ranks))
    check_memory(pool, ranks)
    return WorkerGroup(pool.session, ranks[0], ranks[1:], schedule)


def check_memory(
    pool: ResourcePool,
    new: Sequence[RankGroup],
    placed: Sequence[RankGroup] = (),
    leaving: RankGroup | None = None,
) -> None:
    """Errors: PlacementError, before a rank is built, where a device cannot hold what `new` ranks and those that are
    `placed` there (default: the session's) keep on it; or what both have while the `new` ones take over the state of
    ranks that are `leaving`. What the planner does not know counts as nothing."""
    if (memory := pool.device_memory()) is None:
        return
    groups = pool.session.groups.values()
    asleep = {id(part) for group in groups for part in group.sleeping.values()}  # without memory
    placed = placed or [part for group in groups for part in group.all_ranks if id(part) not in asleep]
    here = [one for one in (*placed, *new) if one.pool_name == pool.name]
    known = [(one, own) for one in here if (own := _placed_group(one))]
    devices = {device for ranks in new for device in ranks.members}
    for there in {tuple(n for n, (one, _) in enumerate(known) if device in one.members) for device in devices}:
        former = next((known[n][1] for n in there if known[n][0] is leaving), None)
        if why := check_resident([known[n][1] for n in there if known[n][0] is not leaving], memory, former):
            raise PlacementError(f"{new[0].name} does not fit on its devices: {why}")


def _placed_group(ranks: RankGroup) -> PlacedGroup | None:
    if (model := ranks.spec.model) is None or not is_strategy(ranks.settings.get("train")):
        return None
    return PlacedGroup.of(ranks.name, model(), ranks.settings, ranks.grid)


def ranks_on(
    worker_class: type,
    pool: ResourcePool,
    settings: Mapping[str, Any],
    name: str,
    grid: RankGrid | None = None,
    instead_of: WorkerGroup | None = None,
    beside: Sequence[RankGroup] = (),
) -> RankGroup:
    """The ranks of a group, after all checks that need no built rank.

    `instead_of` is a group whose own ranks will be freed, `beside` are further ranks on these devices.
    Errors: ConfigError, PlacementError, and those of the class.
    """
    settings = dict(spec_of(worker_class, settings).resolve(settings))
    spec, own_grid = spec_of(worker_class, settings), grid is not None
    grid = grid or spec.grid(pool.size)
    if grid.size != pool.size:
        raise PlacementError(
            f"{worker_class.__name__} asks for p*t*d = {grid.p}*{grid.t}*{grid.d} = {grid.size} devices, "
            f"the pool has {pool.size}."
        )
    spec.check(grid, "cuda" if pool.session.has_cuda else "cpu")
    placed = [part for group in pool.session.groups.values() for part in group.all_ranks]
    others = [*beside, *(part for part in placed if instead_of is None or part is not instead_of.ranks)]
    shared = [part for part in others if part.pool_name == pool.name and set(pool.members) & set(part.members)]
    _check_alone(worker_class.__name__, settings, shared)
    found = pool.ranks(name, worker_class, settings, grid, own_grid)
    _check_tokens(found, [group.ranks for group in pool.session.groups.values() if group is not instead_of])
    return found


def _check_alone(name: str, settings: Mapping[str, Any], neighbours: Sequence[RankGroup]) -> None:
    """A process can hold one vLLM engine, which keeps its groups in globals. Errors: PlacementError."""
    for group in neighbours if isinstance(settings.get("generate"), VLLM) else ():
        if isinstance(group.settings.get("generate"), VLLM):
            raise PlacementError(
                f"{name}(generate=...) asks for a vLLM engine in hosts where {group.name} has one already, "
                f"and a process can hold one. Close that group first ({group.name}.close()), place this one on "
                f"other devices, or leave generate= out."
            )


def _check_tokens(new: RankGroup, others: Sequence[RankGroup]) -> None:
    """Errors: ConfigError where a model is given the token ids of policies, and has the tokenizer of none of them."""
    known = [one for one in (*others, new) if one.spec.model is not None and "model" in one.settings]
    of = {one.name: str(one.settings["model"]) for one in known}
    writes = {one.name for one in known if "generation" in map(kind_of, operations(one.worker_class).values())}
    for one in known if writes else ():
        asked = new.name in writes or one is new
        if not asked or one.name in writes or one.settings.get("tokenizer") is not None:
            continue
        odd = [other_token(of[name], of[one.name]) for name in sorted(writes)]
        if all(odd):
            raise ConfigError(
                f"{one.name} has the model {of[one.name]}, whose tokenizer is not that of {min(writes)}, "
                f"{of[min(writes)]}: {odd[0]}. It would read the policy's token ids as other words. Use models of one "
                f"tokenizer (a RewardWorker takes tokenizer=, the policy's)."
            )


ReplicaPlacement = tuple[type, tuple[int, ...], Mapping[str, Any]]
"""Class, devices and settings of ranks that run calls of another group."""


def divided(
    worker_class: type, where: GroupPlacement, settings: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], list[ReplicaPlacement], CallSchedule]:
    """The settings, replicas and call schedule that `where` requires of a group with these resolved settings.

    Calls that generate without a place of their own follow those that have one.

    Errors: PlacementError for an unknown method or one that only the group's own ranks can run.
    """
    known, replicas, schedule = operations(worker_class), list[ReplicaPlacement](), dict[str, list[int | None]]()
    for one in where.elsewhere:
        if one.method not in known:
            hint = nearest(one.method, known)
            raise PlacementError(f"{name} is placed with a layout for {one.method!r}, and has no such method.{hint}")
        number = None
        if not _is_primary(where, one, known[one.method]):
            part = _part(worker_class, where, one, known[one.method], settings, name)
            replicas += [part] if part not in replicas else []
            number = replicas.index(part)
        schedule.setdefault(one.method, []).append(number)
    generating = [method for method in known if kind_of(known[method]) == "generation"]
    for number in [numbers[0] for method in generating if (numbers := schedule.get(method))]:
        same = operations(replicas[number][0]) if number is not None else {}
        schedule |= {method: [number] for method in generating if method not in schedule and method in same}
    primary = apply_placement(where, settings)
    if generating and all(method in schedule and None not in schedule[method] for method in generating):
        primary |= spec_of(worker_class, primary).without_generation  # generation is on the replicas
    return primary, replicas, schedule


def can_replicate(worker_class: type, settings: Mapping[str, Any]) -> bool:
    """Whether every call of such a group except training may have its own layout."""
    kinds: set[OperationKind] = {kind_of(operation) for operation in operations(worker_class).values()}
    kinds.discard("training")
    if settings.get("generate") is None:
        kinds.discard("generation")
    return kinds <= spec_of(worker_class, settings).replicas.keys()


def _is_primary(where: GroupPlacement, one: CallPlacement, operation: Operation) -> bool:
    """Whether the group's own ranks have this layout or reach it by their transition."""
    if one.devices != where.devices:
        return False
    p, t, cp, ep = (getattr(where.train, name, 1) for name in ("pp", "tp", "cp", "ep"))
    own = Backend.of(where.train).parallel(p, t, len(where.devices) // (p * t), cp, ep)
    if own is not None and kind_of(operation) == "generation" and where.generate == one.sizes[:2]:
        mesh = Mesh(where.devices)
        return CallPlan(mesh, Parallel.read(one.sizes)).within(CallPlan(mesh, own))
    return Parallel.read(one.sizes).cut == (p, t, len(where.devices) // (p * t), cp, ep)


def _part(
    worker_class: type,
    where: GroupPlacement,
    one: CallPlacement,
    operation: Operation,
    settings: Mapping[str, Any],
    name: str,
) -> ReplicaPlacement:
    kind = kind_of(operation)
    if kind == "training" or (found := spec_of(worker_class, settings).replicas.get(kind)) is None:
        why = "it steps the weights" if kind == "training" else "this group gives its weights to no other ranks"
        raise PlacementError(
            f"{name}.{one.method} is placed with a layout of its own, {'-'.join(map(str, one.sizes[:3]))} (p-t-d) on "
            f"devices {ranges(one.devices)}, and {why}. Leave it out, or plan with hf.planner.OneLayout({name!r})."
        )
    p, t, d = one.sizes[:3]
    if p * t * d != len(one.devices):
        raise PlacementError(f"{name}.{one.method} asks for p*t*d = {p * t * d} devices, and has {len(one.devices)}.")
    replica, own = found
    generates = isinstance(own.get("generate"), VLLM)
    at = GroupPlacement(
        one.devices,
        where.nodes,
        where.train and Backend.of(where.train).sized(Parallel.read(one.sizes)),
        (p, t) if generates else None,
        memory_fraction=where.memory_fraction if generates else None,
    )
    return replica, one.devices, apply_placement(at, own)


def apply_placement(where: GroupPlacement, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the sizes of `where` in `train` and `generate`. `PRICED`, the memory fraction of generation
    and its rows under way are those of `where` where they have default values; the driver's other settings stay."""
    out = dict(settings)
    if where.train is not None and isinstance(given := settings.get("train"), TrainStrategy):
        out["train"] = _train(where.train, given)
    if where.offload is not None and isinstance(settings.get("offload"), bool):
        out["offload"] = where.offload
    if where.generate is not None and isinstance(given := settings.get("generate"), VLLM):
        share = chosen(given, "memory_fraction") or where.memory_fraction or given.memory_fraction
        pp, tp = where.generate
        rows = chosen(given, "max_sequences") or pp * given.max_sequences  # prices give each micro-batch as many
        out["generate"] = replace(given, pp=pp, tp=tp, memory_fraction=share, max_sequences=rows)
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
    priced |= {name: getattr(found, name) if alike else 1 for name in ("cp", "ep") if hasattr(given, name)}
    return replace(own.sized(Parallel(p, t, 1)), dp=found.dp if own.pipeline else None, **priced)
