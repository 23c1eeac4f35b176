"""Functions: one or several reward functions with weights, limits and a rule for rows that fail."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, RewardError, nearest
from hybridflow.rewards.calling import (
    GRACE,
    PATIENCE,
    Breakdown,
    Call,
    Caller,
    CallLimit,
    LateCallError,
    Outcome,
    RowAnswer,
    RowFailure,
    innermost,
    layers,
    name_of,
)
from hybridflow.rewards.function import FLOAT32_MAX, Columns, FunctionReward, Level, Table
from hybridflow.rewards.process_pool import UNSENT, ProcessPool, pickled
from hybridflow.settings import is_number

Function = Callable[..., Any]
OnFailure = Literal["raise", "zero", "mask"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What `Functions` answer for B rows.

    `rewards`: [B] float32, or ragged [B, R] float32 at level "token"; 0 for rows that failed. `components`: full
    column name ("rewards/format") -> [B] float32, NaN where the function did not apply to the row or failed.
    `failures`: for every row None, or function and reason.
    """

    rewards: torch.Tensor | Ragged
    components: dict[str, torch.Tensor] = field(default_factory=dict)
    failures: list[str | None] = field(default_factory=list)


class Functions:
    """Reward functions as a RewardWorker calls them; `column` is "costs" for those of a CostWorker.

    `functions` is one, a list, or a mapping from names to functions (conventions: FunctionReward; verl's
    compute_score: from_compute_score). The reward of a row is the sum of weight * value over the functions that did not
    return None for it (`weights`: a list, or a mapping by name; default 1). With several functions each writes its own
    values as a column `rewards/<name>`, NaN where it answered None; at level "token" the sum over the row.

    `workers` worker processes run the functions, each call (of a row, or of a share of the rows for functions that take
    all rows) for at most `timeout` seconds; workers=0 with a `timeout` is one worker. Without a `timeout` the limit is
    600 s, and workers=0 runs the functions in this process, where a late call is interrupted, except inside a C
    function. A callable with an attribute `limits_itself`, such as a verifier, has no limit there. A row that cannot be
    judged (the function raised, was late, died, or answered RowFailure) is an error with on_failure="raise", and has
    reward 0 and a reason in `Scores.failures` with "zero" and "mask" (with "mask" the caller masks it out). Invalid
    return values are always errors.

    Constructing is cheap and starts nothing; a copy starts workers of its own. Errors: ConfigError.
    """

    def __init__(
        self,
        functions: Function | Sequence[Function] | Mapping[str, Function],
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        level: Level = "sample",
        workers: int = 0,
        timeout: float | None = None,
        on_failure: OnFailure = "raise",
        column: str = "rewards",
    ) -> None:
        _choose("level", level, ("sample", "token"))
        _choose("on_failure", on_failure, ("raise", "zero", "mask"))
        if type(workers) is not int or workers < 0:
            raise ConfigError(
                f"reward functions: workers={workers!r} must be a whole number: of worker processes, or 0 for none."
            )
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise ConfigError(f"reward functions: timeout={timeout!r} must be a number of seconds above 0.")
        by_name = named(functions)
        self.names = tuple(by_name)
        self.weights = weights_of(weights, self.names)
        self.level, self.on_failure, self.column = level, on_failure, column
        self.rewards = [FunctionReward(function, level=level, column=column) for function in by_name.values()]
        several = [f"{column}/{name}" for name in self.names] if len(self.names) > 1 else []
        self.writes = (*several, *(f"{column}/{part}" for reward in self.rewards for part in reward.components))
        if twice := [name for name in self.writes if self.writes.count(name) > 1]:
            raise ConfigError(
                f"reward functions: {twice[0]!r} would be written twice; name the functions, as in "
                f"{{'first': f, 'second': g}}, or leave the component out."
            )
        self.workers = max(workers, 0 if timeout is None else 1)
        self._seconds = PATIENCE if timeout is None else float(timeout)
        self._caller = Caller([reward.function for reward in self.rewards], self._seconds)
        self._pool = ProcessPool(self._caller, self.workers, seconds=self._seconds) if self.workers else None
        self._checked = False

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Columns besides the texts and row_id ("name?" where it may be missing); None: every column."""
        entries: dict[str, None] = {}
        for reward in self.rewards:
            if reward.reads is None:
                return None
            entries |= dict.fromkeys(reward.reads)
        return tuple(entry for entry in entries if entry.removesuffix("?") == entry or entry[:-1] not in entries)

    def check(self) -> None:
        """Further checks on the driver: functions for worker processes can be pickled.

        Errors: ConfigError.
        """
        if self._pool is None or self._checked:
            return
        for reward in self.rewards:
            _ = pickled(reward.function, reward.name, ", or set workers=0 without a timeout")
        self._checked = True

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        columns: Columns,
        row_ids: Sequence[int] | None = None,
        response_ids: Ragged | None = None,
    ) -> Scores:
        """Scores of all rows. Errors: RewardError naming function, its place, row and column."""
        given = dict(columns) if response_ids is None else {**columns, "response_ids": response_ids}
        tables = [reward.table(prompts, responses, given, row_ids) for reward in self.rewards]
        raising = self.on_failure == "raise"
        self.check()
        if self._pool is not None:
            answers = judged(self.rewards, tables, self._run_in_workers, parts=self.workers, raising=raising)
        else:
            with CallLimit() as limit:
                answers = judged(self.rewards, tables, partial(self._run_here, limit), parts=1, raising=raising)
        return self._scores(answers, tables[0])

    def _call(self, chunk: _Chunk) -> Call:
        return (self.rewards.index(chunk.reward), chunk.reward.calls(*chunk[1:]), chunk.together), {}

    def _run_here(self, limit: CallLimit, chunks: Sequence[_Chunk]) -> Iterator[Outcome]:
        """Runs the chunks in this process, lazily."""
        for chunk in chunks:
            unlimited = getattr(chunk.reward.function, "limits_itself", False)
            seconds = math.inf if unlimited else self._seconds + (GRACE if chunk.together else 0.0)
            arguments, _ = self._call(chunk)
            yield Outcome(limit.run(partial(self._caller, *arguments), seconds))

    def _run_in_workers(self, chunks: Sequence[_Chunk]) -> list[Outcome]:
        seconds = [self._seconds + (min(GRACE, self._seconds) if chunk.together else 0.0) for chunk in chunks]
        assert self._pool is not None
        try:
            return self._pool.map(list(map(self._call, chunks)), seconds=seconds)
        except RewardError as error:
            names = ", ".join(reward.name for reward in self.rewards)
            raise RewardError(f"reward functions {names}: {error}") from error

    def close(self) -> None:
        """Stop the worker processes, if any, and close the functions that have a method `close`, as verifiers do."""
        if self._pool is not None:
            self._pool.close()
        closing = {id(part): part for reward in self.rewards for part in layers(reward.function)}
        for part in closing.values():
            if callable(close := getattr(part, "close", None)) and not isinstance(part, type):
                try:
                    close()
                except Exception as error:  # the user's code; the others must still be closed
                    _log.warning("%s.close() raised %s: %s", name_of(part), type(error).__name__, error)

    def _scores(self, answers: Sequence[Sequence[RowAnswer]], table: Table) -> Scores:
        rows = list(zip(*answers, strict=True))
        failures = [self._failure(row) for row in rows]
        if failed := [(row, why) for row, why in zip(table.rows, failures, strict=True) if why is not None]:
            _log.warning("%d of %d rows could not be judged; row %d: %s", len(failed), len(rows), *failed[0])
        sums = [
            self._sum(row, table, number) if why is None else None
            for number, (row, why) in enumerate(zip(rows, failures, strict=True))
        ]
        return Scores(rewards=self._column(sums, table), components=self._components(answers), failures=failures)

    def _failure(self, row: Sequence[RowAnswer]) -> str | None:
        for reward, answer in zip(self.rewards, row, strict=True):
            if answer.failure is not None:
                return f"{reward.name}: {answer.failure.reason}"
        return None

    def _sum(self, row: Sequence[RowAnswer], table: Table, number: int) -> float | list[float]:
        total = weighted_sum([answer.value for answer in row], self.weights)
        name, where = table.rows[number], self.rewards[0].where
        if total is None:
            if len(self.rewards) == 1:
                raise self.rewards[0].error(f"returned None (NoneType) at row {name}; it must be a number.")
            raise RewardError(
                f"all reward functions ({', '.join(self.names)}) returned None at row {name}; at least one must apply "
                f"to every row. {where}"
            )
        if any(abs(value) > FLOAT32_MAX for value in (total if isinstance(total, list) else [total])):
            raise RewardError(f"the weighted reward at row {name} does not fit float32: {total!r:.60}. {where}")
        return total

    def _column(self, sums: Sequence[float | list[float] | None], table: Table) -> torch.Tensor | Ragged:
        if self.level == "sample":
            return torch.tensor([0.0 if value is None else value for value in sums], dtype=torch.float32)
        values = [[0.0] * length if v is None else v for v, length in zip(sums, table.lengths, strict=True)]
        return Ragged.from_lengths(
            torch.tensor([number for row in values for number in row], dtype=torch.float32),  # type: ignore[union-attr]
            table.lengths,
        )

    def _components(self, answers: Sequence[Sequence[RowAnswer]]) -> dict[str, torch.Tensor]:
        found: dict[str, list[float]] = {}
        for name, reward, said in zip(self.names, self.rewards, answers, strict=True):
            found[f"{self.column}/{name}"] = [
                math.nan if one.value is None else sum(one.value) if isinstance(one.value, list) else one.value
                for one in said
            ]
            found |= {
                f"{self.column}/{part}": [one.parts.get(part, math.nan) for one in said] for part in reward.components
            }
        return {name: torch.tensor(found[name], dtype=torch.float32) for name in self.writes}


def _choose(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"reward functions: {name}={value!r} must be one of {', '.join(map(repr, known))}.")


class _Chunk(NamedTuple):
    """Rows start:stop for one call of a function and its table."""

    reward: FunctionReward
    table: Table
    start: int
    stop: int

    @property
    def together(self) -> bool:
        """Whether its rows run on one event loop, each with a limit of its own; one row alone has that of the call."""
        return self.reward.per_row and self.reward.is_async and self.stop - self.start > 1

    def failed(self, failure: RowFailure) -> RewardError:
        first, last = self.table.rows[self.start], self.table.rows[self.stop - 1]
        return self.reward.failed(failure, f"at row {first}" if first == last else f"for rows {first}..{last}")


RunChunks = Callable[[Sequence[_Chunk]], Iterable[Outcome]]
"""Runs a call of a `Caller` for each chunk."""


def judged(
    rewards: Sequence[FunctionReward], tables: Sequence[Table], run: RunChunks, *, parts: int, raising: bool
) -> list[list[RowAnswer]]:
    """The answers of every function for every row.

    A function that is called row by row has one call per row; one for all rows gets `parts` chunks. A chunk that fails
    is repeated row by row, and so are async rows, which run together, when one of them blocks all others; but not in
    this process while `raising`, nor where a call was late, since each row could take as long again. Errors:
    RewardError for wrong answers, and for rows that cannot be judged while `raising`.
    """
    found: list[list[RowAnswer]] = [[RowAnswer()] * len(table) for table in tables]
    chunks = [
        _Chunk(reward, table, start, min(start + size, len(table)))
        for reward, table in zip(rewards, tables, strict=True)
        for size in [1 if reward.per_row and not reward.is_async else -(-len(table) // parts)]
        for start in range(0, len(table), size or 1)
    ]
    while chunks:
        again: list[_Chunk] = []
        for chunk, outcome in zip(chunks, run(chunks), strict=True):
            reward, table, start, stop = chunk
            values = outcome.value if outcome.ok else Breakdown(str(outcome.failure))
            if isinstance(values, list) and isinstance(values[0], RowFailure) and not reward.per_row:
                values = values[0]
            if not isinstance(values, RowFailure):
                answers = reward.accepted(values, table, start, stop)
            elif stop - start > 1 and not (values.error and (raising or isinstance(values.error, LateCallError))):
                again += [_Chunk(reward, table, row, row + 1) for row in range(start, stop)]
                continue
            elif (outcome.failure or "").startswith(UNSENT):
                raise reward.error(f"{outcome.failure} at row {table.rows[start]}.")
            elif raising:
                raise chunk.failed(values) from values.error
            else:
                answers = [RowAnswer(failure=values)] * (stop - start)
            for row, answer in enumerate(answers, start):
                if raising and answer.failure is not None:
                    raise chunk._replace(start=row, stop=row + 1).failed(answer.failure) from answer.failure.error
            found[rewards.index(reward)][start:stop] = answers
        chunks = again
    return found


def weighted_sum(values: Sequence[float | list[float] | None], weights: Sequence[float]) -> float | list[float] | None:
    """Sum of weight * value over the functions whose value for the row is not None; None when no function applies.

    Values are numbers, or lists of one length (one number per token), which are added token by token.
    """
    given = [(weight, value) for weight, value in zip(weights, values, strict=True) if value is not None]
    if not given:
        return None
    if isinstance(given[0][1], list):
        columns = zip(*(value for _, value in given), strict=True)  # type: ignore[arg-type]
        return [sum(w * v for (w, _), v in zip(given, column, strict=True)) for column in columns]
    return sum(weight * value for weight, value in given)  # type: ignore[operator]


def named(functions: Any) -> dict[str, Any]:
    """Functions by the name of their column: the names of a mapping, else their own, made unique with _2, _3, ...

    A function counts by its name, a callable object by its class (`ExactMatch` is exact_match).
    Errors: ConfigError without any function.
    """
    if isinstance(functions, Mapping):
        if bad := [name for name in functions if not isinstance(name, str) or not name]:
            raise ConfigError(f"reward functions are named by texts that are not empty, got {bad[0]!r}.")
        given = list(functions.items())
    else:
        several = functions if isinstance(functions, list | tuple) else [functions]
        given = [(_column_name(function), function) for function in several]
    if not given:
        raise ConfigError("there is no reward function in the list: give at least one.")
    out: dict[str, Any] = {}
    for name, function in given:
        number = 1
        unique = name
        while unique in out:
            number += 1
            unique = f"{name}_{number}"
        out[unique] = function
    return out


def weights_of(weights: Sequence[float] | Mapping[str, float] | None, names: Sequence[str]) -> list[float]:
    """One weight per function, 1 where none is given. Errors: ConfigError for a wrong count, name or value."""
    if weights is None:
        return [1.0] * len(names)
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in names]:
            raise ConfigError(f"weights: there is no reward function {unknown[0]!r}.{nearest(str(unknown[0]), names)}")
        weights = [weights.get(name, 1.0) for name in names]
    if isinstance(weights, str) or not isinstance(weights, Sequence) or len(weights) != len(names):
        raise ConfigError(f"weights={weights!r}: give one per reward function ({', '.join(names)}), or a mapping.")
    if bad := [weight for weight in weights if not is_number(weight)]:
        raise ConfigError(f"weights: {bad[0]!r} is not a finite number.")
    return [float(weight) for weight in weights]


def _column_name(function: Any) -> str:
    inner = innermost(function)
    name = getattr(inner, "__name__", None)
    if name is None or isinstance(inner, functools.partial):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(inner).__name__).lower()
    return "function" if name == "<lambda>" else name
