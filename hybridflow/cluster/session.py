"""Session: the driver's connection to Ray, and what it knows of everything that it issued.

One session lives in a driver process at a time; `Session.current()` opens it when the first pool is made.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import ray.exceptions
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.worker import global_worker
from ray._raylet import GcsClient  # type: ignore[attr-defined]

from hybridflow.cluster.host import Deadlines
from hybridflow.cluster.iterations import Iterations
from hybridflow.cluster.leftovers import Watcher, marked
from hybridflow.cluster.links import Links
from hybridflow.errors import ConfigError, PlacementError

if TYPE_CHECKING:
    from hybridflow.cluster.group import WorkerGroup
    from hybridflow.cluster.pool import ResourcePool
    from hybridflow.placement import Placement

logger = logging.getLogger(__name__)
LOCAL_DEVICES = 16
_ANSWER_SECONDS = 5.0


class Session:
    """Connects to the cluster at `address` (or `RAY_ADDRESS`), or starts a local one with `devices` logical devices.

    On a local machine without CUDA a device is a logical slot, so a pool may be larger than the number of cores.
    """

    _current: ClassVar[Session | None] = None
    _assignment: ClassVar[Placement | None] = None

    def __init__(
        self, address: str | None = None, devices: int | None = None, deadlines: Deadlines | None = None
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self.name = uuid.uuid4().hex[:8]
        self.pools: list[ResourcePool] = []
        self.groups: dict[str, WorkerGroup] = {}
        self.links = Links(self)
        self._sequence = itertools.count(1)
        self.iterations = Iterations(self.deadlines.peers)
        self._helper: WorkerGroup | None = None
        self._closing: list[Callable[[], None]] = []
        self.started_ray = False
        self._connected = not ray.is_initialized()
        if self._connected:
            self._connect(address or os.environ.get("RAY_ADDRESS"), devices)
        directory = str(global_worker.node.get_session_dir_path()) if self.started_ray and global_worker.node else ""
        self._watcher = Watcher(self.name, directory)
        self.accelerators = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
        self.has_cuda = any(self.accelerators)
        atexit.register(self.shutdown)

    def _connect(self, address: str | None, devices: int | None) -> None:
        # Ray would otherwise wrap every worker in `uv run` or set CUDA_VISIBLE_DEVICES="" for zero-GPU actors
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address and address != "local":
            _join(address)
            return
        self.started_ray = True
        # one idle worker per CPU would be started, and hosts are none of them: their environment is their own
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        os.environ.setdefault("RAY_enable_worker_prestart", "0")
        cores = devices or max(LOCAL_DEVICES, os.cpu_count() or 1)
        with _terminal_signals_not_inherited(), marked(self.name):
            ray.init(
                "local", num_cpus=cores, include_dashboard=False, configure_logging=False, logging_level=logging.ERROR
            )

    @classmethod
    def current(cls) -> Session:
        """The open session; opens one with default settings if there is none."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @classmethod
    def existing(cls) -> Session | None:
        """The open session, if there is one."""
        return cls._current

    @classmethod
    def open(cls, **settings: Any) -> Session:
        """Open the session with settings. Errors: ConfigError when one is open already."""
        if cls._current is not None:
            raise ConfigError("a session is open already: call hybridflow.shutdown() first, then hybridflow.init(...).")
        cls._current = cls(**settings)
        return cls._current

    @classmethod
    @contextlib.contextmanager
    def assigning(cls, placement: Placement) -> Iterator[None]:
        """Groups that are placed within are where `placement` has a group of their name, whatever their driver says."""
        before, Session._assignment = Session._assignment, placement
        try:
            yield
        finally:
            Session._assignment = before

    @property
    def assignment(self) -> Placement | None:
        """The placement that decides at the moment."""
        return Session._assignment

    @property
    def helper(self) -> WorkerGroup:
        """The long-lived process without a device that runs numerical work of the controller."""
        if self._helper is None:
            raise PlacementError("the session has no pool yet: make a ResourcePool first.")
        return self._helper

    def set_helper(self, helper: WorkerGroup) -> None:
        self._helper = helper

    @property
    def has_helper(self) -> bool:
        return self._helper is not None

    def put(self, value: Any) -> Any:
        """Store something of the driver's own; a reference to it."""
        return ray.put(value)

    def sequence(self) -> int:
        return next(self._sequence)

    def pool_of(self, group: WorkerGroup) -> ResourcePool:
        """The slice of a pool on which a group lives."""
        return next(pool for pool in self.pools if pool.name == group.pool_name).part(group.members)

    def unique(self, role: str) -> str:
        """A name for a group: the role, numbered when it is taken."""
        names = itertools.chain([role], (f"{role}_{i}" for i in itertools.count(2)))
        return next(name for name in names if name not in self.groups)

    def next_iteration(self, in_flight: int = 2) -> None:
        """Begin an iteration; wait until at most `in_flight` iterations, this one included, are under way.

        Errors: WorkerError of a call that failed in an iteration that is now over.
        """
        self.iterations.begin(in_flight)

    def drain(self) -> None:
        """Wait for everything issued so far. Errors: as `next_iteration`."""
        self.iterations.drain()

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
        pools, self.pools = self.pools, []
        helper, self._helper = self._helper, None
        if ray.is_initialized():
            for pool in pools:
                with contextlib.suppress(ray.exceptions.RayError):
                    pool.close()
            if helper is not None:
                helper.forget_hosts()
                for host in helper.hosts:
                    ray.kill(host)
            if self._connected:
                ray.shutdown()
        self.groups.clear()
        self.iterations = Iterations(self.deadlines.peers)
        self._watcher.sweep()


def _join(address: str) -> None:
    """Connect to an existing cluster, `host:port` or "auto". Errors: ConfigError when none answers there."""
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
            _show_token(address, host)
        ray.init(address=address, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}). Start one with `ray start --head` and give its host:port, "
            f"or unset RAY_ADDRESS to have one started."
        ) from error


def _show_token(address: str, host: str) -> None:
    """`ray start` may ask for the user's token, which Ray shows only to clusters that it finds without an address."""
    try:
        GcsClient(address=address)
    except ray.exceptions.AuthenticationError:
        here = host in ("localhost", "127.0.0.1", ray.util.get_node_ip_address())
        if not (here and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)):
            raise ConfigError(
                f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                f"~/.ray/auth_token to the cluster's."
            ) from None


@contextlib.contextmanager
def _terminal_signals_not_inherited():
    """Let Ctrl-C reach the driver only: Ray's processes would die first and take the clean-up with them."""
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
