"""FunctionReward: a user's Python function as a reward. All are called as TRL calls them; adapters do the rest."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridflow.batch.columns import Column
from hybridflow.batch.ragged import Ragged
from hybridflow.data.prompts import RESERVED, RESERVED_PREFIXES
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.answers import AnswerCheck, Level, RowAnswer
from hybridflow.rewards.calling import (
    GRACE,
    PATIENCE,
    Call,
    CallLimit,
    LateCallError,
    attempt,
    attempt_together,
    is_async,
    name_of,
    place_of,
)
from hybridflow.rewards.outcome import RowFailure
from hybridflow.rewards.signature_adapters import RowFunction

Columns = Mapping[str, Column | Sequence[Any]]

_TEXTS = ("prompts", "completions", "completion_ids")
_LOGS = ("log_extra", "log_metric")
_TRAINER = "trainer_state"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The arguments of a reward function, all passed by keyword.

    `texts`: which of prompts, completions and completion_ids it takes (`needs_ids`: it cannot do without the last).
    `logs`: which of TRL's logging functions. `needed` and `optional`: columns by name (optional: the parameter has a
    default). `everything`: all columns that came with the prompts.
    """

    texts: tuple[str, ...] = ()
    needs_ids: bool = False
    logs: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False


@dataclass(frozen=True)
class Table:
    """The rows as one function gets them: texts, the columns that it takes as plain values, tokens per response."""

    prompts: list[Any]
    responses: list[Any]
    columns: dict[str, list[Any]]
    rows: list[int]
    lengths: list[int] | None

    def __len__(self) -> int:
        return len(self.rows)


