"""FunctionReward: a user's Python function as a reward, called in the way that its signature asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.columns import Column
from hybridflow.data.prompts import RESERVED, RESERVED_PREFIXES
from hybridflow.errors import RewardError
from hybridflow.ragged import Ragged
from hybridflow.rewards.answers import AnswerCheck, Level, RowAnswer
from hybridflow.rewards.calling import Call, attempt, attempt_together, is_async, unheard
from hybridflow.rewards.outcome import RowFailure
from hybridflow.rewards.signature import Signature, name_of, place_of, read_signature

Columns = Mapping[str, Column | Sequence[Any]]


@dataclass(frozen=True)
class Table:
    """The rows as one function gets them: texts, the columns that it takes as plain values, tokens per response.

    `asked` is how it wants to be called with these columns.
    """

    prompts: list[Any]
    responses: list[Any]
    columns: dict[str, list[Any]]
    rows: list[int]
    lengths: list[int] | None
    asked: Signature

    def __len__(self) -> int:
        return len(self.rows)


class FunctionReward:
    """A reward function with what its signature says, and a check of everything that it returns.

    - `f(prompts, completions, **columns) -> list of numbers` as in TRL, told by the name `completions` or
      `completion_ids`, or by `**kwargs` with fewer than two positional parameters: called by keyword, in any order,
      with prompts, completions and completion_ids where it names them (all of them with `**kwargs`). Where a prompt is
      a list of chat messages, the completion is one too: `[{"role": "assistant", "content": text}]`. TRL's
      `log_extra` and `log_metric` go nowhere, and there is no `trainer_state`.
    - `f(a, b, **columns) -> list of numbers` with other names: called by position with all prompts and responses.
      Where the batch has a column with the name of a or b, `f(prompts, answer, **kwargs)` is called as in TRL (the
      texts are in `kwargs["completions"]`), anything else is refused: it would get texts for that column.
    - `f(prompt, response, **columns) -> number`, when the first parameter is named `prompt`: called row by row.

    Each may be `async def`; rows of an async function of the last kind run at the same time. Of the batch's other
    columns it gets those that the signature names, as lists of plain Python values (or the plain value of the row);
    with `**kwargs` all that came with the prompts (what hybridflow writes, like log_probs, only by name), unless a
    callable object names them in an attribute `reads`. A column that only has a default may be missing. True and False
    count as 1 and 0; None means that the function does not apply to the row; RowFailure(reason) that the row could not
    be judged. At level "token" a row's answer is a list of numbers, one per response token. Errors: ConfigError when
    the function cannot be called in one of these ways.
    """

    def __init__(self, function: Callable[..., Any], *, level: Level = "sample", column: str = "rewards") -> None:
        self.function, self.level = function, level
        self.name = name_of(function)
        self.signature = read_signature(function, self.name)
        self.per_row = self.signature.style == "row"
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
        elif "completion_ids" in asked.own:
            optional.append("response_ids")
        optional += asked.texts  # only to see whether there is such a column
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
        asked = self._asked(columns)
        rows = [int(row) for row in row_ids] if row_ids is not None else list(range(len(prompts)))
        if missing := [name for name in asked.needed if name not in columns]:
            raise RewardError(
                f"reward function {self.name} needs the column {missing[0]!r}; there are {sorted(columns)}. Add it to "
                f"the prompts, or give the parameter a default. {self.check.where}"
            )
        names = [name for name in (*asked.needed, *asked.optional) if name in columns]
        if asked.everything:
            names += [n for n, column in columns.items() if n not in asked.excluded and not _is_of_tokens(n, column)]
        plain = {name: _as_list(columns[name]) for name in dict.fromkeys(names)}
        lengths = None
        if self.level == "token" or asked.needs_ids:
            if "response_ids" not in columns:
                raise RewardError(f"reward function {self.name} needs the column 'response_ids'. {self.check.where}")
            lengths = [len(ids) for ids in _as_list(columns["response_ids"])]
        if asked.style == "keywords":
            given: dict[str, Any] = {
                "prompts": list(prompts),
                "completions": list(map(_completion, prompts, responses)),
            }
            if "response_ids" in columns:
                given["completion_ids"] = _as_list(columns["response_ids"])
            plain |= {name: given[name] for name in asked.own if name in given}
        return Table(list(prompts), list(responses), plain, rows, lengths, asked)

    def call(self, table: Table, start: int, stop: int) -> Call:
        """Arguments for the rows start:stop in one call (not for a function that is called row by row)."""
        part = slice(start, stop)
        texts = () if table.asked.style == "keywords" else (table.prompts[part], table.responses[part])
        columns = {name: values[part] for name, values in table.columns.items()}
        return texts, columns | dict.fromkeys(table.asked.logs, unheard)

    def row_call(self, table: Table, row: int) -> Call:
        """Arguments for one row of a function that is called row by row."""
        return (table.prompts[row], table.responses[row]), {name: values[row] for name, values in table.columns.items()}

    def answers(self, table: Table, *, raising: bool = True) -> list[RowAnswer]:
        """What the function says about every row, called in this process.

        Not `raising`: rows that cannot be judged come back with their failure, and a call for all rows that raises is
        repeated row by row, so that only the guilty rows fail. Errors: RewardError for wrong answers in any case.
        """
        if not len(table):
            return []
        if not self.per_row:
            return self._all_at_once(table, raising)
        calls = [self.row_call(table, row) for row in range(len(table))]
        found = attempt_together(self.function, calls) if self.is_async else (attempt(self.function, c) for c in calls)
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

    def _asked(self, columns: Columns) -> Signature:
        """How to call it with these columns. Errors: RewardError where texts would go in for a column."""
        clash = [name for name in self.signature.texts if name in columns]
        if not clash:
            return self.signature
        if self.signature.by_name is not None:
            return self.signature.by_name
        names = "(prompt, response, ...)" if self.per_row else "(prompts, completions, ...)"
        raise RewardError(
            f"reward function {self.name}: its parameter {clash[0]!r} would get texts by position, and the batch has a "
            f"column of that name. Take {names}, and the column after them. {self.check.where}"
        )

    def _all_at_once(self, table: Table, raising: bool) -> list[RowAnswer]:
        values = attempt(self.function, self.call(table, 0, len(table)))
        if not isinstance(values, RowFailure):
            return self.accepted_all(values, table, 0, len(table), raising)
        if raising:
            raise self.check.failed(values, f"for rows {table.rows[0]}..{table.rows[-1]}") from values.error
        if len(table) == 1:
            return [RowAnswer(failure=values)]
        answers: list[RowAnswer] = []
        for row in range(len(table)):
            value = attempt(self.function, self.call(table, row, row + 1))
            failed = isinstance(value, RowFailure)
            answers += [RowAnswer(failure=value)] if failed else self.accepted_all(value, table, row, row + 1, False)
        return answers


def _completion(prompt: Any, response: str) -> Any:
    """The response, as chat messages where the prompt is."""
    chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    return [{"role": "assistant", "content": response}] if chat and prompt else response


def _is_of_tokens(name: str, column: Any) -> bool:
    """Whether hybridflow writes a value per token there: a function gets those that it names."""
    return isinstance(column, Ragged) and (name in RESERVED or name.startswith(RESERVED_PREFIXES))


def _as_list(column: Any) -> list[Any]:
    return column if isinstance(column, list) else column.tolist() if hasattr(column, "tolist") else list(column)
