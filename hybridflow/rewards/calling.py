"""Calling a user's function, sync or async, so that what it raises becomes the failure of its rows."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hybridflow.rewards.outcome import Breakdown

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and named arguments."""

_LONGEST_REASON = 1000


def reason_of(error: BaseException) -> str:
    """`raised ValueError: what it says (rewards.py:12)`, not longer than a paragraph."""
    text = str(error)
    text = text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}" + (f": {text}" if text else "") + place


def unheard(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`: what the function says to them is heard by nobody."""


def is_async(function: Any) -> bool:
    """Whether calling it gives something to await; a callable may say so itself by an attribute `is_async`."""
    while isinstance(function, functools.partial):
        function = function.func
    said = getattr(function, "is_async", None)
    if isinstance(said, bool):
        return said
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def settled(value: Any) -> Any:
    """`value`, or what awaiting it gives."""
    return _run(_wait(value)) if inspect.isawaitable(value) else value


def attempt(function: Callable[..., Any], call: Call) -> Any:
    """What the call returns, or a Breakdown with what it raised."""
    try:
        return settled(function(*call[0], **call[1]))
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises is the failure of its rows
        return Breakdown(reason_of(error), error)


def attempt_together(function: Callable[..., Any], calls: Sequence[Call], seconds: float | None = None) -> list[Any]:
    """What the calls of an async function return, all at once on one event loop; Breakdowns as in `attempt`.

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

    thread = threading.Thread(target=run, name="reward-event-loop")
    thread.start()
    thread.join()
    if "error" in done:
        raise done["error"]
    return done["value"]


class Caller:
    """The functions of a reward, as a child process runs them; answers never raise but for what must end the call."""

    def __init__(self, functions: Sequence[Callable[..., Any]], seconds: float) -> None:
        self.functions, self.seconds = tuple(functions), seconds

    def __call__(self, index: int, calls: Sequence[Call], together: bool) -> list[Any]:
        """One answer per call of function `index`; `together`: on one event loop, each with the limit of its own."""
        if together:
            return attempt_together(self.functions[index], calls, self.seconds)
        return [attempt(self.functions[index], call) for call in calls]
