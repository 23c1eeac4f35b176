"""Functions: one or several reward functions with weights, limits and a rule for rows that fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hybridflow.columns import Column
from hybridflow.ragged import Ragged
from hybridflow.rewards.outcome import Scores

Function = Callable[..., Any]


class Functions:
    """Reward functions as a RewardWorker calls them; `column` is "costs" for those of a CostWorker.

    Conventions of a function: see FunctionReward. A verifier is a callable `f(prompts, completions, **columns)` with
    an attribute `reads`, the names of the columns that it gets. A row's answer is a number, None (does not apply) or
    RowFailure(reason). Constructing is cheap and starts nothing.
    """

    def __init__(
        self,
        functions: Function | Sequence[Function] | Mapping[str, Function],
        *,
        weights: Sequence[float] | Mapping[str, float] | None = None,
        level: Literal["sample", "token"] = "sample",
        workers: int = 0,
        timeout: float | None = None,
        on_failure: Literal["raise", "zero", "mask"] = "raise",
        column: str = "rewards",
    ) -> None:
        raise RuntimeError("Functions is being written")

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Columns besides the texts and row_id ("name?" where it may be missing); None: every column."""
        raise RuntimeError("Functions is being written")

    @property
    def writes(self) -> tuple[str, ...]:
        """Component columns ("rewards/format"), one per function where there are several; not `column` itself."""
        raise RuntimeError("Functions is being written")

    def check(self) -> None:
        """What can be checked on the driver beyond the constructor. Errors: ConfigError."""

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        columns: Mapping[str, Column | Sequence[Any]],
        row_ids: Sequence[int] | None = None,
        response_ids: Ragged | None = None,
    ) -> Scores:
        """Scores of all rows. Errors: RewardError naming function, its place, row and column."""
        raise RuntimeError("Functions is being written")

    def close(self) -> None:
        """Stop the child processes, if any."""
