"""compute_advantage: from rewards to advantages and returns, by the name of an estimator.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.credit import token_rewards
from hybridflow.algorithms.estimators import ESTIMATORS, Estimator, EstimatorFunction, Options
from hybridflow.algorithms.kl import FixedKL, KLState, check_kl_kind, penalise
from hybridflow.algorithms.lagrange import LagrangeState
from hybridflow.algorithms.typed_columns import check_finite, mask_column, token_column, with_mask_of_bools
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
    estimator: str | EstimatorFunction, options: Options, *, kl_coef: Any = None, kl: str | None = None
) -> Estimator:
    """Check a call of `compute_advantage` without data. Errors: ConfigError, with the nearest name."""
    found = find_estimator(estimator)
    found.check(options)
    if kl is not None:
        check_kl_kind(kl)
        if kl_coef is None:
            raise ConfigError(
                f"compute_advantage(kl={kl!r}) without kl_coef takes no penalty: give kl_coef=..., or leave out kl."
            )
    if _uses_kl(kl_coef) and found.kl == "unused":
        raise ConfigError(
            f"advantage estimator {found.name!r} does not look at the total reward, so a KL penalty in it would be "
            f"without effect. Leave out kl_coef here and use update_actor(batch, kl_coef=...)."
        )
    return found


def advantage_reads(
    estimator: str | EstimatorFunction, options: Options | None = None, *, kl_coef: Any = None
) -> tuple[str, ...] | None:
    """Columns that `compute_advantage` reads (None: every column)."""
    own = find_estimator(estimator).columns_read(options or {})
    if own is None:
        return None
    return ("rewards", "response_mask", *own, *(("old_log_probs", "ref_log_probs") if _uses_kl(kl_coef) else ()))


def advantage_writes(estimator: str | EstimatorFunction, *, kl_coef: Any = None) -> tuple[str, ...]:
    """Columns that `compute_advantage` writes."""
    own = find_estimator(estimator).writes
    return ("advantages", "returns", *own, *(("kl", "kl_coef") if _uses_kl(kl_coef) else ()))


def compute_advantage(
    batch: Batch,
    estimator: str | EstimatorFunction,
    *,
    kl_coef: KLCoef | None = None,
    kl: str | None = None,
    **options: Any,
) -> Batch:
    """A batch of `advantages` and `returns`, ragged [B, R] float32, exactly 0 at masked tokens (paper, table 4).

    Reads `rewards` ([B], credited to the last valid response token, or ragged [B, R] token rewards),
    `response_mask` (bool, or numbers 0 and 1), what the estimator reads, and with a KL penalty `old_log_probs` and
    `ref_log_probs`. The penalty `kl_coef` * kl_t (estimated as `kl`, by default "k1") is taken from the reward of every
    valid token; then `kl` [B] float32 (k1, nats per row) and `kl_coef` [B] float32 are written too. A `KLState` gives
    the coefficient of this batch and then takes in its KL. Computed in float64, and rounded to float32 at the end.

    Estimators over groups write as `returns` the score of the row, its summed reward, at every valid token (verl: the
    advantages). They leave rows without a valid token out of the statistics of their group (verl and TRL count them).

    Errors: ConfigError for an unknown estimator or option, or `kl` without `kl_coef`; MissingColumnError;
    EmptyBatchError; BatchError when a reward, another column or a result is not finite, and by an estimator over groups
    when every group has one row. A state that learns (`KLState`, `LagrangeState`) moves only when the call succeeds.
    """
    found = check_advantage(estimator, options, kl_coef=kl_coef, kl=kl)
    if len(batch) == 0:
        raise EmptyBatchError("compute_advantage was given a batch without rows.")
    batch = with_mask_of_bools(batch)
    mask = mask_column(batch)
    rewards = token_rewards(batch.peek("rewards"), mask)
    kl_rewards, kl_columns = _kl_rewards(batch, mask, kl_coef, kl or "k1")
    trial = {name: replace(value) if isinstance(value, LagrangeState) else value for name, value in options.items()}
    if found.kl == "split":
        result = found.function(rewards, batch, kl_rewards, **trial)
    else:
        rewards = rewards.with_values(rewards.values + kl_rewards.values)
        result = found.function(rewards if found.built_in else rewards.to(torch.float32), batch, **trial)
    out = Batch({**_columns(found, result, mask), **kl_columns})
    for name, state in trial.items():
        if isinstance(state, LagrangeState):
            options[name].log_multiplier = state.log_multiplier
    if isinstance(kl_coef, KLState):
        kl_coef.update(float(kl_columns["kl"].mean()), len(batch))
    return out


def _kl_rewards(batch: Batch, mask: Ragged, kl_coef: KLCoef | None, kl: str) -> tuple[Ragged, dict[str, Tensor]]:
    """-kl_coef * kl_t of every valid token, ragged [B, R] float64 (0 without a penalty), and `kl`, `kl_coef` [B]."""
    nothing = mask.with_values(torch.zeros(len(mask.values), dtype=torch.float64))
    if kl_coef is None or not _uses_kl(kl_coef):
        return nothing, {}
    coef = float(kl_coef.coef if isinstance(kl_coef, FixedKL | KLState) else kl_coef)
    log_probs, reference = token_column(batch, "old_log_probs", mask), token_column(batch, "ref_log_probs", mask)
    for name, column in (("old_log_probs", log_probs), ("ref_log_probs", reference)):
        check_finite(name, column, mask.values)
    row_kl = -penalise(nothing, log_probs, reference, mask, 1.0, "k1").row_sum()
    columns = {"kl": row_kl.to(torch.float32), "kl_coef": torch.full((len(batch),), coef)}
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
            f"look at what else it reads, and at what it computes."
        )
    return mask.with_values(flat) if per_token else flat


def _uses_kl(kl_coef: Any) -> bool:
    """Errors: ConfigError when it is no coefficient."""
    if isinstance(kl_coef, KLState | FixedKL):
        return isinstance(kl_coef, KLState) or kl_coef.coef > 0
    if kl_coef is None:
        return False
    if isinstance(kl_coef, bool) or not isinstance(kl_coef, Real):
        raise ConfigError(
            f"kl_coef={kl_coef!r} is no KL coefficient: give a number, FixedKL(...), or KLState(AdaptiveKL(...)), "
            f"which keeps the coefficient from one iteration to the next."
        )
    return FixedKL(float(kl_coef)).coef > 0
