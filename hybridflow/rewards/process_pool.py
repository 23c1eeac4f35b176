"""ProcessPool: worker processes that run a function, each call with a limit of time and memory.

Libraries' pools were measured first: in pebble 5.2.3 one worker that dies can fail the calls of others (its workers
share one pipe and its locks), and multiprocessing's "spawn" and "forkserver" run the user's main module again.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import cloudpickle

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.calling import Call, name_of
from hybridflow.rewards.outcome import Outcome
from hybridflow.rewards.template_process import LARGEST_MESSAGE, LOADING, ending, receive, send
from hybridflow.settings import is_number

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from hybridflow.rewards import template_process
template_process.serve(int(sys.argv[1]))"""
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 for workers unless set by the user: threads that start at import prevent forking."""

_PATIENCE = 60.0  # seconds for the template process to answer, beyond the limits of the calls
_RESTARTS = 3
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

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("function", "workers", "seconds", "memory_mb")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

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
        self._template: _TemplateHandle | None = None
        self._finalizer: weakref.finalize | None = None

    def _check_process(self) -> None:
        """In a process that was forked from the owner, forget the owner's workers, and its lock, which may be held."""
        if self._process_id != os.getpid():
            if self._finalizer is not None:
                self._finalizer.detach()
            if self._template is not None:
                self._template.forget()
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
            waiting = [index for index in messages if index not in found]
            allowed = None if failures is None else max(0, failures - sum(not one.ok for one in found.values()))
            try:
                batch = [(messages[index], limits[index]) for index in waiting]
                for position, outcome in self._running().run(batch, allowed):
                    found[waiting[position]] = outcome
                break
            except OSError:  # calls run in order, so the ones that were running are the first without an outcome
                self._stop()
                lost = [index for index in waiting if index not in found][: self.workers]
                found |= {index: Outcome(None, _LOST) for index in lost}
                if not left:
                    raise RewardError(
                        f"the template process of the workers is gone. It was started anew {_RESTARTS} times before."
                    ) from None
        return [found[index] for index in range(len(calls))]

    def _running(self) -> _TemplateHandle:
        if self._template is not None and self._template.alive:
            return self._template
        self._stop()
        try:
            pickled = cloudpickle.dumps(self.function)
        except Exception as error:  # pickling runs the user's classes
            raise ConfigError(
                f"{name_of(self.function)} cannot be sent to a worker process ({type(error).__name__}: {error}). Let "
                f"it make what it needs when it is called."
            ) from error
        setup = {
            "function": pickled,
            "workers": self.workers,
            "memory_mb": self.memory_mb,
            "owner": os.getpid(),
            "preload": True,
        }
        template = _TemplateHandle(setup)
        if not template.forks:
            template.close()
            template = _TemplateHandle(setup | {"preload": False})
        self._template, self._finalizer = template, weakref.finalize(self, template.close)
        return template


class _TemplateHandle:
    """The owner's end of a template process, started here. Errors: RewardError when it cannot load the function.

    `forks` is False where loading started threads: then only a template that does not load the function can fork.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=dict.fromkeys(_ONE_THREAD, "1") | os.environ,
                start_new_session=True,  # an interrupt from the terminal is for this process only
            )
            theirs.close()
            self._socket.settimeout(LOADING)
            try:
                send(self._socket, pickle.dumps(setup))
                kind, why = pickle.loads(receive(self._socket))
            except OSError as error:
                self._process.kill()
                code = self._process.wait()
                output.seek(0)
                said = output.read().decode(errors="replace")
                late = isinstance(error, TimeoutError)
                kind, why = "broken", f"took longer than {LOADING:g} s" if late else ending(_status(code), said)
            except BaseException:
                self.close()
                raise
        self.forks = kind != "threads"
        if kind == "broken":
            self.close()
            raise _not_loaded(f"{why}. What it imports must be installed and on sys.path where it runs")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, batch: Sequence[tuple[bytes, float]], failures: int | None) -> Iterator[tuple[int, Outcome]]:
        """The outcomes of the (call, limit)s, each with its index, as they arrive. Errors: OSError: it has ended."""
        self._socket.settimeout(max((limit for _, limit in batch), default=0.0) + LOADING + _PATIENCE)
        send(self._socket, pickle.dumps((len(batch), [limit for _, limit in batch], failures)))
        for call, _ in batch:
            send(self._socket, call)
        for _ in batch:
            index, outcome = pickle.loads(receive(self._socket))
            if index == "broken":
                raise _not_loaded(outcome)
            yield index, outcome

    def close(self) -> None:
        """End the process and its workers (in a process that was forked from the owner: nothing)."""
        if os.getpid() != self._owner:
            return
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        self._socket.close()
        self._process.returncode = 0  # not a child of this process, which has nothing to wait for


def _not_loaded(why: str) -> RewardError:
    return RewardError(f"the reward function cannot be loaded in a worker process: it {why}.")


def _status(code: int) -> int:
    """A wait status, from Popen's exit code."""
    return -code if code < 0 else code << 8


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0
