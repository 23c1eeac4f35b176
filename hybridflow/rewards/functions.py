"""Functions: one or several reward functions with weights, limits and a rule for rows that fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import cloudpickle
import torch

from hybridflow.errors import ConfigError, RewardError
from hybridflow.ragged import Ragged
from hybridflow.rewards.answers import FLOAT32_MAX, Level, RowAnswer, is_number
from hybridflow.rewards.calling import Caller
from hybridflow.rewards.children import Children
from hybridflow.rewards.function import Columns, FunctionReward, Table
from hybridflow.rewards.outcome import Scores
from hybridflow.rewards.parallel import in_children
from hybridflow.rewards.signature import layers, name_of
from hybridflow.rewards.weighted import named, weighted_sum, weights_of

Function = Callable[..., Any]
OnFailure = Literal["raise", "zero", "mask"]

PATIENCE = 600.0
"""Seconds that a call in a child process may take where no `timeout` is given."""

_log = logging.getLogger(__name__)


class Functions:
    """Reward functions as a RewardWorker calls them; `column` is "costs" for those of a CostWorker.

    `functions` is one, a list, or a mapping from names to functions (conventions: FunctionReward; verl's
    compute_score: from_compute_score). The reward of a row is the sum of weight * value over the functions that did
    not answer None for it (`weights`: a list, or a mapping by name; 1 where nothing is said). With several functions
    each writes its own values as a column `rewards/<name>`, NaN where it answered None; at level "token" the sum over
    the row.

    `workers` child processes run the functions, each call (of a row, or of a share of the rows for functions that take
    all rows) for at most `timeout` seconds (600 where not given); workers=0 runs them in this process, where nothing
    can be stopped, so a `timeout` makes it one worker. A row that cannot be judged (the function raised, was late,
    died, or answered RowFailure) is an error with on_failure="raise", and has reward 0 and a reason in
    `Scores.failures` with "zero" and "mask" (whoever calls this masks those rows out). Wrong answers are errors always.

    Constructing is cheap and starts nothing; a copy starts children of its own. Errors: ConfigError.
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
    ) -> None:
        _choose("level", level, ("sample", "token"))
        _choose("on_failure", on_failure, ("raise", "zero", "mask"))
        if type(workers) is not int or workers < 0:
            raise ConfigError(
                f"reward functions: workers={workers!r} must be a whole number: of child processes, or 0 for none."
            )
        if timeout is not None and not (is_number(timeout) and timeout > 0):
            raise ConfigError(f"reward functions: timeout={timeout!r} must be a number of seconds above 0.")
        by_name = named(functions)
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
        seconds = PATIENCE if timeout is None else float(timeout)
        caller = Caller([reward.function for reward in self.rewards], seconds)
        self._children = Children(caller, self.workers, seconds=seconds) if self.workers else None
        self._checked = False

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Columns besides the texts and row_id ("name?" where it may be missing); None: every column."""
        entries: dict[str, None] = {}
        for reward in self.rewards:
            if reward.reads is None:
                return None
            entries |= dict.fromkeys(reward.reads)
        return tuple(entry for entry in entries if entry.removesuffix("?") == entry or entry[:-1] not in entries)

    def check(self) -> None:
        """What can be checked on the driver beyond the constructor: functions for child processes can be sent there.

        Errors: ConfigError.
        """
        if self._children is None or self._checked:
            return
        for reward in self.rewards:
            try:
                _ = cloudpickle.dumps(reward.function)
            except Exception as error:  # pickling runs the user's classes: whatever they raise means the same
                raise ConfigError(
                    f"reward function {reward.name} cannot be sent to a child process ({type(error).__name__}: "
                    f"{error}). Let it make what it needs when it is called, or set workers=0 without a timeout."
                ) from error
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
        raising = self.on_failure == "raise"
        if self._children is None or not len(prompts):
            pairs = zip(self.rewards, tables, strict=True)
            answers = [reward.answers(table, raising=raising) for reward, table in pairs]
        else:
            self.check()
            answers = in_children(self.rewards, tables, self._children, raising=raising)
        return self._scores(answers, tables[0])

    def close(self) -> None:
        """Stop the child processes, if any, and close the functions that have a method `close`, as verifiers do."""
        if self._children is not None:
            self._children.close()
        closing = {id(part): part for reward in self.rewards for part in layers(reward.function)}
        for part in closing.values():
            if callable(close := getattr(part, "close", None)) and not isinstance(part, type):
                try:
                    close()
                except Exception as error:  # the user's code; the others are to be closed in any case
                    _log.warning("%s.close() raised %s: %s", name_of(part), type(error).__name__, error)

    def _scores(self, answers: Sequence[Sequence[RowAnswer]], table: Table) -> Scores:
        rows = list(zip(*answers, strict=True))
        failures = [self._failure(row) for row in rows]
        if failed := [(row, why) for row, why in zip(table.rows, failures, strict=True) if why is not None]:
            _log.warning("%d of %d rows could not be judged; row %d: %s", len(failed), len(rows), *failed[0])
        sums = [
            self._sum(row, table, number) if why is None else None
            for number, (row, why) in enumerate(zip(rows, failures, strict=True))
        ]
        return Scores(rewards=self._column(sums, table), components=self._components(answers), failures=failures)

    def _failure(self, row: Sequence[RowAnswer]) -> str | None:
        for reward, answer in zip(self.rewards, row, strict=True):
            if answer.failure is not None:
                return f"{reward.name}: {answer.failure.reason}"
        return None

    def _sum(self, row: Sequence[RowAnswer], table: Table, number: int) -> float | list[float]:
        total = weighted_sum([answer.value for answer in row], self.weights)
        name, where = table.rows[number], self.rewards[0].check.where
        if total is None:
            if len(self.rewards) == 1:
                raise self.rewards[0].check.error(f"returned None (NoneType) at row {name}; it must be a number.")
            raise RewardError(
                f"all reward functions ({', '.join(self.names)}) returned None at row {name}; at least one must apply "
                f"to every row. {where}"
            )
        if any(abs(value) > FLOAT32_MAX for value in (total if isinstance(total, list) else [total])):
            raise RewardError(f"the weighted reward at row {name} does not fit float32: {total!r:.60}. {where}")
        return total

    def _column(self, sums: Sequence[float | list[float] | None], table: Table) -> torch.Tensor | Ragged:
        if self.level == "sample":
            return torch.tensor([0.0 if value is None else value for value in sums], dtype=torch.float32)
        lengths = table.lengths or []
        values = [[0.0] * length if v is None else v for v, length in zip(sums, lengths, strict=True)]
        return Ragged.from_lengths(
            torch.tensor([number for row in values for number in row], dtype=torch.float32),  # type: ignore[union-attr]
            lengths,
        )

    def _components(self, answers: Sequence[Sequence[RowAnswer]]) -> dict[str, torch.Tensor]:
        found: dict[str, list[float]] = {}
        for name, reward, said in zip(self.names, self.rewards, answers, strict=True):
            found[f"{self.column}/{name}"] = [
                math.nan if one.value is None else sum(one.value) if isinstance(one.value, list) else one.value
                for one in said
            ]
            found |= {
                f"{self.column}/{part}": [one.parts.get(part, math.nan) for one in said] for part in reward.components
            }
        return {name: torch.tensor(found[name], dtype=torch.float32) for name in self.writes}


def _choose(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"reward functions: {name}={value!r} must be one of {', '.join(map(repr, known))}.")
