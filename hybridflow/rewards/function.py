"""FunctionReward: a user's Python function as a reward, called as in TRL."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.batch.columns import Column
from hybridflow.batch.ragged import Ragged
from hybridflow.data.prompts import RESERVED, RESERVED_PREFIXES
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.calling import (
    Breakdown,
    Call,
    RowAnswer,
    RowFailure,
    is_async,
    listed,
    name_of,
    place_of,
    shown,
)
from hybridflow.rewards.row_function import RowFunction, entries, parameters_of

Level = Literal["sample", "token"]
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
Columns = Mapping[str, Column | Sequence[Any]]

_TEXTS = ("prompts", "completions", "completion_ids")
_LOGS = ("log_extra", "log_metric")
_TRAINER = "trainer_state"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The arguments of a reward function, all passed by keyword.

    `texts`: which of prompts, completions and completion_ids it takes (`needs_ids`: it cannot do without the last).
    `logs`: which of TRL's logging functions. `columns`: by name, "name?" where they may be missing. `everything`: all
    columns that came with the prompts.
    """

    texts: tuple[str, ...] = ()
    needs_ids: bool = False
    logs: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    everything: bool = False


@dataclass(frozen=True)
class Table:
    """The rows as one function gets them: texts, the columns that it takes as plain values, tokens per response."""

    prompts: list[Any]
    responses: list[Any]
    columns: dict[str, list[Any]]
    rows: list[int]
    lengths: list[int]

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
        self.function, self.column = function, column
        self.level: Level = level
        self.name = name_of(function)
        self.per_row = isinstance(function, RowFunction)
        self.signature = read_signature(function, self.name)
        self.is_async = is_async(function)
        components = getattr(function, "components", None)
        self.components: tuple[str, ...] = () if components is None else tuple(components)
        place = place_of(function)
        self.where = f"[column {column!r}" + (f", {self.name} at {place}]" if place else "]")
        self._answers_dicts = components is not None

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Names of the extra columns, "name?" where the parameter has a default; None: every column."""
        asked = self.signature
        if asked.everything:
            return None
        ids = ["response_ids"] if asked.needs_ids or self.level == "token" else []
        ids = ids or (["response_ids?"] if "completion_ids" in asked.texts else [])
        return tuple(sorted(dict.fromkeys([*asked.columns, *ids]), key=lambda entry: entry.endswith("?")))

    def table(
        self, prompts: Sequence[Any], responses: Sequence[str], columns: Columns, row_ids: Sequence[int] | None = None
    ) -> Table:
        """The rows as `calls` takes them. Errors: RewardError for a column that is missing."""
        asked = self.signature
        rows = [int(row) for row in row_ids] if row_ids is not None else list(range(len(prompts)))
        if missing := [name for name in asked.columns if not name.endswith("?") and name not in columns]:
            raise RewardError(
                f"reward function {self.name} needs the column {missing[0]!r}; there are {sorted(columns)}. Add it to "
                f"the prompts, or give the parameter a default. {self.where}"
            )
        names = [name for name in (entry.removesuffix("?") for entry in asked.columns) if name in columns]
        if asked.everything:
            excluded = {"prompt", "response", _TRAINER, *_TEXTS, *asked.logs}
            own = {n for n in columns if n in RESERVED or n.startswith(RESERVED_PREFIXES)}
            excluded |= {n for n in own if isinstance(columns[n], Ragged)}  # a value per token: only where it is named
            names += [n for n in columns if n not in excluded]
        plain = {name: list(listed(columns[name])) for name in dict.fromkeys(names)}
        given: dict[str, Any] = {"prompts": list(prompts), "completions": list(map(_completion, prompts, responses))}
        if "response_ids" in columns:
            given["completion_ids"] = list(listed(columns["response_ids"]))
        elif self.level == "token" or asked.needs_ids:
            raise RewardError(f"reward function {self.name} needs the column 'response_ids'. {self.where}")
        lengths = list(map(len, given["completion_ids"])) if "completion_ids" in given else [0] * len(rows)
        plain |= {name: given[name] for name in asked.texts if name in given}
        return Table(list(prompts), list(responses), plain, rows, lengths)

    def calls(self, table: Table, start: int, stop: int) -> list[Call]:
        """Arguments for the rows start:stop: one call of a RowFunction for each, else one for all of them."""
        if self.per_row:
            return [
                ((table.prompts[row], table.responses[row]), {name: v[row] for name, v in table.columns.items()})
                for row in range(start, stop)
            ]
        columns = {name: values[start:stop] for name, values in table.columns.items()}
        return [((), columns | dict.fromkeys(self.signature.logs, _dropped))]

    def accepted(self, values: Sequence[Any], table: Table, start: int, stop: int) -> list[RowAnswer]:
        """The checked answers of the rows start:stop to their calls. Errors: RewardError for a wrong one."""
        rows, lengths = table.rows[start:stop], table.lengths[start:stop]
        answers = values if self.per_row else self._one_per_row(values[0], rows)
        return [self._answer(answer, row, length) for answer, row, length in zip(answers, rows, lengths)]

    def _one_per_row(self, answer: Any, rows: Sequence[int]) -> Sequence[Any]:
        values = listed(answer)
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise self.error(
                f"returned {shown(answer)} for {len(rows)} rows; it must return a list of {len(rows)} numbers. To be "
                f"called once per row instead, wrap it in rewards.per_row."
            )
        if len(values) != len(rows):
            raise self.error(
                f"returned {len(values)} rewards for {len(rows)} rows ({rows[0]}..{rows[-1]}); it must return one per "
                f"row, in their order."
            )
        return values

    def _answer(self, answer: Any, row: int, length: int) -> RowAnswer:
        """The answer for row `row`, whose response has `length` tokens."""
        value = listed(answer)
        if isinstance(value, RowFailure):
            return RowAnswer(failure=value)
        if value is None:
            return RowAnswer()
        if isinstance(value, Mapping) and self._answers_dicts:
            if "score" not in value:
                raise self.error(f"returned {shown(answer)} at row {row}; a dict must have the entry 'score'.")
            given = [key for key in self.components if value.get(key) is not None]
            parts = {key: self._number(value[key], f"as {key!r} at row {row}") for key in given}
            return RowAnswer(self._number(value["score"], f"at row {row}"), parts=parts)
        if self.level == "token":
            return RowAnswer(self._per_token(value, row, length))
        return RowAnswer(self._number(value, f"at row {row}"))

    def error(self, says: str) -> RewardError:
        return RewardError(f"reward function {self.name} {says} {self.where}")

    def failed(self, failure: RowFailure, rows: str) -> RewardError:
        """The error for rows that could not be judged, where that is not allowed."""
        go_on = "set on_failure='zero' or 'mask' to go on without such rows."
        if not isinstance(failure, Breakdown):
            return self.error(f"{rows}: {failure.reason}. Mend the row, or {go_on}")
        head, _, detail = failure.reason.partition(": ")
        detail = f": {detail}" if detail else ""
        return self.error(f"{head} {rows}{detail}. Fix the function, or {go_on}")

    def _per_token(self, value: Any, row: int, length: int) -> list[float]:
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
            raise self.error(
                f"returned {shown(value)} at row {row}; at level='token' it must return a list of {length} numbers, "
                f"one per response token. For one number per response use level='sample'."
            )
        if len(value) != length:
            raise self.error(
                f"returned {len(value)} rewards at row {row}, whose response has {length} tokens; at level='token' it "
                f"must return one per response token."
            )
        return [self._number(one, f"at row {row}, token {i}") for i, one in enumerate(value)]

    def _number(self, answer: Any, place: str) -> float:
        value = listed(answer)
        if not isinstance(value, numbers.Real):
            several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            hint = ", or with level='token' a list of one number per response token" if several else ""
            raise self.error(f"returned {shown(answer)} {place}; it must be a number{hint}.")
        if value != value or abs(value) == math.inf:
            raise self.error(f"returned {value} {place}; it must be finite.")
        if abs(value) > FLOAT32_MAX:
            raise self.error(f"returned {shown(answer)} {place}; it does not fit float32.")
        return float(value)


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Errors: ConfigError when it cannot be called with completions, or with the columns that its `reads` lists."""
    signature, parameters, everything = parameters_of(function)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    reads = _listed_reads(function, name, signature, set(named), everything)
    if isinstance(function, RowFunction):
        return Signature(columns=reads or (), everything=reads is None)
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
    own = [parameter for parameter in named.values() if parameter.name not in (*_TEXTS, *_LOGS, _TRAINER)]
    takes_all = everything and (reads is None or not any(text in named for text in _TEXTS))
    ids = named.get("completion_ids")
    return Signature(
        texts=tuple(text for text in _TEXTS if text in named or takes_all),
        needs_ids=ids is not None and ids.default is inspect.Parameter.empty,
        logs=tuple(log for log in _LOGS if log in named),
        columns=entries(own) if reads is None else reads,
        everything=everything and reads is None,
    )


def _listed_reads(
    function: Any, name: str, signature: inspect.Signature, known: set[str], everything: bool
) -> tuple[str, ...] | None:
    """The columns that an attribute `reads` lists; None without one."""
    reads = getattr(function, "reads", None)
    if reads is None:
        return None
    if isinstance(reads, str) or not all(isinstance(entry, str) and entry.rstrip("?") for entry in reads):
        raise ConfigError(f"reward function {name}: reads={reads!r} must be a tuple of column names.")
    strange = [entry for entry in reads if not everything and entry.removesuffix("?") not in known]
    if strange:
        raise ConfigError(f"reward function {name}{signature} reads the column {strange[0]!r} and does not take it.")
    return tuple(reads)


def _dropped(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`: values are dropped."""


def _completion(prompt: Any, response: str) -> Any:
    """The response, as chat messages if the prompt is."""
    chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    return [{"role": "assistant", "content": response}] if chat and prompt else response
