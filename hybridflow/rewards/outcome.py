"""What comes out of a reward function: of one call, of one row, of a whole batch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hybridflow.batch.ragged import Ragged


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
