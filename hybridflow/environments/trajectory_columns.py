"""The rows of trajectories as a Batch: the columns of their prompts, what the model said, and how they ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.contract import Row
from hybridflow.environments.agent import Acted
from hybridflow.environments.trajectory import GREEDY, NO_TURN, TrajectoryRow

AGENT_COLUMNS = ("row_id", "group_id", "trajectory_id", "response_mask", "turn_ids", "turns", "stop")
AGENT_COLUMNS += ("environment_failure", "tool_calls", "tool_errors", "prefill_tokens")
REWARD_COLUMNS = ("rewards", "rewards/environment", "environment_metrics")
_FORK = 1 << 48
"""`row_id` of a trajectory's k-th further row: `trajectory_id` + k * this."""
_TRUNCATED = ("length", "turns", "failure")


def trajectory_rows(acted: Sequence[Acted], silent: Sequence[int]) -> list[list[tuple[Row, TrajectoryRow]]]:
    """The rows of each trajectory, in the order in which they began. Where the model said nothing: one masked token
    after the prompt (without `prompt_ids`, `silent`)."""
    out = []
    for first, given, end in acted:
        prompt = given.get("prompt_ids", silent)
        usual = first.sampling.policy_temperature
        unsaid = prompt[-1:] if first.images is None else silent
        own = first.images if "prompt_ids" in given else None
        empty = TrajectoryRow(list(prompt), usual, list(unsaid), [False], [0.0], [-1], [NO_TURN], images=own)
        parts = end.trajectory.rows or [empty]
        rows = [
            Row(first.row_id, first.index, one.prompt_ids, sampling, 0, one.token_ids, one.log_probs)
            for one in parts
            for sampling in [replace(first.sampling, greedy=False, temperature=one.temperature or usual)]
        ]
        for row, one in zip(rows, parts, strict=True):
            row.policy_version, row.routed_experts, row.images = one.policy_version, one.routed_experts, one.images
            row.end = "stop" if one.finished and end.ending.stop not in _TRUNCATED else "length"
        out.append(list(zip(rows, parts, strict=True)))
    return out


def trajectory_columns(
    acted: Sequence[Acted], several: Sequence[Sequence[tuple[Row, TrajectoryRow]]], n: int, rewards: bool
) -> Batch:
    """AGENT_COLUMNS, with `rewards` also REWARD_COLUMNS, for the rows of all trajectories, `n` for each prompt."""
    ends = [one.end for one in acted]
    keys = [key for key, rows in enumerate(several) for _ in rows]
    parts = [part for rows in several for _, part in rows]
    masks = [
        [kept and part.temperature != GREEDY and ends[key].failure is None for kept in part.response_mask]
        for part, key in zip(parts, keys, strict=True)
    ]

    def numbers(values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([values[key] for key in keys], dtype=dtype)

    ids = [one.begun.row_id * n + one.begun.index for one in acted]
    forks = torch.tensor([fork for rows in several for fork in range(len(rows))], dtype=torch.int64)
    own: dict[str, Any] = {
        "row_id": numbers(ids) + forks * _FORK,
        "group_id": numbers([one.row.get("group_id", number // n) for one, number in zip(acted, ids, strict=True)]),
        "trajectory_id": numbers(ids),
        "response_mask": Ragged.from_rows(masks, torch.bool),
        "turn_ids": Ragged.from_rows([part.turn_ids for part in parts], torch.int64),
        "turns": numbers([end.trajectory.turns for end in ends]),
        "stop": [ends[key].ending.stop for key in keys],
        "environment_failure": [ends[key].failure for key in keys],
        "prefill_tokens": numbers([one.begun.prefilled for one in acted]),
    }
    for name in ("tool_calls", "tool_errors"):
        own[name] = numbers([int(end.ending.metrics.get(name, 0)) for end in ends])
    if rewards:
        given = [math.nan if end.ending.reward is None else end.ending.reward for end in ends]
        masked = [0.0 if end.failure is not None else reward for end, reward in zip(ends, given, strict=True)]
        own["rewards"], own["rewards/environment"] = numbers(masked, torch.float32), numbers(given, torch.float32)
        own["environment_metrics"] = [dict(ends[key].ending.metrics) for key in keys]
    return Batch(own)
