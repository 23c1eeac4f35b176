"""Session: the driver's pools and groups, on the backend that runs their calls.

A driver process has one open session at a time; `Session.current()` opens it when the first pool is made.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from hybridflow.cluster.backend import CONTROLLER as CONTROLLER
from hybridflow.cluster.backend import Deadlines, SessionBackend
from hybridflow.cluster.incidents import LostHost
from hybridflow.cluster.interactive import Cell, replaced
from hybridflow.cluster.ray_backend import RayBackend
from hybridflow.errors import ConfigError, HybridFlowError, PlacementError, nearest
from hybridflow.placement import Placement

logger = logging.getLogger(__name__)
_PATIENCE = 30.0  # seconds
_DRIVER_WRITES = {"advantages": "hf.compute_advantage(batch, ...)", "returns": "hf.compute_advantage(batch, ...)"}
_DRIVER_WRITES |= dict.fromkeys(("cost_advantages", "cost_returns"), 'hf.compute_advantage(batch, "safe_rlhf", ...)')
_DRIVER_WRITES |= {"group_id": "generate_sequences(batch, n=...) or batch.repeat(n)"}
_PLACED = {"ref_log_probs": "hf.ReferenceWorker and call compute_ref_log_prob"}
_PLACED |= {"values": "hf.CriticWorker and call compute_values", "rewards": "hf.RewardWorker and call compute_reward"}


class Session:
    """The pools and groups of a driver, which register themselves in `pools` and `groups`.

    `controller_pool` is that of the controller worker; a session that `traces` only records calls. `parts` are the
    loaders, trackers and other objects of the driver that checkpoints contain, `states` those of a loaded checkpoint
    for parts that are not attached yet, `first_states` those at the start of the program. `run_directory` is that of
    the first tracker. `recorded` records calls that generate, or answers them in a `replay` of a run
    (`recorded_calls`; a trace takes its place). `cells`: the notebook cells that made the groups and pools, by name
    ("": the session).
    """

    traces = False

    _current: ClassVar[Session | None] = None
    assignment: ClassVar[Placement | None] = None  # see `assigning`
    replay: ClassVar[Any] = None

    def __init__(self, backend: SessionBackend) -> None:
        self.backend: Any = backend
        self.name, self.has_cuda = backend.name, backend.has_cuda
        self.pools: list[Any] = []
        self.groups: dict[str, Any] = {}
        self.controller_pool: Any = None
        self.parts: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self.states: dict[str, Any] = {}
        self.first_states: dict[str, Any] = {}
        self.run_directory: Path | None = None
        self.cells: dict[str, Cell] = {}
        self.assigned: set[str] = set()  # groups that were placed by the placement of `assigning`
        self.unbuilt: set[str] = set()  # pools whose groups are not on their new hosts yet
        self.recorded: Any = None
        self._closing: list[Callable[[], None]] = []
        self._recoverable: Callable[[BaseException], bool] | None = None
        self.deferred: BaseException | None = None
        atexit.register(self.shutdown)

    @classmethod
    def current(cls) -> Session:
        """The open session; opens one with default settings when needed."""
        return cls._current or cls.open()

    @classmethod
    def existing(cls) -> Session | None:
        """The open session, if there is one."""
        return cls._current

    @classmethod
    def open(
        cls,
        address: str | None = None,
        devices: int | None = None,
        deadlines: Deadlines | None = None,
        deterministic: bool = False,
        prefetch: float | None = None,
    ) -> Session:
        """Open a session on the Ray cluster at `address` (or `RAY_ADDRESS`), or on a local one, see `RayBackend`.

        Errors: ConfigError when one is open already."""
        if cls._current is not None:
            return cls._current.opened_again()
        backend = RayBackend(address, devices, deadlines or Deadlines(), deterministic, prefetch)
        cls._current = session = cls(backend)
        session.iterations.incidents.directory = lambda: session.run_directory
        return session

    def opened_again(self) -> Session:
        raise ConfigError("a session is open already: call hybridflow.shutdown() first, then hybridflow.init(...).")

    @classmethod
    @contextlib.contextmanager
    def assigning(cls, placement: Placement | None) -> Iterator[None]:
        """Groups placed inside get the devices and sizes of their name in `placement`, instead of the driver's."""
        before, Session.assignment = Session.assignment, placement
        try:
            yield
        finally:
            Session.assignment = before

    def check_assignment(self) -> None:
        """Once groups are placed: warn of those of `assignment` that are not. Results are there by now."""
        try:
            if self.assignment is not None:
                self.assignment.check_placed(self.assigned | self.groups.keys())
        except PlacementError as error:
            logger.warning("%s", error)

    @property
    def iterations(self) -> Any:
        """Calls in flight: `iterations.Iterations`."""
        return self.backend.iterations

    @property
    def lost_hosts(self) -> list[LostHost]:
        """Host processes of open pools that are gone: pool, rank there, node and time."""
        return list(self.iterations.incidents.lost.values())

    @property
    def controller(self) -> Any:
        """The group of the controller worker: a process without a device, for numerical work of the controller."""
        if CONTROLLER not in self.groups:
            raise PlacementError("the session has no pool yet: make a ResourcePool first.")
        return self.groups[CONTROLLER]

    def replace_earlier(self, cell: Cell | None, name: str | None = None) -> None:
        """Close what an earlier run of this cell made at this place, or else the group `name` of an earlier cell."""
        if cell is None:
            return
        for pool in [pool for pool in self.pools if cell.made_before(self.cells.get(pool.name))]:
            replaced(f"the pool {pool}")
            self.write_metrics()
            pool.close()
            self.iterations.forget(pool.hosts)
        for group in list(self.groups.values()):
            other = self.cells.get(group.name)
            if cell.made_before(other) or (group.name == name and cell.earlier(other)):
                replaced(f"the group {group.name}")
                group.close()

    def write_metrics(self) -> None:
        """Have trackers write the metrics of calls that end soon, before their hosts are gone."""
        if not self.iterations.wait_quietly(_PATIENCE):
            logger.warning("calls still run after %g s: their metrics are not written.", _PATIENCE)
            return
        for part in list(self.parts.values()):
            try:
                getattr(part, "flush", lambda: None)()
            except HybridFlowError as error:
                logger.warning("metrics of a failed call are not written: %s", error)

    def who_writes(self, column: str, asking: Any, have: Iterable[str]) -> str:
        """The end of a sentence that no call has written the column, for a group that has the columns `have`."""
        if column in _DRIVER_WRITES:
            return f": call {_DRIVER_WRITES[column]} first."
        every = [(one, name) for one in self.groups.values() for name in one.operations]
        every.sort(key=lambda one: (one[0].operations[one[1]].later, one[0] is not asking))  # sessions of rows last
        for group, name in every:
            if column in group.usually_writes(name) and group.can_run(name):
                return f": call {group.name}.{name}(batch) first."
        if column in _PLACED:
            return f" and no group writes it: place {_PLACED[column]}(batch) first."
        return f" and no group writes it: the prompts must bring it.{nearest(column, have)}"

    def unique(self, role: str) -> str:
        """A name for a group: the role, numbered when it is taken."""
        names = itertools.chain([role], (f"{role}_{i}" for i in itertools.count(2)))
        return next(name for name in names if name not in self.groups)

    def attach(self, part: Any, name: str | None = None) -> None:
        """Make an object with `state()` and `load_state(state)` a part of checkpoints, for as long as it lives.

        It replaces another part of its `name`; the default is that of its class, numbered in the order of first use. In
        a run that continues it takes its state from the checkpoint.
        """
        if any(known is part for known in self.parts.values()):
            return
        kind = type(part).__name__
        name = name or next(n for n in (f"{kind}-{i}" for i in itertools.count()) if n not in self.parts)
        self.parts[name], self.first_states[name] = part, part.state()
        if name in self.states:
            part.load_state(self.states.pop(name))

    @contextlib.contextmanager
    def recovering(self, recoverable: Callable[[BaseException], bool]) -> Iterator[None]:
        """Inside, `recoverable` errors of calls are deferred to the loop, which can replace the hosts that failed."""
        self._recoverable, self.deferred, self.iterations.defer = recoverable, None, self.defer
        try:
            yield
        finally:
            self._recoverable = self.deferred = None

    def defer(self, error: BaseException) -> bool:
        """Whether the loop will handle this error of a call, in place of the caller."""
        if self._recoverable is None or not self._recoverable(error):
            return False
        self.deferred = self.deferred or error
        return True

    def raise_deferred(self) -> None:
        if self.deferred is not None:
            raise self.deferred

    def before_shutdown(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the session ends, while its groups still answer; what it raises is logged."""
        self._closing.append(callback)

    def shutdown(self) -> None:
        """Close all models, pools and, if this session started it, Ray. Can be called again at any time."""
        closing, self._closing = self._closing, []
        for callback in closing:
            try:
                callback()
            except Exception:
                logger.warning("%s failed while the session was closing", callback, exc_info=True)
        if Session._current is self:
            Session._current = None
        atexit.unregister(self.shutdown)
        for pool in [*self.pools, self.controller_pool]:
            if pool is not None:
                pool.close()
        self.groups.clear()
        self.backend.close()
