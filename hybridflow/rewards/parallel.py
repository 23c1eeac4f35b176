"""Reward functions in child processes: rows in chunks, each call with a limit, guilty rows told from innocent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridflow.errors import RewardError
from hybridflow.rewards.answers import RowAnswer
from hybridflow.rewards.child import UNSENT
from hybridflow.rewards.children import Children
from hybridflow.rewards.function import FunctionReward, Table
from hybridflow.rewards.outcome import Breakdown, Outcome, RowFailure

GRACE = 5.0
"""Seconds (at most a limit's length) until a child is killed that should have cancelled its own late calls."""


class _Chunk(NamedTuple):
    """Rows start:stop for one call of function number `function`."""

    function: int
    start: int
    stop: int


def in_children(
    rewards: Sequence[FunctionReward], tables: Sequence[Table], children: Children, *, raising: bool
) -> list[list[RowAnswer]]:
    """What every function says about every row; `children` run a `Caller` of the functions.

    A function that is called row by row has one call per row; one for all rows gets as many chunks as there are
    children, and a chunk that fails is repeated row by row. So are async rows, which run together, when one of them
    blocks all others. Errors: RewardError for wrong answers, and for rows that cannot be judged while `raising`.
    """
    found: list[list[RowAnswer]] = [[RowAnswer()] * len(table) for table in tables]
    chunks = [
        _Chunk(number, start, min(start + size, len(table)))
        for number, (reward, table) in enumerate(zip(rewards, tables, strict=True))
        for size in [1 if reward.per_row and not reward.is_async else -(-len(table) // children.count)]
        for start in range(0, len(table), size)
    ]
    while chunks:
        again: list[_Chunk] = []
        for chunk, outcome in zip(chunks, _run(rewards, tables, children, chunks), strict=True):
            reward, table = rewards[chunk.function], tables[chunk.function]
            values = outcome.value if outcome.ok else [Breakdown(str(outcome.failure))]
            failed = isinstance(values[0], RowFailure) and (not reward.per_row or not outcome.ok)
            if failed and chunk.stop - chunk.start > 1:
                again += [_Chunk(chunk.function, row, row + 1) for row in range(chunk.start, chunk.stop)]
            elif reward.per_row or failed:
                if (outcome.failure or "").startswith(UNSENT):
                    raise reward.check.error(f"{outcome.failure} at row {table.rows[chunk.start]}.")
                for row, value in zip(range(chunk.start, chunk.stop), values, strict=True):
                    found[chunk.function][row] = reward.accepted(value, table, row, raising)
            else:
                answers = reward.accepted_all(values[0], table, chunk.start, chunk.stop, raising)
                found[chunk.function][chunk.start : chunk.stop] = answers
        chunks = again
    return found


def _run(
    rewards: Sequence[FunctionReward], tables: Sequence[Table], children: Children, chunks: Sequence[_Chunk]
) -> list[Outcome]:
    calls, limits = [], []
    for chunk in chunks:
        reward, table = rewards[chunk.function], tables[chunk.function]
        rows = range(chunk.start, chunk.stop)
        arguments: list[Any] = (
            [reward.row_call(table, row) for row in rows]
            if reward.per_row
            else [reward.call(table, chunk.start, chunk.stop)]
        )
        together = reward.per_row and reward.is_async and len(rows) > 1  # one row alone has the child's own limit
        calls.append(((chunk.function, arguments, together), {}))
        limits.append(children.seconds + (min(GRACE, children.seconds) if together else 0.0))
    try:
        return children.map(calls, seconds=limits)
    except RewardError as error:
        raise RewardError(f"reward functions {', '.join(reward.name for reward in rewards)}: {error}") from error
