"""Adapters: a user's reward function, bound once to `(rows) -> scores`: from TRL's signature, one row's, and verl's.

Imports little: the worker processes that run the functions load it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.processes.fork_server import reason_of
from hybridflow.settings import require

Rows = Mapping[str, Sequence[Any]]
"""Some rows: plain values by column. "prompt" and "response" are the texts."""

TEXTS = ("prompts", "completions", "completion_ids")  # as TRL names them
_LOGS = ("log_extra", "log_metric")
TRAINER = "trainer_state"


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


class BoundFunction:
    """A user's function `inner`, whose `scores` are those of the rows that it is given, in any process.

    `call`: the function that is called, `inner` unless that takes other arguments. `columns`: those that it
    takes besides the texts, "name?" where they may be missing. `everything`: all columns that came with the prompts.
    `ids`: whether it gets token ids ("completion_ids"), `needs_ids`: not without. `logs`: TRL's logging functions that
    it takes. `whole`: it gets all rows of a call at once. `components`: entries of an answered dict that become
    columns; None: no dicts.
    """

    per_row = whole = ids = needs_ids = limits_itself = False
    logs: tuple[str, ...] = ()
    components: Sequence[str] | None = None

    def __init__(self, inner: Callable[..., Any], columns: tuple[str, ...], everything: bool) -> None:
        self.inner, self.call, self.columns, self.everything = inner, inner, columns, everything
        self.is_async = is_async(inner)

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Its columns; None: every column."""
        return None if self.everything else self.columns

    def scores(self, rows: Rows, seconds: float) -> Any:
        """A list of one answer per row, checked by the caller; a Breakdown for an exception.

        Rows that run together on one event loop have `seconds` each.
        """
        raise NotImplementedError


def scores_of(functions: Sequence[BoundFunction], seconds: float, index: int, rows: Rows) -> Any:
    """What a worker process of a reward does."""
    return functions[index].scores(rows, seconds)


