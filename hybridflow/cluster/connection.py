"""Connection: joins a Ray cluster or starts a local one, closed to other users and the network; probes of its machines;
SIGTERM ends the driver as Ctrl-C does, with status 143."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import ray
import ray._private.services as services
import ray._private.state as state
import ray._private.utils as utils
import ray.exceptions
from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.authentication.authentication_token_setup import (
    AUTH_MODE_ENV_VAR,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.node import Node
from ray._private.worker import global_worker
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridflow.cluster.orphan_cleanup import marked
from hybridflow.errors import ConfigError

LOCAL_DEVICES = 16
STATUS = 128 + signal.SIGTERM
_WITHIN_SECONDS = 30.0
_ANSWER_SECONDS = 5.0
_SETTINGS = bytes(3) + b"\x04" + bytes(5)  # an HTTP/2 frame: its length, type, flags, stream
_LONGEST_DIRECTORY = 107 - len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
"""Bytes of Ray's directory: a socket's path has at most 107."""


def connect(session: str, address: str | None, devices: int | None) -> str:
    """Join the cluster at `address`, or start a local one with `devices` logical devices.

    Returns the directory of a started cluster, "" for a joined one. Processes of a local cluster listen on the loopback
    address only, and answer to clients with this user's token (unless RAY_AUTH_MODE=disabled). Errors: ConfigError.
    """
    # Ray would otherwise wrap every worker in `uv run` or set CUDA_VISIBLE_DEVICES="" for zero-GPU actors
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address and address != "local":
        _join(address)
        return ""
    # Ray would start one idle worker per CPU, which hosts with their own environment never use
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    cores = devices or max(LOCAL_DEVICES, os.cpu_count() or 1)
    _private_token()
    with marked(session), _loopback_only(), _one_machine():
        ray.init(
            "local",
            num_cpus=cores,
            include_dashboard=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            _temp_dir=_ray_directory(),
        )
    return str(global_worker.node.get_session_dir_path())  # type: ignore[union-attr]


def _join(address: str) -> None:
    """Connect to an existing cluster, `host:port` or "auto". Errors: ConfigError when no head answers there, within
    twice `_ANSWER_SECONDS`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    good = host and "://" not in host and port.isdecimal() and 0 < int(port) < 1 << 16
    if not good and address != "auto":
        kind = "an address of Ray Client, whose driver is outside of the cluster" if "ray://" in address else "none"
        raise ConfigError(
            f"RAY_ADDRESS or address={address!r} is not host:port of a cluster's head ({kind}): run the driver on a "
            f"machine of the cluster and give its host and port, such as 10.0.0.1:6379, or 'auto'."
        )
    try:
        if good:
            _check_grpc(host.strip("[]"), int(port))
            _show_token(address, host)
        ray.init(address=address, logging_level=logging.ERROR)
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}). Start one with `ray start --head` and give its host:port, "
            f"or unset RAY_ADDRESS to have one started."
        ) from error


def _check_grpc(host: str, port: int) -> None:
    """A Ray head speaks gRPC, which is HTTP/2: its first frame has settings. Errors: OSError when nothing or something
    else answers there."""
    end = time.monotonic() + _ANSWER_SECONDS
    with socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
        frame = b""
        while len(frame) < len(_SETTINGS):
            connection.settimeout(max(0.01, end - time.monotonic()))
            if not (part := connection.recv(len(_SETTINGS) - len(frame))):
                break
            frame += part
    if frame[3:] != _SETTINGS[3:]:
        raise OSError(f"another service, whose answer begins with {frame!r}")


def _show_token(address: str, host: str) -> None:
    """Ray sends the user's token, which `ray start` may require, only to clusters found without an address.

    Errors: ConfigError for a wrong token; OSError, as `_ask_head`."""
    try:
        _ask_head(address)
    except ray.exceptions.AuthenticationError:
        here = host in ("localhost", "127.0.0.1", ray.util.get_node_ip_address())
        if here and maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
            with contextlib.suppress(ray.exceptions.AuthenticationError):
                _ask_head(address)
                return
        raise ConfigError(
            f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            f"~/.ray/auth_token to the cluster's."
        ) from None


