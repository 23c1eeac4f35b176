"""Functions: one or several reward functions with weights, limits and a rule for rows that fail; the rows that each of
them gets, and a check of everything that it returns."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from hybridflow.batch.columns import Column
from hybridflow.batch.ragged import Ragged
from hybridflow.data.prompts import RESERVED, RESERVED_PREFIXES
from hybridflow.errors import ConfigError, RewardError, nearest
from hybridflow.models.images import GRIDS
from hybridflow.rewards.function_adapters import (
    TEXTS,
    TRAINER,
    BoundFunction,
    Breakdown,
    RowFailure,
    Rows,
    TRLFunction,
    layers,
    name_of,
    named,
    place_of,
    scores_of,
)
from hybridflow.rewards.limited_calls import NOT_BEGUN, UNSENT, CallLimit, LateCallError, ProcessPool, pickled
from hybridflow.settings import is_number, require

Function = Callable[..., Any]
OnFailure = Literal["raise", "zero", "mask"]
LEVELS, ON_FAILURE = ("sample", "token"), ("raise", "zero", "mask")
PATIENCE = 600.0
"""Seconds that a call may take where no `timeout` is given."""
GRACE = 5.0
"""Seconds (in a worker at most a limit's length) in which an event loop has to cancel its own late calls."""

_log = logging.getLogger(__name__)
Level = Literal["sample", "token"]
Columns = Mapping[str, Column | Sequence[Any]]
Value = float | list[float] | None
Answer = Mapping[str, Value] | RowFailure
"""Of one function for one row: its VALUE (None: it does not apply; a list: one per token) and its components."""

VALUE = ""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class Table:
    """The rows as one function gets them; their numbers for messages; tokens per response, at level "token"."""

    columns: Rows
    rows: list[int]
    lengths: list[int]


class FunctionReward:
    """A reward function, with a check of everything that it returns.

    For functions as in TRL see `TRLFunction`; others are wrapped: `per_row(f)`, `whole_batch(f)`,
    `from_compute_score(f)`. It may be `async def`. Of the batch's columns it gets those that its signature names, as
    lists of plain Python values; with `**kwargs` all that came with the prompts (those that hybridflow writes, like
    log_probs, and images of PIL only by name), unless a callable object lists them in an attribute `reads`. A column
    that only has a default may be missing. True and False count as 1 and 0; None: the function does not apply to the
    row; RowFailure(reason): the row could not be judged. At level "token" the answer for a row is a list of numbers,
    one per response token. Errors: ConfigError when the function cannot be called in this way.
    """

    def __init__(self, function: Callable[..., Any], *, level: Level = "sample", column: str = "rewards") -> None:
        self.function, self.level, self.column = function, level, column
        self.bound = function if isinstance(function, BoundFunction) else TRLFunction(function)
        self.name, place = name_of(function), place_of(function)
        self.components = tuple(self.bound.components or ())
        self.where = f"[column {column!r}" + (f", {self.name} at {place}]" if place else "]")

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Names of the extra columns, "name?" where the parameter has a default; None: every column."""
        if self.bound.reads is None:
            return None
        needed = self.bound.needs_ids or self.level == "token"
        ids = ["response_ids"] if needed else ["response_ids?"] if self.bound.ids else []
        return tuple(sorted(dict.fromkeys([*self.bound.reads, *ids]), key=lambda entry: entry.endswith("?")))

    def table(
        self, prompts: Sequence[Any], responses: Sequence[str], columns: Columns, row_ids: Sequence[int] | None
    ) -> Table:
        """The rows that the function gets. Errors: RewardError for a column that is missing."""
        bound, needs_ids = self.bound, self.bound.needs_ids or self.level == "token"
        needed = [*(name for name in bound.columns if name[-1:] != "?"), *(["response_ids"] if needs_ids else [])]
        if missing := [name for name in needed if name not in columns]:
            raise RewardError(
                f"reward function {self.name} needs the column {missing[0]!r}; there are {sorted(columns)}. Add it to "
                f"the prompts, or give the parameter a default. {self.where}"
            )
        names = [name for entry in bound.columns if (name := entry.removesuffix("?")) in columns]
        if bound.everything:
            # A value per token that hybridflow has written, or a decoded image, is given only where it is named.
            own = {n for n in columns if n in RESERVED or n.startswith(RESERVED_PREFIXES)}
            excluded = {"prompt", "response", TRAINER, *TEXTS, *bound.logs, *(("images",) if GRIDS in columns else ())}
            excluded |= {n for n in own if isinstance(columns[n], Ragged)}
            names += [n for n in columns if n not in excluded]
        given = {name: list(_listed(columns[name])) for name in dict.fromkeys(names)}
        ids = list(_listed(columns["response_ids"])) if "response_ids" in columns else []
        given |= {"completion_ids": ids} if bound.ids and "response_ids" in columns else {}
        rows = [int(row) for row in row_ids] if row_ids is not None else list(range(len(prompts)))
        lengths = list(map(len, ids)) if self.level == "token" else [0] * len(rows)
        return Table({**given, "prompt": list(prompts), "response": list(responses)}, rows, lengths)

    def accepted(self, values: Any, table: Table, at: Sequence[int]) -> list[Answer]:
        """The checked answers for the rows at these places. Errors: RewardError for a wrong one."""
        if not self.bound.per_row:
            whose = f"for {len(at)} rows ({table.rows[at[0]]}..{table.rows[at[-1]]}); it must return one per row"
            once = "To be called once per row instead, wrap it in rewards.per_row"
            what = f"for {len(at)} rows; it must return a list of {len(at)} numbers. {once}."
            values = self._several(values, len(at), what, f"{whose}, in their order.")
        return [self._answer(answer, table.rows[row], table.lengths[row]) for answer, row in zip(values, at)]

    def _several(self, answer: Any, count: int, wanted: str, whose: str) -> Sequence[Any]:
        values = _listed(answer)
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise self.error(f"returned {_shown(answer)} {wanted}")
        if len(values) != count:
            raise self.error(f"returned {len(values)} rewards {whose}")
        return values

    def _answer(self, answer: Any, row: int, length: int) -> Answer:
        """The answer for row `row`, whose response has `length` tokens."""
        value = _listed(answer)
        if isinstance(value, RowFailure):
            return value
        if value is None:
            return {VALUE: None}
        if isinstance(value, Mapping) and self.bound.components is not None:
            if "score" not in value:
                raise self.error(f"returned {_shown(answer)} at row {row}; a dict must have the entry 'score'.")
            given = [key for key in self.components if value.get(key) is not None]
            parts = {key: self._number(value[key], f"as {key!r} at row {row}") for key in given}
            return {VALUE: self._number(value["score"], f"at row {row}"), **parts}
        if self.level == "sample":
            return {VALUE: self._number(value, f"at row {row}")}
        must = f"at level='token' it must return a list of {length} numbers, one per response token"
        wanted = f"at row {row}; {must}. For one number per response use level='sample'."
        whose = f"at row {row}, whose response has {length} tokens; at level='token' it must return one per response"
        values = self._several(value, length, wanted, f"{whose} token.")
        return {VALUE: [self._number(one, f"at row {row}, token {i}") for i, one in enumerate(values)]}

    def error(self, says: str) -> RewardError:
        return RewardError(f"reward function {self.name} {says} {self.where}")

    def _number(self, answer: Any, place: str) -> float:
        value = _listed(answer)
        if not isinstance(value, numbers.Real):
            several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            hint = ", or with level='token' a list of one number per response token" if several else ""
            raise self.error(f"returned {_shown(answer)} {place}; it must be a number{hint}.")
        if value != value or abs(value) == math.inf:
            raise self.error(f"returned {value} {place}; it must be finite.")
        if abs(value) > FLOAT32_MAX:
            raise self.error(f"returned {_shown(answer)} {place}; it does not fit float32.")
        return float(value)


class Chunk(NamedTuple):
    """The rows at these places of a table, for one call of a function."""

    reward: FunctionReward
    table: Table
    at: Sequence[int]

    @property
    def together(self) -> bool:
        """Whether its rows run on one event loop, each with a limit of its own; a row alone has the call's."""
        return self.reward.bound.per_row and self.reward.bound.is_async and len(self.at) > 1

    def failed(self, failure: RowFailure) -> RewardError:
        """The error for rows that could not be judged, where that is not allowed."""
        first, last = self.table.rows[self.at[0]], self.table.rows[self.at[-1]]
        rows = f"at row {first}" if first == last else f"for rows {first}..{last}"
        go_on = "set on_failure='zero' or 'mask' to go on without such rows."
        if not isinstance(failure, Breakdown):
            return self.reward.error(f"{rows}: {failure.reason}. Mend the row, or {go_on}")
        head, _, detail = failure.reason.partition(": ")
        detail = f": {detail}" if detail else ""
        return self.reward.error(f"{head} {rows}{detail}. Fix the function, or {go_on}")

    def taken(self, values: Any, raising: bool) -> list[Answer] | None:
        """The answers of the chunk's rows, from what its call has returned; None where each row has to be called alone.

        A chunk that fails is repeated row by row unless its function takes whole batches, and so are async rows, which
        run together, when one of them blocks all others; but not in this process (where the error is known) while
        `raising`, nor where the call was late, since each row could take as long again. Errors: RewardError for wrong
        answers, and for rows that cannot be judged while `raising`.
        """
        if not isinstance(values, RowFailure):
            answers = self.reward.accepted(values, self.table, self.at)
        elif (
            len(self.at) > 1
            and not self.reward.bound.whole
            and not (values.error and (raising or isinstance(values.error, LateCallError)))
        ):
            return None
        elif isinstance(values, Breakdown) and values.reason.startswith(UNSENT):
            raise self.reward.error(f"{values.reason} at row {self.table.rows[self.at[0]]}.")
        elif raising:
            raise self.failed(values) from values.error
        else:
            answers: list[Answer] = [values] * len(self.at)
        for row, answer in zip(self.at, answers, strict=True):
            if raising and isinstance(answer, RowFailure):
                raise self._replace(at=[row]).failed(answer) from answer.error
        return answers


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
    values as a column `rewards/<name>`, NaN where it answered None; at level "token" the sum over the row. With `by`, a
    column of names such as the `source` of a Mixture, a row is judged by the function of its name alone.

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
        by: str | None = None,
    ) -> None:
        for name, value, known in (("level", level, LEVELS), ("on_failure", on_failure, ON_FAILURE)):
            choices = ", ".join(map(repr, known))
            require(value in known, f"reward functions: {name}={value!r} must be one of {choices}.")
        good = type(workers) is int and workers >= 0
        what = f"reward functions: workers={workers!r} must be a whole number: of worker processes, or 0 for none."
        require(good, what)
        good = timeout is None or (is_number(timeout) and timeout > 0)
        require(good, f"reward functions: timeout={timeout!r} must be a number of seconds above 0.")
        good = by is None or isinstance(functions, Mapping)
        require(good, f"reward functions: by={by!r} chooses a function by its name: give {{'math': f, 'code': g}}.")
        by_name = named(functions)
        self.by = by
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
        self._caller = partial(scores_of, tuple(reward.bound for reward in self.rewards), self._seconds)
        self._pool = ProcessPool(self._caller, self.workers) if self.workers else None
        self._checked = False

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Columns besides the texts and row_id ("name?" where it may be missing); None: every column."""
        entries = [self.by] if self.by is not None else []
        for reward in self.rewards:
            if reward.reads is None:
                return None
            entries += reward.reads
        return tuple(entry for entry in dict.fromkeys(entries) if entry[-1:] != "?" or entry[:-1] not in entries)

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
        chunks = list(self._chunks(tables, columns))
        self.check()
        if self._pool is not None:
            found = self._judged(len(prompts), chunks, self._run_in_workers)
        else:
            with CallLimit() as limit:
                found = self._judged(len(prompts), chunks, partial(self._run_here, limit))
        return self._scores(found, tables[0])

    def _chunks(self, tables: Sequence[Table], columns: Columns) -> Iterator[Chunk]:
        """One that is called row by row has a call per row, one of whole batches has one, others have one per worker.

        Errors: RewardError for a name without a function.
        """
        kinds: Any = None if self.by is None else columns[self.by]
        for row, kind in () if kinds is None else zip(tables[0].rows, kinds, strict=True):
            if kind not in self.names:
                raise RewardError(
                    f"row {row} has {self.by}={kind!r}, for which there is no reward function; there are those of "
                    f"{', '.join(self.names)}. Give function={{..., {kind!r}: f}}."
                )
        for name, reward, table in zip(self.names, self.rewards, tables, strict=True):
            own = range(len(table.rows)) if kinds is None else [i for i, kind in enumerate(kinds) if kind == name]
            parts = 1 if reward.bound.whole else max(1, self.workers)
            size = 1 if reward.bound.per_row and not reward.bound.is_async else -(-len(own) // parts)
            for start in range(0, len(own), size or 1):
                yield Chunk(reward, table, own[start : start + size])

    def _judged(
        self, rows: int, chunks: Sequence[Chunk], run: Callable[[Sequence[Chunk]], Iterable[Any]]
    ) -> list[list[Answer]]:
        """Every function's answers for all rows."""
        found: dict[FunctionReward, list[Answer]] = {reward: [{VALUE: None}] * rows for reward in self.rewards}
        while chunks:
            again: list[Chunk] = []
            for chunk, values in zip(chunks, run(chunks), strict=True):
                if values is NOT_BEGUN:
                    again.append(chunk)
                elif (answers := chunk.taken(values, self.on_failure == "raise")) is None:
                    again += [chunk._replace(at=[row]) for row in chunk.at]
                else:
                    for row, answer in zip(chunk.at, answers, strict=True):
                        found[chunk.reward][row] = answer
            chunks = again
        return [*found.values()]

    def _run_here(self, limit: CallLimit, chunks: Sequence[Chunk]) -> Iterator[Any]:
        """Runs the chunks in this process, lazily."""
        for chunk in chunks:
            seconds = (
                math.inf if chunk.reward.bound.limits_itself else self._seconds + (GRACE if chunk.together else 0.0)
            )
            yield limit.run(partial(self._caller, *self._call(chunk)), seconds)

    def _run_in_workers(self, chunks: Sequence[Chunk]) -> list[Any]:
        """With on_failure="raise" nothing is begun after a failure."""
        seconds = [self._seconds + (min(GRACE, self._seconds) if chunk.together else 0.0) for chunk in chunks]
        assert self._pool is not None
        try:
            return self._pool.map(
                [*map(self._call, chunks)], seconds, failures=1 if self.on_failure == "raise" else None
            )
        except RewardError as error:
            names = ", ".join(reward.name for reward in self.rewards)
            raise RewardError(f"reward functions {names}: {error}") from error

    def _call(self, chunk: Chunk) -> tuple[int, Rows]:
        columns = chunk.table.columns
        return self.rewards.index(chunk.reward), {name: [columns[name][row] for row in chunk.at] for name in columns}

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

    def _scores(self, answers: Sequence[Sequence[Answer]], table: Table) -> Scores:
        failures, sums = list[str | None](), list[Value]()
        for row, given in zip(table.rows, zip(*answers, strict=True), strict=True):
            reasons = (f"{r.name}: {a.reason}" for r, a in zip(self.rewards, given) if isinstance(a, RowFailure))
            failures.append(next(reasons, None))
            sums.append(None if failures[-1] else self._sum([one[VALUE] for one in given], row))  # type: ignore
        if failed := [(row, why) for row, why in zip(table.rows, failures, strict=True) if why is not None]:
            _log.warning("%d of %d rows could not be judged; row %d: %s", len(failed), len(table.rows), *failed[0])
        columns = {
            f"{self.column}/{name if part == VALUE else part}": [_number(one, part) for one in said]
            for name, reward, said in zip(self.names, self.rewards, answers, strict=True)
            for part in (VALUE, *reward.components)
        }
        parts = {name: torch.tensor(columns[name], dtype=torch.float32) for name in self.writes}
        if self.level == "sample":
            rewards = torch.tensor([value or 0.0 for value in sums], dtype=torch.float32)
        else:
            rows = [[0.0] * length if v is None else v for v, length in zip(sums, table.lengths, strict=True)]
            rewards = Ragged.from_rows(rows, torch.float32)  # type: ignore[arg-type]
        return Scores(rewards=rewards, components=parts, failures=failures)

    def _sum(self, values: Sequence[Value], row: int) -> Value:
        total, where = weighted_sum(values, self.weights), self.rewards[0].where
        if total is None and len(self.rewards) == 1:
            raise self.rewards[0].error(f"returned None (NoneType) at row {row}; it must be a number.")
        if total is None:
            raise RewardError(
                f"all reward functions ({', '.join(self.names)}) returned None at row {row}; at least one must apply "
                f"to every row. {where}"
            )
        if any(abs(value) > FLOAT32_MAX for value in (total if isinstance(total, list) else [total])):
            raise RewardError(f"the weighted reward at row {row} does not fit float32: {total!r:.60}. {where}")
        return total