class TRLFunction(BoundFunction):
    """`f(prompts, completions, **columns) -> list`, called by keyword with all rows.

    It gets prompts, completions and completion_ids where it names them (all of them with `**kwargs`). Where a prompt is
    a list of chat messages, the completion is one too: `[{"role": "assistant", "content": text}]`. Values given to
    TRL's `log_extra` and `log_metric` are dropped; there is no `trainer_state`. Errors: ConfigError when it cannot be
    called with completions, or with the columns that its `reads` lists.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        name = name_of(function)
        signature, named, everything = parameters_of(function)
        reads = getattr(function, "reads", None)
        if isinstance(reads, str) or not all(isinstance(entry, str) and entry.rstrip("?") for entry in reads or ()):
            raise ConfigError(f"reward function {name}: reads={reads!r} must be a tuple of column names.")
        if strange := [entry for entry in reads or () if not everything and entry.removesuffix("?") not in named]:
            raise ConfigError(
                f"reward function {name}{signature} reads the column {strange[0]!r} and does not take it."
            )
        nameless = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in signature.parameters.values())
        takes = everything or "completions" in named or "completion_ids" in named
        if nameless or not takes or (reads is None and {"prompt", "response"} & named.keys()):
            raise ConfigError(
                f"reward function {name}{signature} must take (prompts, completions, **columns), as in TRL: it is "
                f"called by keyword with all rows. Wrap a function (prompt, response, **columns) of one row in "
                f"rewards.per_row, and verl's compute_score in rewards.from_compute_score."
            )
        if reads is None and TRAINER in named and named[TRAINER].default is inspect.Parameter.empty:
            raise ConfigError(
                f"reward function {name} takes {TRAINER!r}: there is no trainer that could have a state. Give the "
                f"parameter a default, and bring what it needs as a column of the prompts."
            )
        own = [parameter for parameter in named.values() if parameter.name not in (*TEXTS, *_LOGS, TRAINER)]
        super().__init__(function, _entries(own) if reads is None else tuple(reads), everything and reads is None)
        takes_all = everything and (reads is None or not any(text in named for text in TEXTS))
        self._texts = [text for text in TEXTS if text in named or takes_all]
        self.ids = "completion_ids" in self._texts
        self.needs_ids = "completion_ids" in named and named["completion_ids"].default is inspect.Parameter.empty
        self.logs = tuple(log for log in _LOGS if log in named)
        self.components = getattr(function, "components", None)
        self.limits_itself = getattr(function, "limits_itself", False)

    def scores(self, rows: Rows, seconds: float) -> Any:
        given = {name: values for name, values in rows.items() if name not in ("prompt", "response")}
        if "prompts" in self._texts:
            given["prompts"] = rows["prompt"]
        if "completions" in self._texts:
            given["completions"] = [
                [{"role": "assistant", "content": response}] if prompt and _is_chat(prompt) else response
                for prompt, response in zip(rows["prompt"], rows["response"], strict=True)
            ]
        return _attempt(partial(self.inner, **given, **dict.fromkeys(self.logs, lambda name, value: None)))


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)


class RowFunction(BoundFunction):
    """Called with (prompt, response, **columns), row by row."""

    per_row = True

    def __call__(self, prompt: Any, response: str, **columns: Any) -> Any:
        return self.call(prompt, response, **columns)

    def scores(self, rows: Rows, seconds: float) -> Any:
        calls = []
        for values in zip(*rows.values(), strict=True):
            columns = dict(zip(rows, values))
            calls.append(partial(self.call, columns.pop("prompt"), columns.pop("response"), **columns))
        together = self.is_async and len(calls) > 1
        return run_async(_attempt_together(calls, seconds)) if together else list(map(_attempt, calls))


def per_row(function: Callable[..., Any]) -> RowFunction:
    """A reward function from `f(prompt, response, **columns) -> number`, for one row.

    `response` is a text, also where the prompt is a list of chat messages. The parameters behind the first two name
    columns, whose value for the row they get; one with a default may be missing. Each row has a time limit of its own,
    and a row that fails costs no other row. The rows of an async function run at the same time.
    Errors: ConfigError when the function does not take two texts.
    """
    signature, named, everything = parameters_of(function)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"per_row({name_of(function)}{signature}): it must take (prompt, response, **columns).")
    return RowFunction(function, _entries([p for p in named.values() if p not in positional[:2]]), everything)


def whole_batch(function: Callable[..., Any]) -> TRLFunction:
    """A reward function `f(prompts, completions, **columns) -> list` that gets all rows of a call of the worker at
    once, for rewards that compare rows or groups (the column `group_id`): one rank, in one process, calls it once.

    With `by=` it gets all rows of its name. A call that fails fails for all of its rows. Errors: ConfigError for a
    function that cannot be called so, such as one of `per_row`.
    """
    if isinstance(function, BoundFunction):
        raise ConfigError(f"whole_batch({name_of(function)}): give the function itself, which takes all rows.")
    bound = TRLFunction(function)
    bound.whole = True
    return bound


def from_compute_score(
    function: Callable[..., Any],
    *,
    data_source: str | None = "data_source",
    ground_truth: str = "ground_truth",
    extra_info: str | None = "extra_info",
    components: Sequence[str] = (),
) -> RowFunction:
    """A reward function from verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

    The function, sync or async, is called by keyword for every row with the response's text, and returns a number or a
    dict with the entry "score". `data_source`, `ground_truth` and `extra_info` name the columns of the batch; a name
    with a dot is an entry of a column of dicts ("reward_model.ground_truth" in verl's own Parquet files), None leaves
    the argument out (data_source: passes None). Without the column `extra_info` a function that cannot do without the
    argument gets {}. A row whose dict has no such entry is a RowFailure. `components` names the entries of the answered
    dict that become columns `rewards/<entry>`, NaN where a row's dict has none. Errors: ConfigError when the function
    does not take these arguments.
    """
    if isinstance(components, str) or not all(isinstance(name, str) and name for name in components):
        raise ConfigError(
            f"from_compute_score(components={components!r}): give a tuple of names, as in components=('acc',)."
        )
    signature, taken, everything = parameters_of(function)
    if missing := [n for n in ("data_source", "solution_str", "ground_truth") if n not in taken and not everything]:
        raise ConfigError(
            f"{name_of(function)}{signature} has no parameter {missing[0]!r}: from_compute_score takes functions "
            f"(data_source, solution_str, ground_truth, extra_info=None)."
        )
    needs_info = "extra_info" in taken and taken["extra_info"].default is inspect.Parameter.empty
    names = {"data_source": data_source, "ground_truth": ground_truth}
    columns = dict.fromkeys(name.partition(".")[0] for name in names.values() if name is not None)
    if extra_info is not None and (everything or "extra_info" in taken):
        names["extra_info"] = extra_info
        if (column := extra_info.partition(".")[0]) not in columns:
            columns[f"{column}?"] = None
    bound = RowFunction(function, tuple(columns), False)
    bound.call, bound.components = partial(_compute_score, function, names, needs_info), tuple(components)
    return bound


def _compute_score(
    function: Callable[..., Any], names: dict[str, str | None], needs_info: bool, _: Any, response: str, **columns: Any
) -> Any:
    """`names`: the column that an argument is, or the entry in one ("reward_model.ground_truth"), without which the row
    fails; the column of `extra_info` may be missing."""
    given: dict[str, Any] = {"extra_info": {}} if needs_info else {}
    for argument, name in names.items():
        if name is None:
            given[argument] = None
            continue
        column, *path = name.split(".")
        if column not in columns:
            continue
        value = columns[column]
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                has = (
                    f"its entries are {sorted(map(str, value))}"
                    if isinstance(value, Mapping)
                    else f"it is {value!r:.60}"
                )
                return RowFailure(f"column {column!r} has no entry {'.'.join(path)!r}; {has}")
            value = value[key]
        given[argument] = value
    return function(solution_str=response, **given)


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, inspect.Parameter], bool]:
    """Its signature, the parameters that have a name for calls, and whether it takes any other keyword. Errors:
    ConfigError without a signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name_of(function)} has no signature: wrap it in one.") from None
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return signature, named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _entries(parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Columns for parameters, "name?" for one that has a default."""
    return tuple(p.name if p.default is p.empty else f"{p.name}?" for p in parameters)


def _attempt(call: Callable[[], Any]) -> Any:
    """The call's return value, or a Breakdown with its exception."""
    try:
        return settled(call())
    except (Exception, SystemExit) as error:  # the user's code: whatever it raises is the failure of its rows
        return Breakdown(reason_of(error), error)


async def _attempt_together(calls: Sequence[Callable[[], Any]], seconds: float) -> list[Any]:
    """Results of an async function's calls, run concurrently. One that takes longer than `seconds` is cancelled."""

    async def one(call: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(seconds) as clock:
                value = call()
                return await value if inspect.isawaitable(value) else value
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # as in `_attempt`
            late = isinstance(error, TimeoutError) and clock.expired()
            return Breakdown(f"took longer than {seconds:g} s" if late else reason_of(error), error)

    return list(await asyncio.gather(*map(one, calls)))


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

    async def wait(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    return run_async(wait(value)) if inspect.isawaitable(value) else value


def run_async(coroutine: Any) -> Any:
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


def layers(function: Any) -> Iterator[Any]:
    """The function, and the functions inside partials (`func`) and adapters (`inner`)."""
    while callable(function) or isinstance(function, BoundFunction):
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "inner", None)


def innermost(function: Any) -> Any:
    """The user's own function inside partials and adapters."""
    return [function, *layers(function)][-1]


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


def named(functions: Any) -> dict[str, Any]:
    """Functions by the name of their column: the names of a mapping, else their own, made unique with _2, _3, ...

    A function counts by its name, a callable object by its class (`ExactMatch` is exact_match).
    Errors: ConfigError without any function.
    """
    if isinstance(functions, Mapping):
        out = dict(functions)
        for name in out:
            good = isinstance(name, str) and name != ""
            require(good, f"reward functions are named by texts that are not empty, got {name!r}.")
    else:
        out = {}
        for function in functions if isinstance(functions, list | tuple) else [functions]:
            name = _column_name(function)
            names = (name, *(f"{name}_{number}" for number in range(2, len(out) + 2)))
            out[next(one for one in names if one not in out)] = function
    require(bool(out), "there is no reward function in the list: give at least one.")
    return out


def _column_name(function: Any) -> str:
    inner = innermost(function)
    name = getattr(inner, "__name__", None)
    if name is None or isinstance(inner, functools.partial):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(inner).__name__).lower()
    return "function" if name == "<lambda>" else name
