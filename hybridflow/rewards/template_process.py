"""The template process of a `ProcessPool`: it loads the function once, forks workers from itself, and enforces limits.

It has one thread, so that it may fork, and imports only the standard library and cloudpickle. As a subreaper it adopts
and kills processes that workers leave behind. It ends, with every worker, when its parent ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import cloudpickle

from hybridflow.rewards.calling import reason_of, settled
from hybridflow.rewards.outcome import Outcome, plain
from hybridflow.rewards.sandbox.containment import die_with_parent, prctl

LOADING = 120.0
"""Seconds in which a process has to import what the function needs."""

LARGEST_MESSAGE = 2**28
"""Bytes of one call or result. Larger results count as failures, to bound memory."""

UNSENT = "answered with what cannot be sent back"
NOT_BEGUN = "was not begun: too many others failed"

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!Q")
_TRANSFER = 30.0  # seconds for one message between the template and a worker
_KEPT_OUTPUT, _SHOWN_OUTPUT = 2000, 300


class NotLoadedError(Exception):
    """The function cannot be loaded in a worker; the message says why."""


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """Errors: ConnectionError when the other end is closed or sends more than a message may have; TimeoutError."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > LARGEST_MESSAGE + 2**20:
        raise ConnectionError(f"a message of {length} bytes")
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        if not (piece := connection.recv(min(count - len(found), 1 << 20))):
            raise ConnectionError("the other end is closed")
        found += piece
    return found


def ending(status: int, output: str) -> str:
    """`died with SIGSEGV`, `exited with code 3`: a wait status in words, and the last of what was printed."""
    code = os.waitstatus_to_exitcode(status)
    hint = " (killed; perhaps the machine had no memory left)" if -code == signal.SIGKILL else ""
    how = f"exited with code {code}" if code >= 0 else f"died with {signal.Signals(-code).name}{hint}"
    said = output.strip()[-_SHOWN_OUTPUT:]
    return how + (f"; it printed last: {said}" if said else "")