def _ask_head(address: str) -> None:
    """Ask a head for its cluster's id. Errors: AuthenticationError; OSError when another gRPC service answers, such as
    a raylet, or none in time: Ray's client has a longer limit, and none in its interface."""
    answer = Future[GcsClient]()

    def ask() -> None:
        try:
            answer.set_result(GcsClient(address=address))
        except ray.exceptions.RayError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="ray head", daemon=True).start()
    try:
        answer.result(_ANSWER_SECONDS)
    except TimeoutError:
        raise OSError(f"it has not said which cluster it is in {_ANSWER_SECONDS:g} s") from None
    except ray.exceptions.RpcError as error:
        raise OSError(f"another gRPC service, which knows no cluster: {error}") from None


def _private_token() -> None:
    """Ray's own token file, or a new one, which only this user can read: Ray would open it to every user.

    A token that the environment names is left alone. Errors: ConfigError for a file that cannot be protected.
    """
    named = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if named or os.environ.get(AUTH_MODE_ENV_VAR, "token").lower() != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
                file.write(generate_new_authentication_token())
                file.flush()
                with contextlib.suppress(FileExistsError):  # another driver was faster
                    os.link(file.name, path)
        path.chmod(0o600)
    except OSError as error:
        raise ConfigError(
            f"Ray's token {path} cannot be made this user's alone: {error}. Set RAY_AUTH_TOKEN_PATH to a file that can."
        ) from None
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """A cluster started inside listens on 127.0.0.1 only.

    Ray replaces a loopback address by the machine's outward one and listens on all interfaces, except on systems
    without multi-machine clusters (macOS, Windows). Its processes need the same setting to find each other.
    """
    name, known = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = known
        os.environ.pop(name)
        os.environ.update({} if before is None else {name: before})


@contextlib.contextmanager
def _one_machine() -> Iterator[None]:
    """A cluster started inside has no autoscaler and no head of a dashboard. Ray starts both for every cluster, which
    takes 3 s of a core, and waits for one when it starts and for the other when it ends."""
    names = ("start_monitor", "start_api_server")
    before = {name: getattr(Node, name) for name in names}
    for name in names:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            setattr(Node, name, before[name])


def _ray_directory() -> str:
    """Ray's directory, which Ray opens to every user, inside a private one. Errors: ConfigError for a long path."""
    path = private_directory() / "ray"
    if (length := len(os.fsencode(path))) > _LONGEST_DIRECTORY:
        raise ConfigError(
            f"Ray cannot make sockets in {path}, which has {length} bytes: at most {_LONGEST_DIRECTORY} leave room for "
            f"their names. Set RAY_TMPDIR to a shorter directory."
        )
    return str(path)


def private_directory() -> Path:
    """A directory that only this user can enter. Errors: ConfigError when another user owns the path."""
    path = Path(get_default_system_temp_dir()) / f"hybridflow-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{path} is another user's, or not a directory. Remove it, or set RAY_TMPDIR to another one.")
    path.chmod(0o700)
    return path


@dataclass(frozen=True)
class Machine:
    """A machine that Ray counts as alive."""

    name: str
    address: str
    devices: Mapping[str, tuple[int, int]]
    """Free ones and all, of each kind: "GPU", "CPU"."""


@dataclass(frozen=True)
class Unanswered:
    """What came in place of a probe's answer."""

    why: str


