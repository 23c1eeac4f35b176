"""FunctionReward: one reward function: the rows that it gets, and a check of everything that it returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hybridflow.batch.columns import Column
from hybridflow.batch.ragged import Ragged
from hybridflow.data.prompts import RESERVED, RESERVED_PREFIXES
from hybridflow.errors import RewardError
from hybridflow.models.images import GRIDS
from hybridflow.rewards.function_adapters import (
    TEXTS,
    TRAINER,
    BoundFunction,
    Breakdown,
    RowFailure,
    Rows,
    TRLFunction,
    name_of,
    place_of,
)
from hybridflow.rewards.process_pool import UNSENT

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


class LateCallError(BaseException):
    """Raised inside a call that is late for `limit`; no `except Exception` of the function may stop it."""

    def __init__(self, limit: object) -> None:
        super().__init__()
        self.limit = limit


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
        elif values.reason.startswith(UNSENT):
            raise self.reward.error(f"{values.reason} at row {self.table.rows[self.at[0]]}.")
        elif raising:
            raise self.failed(values) from values.error
        else:
            answers: list[Answer] = [values] * len(self.at)
        for row, answer in zip(self.at, answers, strict=True):
            if raising and isinstance(answer, RowFailure):
                raise self._replace(at=[row]).failed(answer) from answer.error
        return answers


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a type of the user's; or an integer of more than 4,300 digits
        text = f"what has no repr: {error}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _listed(value: Any) -> Any:
    """Python values of torch and numpy arrays and scalars, and of ragged rows."""
    return value.tolist() if hasattr(value, "tolist") else value
