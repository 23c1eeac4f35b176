"""FunctionReward: a user's Python function as a reward, called as in TRL; adapters wrap other signatures."""

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
            names += [n for n, column in columns.items() if n not in excluded and not _is_of_tokens(n, column)]
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
    signature, parameters, everything = _parameters(function)
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
        columns=_entries(own) if reads is None else reads,
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


def _entries(parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Columns for parameters, "name?" for one that has a default."""
    return tuple(p.name if p.default is p.empty else f"{p.name}?" for p in parameters)


def _dropped(name: str, value: Any) -> None:
    """TRL's `log_extra` and `log_metric`: values are dropped."""


def _completion(prompt: Any, response: str) -> Any:
    """The response, as chat messages if the prompt is."""
    chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    return [{"role": "assistant", "content": response}] if chat and prompt else response


def _is_of_tokens(name: str, column: Any) -> bool:
    """Whether hybridflow writes a value per token there: a function gets those that it names."""
    return isinstance(column, Ragged) and (name in RESERVED or name.startswith(RESERVED_PREFIXES))


class RowFunction:
    """A reward function that is called with (prompt, response, **columns), row by row; `inner` is the user's function.

    `reads`: the columns that it takes ("name?" where they may be missing); None: every column.
    """

    def __init__(self, inner: Callable[..., Any], reads: tuple[str, ...] | None) -> None:
        self.inner, self.is_async, self.reads = inner, is_async(inner), reads

    def __call__(self, prompt: Any, response: str, **columns: Any) -> Any:
        return self.inner(prompt, response, **columns)


def per_row(function: Callable[..., Any]) -> RowFunction:
    """A reward function from `f(prompt, response, **columns) -> number`, for one row.

    `response` is a text, also where the prompt is a list of chat messages. The parameters behind the first two name
    columns, whose value for the row they get; one with a default may be missing. Each row has a time limit of its own,
    and a row that fails costs no other row. The rows of an async function run at the same time.
    Errors: ConfigError when the function does not take two texts.
    """
    signature, parameters, everything = _parameters(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"per_row({name_of(function)}{signature}): it must take (prompt, response, **columns).")
    columns = [p for p in parameters if p not in positional[:2] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RowFunction(function, None if everything else _entries(columns))


def from_compute_score(
    function: Callable[..., Any],
    *,
    data_source: str | None = "data_source",
    ground_truth: str = "ground_truth",
    extra_info: str | None = "extra_info",
    components: Sequence[str] = (),
) -> ComputeScore:
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
    signature, parameters, everything = _parameters(function)
    taken = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if missing := [n for n in ("data_source", "solution_str", "ground_truth") if n not in taken and not everything]:
        raise ConfigError(
            f"{name_of(function)}{signature} has no parameter {missing[0]!r}: from_compute_score takes functions "
            f"(data_source, solution_str, ground_truth, extra_info=None)."
        )
    needs_info = "extra_info" in taken and taken["extra_info"].default is inspect.Parameter.empty
    names = {"data_source": data_source, "ground_truth": ground_truth}
    if extra_info is not None and (everything or "extra_info" in taken):
        names["extra_info"] = extra_info
    return ComputeScore(function, names, needs_info, tuple(components))


class ComputeScore(RowFunction):
    """`names`: the column, or the entry in one, that an argument is; the column of `extra_info` may be missing."""

    def __init__(
        self, function: Callable[..., Any], names: dict[str, str | None], needs_info: bool, components: tuple[str, ...]
    ) -> None:
        self._names, self._needs_info, self.components = names, needs_info, components
        columns = {key: name.partition(".")[0] for key, name in names.items() if name is not None}
        self._extra = columns.pop("extra_info", None)
        needed = tuple(dict.fromkeys(columns.values()))
        extra = () if self._extra is None or self._extra in needed else (f"{self._extra}?",)
        super().__init__(function, (*needed, *extra))

    def __call__(self, prompt: Any, response: str, **columns: Any) -> Any:
        given = {key: name for key, name in self._names.items() if key != "extra_info" or self._extra in columns}
        found = {key: None if name is None else _entry(columns, name) for key, name in given.items()}
        if failed := [value for value in found.values() if isinstance(value, RowFailure)]:
            return failed[0]
        if self._needs_info:
            found.setdefault("extra_info", {})
        return self.inner(solution_str=response, **found)


def _parameters(function: Callable[..., Any]) -> tuple[inspect.Signature, list[inspect.Parameter], bool]:
    """Its signature, the parameters, and whether it takes any keyword. Errors: ConfigError without a signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name_of(function)} has no signature: wrap it in one.") from None
    parameters = list(signature.parameters.values())
    return signature, parameters, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _entry(columns: dict[str, Any], name: str) -> Any:
    """The value of a column, or of an entry in it ("reward_model.ground_truth"); a RowFailure if it is missing."""
    column, *path = name.split(".")
    value = columns[column]
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            there = (
                f"its entries are {sorted(map(str, value))}" if isinstance(value, Mapping) else f"it is {value!r:.60}"
            )
            return RowFailure(f"column {column!r} has no entry {name.partition('.')[2]!r}; {there}")
        value = value[key]
    return value
