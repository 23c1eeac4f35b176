"""Trajectory: what a model said in one conversation, as rows to train on (token in, token out).

A turn begins with the ids that the model is given. Where these continue a row, the ids between are the environment's
and join the row, masked; where they do not (the history was rendered in another way, an agent asks about something
else, or at another temperature), a new row begins with them as its prompt. So each sampled token is in exactly one row,
as it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NO_TURN = -1
"""In `turn_ids`: a token that the model did not write."""
GREEDY = 0.0
"""The `temperature` of a row whose turns were greedy though the call samples: there is no draw to learn from."""


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
