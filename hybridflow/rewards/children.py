"""Children: processes that run a function and can be killed when it takes too long, too much, or everything down."""

from __future__ import annotations

import math
import os
import pickle
import selectors
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.calling import Call
from hybridflow.rewards.child import LARGEST_FRAME, Frames, frame
from hybridflow.rewards.nursery import Nursery
from hybridflow.rewards.outcome import Outcome

LOADING = 120.0
"""Seconds that a child may take to import what the function needs."""

_NOT_LOADED = "the reward function cannot be loaded in a child process: it"
_SHOWN_OUTPUT = 300


class Children:
    """Up to `count` child processes that run `function` (sync or async), each call with a limit of `seconds`.

    They start with the first calls, from a small process of their own (this one's threads and memory are not copied)
    that loads the function once, and end with this process, however it ends. Pickling takes the settings only: a copy
    starts children of its own. `memory_mb` is what a child may allocate beyond what it occupies once the function is
    loaded. What a function prints is not shown; where a child dies, its last words are part of the reason.
    Errors: ConfigError for settings out of range; RewardError when the function cannot be loaded in a child.
    """

    def __init__(
        self, function: Callable[..., Any], count: int, *, seconds: float, memory_mb: float | None = None
    ) -> None:
        if type(count) is not int or count < 1:
            raise ConfigError(f"Children(count={count!r}): give a whole number of at least 1.")
        for name, value in (("seconds", seconds), ("memory_mb", memory_mb)):
            if value is not None and not _positive(value):
                raise ConfigError(f"Children({name}={value!r}): give a number above 0.")
        if seconds is None:
            raise ConfigError("Children(seconds=None): a call in a child process needs a limit.")
        self.function, self.count, self.seconds, self.memory_mb = function, count, seconds, memory_mb
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        names = ("function", "count", "seconds", "memory_mb")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def map(self, calls: Sequence[Call], *, seconds: float | Sequence[float] | None = None) -> list[Outcome]:
        """Run `function(*args, **kwargs)` for every (args, kwargs) and return one Outcome per call, in order.

        The limit (`seconds` here replaces the one of the constructor, for all calls or for each) counts from the
        moment a child that has loaded the function gets the call. A child that is late or dead is killed with
        everything it started, and replaced.
        """
        given = self.seconds if seconds is None else seconds
        limits = [given] * len(calls) if isinstance(given, int | float) else list(given)
        if len(limits) != len(calls) or not all(map(_positive, limits)):
            raise ConfigError(f"Children.map(seconds={seconds!r}): give one number above 0, or one per call.")
        if not calls:
            return []
        with self._lock:
            try:
                return self._map(calls, limits)
            except BaseException:
                self._stop()  # a child that is in the middle of a call would answer to the next one
                raise

    def close(self) -> None:
        """Kill the children and everything that they started; the next `map` starts new ones."""
        with self._lock:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._finalizer: weakref.finalize | None = None

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._running = self._finalizer = None

    def _map(self, calls: Sequence[Call], limits: Sequence[float]) -> list[Outcome]:
        if self._running is not None and self._running.nursery.owner != os.getpid():
            self._stop()
        if self._running is None:
            setup = {"function": cloudpickle.dumps(self.function), "memory_mb": self.memory_mb}
            self._running = _Running(Nursery(), frame(pickle.dumps(setup)), self.memory_mb)
            self._finalizer = weakref.finalize(self, self._running.close)
            self._running.load()
        return _Round(self._running, calls, limits, self.count).outcomes()


@dataclass(eq=False)
class _Child:
    """One child process as we see it: `call` is the index of the call that it works on."""

    socket: socket.socket
    pid: int
    ended: int
    outbox: memoryview
    due: float
    ready: bool = False
    call: int | None = None
    frames: Frames = field(default_factory=Frames)

    @property
    def idle(self) -> bool:
        return self.ready and self.call is None


