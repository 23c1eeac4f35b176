"""Calls of a user's function, sync or async, whose exceptions become failures of its rows; and its name in messages.

Imports little, since worker processes load it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

from hybridflow.rewards.outcome import Breakdown

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments."""

PATIENCE = 600.0
"""Seconds that a call may take where no `timeout` is given."""

GRACE = 5.0
"""Seconds (in a worker at most a limit's length) in which an event loop has to cancel its own late calls."""

_LONGEST_REASON = 1000


def reason_of(error: BaseException) -> str:
    """`raised ValueError: what it says (rewards.py:12)`, not longer than a paragraph."""
    text = str(error)
    text = text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}" + (f": {text}" if text else "") + place


def is_async(function: Any) -> bool:
    """Whether calling it returns an awaitable; a callable may declare it by an attribute `is_async`."""
    while isinstance(function, functools.partial):
        function = function.func
    said = getattr(function, "is_async", None)
    if isinstance(said, bool):
        return said
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def settled(value: Any) -> Any:
    """`value`, or the awaited result."""
    return _run(_wait(value)) if inspect.isawaitable(value) else value


class LateCallError(BaseException):
    """Raised inside a call that is late for `limit`; no `except Exception` of the function may stop it."""

    def __init__(self, limit: CallLimit) -> None:
        super().__init__()
        self.limit = limit


class CallLimit:
    """Interrupts calls in this process that take longer than `seconds`, by a signal, and again every second.

    Without effect off the main thread, the only one that Python interrupts, and while a C function runs.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self._due, self._over = seconds, math.inf, threading.Event()
        self._watching = threading.Thread(target=self._watch, name="reward-limit", daemon=True)
        self._main = threading.current_thread() is threading.main_thread()

    def run(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """The call's return value, or a Breakdown if it took over `seconds` (None: the limit's own)."""
        limit = self.seconds if seconds is None else seconds
        try:
            try:
                self._due = time.monotonic() + limit
                return call()
            finally:
                self._due = math.inf
        except LateCallError as error:
            if error.limit is not self:
                raise
            return Breakdown(f"took longer than {limit:g} s (timeout= sets another limit)", error)

    def __enter__(self) -> Self:
        if self._main:
            self._before = signal.signal(signal.SIGVTALRM, self._interrupt)
            self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._main:
            self._over.set()
            self._watching.join()
            signal.signal(signal.SIGVTALRM, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() >= self._due:
            raise LateCallError(self)
        if callable(self._before):  # it is meant for a limit around this one
            self._before(number, frame)

    def _watch(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            pause = min(1.0, self._due - time.monotonic())
            if pause <= 0:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGVTALRM)
                pause = 1.0


def attempt(function: Callable[..., Any], call: Call) -> Any:
    """The call's return value, or a Breakdown with its exception."""
    try:
        return settled(function(*call[0], **call[1]))
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises is the failure of its rows
        return Breakdown(reason_of(error), error)


def attempt_together(function: Callable[..., Any], calls: Sequence[Call], seconds: float | None = None) -> list[Any]:
    """Results of an async function's calls, run concurrently on one event loop; Breakdowns as in `attempt`.

    A call that takes longer than `seconds` is cancelled and fails.
    """

    async def one(call: Call) -> Any:
        limit = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(limit) as clock:
                return await function(*call[0], **call[1])
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # as in `attempt`
            late = isinstance(error, TimeoutError) and clock.expired()
            return Breakdown(f"took longer than {seconds:g} s" if late else reason_of(error), error)

    async def together() -> list[Any]:
        return list(await asyncio.gather(*map(one, calls)))

    return _run(together())


async def _wait(value: Awaitable[Any]) -> Any:
    return await value


def _run(coroutine: Any) -> Any:
    """Run it to its end, on a thread of its own where this one already runs an event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    done: dict[str, Any] = {}

    def run() -> None:
        try:
            done["value"] = asyncio.run(coroutine)
        except BaseException as error:  # handed to the thread that waits
            done["error"] = error

    thread = threading.Thread(target=run, name="reward-event-loop", daemon=True)
    thread.start()
    thread.join()
    if "error" in done:
        raise done["error"]
    return done["value"]


class Caller:
    """The functions of a reward, as a worker process runs them; exceptions are returned as Breakdowns."""

    def __init__(self, functions: Sequence[Callable[..., Any]], seconds: float) -> None:
        self.functions, self.seconds = tuple(functions), seconds

    def __call__(self, index: int, calls: Sequence[Call], together: bool) -> list[Any]:
        """One answer per call of function `index`; `together`: on one event loop, each with the limit of its own."""
        if together:
            return attempt_together(self.functions[index], calls, self.seconds)
        return [attempt(self.functions[index], call) for call in calls]


def layers(function: Any) -> Iterator[Any]:
    """The function, and the functions inside partials (`func`) and adapters (`inner`)."""
    while callable(function):
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "inner", None)


def innermost(function: Any) -> Any:
    """The user's own function inside partials and adapters."""
    return list(layers(function))[-1] if callable(function) else function


def name_of(function: Any) -> str:
    """As it is called in messages: the function's name, or the class of a callable object."""
    inner = innermost(function)
    return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]


def place_of(function: Any) -> str | None:
    """`rewards.py:12`, where it can be known."""
    inner = innermost(function)
    for candidate in (inner, type(inner).__call__):
        code = getattr(inspect.unwrap(candidate), "__code__", None) if callable(candidate) else None
        if code is not None:
            near = os.path.relpath(code.co_filename)
            return f"{code.co_filename if near.startswith('..') else near}:{code.co_firstlineno}"
    return None
