"""compute_advantage: from rewards to advantages and returns, by the name of an estimator.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms import whitening
from hybridflow.algorithms.gae import gae, valid_lengths
from hybridflow.algorithms.group import grpo, rloo
from hybridflow.algorithms.kl import FixedKL, KLState, check_kl_kind, kl_estimate, penalise
from hybridflow.algorithms.options import check_options
from hybridflow.algorithms.reinforce import reinforce
from hybridflow.algorithms.remax import remax
from hybridflow.algorithms.typed_columns import row_column, token_column
from hybridflow.batch import Batch
from hybridflow.columns import Column
from hybridflow.errors import BatchError, ConfigError, EmptyBatchError, nearest
from hybridflow.ragged import Ragged

EstimatorFunction = Callable[..., tuple[Ragged, Ragged]]
"""`estimator(token_rewards, batch, **options) -> (advantages, returns)`, all ragged [B, R] like the response."""


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: its function, and the columns it reads besides rewards and mask (None: every column)."""

    name: str
    function: EstimatorFunction
    reads: tuple[str, ...] | None

    def check(self, options: Mapping[str, Any]) -> None:
        """Errors: ConfigError for an option that the function does not take, with the nearest one that it does."""
        check_options(f"advantage estimator {self.name!r}", self.function, options, after=2)  # rewards and batch


def _gae(rewards: Ragged, batch: Batch, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True):
    mask = token_column(batch, "response_mask")
    advantages, returns = gae(rewards, token_column(batch, "values", mask), mask, gamma=gamma, lam=lam)
    return whitening.whiten(advantages, mask) if whiten else advantages, returns


def _grpo(rewards: Ragged, batch: Batch, *, normalize: bool = True, eps: float = 1e-6):
    scores = rewards.row_sum()  # masked tokens have none
    advantages = grpo(scores, row_column(batch, "group_id"), normalize=normalize, eps=eps)
    return _spread(advantages, batch), _spread(scores, batch)


def _rloo(rewards: Ragged, batch: Batch):
    scores = rewards.row_sum()
    return _spread(rloo(scores, row_column(batch, "group_id")), batch), _spread(scores, batch)


def _remax(rewards: Ragged, batch: Batch, *, gamma: float = 1.0):
    return remax(rewards, row_column(batch, "baseline"), token_column(batch, "response_mask"), gamma=gamma)


def _reinforce(rewards: Ragged, batch: Batch, *, gamma: float = 1.0, normalize: bool = False):
    return reinforce(rewards, token_column(batch, "response_mask"), gamma=gamma, normalize=normalize)


_GROUP = ("group_id",)
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        e.name: e
        for e in (
            Estimator("gae", _gae, ("values",)),
            Estimator("grpo", _grpo, _GROUP),
            Estimator("rloo", _rloo, _GROUP),
            Estimator("remax", _remax, ("baseline",)),
            Estimator("reinforce", _reinforce, ()),
        )
    }
)

KLCoef = float | FixedKL | KLState


def find_estimator(estimator: str | EstimatorFunction) -> Estimator:
    """By name, or a user's function (its attribute `reads` names its columns; without it, it is sent all of them).

    Errors: ConfigError for an unknown name, with the nearest known one.
    """
    if callable(estimator):
        reads = getattr(estimator, "reads", None)
        name = getattr(estimator, "__name__", type(estimator).__name__)
        return Estimator(name, estimator, None if reads is None else tuple(reads))
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise ConfigError(f"advantage estimator {estimator!r} is unknown.{nearest(str(estimator), ESTIMATORS)}")
    return ESTIMATORS[estimator]


def check_advantage(
    estimator: str | EstimatorFunction, options: Mapping[str, Any], *, kl_coef: Any = 0.0, kl: str = "k1"
) -> Estimator:
    """Check a call of `compute_advantage` without data. Errors: ConfigError, with the nearest name."""
    found = find_estimator(estimator)
    found.check(options)
    check_kl_kind(kl)
    _ = _uses_kl(kl_coef)
    return found


def advantage_reads(estimator: str | EstimatorFunction, *, kl_coef: Any = 0.0) -> tuple[str, ...] | None:
    """Columns that `compute_advantage` reads (None: every column)."""
    own = find_estimator(estimator).reads
    if own is None:
        return None
    return ("rewards", "response_mask", *own, *(("old_log_probs", "ref_log_probs") if _uses_kl(kl_coef) else ()))


def advantage_writes(*, kl_coef: Any = 0.0) -> tuple[str, ...]:
    """Columns that `compute_advantage` writes."""
    return ("advantages", "returns", *(("kl", "kl_coef") if _uses_kl(kl_coef) else ()))


