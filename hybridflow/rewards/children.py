"""Children: processes that run a function and can be killed when it takes too long, too much, or everything down."""

from __future__ import annotations

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

import cloudpickle

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.answers import is_number
from hybridflow.rewards.brood import LOADING, NOT_LOADED, Brood, Child
from hybridflow.rewards.calling import Call
from hybridflow.rewards.child import LARGEST_FRAME, frame, read_answer
from hybridflow.rewards.nursery import NurseryError
from hybridflow.rewards.outcome import Outcome

_RESTARTS = 3
_GONE = "ended when something killed the process that starts children"


class Children:
    """Up to `count` child processes that run `function` (sync or async), each call with a limit of `seconds`.

    They start with the first calls, from a small process of their own (this one's threads and memory are not copied)
    that loads the function once, and end with this process, however it ends. Pickling takes the settings only: a copy
    starts children of its own, and so does a process that is forked from this one. `memory_mb` is what a child may
    allocate beyond what it occupies once the function is loaded. What a function prints is not shown; where a child
    dies, its last words are part of the reason. Answers are plain data: numbers (those of numpy and torch too), texts,
    None, RowFailure, and lists and dicts of them.

    Children keep crashes, memory and time that got out of hand away from this process. They are no protection from a
    function that means harm, which may do all that this user may do (programs that a model wrote: see `Code`).
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
        everything it started, and replaced; daemons that calls have left behind are killed once all are answered.
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
        _made_here.add(self)
        self._lock = threading.Lock()
        self._brood: Brood | None = None
        self._finalizer: weakref.finalize | None = None

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._brood = self._finalizer = None

    def _map(self, calls: Sequence[Call], limits: Sequence[float]) -> list[Outcome]:
        if self._brood is not None and not self._brood.nursery.alive:
            self._stop()
        brood = self._brood or self._start()
        round = _Round(brood, calls, limits, self.count)
        for left in reversed(range(_RESTARTS + 1)):
            try:
                outcomes = round.outcomes()
                break
            except NurseryError as error:
                if not left:
                    raise RewardError(f"{error} It was started anew {_RESTARTS} times before.") from None
                round.fail_running()
                self._stop()
                round.brood = self._start()
        with suppress(NurseryError):  # the next round finds that out
            round.brood.nursery.sweep()
        return outcomes

    def _start(self) -> Brood:
        self._brood = brood = Brood(self.function, self.memory_mb)
        self._finalizer = weakref.finalize(self, brood.close)
        brood.load()
        return brood

    def _after_fork(self) -> None:
        """In a process that was forked from this one: let go of children that are not its own."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._brood is not None:
            self._brood.forget()
        self._forget()


_made_here: weakref.WeakSet[Children] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    for children in list(_made_here):
        children._after_fork()


os.register_at_fork(after_in_child=_let_go_after_fork)


class _Round:
    """One `map`: hands the calls out, and waits for answers, deaths and limits."""

    def __init__(self, brood: Brood, calls: Sequence[Call], limits: Sequence[float], count: int) -> None:
        self.brood, self.calls, self.limits, self.count = brood, calls, limits, count
        self.waiting = deque(range(len(calls)))
        self.done: dict[int, Outcome] = {}

    def outcomes(self) -> list[Outcome]:
        self._watch(0.0)  # children that died since the last round
        while len(self.done) < len(self.calls):
            self._hand_out()
            due = [child.due for child in self.brood.children if not child.idle]
            self._watch(max(0.0, min(due) - time.monotonic()) if due else 0.0)
            for child in [c for c in self.brood.children if not c.idle and c.due <= time.monotonic()]:
                self._end(child, late=True)
        return [self.done[index] for index in range(len(self.calls))]

    def fail_running(self) -> None:
        """The nursery is gone, and the children with it: what they worked on has failed, the rest can go on."""
        for child in self.brood.children:
            if child.call is not None:
                self.done[child.call] = Outcome(None, _GONE)

    def _hand_out(self) -> None:
        children = self.brood.children
        for child in [child for child in children if child.idle]:
            if not self.waiting:
                return
            index = self.waiting.popleft()
            try:
                payload = frame(cloudpickle.dumps(tuple(self.calls[index])))
            except Exception as error:  # pickling runs the user's classes, as above
                self.done[index] = Outcome(None, f"was given what cannot be sent to it: {error}")
                continue
            if len(payload) > LARGEST_FRAME:
                self.done[index] = Outcome(None, f"was given {len(payload) >> 20} MiB, more than a call may have")
                continue
            child.call, child.due = index, time.monotonic() + self.limits[index]
            self.brood.send(child, payload)
        starting = sum(not child.ready for child in children)
        for _ in range(min(self.count - len(children), len(self.waiting) - starting)):
            self.brood.spawn()

    def _watch(self, seconds: float) -> None:
        over: dict[Child, None] = {}
        for key, events in self.brood.selector.select(seconds):
            child: Child = key.data
            if events & selectors.EVENT_WRITE:
                self.brood.flush(child)
            if events & selectors.EVENT_READ and not self._read(child):
                over[child] = None
        for child in over:
            self._end(child, late=False)

    def _read(self, child: Child) -> bool:
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

    def _take(self, child: Child, payload: bytes) -> None:
        try:
            kind, *rest = read_answer(payload)
        except Exception as error:  # not written by the child's own loop: reading it may raise anything
            kind, rest = "raised", [f"answered with what cannot be read here: {type(error).__name__}: {error}"]
        if kind == "broken":
            raise RewardError(f"{NOT_LOADED} {rest[0]}.")
        if kind == "ready":
            child.ready = True
            return
        if child.call is None:  # written to the socket by something else than the child's own loop
            raise ConnectionError("an answer without a call")
        if kind == "memory" and self.brood.memory_mb is not None:
            rest = [f"needed more memory than its {self.brood.memory_mb:g} MB ({rest[0]})"]
        self.done[child.call] = Outcome(rest[0]) if kind == "value" else Outcome(None, rest[0])
        child.call = None

    def _end(self, child: Child, *, late: bool) -> None:
        """The child is late or dead: its call, if it had one, has failed."""
        try:
            ending = self.brood.bury(child)
        except NurseryError:
            if child.call is not None:
                self.done[child.call] = Outcome(None, _GONE)
            raise
        if not child.ready:
            why = f"took longer than {LOADING:g} s" if late else ending
            raise RewardError(f"{NOT_LOADED} {why}.")
        if child.call is not None:
            limit = f"took longer than {self.limits[child.call]:g} s"
            self.done[child.call] = Outcome(None, limit if late else ending)


def _has_ended(child: Child) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(child.ended, selectors.EVENT_READ)
        return bool(selector.select(0))


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0
