"""Worker: base of the classes that are placed on a pool, and `place` for any other class.

A placement gives a group sizes for its settings, and replicas for calls with other layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import CallSchedule, WorkerGroup
from hybridflow.cluster.interactive import current_cell
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import VLLM, TrainStrategy, is_strategy
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.models.spec import Cost
from hybridflow.placement import CallPlacement, GroupPlacement, ranges
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.resident_memory import PlacedGroup, check_resident
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.protocols.operation import Operation, OperationKind, kind_of, operations
from hybridflow.settings import constructor_settings
from hybridflow.topology import RankGrid
from hybridflow.workers.moved_state import MovedState
from hybridflow.workers.saved_state import SavedState

logger = logging.getLogger(__name__)
PRICED = ("micro_tokens", "recompute", "sequence_parallel")
"""Further settings that decide time and memory: taken from the placement where the driver left their defaults."""


class Worker(MovedState, SavedState):
    """One rank of a group. Methods marked with `@register` are the group's operations.

    `self.context` (rank, grid, coordinates, device, process groups) is set before `__init__` runs.
    """

    role: ClassVar[str] = "worker"
    context: RankContext

    @classmethod
    def on(cls, pool: ResourcePool | GroupPlacement, *, name: str | None = None, **settings: Any) -> WorkerGroup:
        """Place this worker on every device of a pool or slice, or by a placement (`placement["actor"]`): on its
        devices, with its sizes in `train` and `generate`. Errors: ConfigError, PlacementError, WorkerError."""
        return place(cls, pool, name=name, **settings)

    @classmethod
    def resolve(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for the hosts: relative paths become absolute."""
        return dict(settings)

    @classmethod
    def grid(cls, devices: int, settings: Mapping[str, Any]) -> RankGrid:
        """The rank grid of a group on `devices` devices; data parallel by default."""
        return RankGrid(d=devices)

    @classmethod
    def check(cls, grid: RankGrid, settings: Mapping[str, Any], device_type: str) -> None:
        """Check settings on the driver, before any rank is built."""

    @classmethod
    def token_cost(cls, settings: Mapping[str, Any]) -> Cost | None:
        """A row's cost as a function of its tokens, which balanced calls spread evenly over data parallel ranks; None:
        cost equals the token count."""
        return None

    @classmethod
    def check_neighbours(cls, settings: Mapping[str, Any], neighbours: Sequence[RankGroup]) -> None:
        """Check against the groups already in the same hosts. Errors: PlacementError."""

    @classmethod
    def shares_stages(cls, settings: Mapping[str, Any], grid: RankGrid) -> bool:
        """Whether updates can share pipeline stages with another group's (`engines.time_sharing`)."""
        return False

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keeps the model's state for a call in device memory. May be collective over the group."""
        yield

    @classmethod
    def without_generation(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a group that no longer generates."""
        return {**settings, "generate": None}

    @classmethod
    def replica(cls, kind: OperationKind, settings: Mapping[str, Any]) -> tuple[type, dict[str, Any]] | None:
        """Class and settings of replicas that run calls of this kind in another layout, with the group's weights; None
        if only the group's own ranks can run them."""
        return None

    # Weights that move to other ranks (hf.sync_weights, hf.reallocate)

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        """The boxes of canonical tensors that each rank holds, from settings alone. Errors: ConfigError without
        weights."""
        raise ConfigError(f"{cls.__name__} has no weights that could be moved.")

    @classmethod
    def has_runtime_layout(cls, settings: Mapping[str, Any]) -> bool:
        """Whether `weights_layout` gives only the tensors, and built ranks give the boxes by `runtime_layout`."""
        return False

    def runtime_layout(self) -> Layout:
        """The complete layout, as found on a built rank."""
        raise ConfigError(f"the settings of {type(self).__name__} say where its weights lie.")

    @classmethod
    def check_written(cls, settings: Mapping[str, Any]) -> None:
        """Errors: ConfigError if other groups may not write its weights."""

    def weights_storage(self) -> Mapping[str, Tensor]:
        """This rank's weights by the names of `weights_layout`: the same tensors every time.

        Called within `resident`, on every rank of the group, before weights are read or written.
        """
        raise ConfigError(f"{type(self).__name__} has no weights that could be moved.")

    def on_weights_loaded(self) -> None:
        """Called after a transfer has written all of `weights_storage`: state derived from the old weights is stale."""

    def while_waiting(self, waits: Callable[[], bool]) -> bool:
        """Called before weights arrive: work that the group can do as long as `waits()`. Returns whether it had any."""
        return False


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
    settings, others, schedule = divided(worker_class, where, _as_worker(worker_class).resolve(settings), name)
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
    spec = getattr(ranks.worker_class, "model_spec", None)
    if spec is None or ranks.settings.get("model") is None or not is_strategy(ranks.settings.get("train")):
        return None
    return PlacedGroup.of(ranks.name, spec(ranks.settings), ranks.settings, ranks.grid)


def _as_worker(worker_class: type) -> type[Worker]:
    """The class as a Worker; wraps any other class."""
    return worker_class if issubclass(worker_class, Worker) else Worker


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
    ours = _as_worker(worker_class)
    settings, own_grid = ours.resolve(settings), grid is not None
    grid = grid or ours.grid(pool.size, settings)
    if grid.size != pool.size:
        raise PlacementError(
            f"{worker_class.__name__} asks for p*t*d = {grid.p}*{grid.t}*{grid.d} = {grid.size} devices, "
            f"the pool has {pool.size}."
        )
    ours.check(grid, settings, "cuda" if pool.session.has_cuda else "cpu")
    placed = [part for group in pool.session.groups.values() for part in group.all_ranks]
    others = [*beside, *(part for part in placed if instead_of is None or part is not instead_of.ranks)]
    shared = [part for part in others if part.pool_name == pool.name and set(pool.members) & set(part.members)]
    ours.check_neighbours(settings, shared)
    return pool.ranks(name, worker_class, settings, grid, own_grid)


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
        primary = _as_worker(worker_class).without_generation(primary)  # generation is on the replicas
    return primary, replicas, schedule


def can_replicate(worker_class: type, settings: Mapping[str, Any]) -> bool:
    """Whether every call of such a group except training may have its own layout."""
    kinds: set[OperationKind] = {kind_of(operation) for operation in operations(worker_class).values()}
    kinds.discard("training")
    if settings.get("generate") is None:
        kinds.discard("generation")
    of_class = _as_worker(worker_class).replica
    return issubclass(worker_class, Worker) and all(of_class(kind, settings) is not None for kind in kinds)


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
    kind = kind_of(operation)
    if (found := _as_worker(worker_class).replica(kind, settings)) is None:
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
    return replica, one.devices, apply_placement(at, own)


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