def _number(answer: Answer, part: str) -> float:
    """A component of an answer, NaN where it has none; of values per token the sum."""
    value = None if isinstance(answer, RowFailure) else answer.get(part)
    return math.nan if value is None else sum(value) if isinstance(value, list) else value


def weighted_sum(values: Sequence[float | list[float] | None], weights: Sequence[float]) -> float | list[float] | None:
    """Sum of weight * value over the functions whose value for the row is not None; None when no function applies.

    Values are numbers, or lists of one length (one number per token), which are added token by token.
    """
    given: list[tuple[float, Any]] = [pair for pair in zip(weights, values, strict=True) if pair[1] is not None]
    if not given:
        return None
    if isinstance(given[0][1], list):
        columns = zip(*(value for _, value in given), strict=True)
        return [sum(w * v for (w, _), v in zip(given, column, strict=True)) for column in columns]
    return sum(weight * value for weight, value in given)


def weights_of(weights: Sequence[float] | Mapping[str, float] | None, names: Sequence[str]) -> list[float]:
    """One weight per function, 1 where none is given. Errors: ConfigError for a wrong count, name or value."""
    if weights is None:
        return [1.0] * len(names)
    if isinstance(weights, Mapping):
        if unknown := [name for name in weights if name not in names]:
            raise ConfigError(f"weights: there is no reward function {unknown[0]!r}.{nearest(str(unknown[0]), names)}")
        weights = [weights.get(name, 1.0) for name in names]
    good = not isinstance(weights, str) and isinstance(weights, Sequence) and len(weights) == len(names)
    require(good, f"weights={weights!r}: give one per reward function ({', '.join(names)}), or a mapping.")
    for weight in weights:
        require(is_number(weight), f"weights: {weight!r} is not a finite number.")
    return [float(weight) for weight in weights]


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a type of the user's; or an integer of more than 4,300 digits
        text = f"what has no repr: {error}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _listed(value: Any) -> Any:
    """Python values of torch and numpy arrays and scalars, and of ragged rows."""
    return value.tolist() if hasattr(value, "tolist") else value