def serve(descriptor: int) -> NoReturn:
    """Load the function, then run batches of calls until the owner closes its end of the socket or ends."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner = socket.socket(fileno=descriptor)
    setup = pickle.loads(receive(owner))
    function = None
    if setup["preload"]:
        try:
            function = cloudpickle.loads(setup["function"])
        except BaseException as error:  # the function's own imports run here
            send(owner, pickle.dumps(("broken", reason_of(error))))
            os._exit(1)
        if len(os.listdir("/proc/self/task")) > 1:  # a fork could find their locks held for ever
            send(owner, pickle.dumps(("threads", "")))
            os._exit(0)
        gc.collect()
        gc.freeze()  # pages shared with the workers stay shared
    send(owner, pickle.dumps(("ready", "")))
    template = _Template(owner, function, setup)
    try:
        while True:
            template.step(None)
            if template.asked:
                count, limits, failures = pickle.loads(receive(owner))
                template.run([receive(owner) for _ in range(count)], limits, failures)
                template.sweep(all_sessions=True)
    except OSError:  # the owner is gone
        pass
    except NotLoadedError as error:
        with contextlib.suppress(OSError):
            send(owner, pickle.dumps(("broken", str(error))))
    finally:
        template.close()
        os._exit(0)


@dataclass(eq=False)
class _Worker:
    """One worker process: `call` is the index of the call that it runs, `due` when it has to have answered."""

    pid: int
    socket: socket.socket
    ended: int  # a pidfd
    output: int  # where it prints to
    due: float
    ready: bool = False
    call: int | None = None
    said: bytearray = field(default_factory=bytearray)

    def listen(self) -> bool:
        """Read some of its output; False at its end."""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.output, 1 << 16)
            self.said += piece
            del self.said[:-_KEPT_OUTPUT]
            return bool(piece)
        return False


class _Template:
    """The workers and the batch that they run."""

    def __init__(self, owner: socket.socket, function: Callable[..., Any] | None, setup: Mapping[str, Any]) -> None:
        self.owner, self.function, self.setup = owner, function, setup
        self.workers: dict[int, _Worker] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(owner, selectors.EVENT_READ)
        self._owner_ended = os.pidfd_open(setup["owner"])
        self.selector.register(self._owner_ended, selectors.EVENT_READ)
        if os.getppid() != setup["owner"]:
            raise ConnectionError("the owner has ended")
        self.asked = False
        self.open: set[int] = set()
        self.failed = 0

    def run(self, calls: Sequence[bytes], limits: Sequence[float], failures: int | None) -> None:
        """Run the calls, oldest first, and send an Outcome for each; see `ProcessPool.map` for `failures`."""
        waiting = deque(range(len(calls)))
        self.open, self.failed = set(waiting), 0
        self.step(0.0)  # workers that died since the last batch
        while self.open:
            while waiting and failures is not None and self.failed >= failures:
                self._answer(waiting.popleft(), Outcome(None, NOT_BEGUN))
            workers = list(self.workers.values())
            for worker in [worker for worker in workers if worker.ready and worker.call is None][: len(waiting)]:
                worker.call = waiting.popleft()
                worker.due = time.monotonic() + limits[worker.call]
                with contextlib.suppress(OSError):  # it has ended, as is noticed next
                    send(worker.socket, calls[worker.call])
            starting = sum(not worker.ready for worker in workers)
            for _ in range(min(self.setup["workers"] - len(workers), len(waiting) - starting)):
                self._fork()
            busy = [worker for worker in self.workers.values() if worker.call is not None or not worker.ready]
            self.step(max(0.0, min(worker.due for worker in busy) - time.monotonic()) if busy else 0.0)
            if self.asked:
                raise ConnectionError("the owner does not wait for this batch any more")
            for worker in [worker for worker in busy if worker.pid in self.workers]:
                if (worker.call is not None or not worker.ready) and worker.due <= time.monotonic():
                    limit = LOADING if worker.call is None else limits[worker.call]
                    self._end(worker, f"took longer than {limit:g} s")

    def step(self, seconds: float | None) -> None:
        """Wait for output, answers and ends of workers, and take them. Errors: ConnectionError: the owner has ended."""
        ended: list[_Worker] = []
        self.asked = False
        for key, _ in self.selector.select(seconds):
            worker: _Worker | None = key.data
            if worker is None:
                if key.fd == self._owner_ended:
                    raise ConnectionError("the owner has ended")
                self.asked = True
            elif worker.pid not in self.workers:  # it was ended by an event before this one
                continue
            elif key.fd == worker.output:
                if not worker.listen():
                    self.selector.unregister(worker.output)
            elif key.fd == worker.ended:
                ended.append(worker)
            elif not self._read(worker):
                self._end(worker)
        for worker in ended:  # last: what a worker wrote before its end has been read
            if worker.pid in self.workers:
                self._end(worker)

    def sweep(self, *, all_sessions: bool = False) -> None:
        """Kill adopted processes; those in the session of a live worker only with `all_sessions`."""
        until = time.monotonic() + 10.0  # something may fork faster than it is killed
        while time.monotonic() < until:
            spared = self.workers
            adopted = [(pid, session) for pid, session in _children() if pid not in spared]
            orphans = [pid for pid, session in adopted if all_sessions or session not in spared]
            if not orphans:
                return
            for pid in orphans:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def close(self) -> None:
        for pid in self.workers:
            _kill(pid)
        self.workers.clear()
        self.sweep(all_sessions=True)

    def _answer(self, index: int, outcome: Outcome) -> None:
        self.open.remove(index)
        self.failed += not outcome.ok
        send(self.owner, pickle.dumps((index, outcome)))

    def _read(self, worker: _Worker) -> bool:
        """Take a message of the worker. False when it has ended, or sent something else than its own loop would."""
        try:
            message = receive(worker.socket)
        except OSError:
            return False
        try:
            kind, value = pickle.loads(message)
        except Exception as error:  # written by the function: reading it may raise anything
            self._end(worker, f"answered with what cannot be read: {reason_of(error)}")
            return True
        if kind == "broken":
            raise NotLoadedError(value)
        if kind == "ready":
            worker.ready = True
        elif worker.call is None:
            return False
        else:
            self._answer(worker.call, Outcome(value) if kind == "value" else Outcome(None, value))
            worker.call = None
        return True

    def _end(self, worker: _Worker, why: str | None = None) -> None:
        """Kill the worker and what it started; its call, if it had one, has failed."""
        del self.workers[worker.pid]
        for end in (worker.socket, worker.ended, worker.output):
            with contextlib.suppress(KeyError):
                self.selector.unregister(end)
        _kill(worker.pid)
        _, status = os.waitpid(worker.pid, 0)
        self.sweep()
        while worker.listen():
            pass
        worker.socket.close()
        os.close(worker.ended)
        os.close(worker.output)
        why = why or ending(status, bytes(worker.said).decode(errors="replace"))
        if not worker.ready:
            raise NotLoadedError(why)
        if worker.call is not None:
            self._answer(worker.call, Outcome(None, why))

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        template = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                self.selector.close()
                self.owner.close()
                ours.close()
                os.close(output)
                for worker in self.workers.values():
                    worker.socket.close()
                    os.close(worker.ended)
                    os.close(worker.output)
                _work(theirs, printed, template, self.function, self.setup)
            finally:
                os._exit(1)
        theirs.close()
        os.close(printed)
        os.set_blocking(output, False)
        ours.settimeout(_TRANSFER)
        worker = _Worker(pid, ours, os.pidfd_open(pid), output, time.monotonic() + LOADING)
        self.workers[pid] = worker
        for end in (worker.socket, worker.ended, worker.output):
            self.selector.register(end, selectors.EVENT_READ, worker)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have had the time to make its session
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _children() -> list[tuple[int, int]]:
    """Process id and session of every child of this process, adopted ones included."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended in between
            with open(f"/proc/{name}/stat") as stat:
                _, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            if int(parent) == os.getpid():
                found.append((int(name), int(session)))
    return found