def compute_advantage(
    batch: Batch, estimator: str | EstimatorFunction, *, kl_coef: KLCoef = 0.0, kl: str = "k1", **options: Any
) -> Batch:
    """A batch of `advantages` and `returns`, ragged [B, R] float32, exactly 0 at masked tokens (paper, table 4).

    Reads `rewards` ([B], credited to the last valid response token, or ragged [B, R] token rewards),
    `response_mask`, what the estimator reads, and with a KL penalty `old_log_probs` and `ref_log_probs`. The
    penalty `kl_coef` * kl_t (estimated as `kl`) is taken from the reward of every valid token; then `kl` [B] float32
    (k1, nats per row) and `kl_coef` [B] float32 are written too. A `KLState` gives the coefficient of this batch and
    then takes in its KL.

    Errors: ConfigError for an unknown estimator or option, MissingColumnError, EmptyBatchError, and BatchError when a
    reward is not finite.
    """
    found = check_advantage(estimator, options, kl_coef=kl_coef, kl=kl)
    if len(batch) == 0:
        raise EmptyBatchError("compute_advantage was given a batch without rows.")
    mask = token_column(batch, "response_mask")
    rewards = token_rewards(batch.peek("rewards"), mask)
    written: dict[str, Tensor | Ragged] = {}
    if _uses_kl(kl_coef):
        coef = kl_coef if isinstance(kl_coef, int | float) else kl_coef.coef
        log_probs, reference = token_column(batch, "old_log_probs", mask), token_column(batch, "ref_log_probs", mask)
        rewards = penalise(rewards, log_probs, reference, mask, coef, kl)
        token_kl = kl_estimate(log_probs.values, reference.values, "k1")
        row_kl = mask.with_values(torch.where(mask.values, token_kl, 0.0)).row_sum()
        if isinstance(kl_coef, KLState):
            kl_coef.update(float(row_kl.mean()), len(batch))
        written = {"kl": row_kl, "kl_coef": torch.full((len(batch),), coef)}
    advantages, returns = found.function(rewards, batch, **options)
    return Batch({"advantages": advantages, "returns": returns, **written})


def token_rewards(rewards: Column, mask: Ragged) -> Ragged:
    """Ragged [B, R] float32: token rewards as they are, or [B] rewards at the last valid token of each row.

    Exactly 0 at masked tokens; a row without valid tokens keeps none. Errors: BatchError for a wrong shape or a reward
    that is not finite, with its row.
    """
    if isinstance(rewards, list):
        raise BatchError("rewards is a column of Python objects; it must be a tensor [rows], or ragged.")
    flat = rewards.values if isinstance(rewards, Ragged) else rewards
    fits = torch.equal(rewards.offsets, mask.offsets) if isinstance(rewards, Ragged) else len(flat) == len(mask)
    if flat.ndim != 1 or not fits:
        raise BatchError(
            f"rewards {rewards if isinstance(rewards, Ragged) else tuple(flat.shape)} do not fit {mask}: they must be "
            f"[rows], or ragged like the response."
        )
    bad = ~torch.isfinite(flat)
    if isinstance(rewards, Ragged):
        bad &= mask.values
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        row = int(mask.row_index()[at]) if isinstance(rewards, Ragged) else at
        raise BatchError(f"the reward of row {row} is {float(flat[at])}; rewards must be finite numbers.")
    flat = flat.to(torch.float32)
    if isinstance(rewards, Ragged):
        return mask.with_values(torch.where(mask.values, flat, 0.0))
    counts = valid_lengths(mask)
    last = mask.values.nonzero()[:, 0][(counts.cumsum(0) - 1)[counts > 0]]
    out = flat.new_zeros(len(mask.values))
    out[last] = flat[counts > 0]
    return mask.with_values(out)


def _spread(per_row: Tensor, batch: Batch) -> Ragged:
    """Ragged [B, R]: a value per row at each of its valid tokens."""
    mask = token_column(batch, "response_mask")
    return mask.with_values(torch.where(mask.values, mask.expand(per_row), 0.0))


def _uses_kl(kl_coef: Any) -> bool:
    """Errors: ConfigError when it is no coefficient."""
    if isinstance(kl_coef, KLState | FixedKL):
        return isinstance(kl_coef, KLState) or kl_coef.coef > 0
    if isinstance(kl_coef, bool) or not isinstance(kl_coef, int | float):
        raise ConfigError(
            f"kl_coef={kl_coef!r} is no KL coefficient: give a number, FixedKL(...), or KLState(AdaptiveKL(...)), "
            f"which keeps the coefficient from one iteration to the next."
        )
    return FixedKL(float(kl_coef)).coef > 0