class NodeProbes:
    """Probes of the class `kind` on all machines of the cluster at `address`; they end, and this process leaves the
    cluster, with the `with` block. Errors of `connect`."""

    def __init__(self, address: str, kind: type, seconds: float = 60.0) -> None:
        self._address, self._kind, self._seconds = address, kind, seconds
        self._probes: list[Any] = []
        self.machines: list[Machine] = []

    def __enter__(self) -> NodeProbes:
        connect("doctor", self._address, None)
        free = state.available_resources_per_node()
        for node in sorted((one for one in ray.nodes() if one["Alive"]), key=lambda one: one["NodeManagerAddress"]):
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self._probes.append(ray.remote(self._kind).options(num_cpus=0, scheduling_strategy=here).remote())
            left, there = free.get(node["NodeID"], {}), node["Resources"]
            devices = {kind: (int(left.get(kind, 0)), int(there[kind])) for kind in ("GPU", "CPU") if kind in there}
            self.machines.append(Machine(node["NodeManagerHostname"], node["NodeManagerAddress"], devices))
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()

    def ask(self, method: str, *given: Any, each: str = "") -> list[Any]:
        """What `method` returns on each machine, or Unanswered. `each` names a field of the Machine that stands before
        the arguments."""
        own = [(getattr(machine, each),) if each else () for machine in self.machines]
        asked = [getattr(probe, method).remote(*before, *given) for probe, before in zip(self._probes, own)]
        ready = set(ray.wait(asked, num_returns=len(asked), timeout=self._seconds)[0])
        return [
            self._answer(one) if one in ready else Unanswered(f"no answer within {self._seconds:g} s") for one in asked
        ]

    @staticmethod
    def _answer(ready: Any) -> Any:
        try:
            return ray.get(ready)
        except Exception as error:  # whatever keeps a probe from running there is what was asked for
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            return Unanswered(f"{type(error).__name__}: {said[-1] if said else 'no reason'}")


class Termination:
    """Handles SIGTERM in the driver between `taken` and `give_back`.

    It raises KeyboardInterrupt in the main thread, the only exception that Ray's waits pass through unchanged, and
    prints no traceback. Further signals are ignored. A driver that still runs `_WITHIN_SECONDS` later is killed, and
    its watcher cleans up. A user's handler or SIG_IGN stays in place; sessions in other threads, a prompt or a
    notebook, where an exception only ends a cell, install nothing.
    """

    def __init__(self) -> None:
        self._came = self._held = self._defers = False
        self.asked = 0  # the exit status of a driver that was asked to end at the next step
        self._hook = sys.excepthook
        self._main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if self._main else None
        if getattr(before, "__module__", "").startswith("ray."):
            before = signal.SIG_DFL
        self._before = before
        self._ours = before == signal.SIG_DFL and not hasattr(sys, "ps1")

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Replace the handler of Ray, which is started inside; a signal in the meantime is handled at the end.

        Ray's own handler ends Ray's processes first, whereupon the driver aborts, as on a second signal. A signal to
        the driver's process group (Ctrl-C, `timeout`) would also reach them first, so they get groups of their own.
        """
        if not self._main or self._before is None:
            yield
            return
        rays, popen, self._held = utils.set_sigterm_handler, services.ConsolePopen, True
        utils.set_sigterm_handler = lambda handler: None
        services.ConsolePopen = partial(popen, process_group=0)
        try:
            self._install()
            yield
        except BaseException:
            self.give_back()
            self._ours = False
            raise
        finally:
            utils.set_sigterm_handler, services.ConsolePopen = rays, popen
            self._install()  # Ray has installed a C++ handler over it
            self._held = False
        if self._ours:
            sys.excepthook = self._ended
        if self._came:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first SIGTERM or Ctrl-C only sets `asked`; a second one ends the driver at once."""
        interrupts = self._main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.asked, self._defers = 0, True
        if interrupts:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            self._defers = False
            if interrupts and signal.getsignal(signal.SIGINT) == self._interrupt:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int) -> bool:
        """Whether this signal only asks the driver to end."""
        if not self._defers or self.asked:
            return False
        self.asked = 128 + number
        os.write(2, b"\nsaving at the end of this iteration, then ending; a second signal ends the run at once\n")
        return True

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._ask(number):
            raise KeyboardInterrupt

    def _install(self) -> None:
        signal.signal(signal.SIGTERM, self._handle if self._ours else self._before)

    def give_back(self) -> None:
        """Restore the original handler, unless the signal came: further signals must not interrupt the shutdown."""
        if self._came or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        if sys.excepthook == self._ended:
            sys.excepthook = self._hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came or self._ask(number):
            return
        self._came = True
        limit = threading.Timer(_WITHIN_SECONDS, os._exit, (STATUS,))
        limit.daemon = True
        limit.start()
        if not self._held:
            raise KeyboardInterrupt

    def _ended(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        """The hook for uncaught exceptions."""
        if not self._came:
            return self._hook(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            self._hook(kind, error, trace)
        raise SystemExit(STATUS)
