"""Rewards per token and per row: normalised by those of the run, to which tokens a score is credited, discounted sums.

Shapes: B rows, R response tokens, V valid (unmasked) tokens of all rows, or rewards that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.kl import Controller
from hybridflow.algorithms.masked import check_finite, valid_lengths
from hybridflow.batch.columns import Column
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError
from hybridflow.settings import Positive, check_fields


def token_rewards(
    rewards: Column, mask: Ragged, name: str = "rewards", change: Callable[[Tensor], Tensor] | None = None
) -> Ragged:
    """Ragged [B, R] float64: token rewards as they are, or [B] rewards at the last valid token of each row.

    Exactly 0 at masked tokens; a row without valid tokens keeps none, whatever its reward. `change` gets all others as
    one tensor, and returns what is credited. `name` of the column is for messages. Errors: BatchError for a wrong shape
    or a reward that is not finite, with its row."""
    if isinstance(rewards, list):
        raise BatchError(f"{name} is a column of Python objects; it must be a tensor [rows], or ragged.")
    per_token = isinstance(rewards, Ragged)
    flat = rewards.values if per_token else rewards
    fits = torch.equal(rewards.offsets, mask.offsets) if per_token else len(flat) == len(mask)
    if flat.ndim != 1 or not fits:
        raise BatchError(
            f"{name} {rewards if per_token else tuple(flat.shape)} do not fit {mask}: they must be [rows], or ragged "
            f"like the response."
        )
    counts = valid_lengths(mask)
    valid = mask.values if per_token else counts > 0
    check_finite(name, rewards, valid)
    flat = flat.to(torch.float64)
    if change is not None:
        flat = flat.masked_scatter(valid, change(flat[valid]))
    if per_token:
        return mask.with_values(torch.where(mask.values, flat, 0.0))
    last = mask.values.nonzero()[:, 0][(counts.cumsum(0) - 1)[counts > 0]]
    out = flat.new_zeros(len(mask.values))
    out[last] = flat[counts > 0]
    return mask.with_values(out)


def row_scores(column: Column, mask: Ragged | None, name: str = "rewards") -> Tensor:
    """[B] float64: the score of each row, [B] as it is, or token scores ragged [B, R] summed over valid tokens.

    Without a `mask` every token counts. Errors: BatchError, with the `name` of the column, when it has no such shape.
    """
    if isinstance(column, Ragged) and column.values.ndim == 1:
        if mask is None:
            return column.to(torch.float64).row_sum()
        if torch.equal(column.offsets, mask.offsets):
            return mask.with_values(torch.where(mask.values, column.values.to(torch.float64), 0.0)).row_sum()
    if isinstance(column, Tensor) and column.ndim == 1:
        return column.to(torch.float64)
    found = tuple(column.shape) if isinstance(column, Tensor) else column
    found = "a column of Python objects" if isinstance(column, list) else found
    raise BatchError(f"{name} {found}: scores must be [rows], or ragged like the response {mask or ''}".rstrip() + ".")


def every_token(per_row: Tensor, mask: Ragged) -> Ragged:
    """Ragged [B, R]: the value of a row, [B], at each of its valid tokens; exactly 0 at masked ones."""
    return mask.with_values(torch.where(mask.values, mask.expand(per_row), 0.0))


def valid_only(x_V: Tensor, mask: Ragged) -> Ragged:
    """Ragged [B, R]: the values at valid tokens, exactly 0 at masked ones."""
    out = x_V.new_zeros(len(mask.values))
    out[mask.values] = x_V
    return mask.with_values(out)


def rewards_to_go(rewards: Ragged, mask: Ragged, gamma: float = 1.0) -> Ragged:
    """Ragged [B, R] float64: r_t + gamma * r_{t+1} + ... over the valid tokens of each row, 0 at masked tokens."""
    to_go_V = discounted_sum(rewards.values[mask.values].to(torch.float64), valid_lengths(mask), float(gamma))
    return valid_only(to_go_V, mask)


def discounted_sum(x_V: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """[V]: y_t = x_t + factor * y_{t+1} within each of the rows of `lengths` [B] int64, for all rows at once."""
    if len(x_V) == 0 or factor == 0.0:
        return x_V.clone()
    row_V = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at_V = torch.arange(len(x_V)) - (lengths.cumsum(0) - lengths)[row_V]
    # Time first, so that each step of the scan reads and writes contiguous memory; beyond a row's end x is 0.
    scan_LB = x_V.new_zeros(int(lengths.max()), len(lengths))
    scan_LB[at_V, row_V] = x_V
    for t in range(len(scan_LB) - 2, -1, -1):
        scan_LB[t].add_(scan_LB[t + 1], alpha=factor)
    return scan_LB[at_V, row_V]


@dataclass(eq=False)
class RunningNorm(Controller):
    """(r - mean) / std, or without `center` r / std, within +-`clip`: of all rewards so far, those of the batch
    included.

    Rewards [B] count where a row has a valid token, token rewards at every valid token, trajectories once. std has
    Bessel's correction; as long as all rewards were equal they are not divided. One object is one statistic, kept from
    iteration to iteration and in the run's checkpoints; a batch that is given twice counts twice.

    TRL's `use_score_scaling` with `use_score_norm` (`center`) and `score_clip`. OpenRLHF's `normalize_reward` is by the
    mean and deviation of the reward model's own data instead. Chan et al., "Updating formulae and a pairwise algorithm
    for computing sample variances" (1979). Errors: ConfigError for a clip that is not positive and finite."""

    center: bool = True
    clip: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        self.state = [0.0, 0.0, 0.0]  # count, mean, sum of squared differences from it

    @property
    def mean(self) -> float:
        return self.state[1]

    @property
    def std(self) -> float:
        count, mean, squares = self.state
        found = math.sqrt(squares / max(1.0, count - 1))
        return found if found > 1e-12 * max(1.0, abs(mean)) else 0.0  # equal rewards differ by rounding

    def __call__(self, rewards_V: Tensor) -> Tensor:
        """Take in the rewards, float64; returns them normalised."""
        if not len(rewards_V):
            return rewards_V
        (before, mean, squares), new, own = self.state, len(rewards_V), float(rewards_V.mean())
        count, apart = before + new, own - mean
        squares += float((rewards_V - own).square().sum()) + apart**2 * before * new / count
        self.state = [count, mean + apart * new / count, squares]
        found = (rewards_V - self.mean if self.center else rewards_V) / (self.std or 1.0)
        return found if self.clip is None else found.clamp(-float(self.clip), float(self.clip))
