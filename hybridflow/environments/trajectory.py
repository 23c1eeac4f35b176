"""Trajectory: what a model said in one conversation, as rows to train on (token in, token out), and as a Batch.

A turn begins with the ids that the model is given. Where these continue a row, the ids between are the environment's
and join the row, masked; where they do not (the history was rendered in another way, an agent asks about something
else, or at another temperature), a new row begins with them as its prompt. So each sampled token is in exactly one row,
as it was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.contract import Row
from hybridflow.environments.acting import Ending

NO_TURN = -1
"""In `turn_ids`: a token that the model did not write."""
GREEDY = 0.0
"""The `temperature` of a row whose turns were greedy though the call samples: there is no draw to learn from."""
AGENT_COLUMNS = ("row_id", "group_id", "trajectory_id", "response_mask", "turn_ids", "turns", "stop")
AGENT_COLUMNS += ("environment_failure", "tool_calls", "tool_errors", "prefill_tokens")
REWARD_COLUMNS = ("rewards", "rewards/environment", "environment_metrics")
_FORK = 1 << 48
"""`row_id` of a trajectory's k-th further row: `trajectory_id` + k * this."""
_TRUNCATED = ("length", "turns", "failure")


@dataclass(slots=True)
class TrajectoryRow:
    """One row: a prompt, and the response to it, of which `response_mask` marks what the model wrote.

    `log_probs` are 0 on other tokens, `turn_ids` NO_TURN, and `policy_version` that of the token before.
    """

    prompt_ids: list[int]
    temperature: float = 1.0  # of all its turns
    token_ids: list[int] = field(default_factory=list)
    response_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    finished: bool = False  # the model ended its last turn, rather than its length
    routed_experts: Any = None  # of all tokens but the last, as they were computed for the last turn
    images: Any = None  # RowImages: those whose tokens are among its tokens

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def begins(self, ids: Sequence[int], images: Any = None) -> bool:
        """Whether `ids` are this row's tokens and something after them, and `images` its images and others."""
        own, given = (() if one is None else tuple(one.names) for one in (self.images, images))
        return list(ids[: self.length]) == self.prompt_ids + self.token_ids and given[: len(own)] == own

    def _add(
        self, ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int], mask: bool, turn: int
    ) -> None:
        self.token_ids += ids
        self.response_mask += [mask] * len(ids)
        self.log_probs += log_probs
        self.policy_version += versions
        self.turn_ids += [turn] * len(ids)


@dataclass(slots=True)
class Trajectory:
    """The rows of one conversation, in the order in which they began. `turns` counts what the model said."""

    rows: list[TrajectoryRow] = field(default_factory=list)
    turns: int = 0

    def add(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int],
        finished: bool = True,
        temperature: float = 1.0,
        routed_experts: Any = None,
        images: Any = None,
    ) -> None:
        """One turn: the ids that the model was given, all of them, and what it sampled, at which temperature; the
        experts of these tokens, and the images (RowImages) whose tokens are among the ids."""
        # The longest row that these ids continue, with the environment's ids, or a new one.
        fitting = (row for row in self.rows if row.temperature == temperature and row.begins(prompt_ids, images))
        if (row := max(fitting, key=lambda row: row.length, default=None)) is None:
            self.rows.append(row := TrajectoryRow(list(prompt_ids), temperature))
        else:
            between = prompt_ids[row.length :]
            row._add(between, [0.0] * len(between), row.policy_version[-1:] * len(between), False, NO_TURN)
        row.finished, row.images = finished, images
        if routed_experts is not None:  # a turn that ended before its engine computed it has none
            row.routed_experts = routed_experts
        row._add(token_ids, log_probs, versions, True, self.turns)
        self.turns += 1


class Acted(NamedTuple):
    """A trajectory: how it began (a Row without tokens, whose counters are those of all turns), its row of the prompts,
    and how it ended; `failure` says why an environment did not do its part."""

    begun: Row
    row: Mapping[str, Any]
    trajectory: Trajectory
    ending: Ending
    failure: str | None = None


def trajectory_rows(acted: Sequence[Acted], silent: Sequence[int]) -> list[list[tuple[Row, TrajectoryRow]]]:
    """The rows of each trajectory, in the order in which they began. Where the model said nothing: one masked token
    after the prompt (without `prompt_ids`, `silent`)."""
    out = []
    for first, given, trajectory, ending, _ in acted:
        prompt = given.get("prompt_ids", silent)
        usual = first.sampling.policy_temperature
        unsaid = prompt[-1:] if first.images is None else silent
        own = first.images if "prompt_ids" in given else None
        empty = TrajectoryRow(list(prompt), usual, list(unsaid), [False], [0.0], [-1], [NO_TURN], images=own)
        parts = trajectory.rows or [empty]
        rows = [
            Row(first.row_id, first.index, one.prompt_ids, sampling, 0, one.token_ids, one.log_probs)
            for one in parts
            for sampling in [replace(first.sampling, greedy=False, temperature=one.temperature or usual)]
        ]
        for row, one in zip(rows, parts, strict=True):
            row.policy_version, row.routed_experts, row.images = one.policy_version, one.routed_experts, one.images
            row.end = "stop" if one.finished and ending.stop not in _TRUNCATED else "length"
        out.append(list(zip(rows, parts, strict=True)))
    return out


def trajectory_columns(
    acted: Sequence[Acted], several: Sequence[Sequence[tuple[Row, TrajectoryRow]]], n: int, rewards: bool
) -> Batch:
    """AGENT_COLUMNS, with `rewards` also REWARD_COLUMNS, for the rows of all trajectories, `n` for each prompt."""
    keys = [key for key, rows in enumerate(several) for _ in rows]
    parts = [part for rows in several for _, part in rows]
    masks = [
        [kept and part.temperature != GREEDY and acted[key].failure is None for kept in part.response_mask]
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
        "turns": numbers([end.trajectory.turns for end in acted]),
        "stop": [acted[key].ending.stop for key in keys],
        "environment_failure": [acted[key].failure for key in keys],
        "prefill_tokens": numbers([one.begun.prefilled for one in acted]),
    }
    for name in ("tool_calls", "tool_errors"):
        own[name] = numbers([int(end.ending.metrics.get(name, 0)) for end in acted])
    if rewards:
        given = [math.nan if end.ending.reward is None else end.ending.reward for end in acted]
        masked = [0.0 if end.failure is not None else reward for end, reward in zip(acted, given, strict=True)]
        own["rewards"], own["rewards/environment"] = numbers(masked, torch.float32), numbers(given, torch.float32)
        own["environment_metrics"] = [dict(acted[key].ending.metrics) for key in keys]
    return Batch(own)
