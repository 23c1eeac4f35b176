"""Calls of a user's function, sync or async, and their outcomes: exceptions become failures of rows.

Imports little, since worker processes load it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

from hybridflow.processes.fork_server import reason_of

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments."""

PATIENCE = 600.0
"""Seconds that a call may take where no `timeout` is given."""

GRACE = 5.0
"""Seconds (in a worker at most a limit's length) in which an event loop has to cancel its own late calls."""


@dataclass(frozen=True)
class RowFailure:
    """Answered by a reward function in place of a number: this row could not be judged, for `reason`.

    It is no score: a wrong answer scores 0, a row whose tests cannot be read was not judged. The setting `on_failure`
    says what becomes of the row. `error` is the exception behind it, where it was met in this process.
    """

    reason: str
    error: BaseException | None = field(default=None, repr=False, compare=False)

    def __reduce__(self):  # an exception of the user's need not survive pickling
        return type(self), (self.reason,)


class Breakdown(RowFailure):
    """A RowFailure that the function did not answer itself: it raised, was late, or died."""


@dataclass(frozen=True)
class Outcome:
    """Of one call in a worker process: its `value`, or the `failure` that it ended with.

    A failure is a reason in words that follow the name of the function: "took longer than 5 s", "died with SIGSEGV",
    "raised ValueError: ...".
    """

    value: Any = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class RowAnswer:
    """What one function says about one row: a value (None: it does not apply), or the reason for a failure.

    `value` is a list of numbers, one per response token, at level "token". `parts` are further named numbers.
    """

    value: float | list[float] | None = None
    failure: RowFailure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a type of the user's; or an integer of more than 4,300 digits
        text = f"what has no repr: {error}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def listed(value: Any) -> Any:
    """Python values of torch and numpy arrays and scalars, and of ragged rows."""
    return value.tolist() if hasattr(value, "tolist") else value


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
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
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
    """Interrupts late calls in this process, by a signal, and again every second.

    Without effect off the main thread, the only one that Python interrupts, and while a C function runs.
    """

    def __init__(self) -> None:
        self._due, self._over = math.inf, threading.Event()
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
                value = function(*call[0], **call[1])
                return await value if inspect.isawaitable(value) else value
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
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(coroutine))
        except BaseException as error:  # handed to the thread that waits
            done.set_exception(error)

    threading.Thread(target=run, name="reward-event-loop", daemon=True).start()
    return done.result()


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
