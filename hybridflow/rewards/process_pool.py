"""ProcessPool: worker processes that run a function, each call with a limit of time and memory.

Libraries' pools were measured first: in pebble 5.2.3 one worker that dies can fail the calls of others (its workers
share one pipe and its locks), and multiprocessing's "spawn" and "forkserver" run the user's main module again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from typing import Any, Self

import cloudpickle

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.calling import Call, Outcome, name_of, reason_of
from hybridflow.rewards.template_process import LARGEST_MESSAGE, receive, send
from hybridflow.settings import is_number

NOT_BEGUN = "was not begun: too many others failed"

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from hybridflow.rewards import template_process
template_process.serve(int(sys.argv[1]), preload=len(sys.argv) == 3)"""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 for workers unless set by the user: threads that start at import prevent forking."""

_LOADING = 120.0  # seconds in which a process has to import what the function needs
_PATIENCE = 60.0  # seconds in which the template process has to fork or end a worker
_TRANSFER = 30.0  # seconds for one message between this process and a worker
_RESTARTS = 3
_KEPT_OUTPUT, _SHOWN_OUTPUT = 2000, 300
_LOST = "ended when something killed the template process of the workers"


class ProcessPool:
    """Up to `workers` processes that run `function` (sync or async), each call with a limit of `seconds`.

    Workers start with the first calls, forked from a small template process that loads the function once (this
    process's threads and memory are not copied), and end with this process, however it ends. Pickling takes the
    settings only: a copy starts workers of its own, and so does a process that is forked from this one. `memory_mb` is
    what a worker may allocate beyond its size once the function is loaded. What a function prints is not shown; where
    a worker dies, its last words are part of the reason. Answers are plain data: numbers (those of numpy and torch
    too), texts, None, RowFailure, and lists and dicts of them.

    The pool keeps crashes and runaway memory and time away from this process. It does not protect against a malicious
    function, which has all rights of this user (for programs written by a model, see `Code`).
    Errors: ConfigError for settings out of range; RewardError when the function cannot be loaded in a worker.
    """

    def __init__(
        self, function: Callable[..., Any], workers: int, *, seconds: float, memory_mb: float | None = None
    ) -> None:
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"ProcessPool(workers={workers!r}): give a whole number of at least 1.")
        for name, value in (("seconds", seconds), ("memory_mb", memory_mb)):
            if not _positive(value) and (name == "seconds" or value is not None):
                raise ConfigError(f"ProcessPool({name}={value!r}): give a number above 0.")
        self.function, self.workers, self.seconds, self.memory_mb = function, workers, seconds, memory_mb
        self._reset()

    def __reduce__(self) -> tuple[Callable[[], ProcessPool], tuple[()]]:
        settings = {"seconds": self.seconds, "memory_mb": self.memory_mb}
        return partial(type(self), self.function, self.workers, **settings), ()

    def map(
        self, calls: Sequence[Call], *, seconds: float | Sequence[float] | None = None, failures: int | None = None
    ) -> list[Outcome]:
        """Run `function(*args, **kwargs)` for every (args, kwargs) and return one Outcome per call, in order.

        The limit (`seconds` here replaces the constructor's, for all calls or for each) counts from the moment a
        worker that has loaded the function gets the call. A worker that is late or dead is killed with everything it
        started, and replaced; daemons that calls left behind are killed once all calls are answered. Once `failures`
        calls have failed, those that no worker has begun fail with NOT_BEGUN.
        """
        given = self.seconds if seconds is None else seconds
        limits = [given] * len(calls) if isinstance(given, int | float) else list(given)
        if len(limits) != len(calls) or not all(map(_positive, limits)):
            raise ConfigError(f"ProcessPool.map(seconds={seconds!r}): give one number above 0, or one per call.")
        if not calls:
            return []
        self._check_process()
        with self._lock:
            try:
                return self._map(calls, limits, failures)
            except BaseException:
                self._stop()  # a worker in the middle of a call would answer to the next one
                raise

    def close(self) -> None:
        """Kill the workers and everything that they started; the next `map` starts new ones."""
        self._check_process()
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._finalizer: weakref.finalize | None = None

    def _check_process(self) -> None:
        """In a process that was forked from the owner, forget the owner's workers, and its lock, which may be held."""
        if self._process_id != os.getpid():
            if self._finalizer is not None:
                self._finalizer.detach()
            if self._template is not None:
                self._template.close()
            self._reset()

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._template = self._finalizer = None

    def _map(self, calls: Sequence[Call], limits: Sequence[float], failures: int | None) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        messages: dict[int, bytes] = {}
        for index, call in enumerate(calls):
            try:
                messages[index] = cloudpickle.dumps(tuple(call))
            except Exception as error:  # pickling runs the user's classes
                found[index] = Outcome(None, f"was given what cannot be sent to it: {error}")
                continue
            if (size := len(messages[index])) > LARGEST_MESSAGE:
                found[index] = Outcome(None, f"was given {size >> 20} MiB, more than a call may have")
                del messages[index]
        for left in reversed(range(_RESTARTS + 1)):
            template = self._running()
            try:
                template.run(messages, limits, failures, found)
                break
            except OSError:
                found |= {one.call: Outcome(None, _LOST) for one in template.workers if one.call is not None}
                self._stop()
                if not left:
                    raise RewardError(
                        f"the template process of the workers is gone. It was started anew {_RESTARTS} times before."
                    ) from None
        return [found[index] for index in range(len(calls))]

    def _running(self) -> Template:
        if self._template is not None and self._template.alive:
            return self._template
        self._stop()
        self._template = Template(pickled(self.function), self.workers, self.memory_mb)
        self._finalizer = weakref.finalize(self, self._template.close)
        return self._template


@dataclass(eq=False)
class PoolWorker:
    """One worker process: `call` is the index of the call that it runs, which may take `limit` seconds until `due`."""

    pid: int
    socket: socket.socket
    ended: int  # a pidfd
    output: io.FileIO  # what it prints
    limit: float
    due: float
    ready: bool = False
    call: int | None = None
    said: bytearray = field(default_factory=bytearray)

    @property
    def busy(self) -> bool:
        return self.call is not None or not self.ready

    @property
    def ends(self) -> list[Any]:
        """What can be waited for: its end first, so that an answer from before its end is seen with it."""
        return [self.ended, self.socket, *([] if self.output.closed else [self.output])]

    def listen(self) -> bool:
        """Read some of its output; False when nothing is available."""
        piece = None if self.output.closed else self.output.read(1 << 16)
        if piece == b"":
            self.output.close()
        self.said += piece or b""
        del self.said[:-_KEPT_OUTPUT]
        return bool(piece)

    def close(self) -> None:
        self.socket.close()
        self.output.close()
        os.close(self.ended)


class Template:
    """The template process, started here, and its workers. Errors: RewardError when it cannot load the function.

    With `serves`, a worker calls `function(connection)` once, with its end of the socket, in place of answering calls.
    """

    def __init__(self, function: bytes, most: int, memory_mb: float | None, serves: bool = False) -> None:
        self.workers: list[PoolWorker] = []
        self._most, self._owner = most, os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as setup:
            pickle.dump({"function": function, "memory_mb": memory_mb, "owner": self._owner, "serves": serves}, setup)
            setup.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=setup,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=dict.fromkeys(_ONE_THREAD, "1") | os.environ,
                start_new_session=True,  # an interrupt from the terminal is for this process only
            )
            theirs.close()
            try:
                self._socket.settimeout(_LOADING)
                broken = self._answer()
            except OSError as error:
                self._process.kill()
                code = self._process.wait()
                output.seek(0)
                late = isinstance(error, TimeoutError)
                broken = f"took longer than {_LOADING:g} s" if late else _ending(code, output.read())
            except BaseException:
                self.close()
                raise
        self._socket.settimeout(_PATIENCE)
        if broken:
            self.close()
            raise not_loaded(f"{broken}. What it imports must be installed and on sys.path where it runs")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(
        self, calls: Mapping[int, bytes], limits: Sequence[float], failures: int | None, found: dict[int, Outcome]
    ) -> None:
        """Run the calls without an outcome, oldest first, and put their outcomes into `found`.

        See `ProcessPool.map` for `failures`. Errors: OSError when the template process has ended.
        """
        waiting = deque(index for index in calls if index not in found)
        self._step(0.0, found)  # workers that died since the last batch
        while waiting or any(worker.call is not None for worker in self.workers):
            if failures is not None and sum(not one.ok for one in found.values()) >= failures:
                found |= {index: Outcome(None, NOT_BEGUN) for index in waiting}
                waiting.clear()
            for worker in [worker for worker in self.workers if not worker.busy][: len(waiting)]:
                worker.call = waiting.popleft()
                worker.limit = limits[worker.call]
                worker.due = time.monotonic() + worker.limit
                with contextlib.suppress(OSError):  # it has ended, as is noticed next
                    send(worker.socket, calls[worker.call])
            starting = sum(not worker.ready for worker in self.workers)
            for _ in range(min(self._most - len(self.workers), len(waiting) - starting)):
                self.fork()
            due = min((worker.due for worker in self.workers if worker.busy), default=0.0)
            self._step(max(0.0, due - time.monotonic()), found)
        self._ask("sweep")

    def close(self) -> None:
        """End the process and its workers (in a process that was forked from the owner: forget them)."""
        self._socket.close()
        while self.workers:
            self.workers.pop().close()
        if os.getpid() != self._owner:
            self._process.returncode = 0  # not a child of this process, which has nothing to wait for
            return
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, what: str, pid: int = 0, ends: Sequence[int] = ()) -> None:
        socket.send_fds(self._socket, [json.dumps([what, pid]).encode()], ends)

    def _answer(self) -> Any:
        if not (answer := self._socket.recv(1 << 16)):
            raise ConnectionError("the template process has ended")
        return json.loads(answer)

    def fork(self) -> PoolWorker:
        """Errors: OSError when the template process has ended."""
        ours, theirs = socket.socketpair()
        read, printed = os.pipe()
        output = io.FileIO(read)
        try:
            self._ask("fork", ends=[theirs.fileno(), printed])
        finally:
            theirs.close()
            os.close(printed)
        pid = self._answer()
        os.set_blocking(read, False)
        ours.settimeout(_TRANSFER)
        self.workers.append(PoolWorker(pid, ours, os.pidfd_open(pid), output, _LOADING, time.monotonic() + _LOADING))
        return self.workers[-1]

    def end(self, worker: PoolWorker) -> str:
        """Kill the worker and what it started. Returns how it ended. Errors: OSError without the template process."""
        self._ask("end", worker.pid)
        status = self._answer()
        self.workers.remove(worker)
        while worker.listen():
            pass
        worker.close()
        return _ending(os.waitstatus_to_exitcode(status), bytes(worker.said))

    def _step(self, seconds: float, found: dict[int, Outcome]) -> None:
        """Wait for output, answers and ends of workers, and take them; end workers that are late."""
        ready = connection.wait([end for worker in self.workers for end in worker.ends], seconds)
        for worker in list(self.workers):
            if worker.output in ready:
                _ = worker.listen()
            if worker.socket in ready:
                self._read(worker, found)
            elif worker.ended in ready:
                self._end(worker, found)
            elif worker.busy and worker.due <= time.monotonic():
                self._end(worker, found, f"took longer than {worker.limit:g} s")

    def _read(self, worker: PoolWorker, found: dict[int, Outcome]) -> None:
        """Take a message of the worker; end one that has ended, or sent something else than its own loop would."""
        try:
            message = receive(worker.socket)
        except OSError:
            return self._end(worker, found)
        try:
            kind, value = pickle.loads(message)
        except Exception as error:  # written by the function: reading it may raise anything
            return self._end(worker, found, f"answered with what cannot be read: {reason_of(error)}")
        if kind == "broken":
            raise not_loaded(value)
        if kind == "ready":
            worker.ready = True
        elif worker.call is None:
            self._end(worker, found)
        else:
            found[worker.call] = Outcome(value) if kind == "value" else Outcome(None, value)
            worker.call = None
        return None

    def _end(self, worker: PoolWorker, found: dict[int, Outcome], why: str | None = None) -> None:
        """End the worker; its call, if it had one, has failed."""
        ending = self.end(worker)
        why = why or ending
        if not worker.ready:
            raise not_loaded(why)
        if worker.call is not None:
            found[worker.call] = Outcome(None, why)


def _ending(code: int, output: bytes) -> str:
    """`died with SIGSEGV`, `exited with code 3`: an exit code in words, and the last of what was printed."""
    hint = " (killed; perhaps the machine had no memory left)" if -code == signal.SIGKILL else ""
    how = f"exited with code {code}" if code >= 0 else f"died with {signal.Signals(-code).name}{hint}"
    said = output.decode(errors="replace").strip()[-_SHOWN_OUTPUT:]
    return how + (f"; it printed last: {said}" if said else "")


def pickled(function: Callable[..., Any], otherwise: str = "") -> bytes:
    """The function as a worker loads it. Errors: ConfigError, with `otherwise` as what else could be done."""
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling runs the user's classes: any error means the same
        raise ConfigError(
            f"{name_of(function)} cannot be sent to a worker process ({type(error).__name__}: {error}). Let it make "
            f"what it needs when it is called{otherwise}."
        ) from error


def not_loaded(why: str) -> RewardError:
    return RewardError(f"the function cannot be loaded in a worker process: it {why}.")


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0
