"""Worker: base of the classes that are placed on a pool, and `place` for any other class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, get_args

from torch import Tensor

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.group_call import bound_settings
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.reallocation import TrainingState
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import TrainState
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.models.spec import Cost
from hybridflow.placement import GroupPlacement
from hybridflow.protocols import OperationKind, operations
from hybridflow.settings import require
from hybridflow.topology import RankGrid
from hybridflow.workers.call_placement import divided


class Worker:
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

    def optimizing_engine(self) -> TrainEngine | None:
        """The engine that holds the weights' optimizer state, within `resident`; None without training."""
        return None

    def open_generation(self) -> None:
        """Build the process's one generation engine. Collective; `__init__` does it unless `context.uninitialized`."""

    def close_generation(self) -> None:
        """Free the process's one generation engine, so that ranks of a new layout can build theirs."""

    def training_state(self) -> TrainingState | None:
        """The optimizer's state kinds and counters, equal on all ranks and returned by rank 0; None without an
        optimizer."""
        with self.resident():
            engine = self.optimizing_engine()
            layout = None if engine is None else engine.optimizer_layout()
            if engine is None or layout is None or self.context.rank:
                return None
            return TrainingState(layout, tuple(engine.optimizer_storage()), engine.optimizer_counters())

    def training_state_arrived(self, counters: dict[str, Any]) -> None:
        """Called after the state was written: restores counters and weights."""
        with self.resident():
            if (engine := self.optimizing_engine()) is not None:
                engine.optimizer_moved(counters)

    def step_aside(self) -> None:
        """Free the process's one generation engine; on a GPU, offload the training state."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():
                engine = self.optimizing_engine()
            if engine is not None:
                engine.offload(get_args(TrainState))

    def step_back(self) -> None:
        """Undo `step_aside`, even if it was interrupted."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():  # leaving it offloads an idle model
                if (engine := self.optimizing_engine()) is not None:
                    engine.reload(get_args(TrainState))
        self.open_generation()


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
    settings = _bound(worker_class, settings)
    role = name or session.unique(getattr(worker_class, "role", worker_class.__name__.lower()))
    if role in session.groups:
        raise ConfigError(f"a group named {role!r} exists already: close it or give another name=.")
    if session.traces:
        return WorkerGroup(session, session.backend.ranks(worker_class, settings, role))
    if planned_for is None and session.assignment is not None:
        planned_for = session.assignment.groups.get(role)
    if planned_for is not None:
        return _on_placement(worker_class, pool, planned_for, settings, role, grid)
    return WorkerGroup(session, ranks_on(worker_class, pool, settings, role, grid))


def _on_placement(
    worker_class: type,
    pool: ResourcePool,
    where: GroupPlacement,
    settings: Mapping[str, Any],
    name: str,
    grid: RankGrid | None,
) -> WorkerGroup:
    """The group on the devices of `where`, with replicas for calls with other layouts."""
    parts = divided(worker_class, where, _as_worker(worker_class).resolve(settings), name)
    primary = ranks_on(worker_class, pool.part(where.devices), parts.settings, name, grid)
    replicas: list[RankGroup] = []
    for part in parts.replicas:
        at = pool.part(part.devices)
        replicas.append(ranks_on(part.worker_class, at, part.settings, name, beside=[primary, *replicas]))
    return WorkerGroup(pool.session, primary, replicas, parts.schedule or {})


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


def _bound(worker_class: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All constructor settings with their defaults."""
    if worker_class.__init__ is not object.__init__:
        return bound_settings(inspect.signature(worker_class.__init__), worker_class.__name__, (), settings)
    require(not settings, f"{worker_class.__name__} takes no settings, got {sorted(settings)}.")
    return {}