def _work(
    connection: socket.socket,
    printed: int,
    template: int,
    function: Callable[..., Any] | None,
    setup: Mapping[str, Any],
) -> None:
    """The main function of a worker: load the function unless the template has, then answer calls.

    Errors: ConnectionError when the template has ended.
    """
    _prepare(printed, template)
    try:
        run = cloudpickle.loads(setup["function"]) if function is None else function
    except BaseException as error:  # the function's own imports run here
        send(connection, pickle.dumps(("broken", reason_of(error))))
        return
    _limit_memory(setup["memory_mb"])
    send(connection, pickle.dumps(("ready", None)))
    while True:
        call = receive(connection)
        try:
            args, kwargs = pickle.loads(call)
            answer = ("value", settled(run(*args, **kwargs)))
        except MemoryError as error:
            limit = setup["memory_mb"]
            why = reason_of(error)
            answer = ("failed", why if limit is None else f"needed more memory than its {limit:g} MB ({why})")
        except BaseException as error:  # the user's code, whose SystemExit must not end the worker either
            answer = ("failed", reason_of(error))
        try:
            message = pickle.dumps(plain(answer))
            if len(message) > LARGEST_MESSAGE:
                raise ValueError(f"{len(message) / 2**20:.0f} MiB is more than an answer may have")
        except Exception as error:  # the answer is of a type of the user's, which may raise anything
            message = pickle.dumps(("failed", f"{UNSENT}: {reason_of(error)}"))
        send(connection, message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function closed it
                stream.flush()


def _prepare(printed: int, template: int) -> None:
    """Give a forked process a session, streams and signals of its own; it dies when the template does."""
    os.setsid()
    die_with_parent(template)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(printed)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")  # a machine out of memory takes a verifier before a model


def _limit_memory(megabytes: float | None) -> None:
    """Let the process grow by so much beyond what it occupies now."""
    if megabytes is None:
        return
    with open("/proc/self/statm") as statm:
        occupied = int(statm.read().split()[0]) * resource.getpagesize()
    limit = occupied + int(megabytes * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
