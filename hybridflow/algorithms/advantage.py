"""compute_advantage: from rewards to advantages and returns, by the name of an estimator.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.credit import token_rewards
from hybridflow.algorithms.estimators import ESTIMATORS, Estimator, EstimatorFunction, Options
from hybridflow.algorithms.kl import FixedKL, KLState, check_kl_kind, kl_estimate, penalise
from hybridflow.algorithms.typed_columns import token_column
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError, EmptyBatchError, nearest
from hybridflow.ragged import Ragged

KLCoef = float | FixedKL | KLState


def find_estimator(estimator: str | EstimatorFunction) -> Estimator:
    """By name, or a user's function.

    The function's attributes `reads` and `writes` name its columns, as those of `Estimator`; without `reads`, it is
    sent all columns. Errors: ConfigError for an unknown name, with the nearest known one.
    """
    if callable(estimator):
        name = getattr(estimator, "__name__", type(estimator).__name__)
        reads, writes = getattr(estimator, "reads", None), getattr(estimator, "writes", ())
        return Estimator(name=name, function=estimator, reads=reads, writes=writes, built_in=False)
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise ConfigError(f"advantage estimator {estimator!r} is unknown.{nearest(str(estimator), ESTIMATORS)}")
    return ESTIMATORS[estimator]


def check_advantage(
    estimator: str | EstimatorFunction, options: Options, *, kl_coef: Any = 0.0, kl: str = "k1"
) -> Estimator:
    """Check a call of `compute_advantage` without data. Errors: ConfigError, with the nearest name."""
    found = find_estimator(estimator)
    found.check(options)
    check_kl_kind(kl)
    if _uses_kl(kl_coef) and found.kl == "unused":
        raise ConfigError(
            f"advantage estimator {found.name!r} does not look at the total reward, so a KL penalty in it would be "
            f"without effect. Leave out kl_coef here and use update_actor(batch, kl_coef=...)."
        )
    return found


def advantage_reads(
    estimator: str | EstimatorFunction, options: Options | None = None, *, kl_coef: Any = 0.0
) -> tuple[str, ...] | None:
    """Columns that `compute_advantage` reads (None: every column)."""
    own = find_estimator(estimator).columns_read(options or {})
    if own is None:
        return None
    return ("rewards", "response_mask", *own, *(("old_log_probs", "ref_log_probs") if _uses_kl(kl_coef) else ()))


def advantage_writes(estimator: str | EstimatorFunction, *, kl_coef: Any = 0.0) -> tuple[str, ...]:
    """Columns that `compute_advantage` writes."""
    own = find_estimator(estimator).writes
    return ("advantages", "returns", *own, *(("kl", "kl_coef") if _uses_kl(kl_coef) else ()))


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
    reward or a result is not finite.
    """
    found = check_advantage(estimator, options, kl_coef=kl_coef, kl=kl)
    if len(batch) == 0:
        raise EmptyBatchError("compute_advantage was given a batch without rows.")
    mask = token_column(batch, "response_mask")
    rewards = token_rewards(batch.peek("rewards"), mask)
    kl_rewards, kl_columns = _kl_rewards(batch, mask, kl_coef, kl)
    if found.kl == "split":
        result = found.function(rewards, batch, kl_rewards, **options)
    else:
        result = found.function(rewards.with_values(rewards.values + kl_rewards.values), batch, **options)
    return Batch({**_columns(found, result, mask), **kl_columns})


def _kl_rewards(batch: Batch, mask: Ragged, kl_coef: KLCoef, kl: str) -> tuple[Ragged, dict[str, Tensor]]:
    """-kl_coef * kl_t of every valid token, ragged [B, R] float32 (0 without a penalty), and `kl`, `kl_coef` [B]."""
    nothing = mask.with_values(torch.zeros(len(mask.values)))
    if not _uses_kl(kl_coef):
        return nothing, {}
    coef = kl_coef if isinstance(kl_coef, int | float) else kl_coef.coef
    log_probs, reference = token_column(batch, "old_log_probs", mask), token_column(batch, "ref_log_probs", mask)
    token_kl = kl_estimate(log_probs.values, reference.values, "k1")
    row_kl = mask.with_values(torch.where(mask.values, token_kl, 0.0)).row_sum()
    if isinstance(kl_coef, KLState):
        kl_coef.update(float(row_kl.mean()), len(batch))
    columns = {"kl": row_kl, "kl_coef": torch.full((len(batch),), float(coef))}
    return penalise(nothing, log_probs, reference, mask, coef, kl), columns


def _columns(found: Estimator, result: Any, mask: Ragged) -> dict[str, Tensor | Ragged]:
    """What an estimator returned, by column: float32, and exactly 0 at masked tokens.

    Errors: BatchError when these are not the columns that it writes, or not finite numbers of the batch's shape.
    """
    if isinstance(result, tuple) and len(result) == 2:
        result = dict(zip(("advantages", "returns"), result, strict=True))
    wanted = ("advantages", "returns", *found.writes)
    if not isinstance(result, Mapping) or set(result) != set(wanted):
        given = f"columns {tuple(result)}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise BatchError(
            f"advantage estimator {found.name!r} returned {given}: it must return (advantages, returns), or a mapping "
            f"of {wanted}. Name further columns in its attribute `writes`."
        )
    return {name: _column(found.name, name, result[name], mask) for name in wanted}


def _column(estimator: str, name: str, column: Any, mask: Ragged) -> Tensor | Ragged:
    per_token = isinstance(column, Ragged)
    flat = column.values if per_token else column
    fits = column.offsets.equal(mask.offsets) if per_token else isinstance(flat, Tensor) and len(flat) == len(mask)
    if not fits or flat.ndim != 1 or (name in ("advantages", "returns") and not per_token):
        raise BatchError(
            f"advantage estimator {estimator!r} returned {name} {column if per_token else type(column).__name__}, the "
            f"response is {mask}: advantages and returns must be ragged like it, other columns that or [rows]."
        )
    flat = (torch.where(mask.values, flat, 0.0) if per_token else flat).to(torch.float32)
    if not bool(torch.isfinite(flat).all()):
        at = int((~torch.isfinite(flat)).nonzero()[0, 0])
        row = int(mask.row_index()[at]) if per_token else at
        raise BatchError(
            f"advantage estimator {estimator!r}: {name} of row {row} is {float(flat[at])}. The rewards are finite: "
            f"look at the other columns that it reads."
        )
    return mask.with_values(flat) if per_token else flat


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
