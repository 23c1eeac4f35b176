"""Outcomes of reward functions by call, row and batch (numbers, None, failures), and their checks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hybridflow.errors import RewardError

if TYPE_CHECKING:
    import torch

    from hybridflow.batch.ragged import Ragged

Level = Literal["sample", "token"]
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


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


@dataclass(frozen=True)
class RowAnswer:
    """What one function says about one row: a value (None: it does not apply), or the reason for a failure.

    `value` is a list of numbers, one per response token, at level "token". `parts` are further named numbers.
    """

    value: float | list[float] | None = None
    failure: RowFailure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerCheck:
    """Turns what the function `name` returned into RowAnswers.

    `where` ends every message: place and column. `components` are the entries of an answer like {"score": 1.0, ...}
    that are kept, None where an answer must not be a mapping. Errors: RewardError with function, row and what to do.
    """

    name: str
    where: str
    level: Level = "sample"
    components: tuple[str, ...] | None = None

    def batch(self, answer: Any, rows: Sequence[int], lengths: Sequence[int] | None) -> list[RowAnswer]:
        """One answer for every row of `rows`, whose responses have `lengths` tokens."""
        values = _listed(answer)
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise self.error(
                f"returned {_show(answer)} for {len(rows)} rows; it must return a list of {len(rows)} numbers. To be "
                f"called once per row instead, wrap it in rewards.per_row."
            )
        if len(values) != len(rows):
            raise self.error(
                f"returned {len(values)} rewards for {len(rows)} rows ({rows[0]}..{rows[-1]}); it must return one per "
                f"row, in their order."
            )
        return [self.one(value, row, lengths[i] if lengths else 0) for i, (value, row) in enumerate(zip(values, rows))]

    def one(self, answer: Any, row: int, length: int) -> RowAnswer:
        """The answer for row `row`, whose response has `length` tokens."""
        value = _listed(answer)
        if isinstance(value, RowFailure):
            return RowAnswer(failure=value)
        if value is None:
            return RowAnswer()
        if isinstance(value, Mapping) and self.components is not None:
            if "score" not in value:
                raise self.error(f"returned {_show(answer)} at row {row}; a dict must have the entry 'score'.")
            parts = {key: self._part(value[key], key, row) for key in self.components if value.get(key) is not None}
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
                f"returned {_show(value)} at row {row}; at level='token' it must return a list of {length} numbers, "
                f"one per response token. For one number per response use level='sample'."
            )
        if len(value) != length:
            raise self.error(
                f"returned {len(value)} rewards at row {row}, whose response has {length} tokens; at level='token' it "
                f"must return one per response token."
            )
        return [self._number(one, f"at row {row}, token {i}") for i, one in enumerate(value)]

    def _part(self, value: Any, key: str, row: int) -> float:
        return self._number(value, f"as {key!r} at row {row}")

    def _number(self, answer: Any, place: str) -> float:
        value = _listed(answer)
        if not isinstance(value, numbers.Real):
            several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            hint = ", or with level='token' a list of one number per response token" if several else ""
            raise self.error(f"returned {_show(answer)} {place}; it must be a number{hint}.")
        try:
            number = float(value)
        except OverflowError:
            raise self.error(f"returned {_show(answer)} {place}; it does not fit float32.") from None
        if not math.isfinite(number):
            raise self.error(f"returned {number} {place}; it must be finite.")
        if abs(number) > FLOAT32_MAX:
            raise self.error(f"returned {number} {place}; it does not fit float32.")
        return number


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the repr of a type of the user's; or an integer of more than 4,300 digits
        text = f"what has no repr: {error}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _listed(value: Any) -> Any:
    """Python values of torch and numpy arrays and scalars, and of ragged rows."""
    return value.tolist() if hasattr(value, "tolist") else value