class FunctionReward:
    """A reward function `f(prompts, completions, **columns) -> list`, with a check of everything that it returns.

    It is called by keyword with all rows, as in TRL, and gets prompts, completions and completion_ids where it names
    them (all of them with `**kwargs`). Where a prompt is a list of chat messages, the completion is one too:
    `[{"role": "assistant", "content": text}]`. Values given to TRL's `log_extra` and `log_metric` are dropped; there is
    no `trainer_state`. Functions with another signature are wrapped: `per_row(f)`, `from_compute_score(f)`. It may be
    `async def`; the rows of an async function in `per_row` run at the same time.

    Of the batch's other columns it gets those that its signature names, as lists of plain Python values; with
    `**kwargs` all that came with the prompts (those that hybridflow writes, like log_probs, only by name), unless a
    callable object lists them in an attribute `reads`. A column that only has a default may be missing. True and False
    count as 1 and 0; None: the function does not apply to the row; RowFailure(reason): the row could not be judged. At
    level "token" the answer for a row is a list of numbers, one per response token. Errors: ConfigError when the
    function cannot be called in this way.
    """

    def __init__(self, function: Callable[..., Any], *, level: Level = "sample", column: str = "rewards") -> None:
        self.function, self.level = function, level
        self.name = name_of(function)
        self.per_row = isinstance(function, RowFunction)
        self.signature = read_signature(function, self.name)
        self.is_async = is_async(function)
        components = getattr(function, "components", None)
        self.components: tuple[str, ...] = () if components is None else tuple(components)
        place = place_of(function)
        where = f"[column {column!r}" + (f", {self.name} at {place}]" if place else "]")
        self.check = AnswerCheck(self.name, where, level, None if components is None else self.components)

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Names of the extra columns, "name?" where the parameter has a default; None: every column."""
        asked = self.signature
        if asked.everything:
            return None
        needed, optional = list(asked.needed), list(asked.optional)
        if asked.needs_ids or self.level == "token":
            needed.append("response_ids")
        elif "completion_ids" in asked.texts:
            optional.append("response_ids")
        return (*dict.fromkeys(needed), *(f"{name}?" for name in dict.fromkeys(optional) if name not in needed))

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        columns: Columns | None = None,
        row_ids: Sequence[int] | None = None,
    ) -> list[Any]:
        """One finite number per row (a list of them at level "token"), computed in this process.

        `row_ids` are the rows' names in messages (default: their positions). Errors: RewardError naming the function
        and the row when it raises or answers with the wrong count, None, NaN, an infinity or no number; a reward is
        never made up.
        """
        table = self.table(prompts, responses, columns or {}, row_ids)
        answers = self.answers(table)
        if nothing := [row for row, answer in zip(table.rows, answers, strict=True) if answer.value is None]:
            raise self.check.error(f"returned None (NoneType) at row {nothing[0]}; it must be a number.")
        return [answer.value for answer in answers]

    def table(
        self, prompts: Sequence[Any], responses: Sequence[str], columns: Columns, row_ids: Sequence[int] | None = None
    ) -> Table:
        """The rows as `call` and `row_call` take them. Errors: RewardError for a column that is missing."""
        asked = self.signature
        rows = [int(row) for row in row_ids] if row_ids is not None else list(range(len(prompts)))
        if missing := [name for name in asked.needed if name not in columns]:
            raise RewardError(
                f"reward function {self.name} needs the column {missing[0]!r}; there are {sorted(columns)}. Add it to "
                f"the prompts, or give the parameter a default. {self.check.where}"
            )
        names = [name for name in (*asked.needed, *asked.optional) if name in columns]
        if asked.everything:
            excluded = {"prompt", "response", _TRAINER, *_TEXTS, *asked.logs}
            names += [n for n, column in columns.items() if n not in excluded and not _is_of_tokens(n, column)]
        plain = {name: _as_list(columns[name]) for name in dict.fromkeys(names)}
        lengths = None
        if self.level == "token" or asked.needs_ids:
            if "response_ids" not in columns:
                raise RewardError(f"reward function {self.name} needs the column 'response_ids'. {self.check.where}")
            lengths = [len(ids) for ids in _as_list(columns["response_ids"])]
        given: dict[str, Any] = {"prompts": list(prompts), "completions": list(map(_completion, prompts, responses))}
        if "response_ids" in columns:
            given["completion_ids"] = _as_list(columns["response_ids"])
        plain |= {name: given[name] for name in asked.texts if name in given}
        return Table(list(prompts), list(responses), plain, rows, lengths)

    def call(self, table: Table, start: int, stop: int) -> Call:
        """Arguments for the rows start:stop in one call (not for a RowFunction)."""
        columns = {name: values[start:stop] for name, values in table.columns.items()}
        return (), columns | dict.fromkeys(self.signature.logs, _dropped)

    def row_call(self, table: Table, row: int) -> Call:
        """Arguments for one row of a RowFunction."""
        return (table.prompts[row], table.responses[row]), {name: values[row] for name, values in table.columns.items()}

    def answers(self, table: Table, *, raising: bool = True, seconds: float = PATIENCE) -> list[RowAnswer]:
        """What the function says about every row, called in this process, each call for at most `seconds`.

        Not `raising`: rows that cannot be judged come back with their failure, and a call for all rows that raises is
        repeated row by row, so that only the guilty rows fail. Errors: RewardError for wrong answers in any case.
        """
        if not len(table):
            return []
        together = self.per_row and self.is_async
        if getattr(self.function, "limits_itself", False):
            seconds = math.inf
        with CallLimit(seconds + (GRACE if together else 0.0)) as limit:
            if not self.per_row:
                return self._all_at_once(table, raising, limit)
            calls = [self.row_call(table, row) for row in range(len(table))]
            found: Iterable[Any] = (limit.run(partial(attempt, self.function, call)) for call in calls)
            if together:
                answers = limit.run(partial(attempt_together, self.function, calls, seconds))
                found = [answers] * len(table) if isinstance(answers, RowFailure) else answers
            return [self.accepted(value, table, row, raising) for row, value in enumerate(found)]

    def accepted(self, value: Any, table: Table, row: int, raising: bool) -> RowAnswer:
        """The checked answer of one row. Errors: RewardError when it is wrong, or a failure while `raising`."""
        answer = self.check.one(value, table.rows[row], table.lengths[row] if table.lengths else 0)
        if raising and answer.failure is not None:
            raise self.check.failed(answer.failure, f"at row {table.rows[row]}") from answer.failure.error
        return answer

    def accepted_all(self, values: Any, table: Table, start: int, stop: int, raising: bool) -> list[RowAnswer]:
        """The checked answers of the rows start:stop, that were judged in one call."""
        lengths = table.lengths[start:stop] if table.lengths else None
        answers = self.check.batch(values, table.rows[start:stop], lengths)
        for row, answer in zip(table.rows[start:stop], answers, strict=True):
            if raising and answer.failure is not None:
                raise self.check.failed(answer.failure, f"at row {row}") from answer.failure.error
        return answers

    def _all_at_once(self, table: Table, raising: bool, limit: CallLimit) -> list[RowAnswer]:
        values = limit.run(partial(attempt, self.function, self.call(table, 0, len(table))))
        if not isinstance(values, RowFailure):
            return self.accepted_all(values, table, 0, len(table), raising)
        if raising:
            raise self.check.failed(values, f"for rows {table.rows[0]}..{table.rows[-1]}") from values.error
        if len(table) == 1 or isinstance(values.error, LateCallError):  # each row could take as long again
            return [RowAnswer(failure=values)] * len(table)
        answers: list[RowAnswer] = []
        for row in range(len(table)):
            value = limit.run(partial(attempt, self.function, self.call(table, row, row + 1)))
            failed = isinstance(value, RowFailure)
            answers += [RowAnswer(failure=value)] if failed else self.accepted_all(value, table, row, row + 1, False)
        return answers


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Errors: ConfigError when it cannot be called with completions, or with the columns that its `reads` lists."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name} has no signature: wrap it in a Python function.") from None
    parameters = list(signature.parameters.values())
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    reads = _listed_reads(function, name, signature, set(named), everything)
    if isinstance(function, RowFunction):
        needed, optional = reads or ((), ())
        return Signature(needed=needed, optional=optional, everything=reads is None)
    nameless = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    takes = everything or "completions" in named or "completion_ids" in named
    if nameless or not takes or (reads is None and {"prompt", "response"} & named.keys()):
        raise ConfigError(
            f"reward function {name}{signature} must take (prompts, completions, **columns), as in TRL: it is called "
            f"by keyword with all rows. Wrap a function (prompt, response, **columns) of one row in rewards.per_row, "
            f"and verl's compute_score in rewards.from_compute_score."
        )
    if reads is None and _TRAINER in named and named[_TRAINER].default is inspect.Parameter.empty:
        raise ConfigError(
            f"reward function {name} takes {_TRAINER!r}: there is no trainer that could have a state. Give the "
            f"parameter a default, and bring what it needs as a column of the prompts."
        )
    columns = [p for p in named.values() if p.name not in (*_TEXTS, *_LOGS, _TRAINER)]
    if reads is None:
        needed = tuple(p.name for p in columns if p.default is p.empty)
        optional = tuple(p.name for p in columns if p.default is not p.empty)
    else:
        needed, optional = reads
    takes_all = everything and (reads is None or not any(text in named for text in _TEXTS))
    ids = named.get("completion_ids")
    return Signature(
        texts=tuple(text for text in _TEXTS if text in named or takes_all),
        needs_ids=ids is not None and ids.default is inspect.Parameter.empty,
        logs=tuple(log for log in _LOGS if log in named),
        needed=needed,
        optional=optional,
        everything=everything and reads is None,
    )


def _listed_reads(
    function: Any, name: str, signature: inspect.Signature, known: set[str], everything: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The columns, needed and optional, that an attribute `reads` lists; None without one."""
    reads = getattr(function, "reads", None)
    if reads is None:
        return None
    if isinstance(reads, str) or not all(isinstance(entry, str) and entry.rstrip("?") for entry in reads):
        raise ConfigError(f"reward function {name}: reads={reads!r} must be a tuple of column names.")
    strange = [entry for entry in reads if not everything and entry.removesuffix("?") not in known]
    if strange:
        raise ConfigError(f"reward function {name}{signature} reads the column {strange[0]!r} and does not take it.")
    optional = tuple(entry.removesuffix("?") for entry in reads if entry.endswith("?"))
    return tuple(entry for entry in reads if not entry.endswith("?")), optional


def _dropped(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`: values are dropped."""


def _completion(prompt: Any, response: str) -> Any:
    """The response, as chat messages where the prompt is."""
    chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    return [{"role": "assistant", "content": response}] if chat and prompt else response


def _is_of_tokens(name: str, column: Any) -> bool:
    """Whether hybridflow writes a value per token there: a function gets those that it names."""
    return isinstance(column, Ragged) and (name in RESERVED or name.startswith(RESERVED_PREFIXES))


def _as_list(column: Any) -> list[Any]:
    return column if isinstance(column, list) else column.tolist() if hasattr(column, "tolist") else list(column)
