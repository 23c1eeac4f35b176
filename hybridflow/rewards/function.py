"""FunctionReward: a user's Python function as a reward, with every answer checked."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.columns import Column
from hybridflow.errors import ConfigError, RewardError


class FunctionReward:
    """Calls `function` in the way that its signature asks for, and returns one finite number per row or raises.

    - `f(prompts, completions, **columns) -> list of numbers` (as in TRL): called once with all rows; the first two
      arguments are positional, so their names do not matter.
    - `f(prompt, response, **columns) -> number`, when the first parameter is named `prompt`: called row by row.

    Of the batch's other columns it gets those that the signature names, as lists of plain Python values (or the plain
    value of the row); all of them when it has `**kwargs`. A column that only has a default may be missing. True and
    False count as 1 and 0. Errors: ConfigError when the function cannot be called with two texts.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            raise ConfigError(f"reward function {self.name} has no signature: wrap it in a Python function.") from None
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        variable = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if len(positional) < 2 and not variable:
            raise ConfigError(
                f"reward function {self.name}{inspect.signature(function)} must take (prompts, completions, ...) for "
                f"all rows, or (prompt, response, ...) for one."
            )
        self.per_row = bool(positional) and positional[0].name == "prompt"
        self._all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [
            p for p in parameters if p not in positional[:2] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        self._texts = {"prompt", "response", *(p.name for p in positional[:2])}
        self._needed = tuple(p.name for p in named if p.default is p.empty)
        self._optional = tuple(p.name for p in named if p.default is not p.empty)

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Names of the extra columns, "name?" where the parameter has a default; None: every column."""
        return None if self._all else (*self._needed, *(f"{name}?" for name in self._optional))

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        columns: Mapping[str, Column | Sequence[Any]] | None = None,
        row_ids: Sequence[int] | None = None,
    ) -> list[float]:
        """One finite number per row. `row_ids` are the rows' names in messages (default: their positions).

        Errors: RewardError naming the function and the row when it raises or answers with the wrong count, None, NaN,
        an infinity or no number; a reward is never made up.
        """
        names = [int(row) for row in row_ids] if row_ids is not None else list(range(len(prompts)))
        extra = self._plain_columns(columns or {})
        if not len(prompts):
            return []
        if self.per_row:
            return [
                self._number(self._call(f"at row {name}", prompt, response, {k: v[i] for k, v in extra.items()}), name)
                for i, (name, prompt, response) in enumerate(zip(names, prompts, responses, strict=True))
            ]
        rows = f"for rows {names[0]}..{names[-1]}"
        return self._numbers(self._call(rows, list(prompts), list(responses), extra), names)

    def _plain_columns(self, columns: Mapping[str, Column | Sequence[Any]]) -> dict[str, list[Any]]:
        """The columns that the function takes, as lists of plain values."""
        if missing := [name for name in self._needed if name not in columns]:
            raise RewardError(
                f"reward function {self.name} needs the column {missing[0]!r}; there are {sorted(columns)}. Add it to "
                f"the prompts, or give the parameter a default."
            )
        taken = (
            [n for n in columns if n not in self._texts]
            if self._all
            else [name for name in (*self._needed, *self._optional) if name in columns]
        )
        return {name: _as_list(columns[name]) for name in taken}

    def _call(self, rows: str, prompts: Any, responses: Any, extra: dict[str, Any]) -> Any:
        try:
            return self.function(prompts, responses, **extra)
        except Exception as error:  # it is the user's code: whatever it raises is passed on with its place
            raise RewardError(
                f"reward function {self.name} raised {type(error).__name__} {rows}: {error}. Fix the function; "
                f"hybridflow does not replace a failed reward."
            ) from error

    def _numbers(self, answer: Any, names: Sequence[int]) -> list[float]:
        values = answer.tolist() if hasattr(answer, "tolist") else answer  # torch and numpy arrays
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise RewardError(
                f"reward function {self.name} returned {_show(answer)} for {len(names)} rows; it must return a list "
                f"of {len(names)} numbers. To be called once per row instead, name its first parameter `prompt`."
            )
        if len(values) != len(names):
            raise RewardError(
                f"reward function {self.name} returned {len(values)} rewards for {len(names)} rows "
                f"({names[0]}..{names[-1]}); it must return one per row, in their order."
            )
        return [self._number(value, name) for name, value in zip(names, values, strict=True)]

    def _number(self, answer: Any, row: int) -> float:
        value = answer.tolist() if hasattr(answer, "tolist") else answer  # torch and numpy scalars
        if not isinstance(value, numbers.Real):
            raise RewardError(
                f"reward function {self.name} returned {_show(answer)} at row {row}; it must be a number."
            )
        number = float(value)
        if not math.isfinite(number):
            raise RewardError(f"reward function {self.name} returned {number} at row {row}; it must be finite.")
        return number


def _as_list(column: Any) -> list[Any]:
    return column if isinstance(column, list) else column.tolist() if hasattr(column, "tolist") else list(column)


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