class _Running:
    """The nursery and the children of one Children, while they live."""

    def __init__(self, nursery: Nursery, setup: bytes, memory_mb: float | None) -> None:
        self.nursery, self.setup, self.memory_mb = nursery, setup, memory_mb
        self.children: list[_Child] = []
        self.forks = False
        self.selector = selectors.DefaultSelector()

    def load(self) -> None:
        """Have the function loaded for all children. Errors: RewardError when that fails."""
        connection, pid = self.nursery.load()
        with connection:
            answer = _first_answer(connection, self.setup)
            if answer is None:
                status, output = self.nursery.reap(pid)
                raise RewardError(f"{_NOT_LOADED} {_ending(status, output)}.")
        if answer[0] == "broken":
            raise RewardError(
                f"{_NOT_LOADED} {answer[1]}. What it imports must be installed and on sys.path where it runs."
            )
        self.forks = answer[1]
        if not self.forks:
            _ = self.nursery.reap(pid)

    def spawn(self) -> None:
        connection, pid = self.nursery.fork() if self.forks else self.nursery.spawn()
        connection.setblocking(False)
        until = time.monotonic() + LOADING
        outbox = memoryview(b"" if self.forks else self.setup)
        child = _Child(connection, pid, os.pidfd_open(pid), outbox, until)
        self.children.append(child)
        self.selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, child)
        self.selector.register(child.ended, selectors.EVENT_READ, child)

    def send(self, child: _Child, payload: bytes) -> None:
        child.outbox = memoryview(payload)
        self.selector.modify(child.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, child)

    def flush(self, child: _Child) -> None:
        """Send what the socket takes."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            child.outbox = child.outbox[child.socket.send(child.outbox) :]
        if not child.outbox:
            self.selector.modify(child.socket, selectors.EVENT_READ, child)

    def bury(self, child: _Child) -> str:
        """Kill the child and forget it: how it ended, in words."""
        self.children.remove(child)
        self._let_go(child)
        return _ending(*self.nursery.reap(child.pid))

    def close(self) -> None:
        for child in self.children:
            self._let_go(child)
        self.children.clear()
        self.selector.close()
        if self.nursery.owner == os.getpid():
            self.nursery.close()
        else:
            self.nursery.forget()

    def _let_go(self, child: _Child) -> None:
        for end in (child.socket, child.ended):
            self.selector.unregister(end)
        child.socket.close()
        os.close(child.ended)


class _Round:
    """One `map`: hands the calls out, and waits for answers, deaths and limits."""

    def __init__(self, running: _Running, calls: Sequence[Call], limits: Sequence[float], count: int) -> None:
        self.running, self.calls, self.limits, self.count = running, calls, limits, count
        self.waiting = deque(range(len(calls)))
        self.done: dict[int, Outcome] = {}

    def outcomes(self) -> list[Outcome]:
        self._watch(0.0)  # children that died since the last round
        while len(self.done) < len(self.calls):
            self._hand_out()
            due = [child.due for child in self.running.children if not child.idle]
            self._watch(max(0.0, min(due) - time.monotonic()) if due else 0.0)
            for child in [c for c in self.running.children if not c.idle and c.due <= time.monotonic()]:
                self._end(child, late=True)
        return [self.done[index] for index in range(len(self.calls))]

    def _hand_out(self) -> None:
        children = self.running.children
        for child in [child for child in children if child.idle]:
            if not self.waiting:
                return
            index = self.waiting.popleft()
            payload = frame(cloudpickle.dumps(tuple(self.calls[index])))
            if len(payload) > LARGEST_FRAME:
                self.done[index] = Outcome(None, f"was given {len(payload) >> 20} MiB, more than a call may have")
                continue
            child.call, child.due = index, time.monotonic() + self.limits[index]
            self.running.send(child, payload)
        starting = sum(not child.ready for child in children)
        for _ in range(min(self.count - len(children), len(self.waiting) - starting)):
            self.running.spawn()

    def _watch(self, seconds: float) -> None:
        over: dict[_Child, None] = {}
        for key, events in self.running.selector.select(seconds):
            child: _Child = key.data
            if events & selectors.EVENT_WRITE:
                self.running.flush(child)
            if events & selectors.EVENT_READ and not self._read(child):
                over[child] = None
        for child in over:
            self._end(child, late=False)

    def _read(self, child: _Child) -> bool:
        """Take what has arrived. False when the child ended, or answers in what is no frame."""
        ended = _has_ended(child)  # asked first: what it wrote before its end is then there to be read
        try:
            while piece := child.socket.recv(1 << 20):
                for payload in child.frames.feed(piece):
                    self._take(child, payload)
        except BlockingIOError:
            return not ended
        except ConnectionError:
            return False
        return False

    def _take(self, child: _Child, payload: bytes) -> None:
        try:
            kind, *rest = pickle.loads(payload)
        except Exception as error:  # the answer is of a type of the user's, whose unpickling may raise anything
            kind, rest = "raised", [f"answered with what cannot be read here: {type(error).__name__}: {error}"]
        if kind == "broken":
            raise RewardError(f"{_NOT_LOADED} {rest[0]}.")
        if kind == "ready":
            child.ready = True
            return
        if child.call is None:  # written to the socket by something else than the child's own loop
            raise ConnectionError("an answer without a call")
        if kind == "memory" and self.running.memory_mb is not None:
            rest = [f"needed more memory than its {self.running.memory_mb:g} MB ({rest[0]})"]
        self.done[child.call] = Outcome(rest[0]) if kind == "value" else Outcome(None, rest[0])
        child.call = None

    def _end(self, child: _Child, *, late: bool) -> None:
        """The child is late or dead: its call, if it had one, has failed."""
        ending = self.running.bury(child)
        if not child.ready:
            why = f"took longer than {LOADING:g} s" if late else ending
            raise RewardError(f"{_NOT_LOADED} {why}.")
        if child.call is not None:
            limit = f"took longer than {self.limits[child.call]:g} s"
            self.done[child.call] = Outcome(None, limit if late else ending)


def _has_ended(child: _Child) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(child.ended, selectors.EVENT_READ)
        return bool(selector.select(0))


def _first_answer(connection: socket.socket, setup: bytes) -> tuple | None:
    """What the process says about loading the function; None when it is late or ended without a word."""
    connection.settimeout(LOADING)
    frames = Frames()
    try:
        connection.sendall(setup)
        while piece := connection.recv(1 << 16):
            for payload in frames.feed(piece):
                return pickle.loads(payload)
    except OSError:
        return None
    return None


def _ending(status: int, output: str) -> str:
    """`died with SIGSEGV`, `exited with code 3`: a wait status in words, and the last of what was printed."""
    code = os.waitstatus_to_exitcode(status)
    hint = " (killed; perhaps the machine had no memory left)" if -code == signal.SIGKILL else ""
    how = f"exited with code {code}" if code >= 0 else f"died with {signal.Signals(-code).name}{hint}"
    said = output.strip()[-_SHOWN_OUTPUT:]
    return how + (f"; it printed last: {said}" if said else "")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value > 0
