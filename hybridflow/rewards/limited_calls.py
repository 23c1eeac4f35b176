"""Calls of functions with a limit of time each: in worker processes (ProcessPool), or in this one (CallLimit).

Libraries' pools were measured first: in pebble 5.2.3 one worker that dies can fail the calls of others (its workers
share one pipe and its locks), and multiprocessing's "spawn" and "forkserver" run the user's main module again.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, Self

import cloudpickle

from hybridflow.errors import ConfigError
from hybridflow.processes.channel import LARGEST_MESSAGE, Channel
from hybridflow.processes.fork_server import reason_of
from hybridflow.processes.supervisor import Supervisor, WorkerProcess
from hybridflow.rewards.function_adapters import Breakdown, RowFailure, name_of, settled

NOT_BEGUN = Breakdown("was not begun: too many others failed")
UNSENT = "answered with what cannot be sent back"


class ProcessPool:
    """Up to `workers` processes that run `function` (sync or async), each call with a limit of time.

    Workers start with the first calls, forked from a small template process that loads the function once (this
    process's threads and memory are not copied), and end with this process, however it ends. Pickling takes the
    settings only: a copy starts workers of its own, and so does a process that is forked from this one. What a function
    prints is not shown; where a worker dies, its last words are part of the reason. Answers are plain data: numbers
    (those of numpy and torch too), texts, None, RowFailure, and lists and dicts of them.

    The pool keeps crashes and runaway time away from this process. It does not protect against a malicious function,
    which has all rights of this user (for programs written by a model, see `Code`).
    Errors: RewardError when the function cannot be loaded in a worker.
    """

    def __init__(self, function: Callable[..., Any], workers: int) -> None:
        self.function, self.workers = function, workers
        self._reset()

    def __reduce__(self) -> tuple[type[ProcessPool], tuple[Callable[..., Any], int]]:
        return type(self), (self.function, self.workers)

    def map(
        self, calls: Sequence[tuple[Any, ...]], seconds: Sequence[float], *, failures: int | None = None
    ) -> list[Any]:
        """`function(*call)` for every call, in order, or a Breakdown: "took longer than 5 s", "died with SIGSEGV" ...

        The limit in `seconds` of each counts from the moment a worker that has loaded the function gets the call. A
        worker that is late or dead is killed with everything it started, and replaced; daemons that calls left behind
        are killed once all calls are answered. Once `failures` calls have failed, those that no worker has begun are
        NOT_BEGUN.
        """
        if not calls:
            return []
        self._check_process()
        with self._lock:
            try:
                return self._map(calls, seconds, failures)
            except BaseException:
                self._stop()  # a worker in the middle of a call would answer to the next one
                raise

    def close(self) -> None:
        """Kill the workers and everything that they started; the next `map` starts new ones."""
        self._check_process()
        with self._lock:
            self._stop()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._template: Supervisor | None = None

    def _check_process(self) -> None:
        """In a process that was forked from the owner, forget the owner's workers, and its lock, which may be held."""
        if self._process_id != os.getpid():
            self._stop()
            self._reset()

    def _stop(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None

    def _map(self, calls: Sequence[tuple[Any, ...]], limits: Sequence[float], failures: int | None) -> list[Any]:
        found: dict[int, Any] = {}
        messages: dict[int, bytes] = {}
        for index, call in enumerate(calls):
            try:
                messages[index] = cloudpickle.dumps(call)
            except Exception as error:  # pickling runs the user's classes
                found[index] = Breakdown(f"was given what cannot be sent to it: {error}")
                continue
            if (size := len(messages[index])) > LARGEST_MESSAGE:
                found[index] = Breakdown(f"was given {size >> 20} MiB, more than a call may have")
                del messages[index]
        if (template := self._template) is None:
            self._template = template = Supervisor(
                pickled(partial(answer_calls, self.function), name_of(self.function))
            )
            _ = weakref.finalize(self, template.close)
        waiting, running = deque(messages), dict[WorkerProcess, int]()
        template.lost = 0
        _ = template.poll(0.0)  # workers that died since the last batch
        while waiting or running:
            if failures is not None and sum(isinstance(one, Breakdown) for one in found.values()) >= failures:
                found |= dict.fromkeys(waiting, NOT_BEGUN)
                waiting.clear()
            for worker in [one for one in template.workers if one.ready and one not in running][: len(waiting)]:
                running[worker] = index = waiting.popleft()
                worker.allow(limits[index])
                worker.send(messages[index])
            starting = sum(not worker.ready for worker in template.workers)
            for _ in range(min(self.workers - len(template.workers), len(waiting) - starting)):
                _ = template.fork()
            due = min((worker.due for worker in template.workers if not worker.ready or worker in running), default=0.0)
            for worker, said in template.poll(max(0.0, due - time.monotonic())):
                index, worker.due, sound = running.pop(worker, None), math.inf, True
                try:
                    answer = Breakdown(said) if isinstance(said, str) else pickle.loads(said)
                except Exception as error:  # written by the function: reading it may raise anything
                    answer, sound = Breakdown(f"answered with what cannot be read: {reason_of(error)}"), False
                if not (sound and index is not None) and worker in template.workers:
                    _ = template.end(worker)  # it was not the loop of a worker that said this
                if index is not None:
                    found[index] = answer
        template.sweep()
        return [found[index] for index in range(len(calls))]


def answer_calls(function: Callable[..., Any], connection: socket.socket) -> None:
    """What a worker does: answer calls, until its owner closes the connection."""
    channel = Channel(connection.fileno(), connection.fileno(), LARGEST_MESSAGE)
    while (call := channel.read()) is not None:
        try:
            answer = settled(function(*pickle.loads(call)))
        except BaseException as error:  # the user's code, whose SystemExit must not end the worker either
            answer = Breakdown(reason_of(error))
        try:
            message = pickle.dumps(plain(answer))
            if len(message) > LARGEST_MESSAGE:
                raise ValueError(f"{len(message) / 2**20:.0f} MiB is more than an answer may have")
        except Exception as error:  # the answer is of a type of the user's, which may raise anything
            message = pickle.dumps(Breakdown(f"{UNSENT}: {reason_of(error)}"))
        channel.write(message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function closed it
                stream.flush()


def plain(value: Any) -> Any:
    """The answer as plain data: arrays as lists, numbers of any type as Python's.

    Errors: TypeError for anything but a number, a text, None, RowFailure or a list, tuple, set or dict of them.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, RowFailure):
        return (Breakdown if isinstance(value, Breakdown) else RowFailure)(str(value.reason))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(map(plain, value))
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(
        f"a {type(value).__name__} is neither a number, a text, None, RowFailure nor a list or dict of them"
    )


def pickled(function: Any, name: str, otherwise: str = "") -> bytes:
    """The function as a worker loads it. Errors: ConfigError, with `otherwise` as what else could be done."""
    try:
        return cloudpickle.dumps(function)
    except Exception as error:  # pickling runs the user's classes: any error means the same
        raise ConfigError(
            f"{name} cannot be sent to a worker process ({type(error).__name__}: {error}). Let it make what it needs "
            f"when it is called{otherwise}."
        ) from error


class LateCallError(BaseException):
    """Raised inside a call that is late for `limit`; no `except Exception` of the function may stop it."""

    def __init__(self, limit: object) -> None:
        super().__init__()
        self.limit = limit


class CallLimit:
    """Interrupts late calls in this process, by a signal, and again every second; tells interrupts by the user apart.

    Without effect off the main thread, the only one that Python interrupts, and while a C function runs.
    """

    def __init__(self) -> None:
        self._due, self._over, self._stopped = math.inf, threading.Event(), False
        self._watching = threading.Thread(target=self._watch, name="reward-limit", daemon=True)
        self._main = threading.current_thread() is threading.main_thread()

    def run(self, call: Callable[[], Any], seconds: float) -> Any:
        """The call's return value, or a Breakdown if it took over `seconds`."""
        try:
            try:
                self._due = time.monotonic() + seconds
                return call()
            finally:
                self._due = math.inf
        except LateCallError as error:
            if error.limit is not self:
                raise
            return Breakdown(f"took longer than {seconds:g} s (timeout= sets another limit)", error)
        except KeyboardInterrupt as error:
            if self._stopped:
                raise
            return Breakdown(reason_of(error), error)  # the function's own

    def __enter__(self) -> Self:
        if self._main:
            ours = (signal.SIGVTALRM, *([signal.SIGINT] if callable(signal.getsignal(signal.SIGINT)) else []))
            self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in ours}
            self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            self._over.set()
            self._watching.join()
            for number, before in self._before.items():
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._stopped |= number == signal.SIGINT
        if number == signal.SIGVTALRM and time.monotonic() >= self._due:
            raise LateCallError(self)
        if callable(before := self._before[number]):  # of the user, or of a limit around this one
            before(number, frame)

    def _watch(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            pause = min(1.0, self._due - time.monotonic())
            if pause <= 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
                pause = 1.0
