"""compute_advantage: from rewards to advantages and returns, by an estimator.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import RunningNorm, token_rewards
from hybridflow.algorithms.kl import AdaptiveKL, Controller, check_kl_kind, kl_estimate
from hybridflow.algorithms.masked import finite_column, mask_column, with_bool_mask
from hybridflow.algorithms.registry import find_estimator
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, EmptyBatchError
from hybridflow.settings import is_number


def compute_advantage(
    batch: Batch,
    estimator: str | Estimator | Callable[..., Any],
    *,
    kl_coef: float | AdaptiveKL | None = None,
    kl: str | None = None,
    reward_norm: RunningNorm | None = None,
    **options: Any,
) -> Batch:
    """`hf.compute_advantage` on a local batch: advantages and returns, ragged [B, R] float32, 0 at masked tokens.

    Reads `rewards` ([B], credited to the last valid response token, or ragged [B, R] token rewards; first normalised by
    `reward_norm`), `response_mask` (bool, or numbers 0 and 1), what the estimator reads, and with a KL penalty
    `old_log_probs` (without it `log_probs`) and `ref_log_probs`. The penalty `kl_coef` * kl_t (estimated as `kl`, by
    default "k1") is subtracted from the reward of every valid token; then `kl` [B] (k1, nats per row or trajectory) and
    `kl_coef` [B] are written too. Computed in float64, rounded at the end. Rows with one `trajectory_id` [B] int64 are
    one sequence: they count once, and the reward [B] is that of the last. Errors: ConfigError for an unknown estimator
    or option, or `kl` without `kl_coef`; MissingColumnError; EmptyBatchError; BatchError when a reward, another column
    or a result is not finite, and by an estimator over groups when every group has one row. An `AdaptiveKL` or
    `Lagrange` learns only from a call that succeeds."""
    return AdvantageCall(find_estimator(estimator, options), kl_coef, kl, reward_norm)(batch)


@dataclass(frozen=True)
class AdvantageCall:
    """The arguments of `compute_advantage` besides the batch, checked without data. Errors: ConfigError."""

    estimator: Estimator
    kl_coef: float | AdaptiveKL | None = None
    kl: str | None = None
    reward_norm: RunningNorm | None = None

    def __post_init__(self) -> None:
        if self.reward_norm is not None:
            if not isinstance(self.reward_norm, RunningNorm):
                raise ConfigError(f"reward_norm={self.reward_norm!r}: give hf.algorithms.RunningNorm(), or None.")
            other = "baseline" if "baseline" in (self.estimator.reads or ()) else ""
            if other := "the components of rewards" if self.estimator.kl == "unused" else other:
                raise ConfigError(
                    f"advantage estimator {self.estimator.name!r} reads {other}, which reward_norm does not normalise. "
                    f"Leave reward_norm out."
                )
        if self.kl is not None:
            check_kl_kind(self.kl)
            if self.kl_coef is None:
                raise ConfigError(
                    f"compute_advantage(kl={self.kl!r}) without kl_coef takes no penalty: give kl_coef=..., or leave "
                    f"out kl."
                )
        coef = self.kl_coef
        if not (coef is None or isinstance(coef, AdaptiveKL) or (is_number(coef) and coef >= 0)):
            raise ConfigError(
                f"kl_coef={coef!r} is not a KL coefficient: give a number of at least 0, or AdaptiveKL(...), which "
                f"adapts the coefficient from one iteration to the next."
            )
        if self._penalises and self.estimator.kl == "unused":
            raise ConfigError(
                f"advantage estimator {self.estimator.name!r} does not look at the total reward, so a KL penalty in it "
                f"would be without effect. Leave out kl_coef here and use update_actor(batch, kl_coef=...)."
            )

    @property
    def _penalises(self) -> bool:
        return isinstance(self.kl_coef, AdaptiveKL) or bool(self.kl_coef)

    @property
    def reads(self) -> tuple[str, ...] | None:
        """The columns that the call reads (None: every column)."""
        own = self.estimator.reads
        penalty = ("old_log_probs", "ref_log_probs") if self._penalises else ()
        return None if own is None else ("rewards", "response_mask", *own, *penalty)

    @property
    def writes(self) -> tuple[str, ...]:
        penalty = ("kl", "kl_coef") if self._penalises else ()
        norm = () if self.reward_norm is None else ("reward_norm_mean", "reward_norm_std")
        return ("advantages", "returns", *self.estimator.writes, *penalty, *norm)

    @property
    def controllers(self) -> list[Controller]:
        """The arguments with state that the call updates."""
        given = (*self.estimator.options.values(), self.kl_coef, self.reward_norm)
        return [value for value in given if isinstance(value, Controller)]

    def __call__(self, batch: Batch) -> Batch:
        """See `compute_advantage`. Controllers keep their states when the call fails."""
        before = [(controller, controller.state) for controller in self.controllers]
        try:
            if len(batch) == 0:
                raise EmptyBatchError("compute_advantage was given a batch without rows.")
            batch = with_bool_mask(batch)
            whole = Trajectories.of(batch)
            out = self._computed(batch if whole is None else whole.join(batch))
            before.clear()
        finally:
            for controller, state in before:
                controller.state = state
        if isinstance(self.kl_coef, AdaptiveKL):
            self.kl_coef.update(float(out["kl"].mean()), len(out))
        return out if whole is None else whole.split(out, mask_column(batch))

    def _computed(self, batch: Batch) -> Batch:
        mask = mask_column(batch)
        norm = self.reward_norm
        rewards = token_rewards(batch.peek("rewards"), mask, change=norm)
        statistics = {} if norm is None else {"reward_norm_mean": norm.mean, "reward_norm_std": norm.std}
        kl_rewards, kl_columns = self._kl_rewards(batch, mask)
        if self.estimator.kl == "split":
            result = self.estimator(rewards, batch, kl_rewards)  # type: ignore[call-arg]
        else:
            result = self.estimator(rewards.with_values(rewards.values + kl_rewards.values), batch)
        columns = {name: torch.full((len(batch),), value) for name, value in statistics.items()}
        return Batch({**_columns(self.estimator, result, mask), **kl_columns, **columns})

    def _kl_rewards(self, batch: Batch, mask: Ragged) -> tuple[Ragged, dict[str, Tensor]]:
        """-kl_coef * kl_t of valid tokens, ragged [B, R] float64 (0 without a penalty), and `kl`, `kl_coef` [B].

        Ziegler et al., "Fine-tuning language models from human preferences" (2019), eq. 2; InstructGPT (2022), eq. 2.
        """
        nothing = torch.zeros(len(mask.values), dtype=torch.float64)
        if not self._penalises:
            return mask.with_values(nothing), {}
        coef = self.kl_coef.state if isinstance(self.kl_coef, AdaptiveKL) else float(self.kl_coef or 0.0)
        own = "log_probs" if "old_log_probs" not in batch and "log_probs" in batch else "old_log_probs"
        columns = (finite_column(batch, name, mask) for name in (own, "ref_log_probs"))
        policy, reference = (column.values.to(torch.float64) for column in columns)
        k1 = torch.where(mask.values, kl_estimate(policy, reference, "k1"), 0.0)
        penalty = torch.where(mask.values, -coef * kl_estimate(policy, reference, self.kl or "k1"), 0.0)
        row_kl = mask.with_values(k1).row_sum().to(torch.float32)
        return mask.with_values(penalty), {"kl": row_kl, "kl_coef": torch.full((len(batch),), coef)}


def _columns(found: Estimator, result: Any, mask: Ragged) -> dict[str, Tensor | Ragged]:
    """An estimator's result by column: float32, and exactly 0 at masked tokens. Errors: BatchError unless these are the
    columns that it writes, with finite numbers in the batch's shape."""
    if isinstance(result, tuple) and len(result) == 2:
        result = dict(zip(("advantages", "returns"), result, strict=True))
    wanted = ("advantages", "returns", *found.writes)
    if not isinstance(result, Mapping) or set(result) != set(wanted):
        given = f"columns {tuple(result)}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise BatchError(
            f"advantage estimator {found.name!r} returned {given}: it must return (advantages, returns), or a mapping "
            f"of {wanted}. Name further columns in its attribute `writes`."
        )
    out: dict[str, Tensor | Ragged] = {}
    for name in wanted:
        column, per_token = result[name], isinstance(result[name], Ragged)
        flat = column.values if per_token else column
        fits = column.offsets.equal(mask.offsets) if per_token else isinstance(flat, Tensor) and len(flat) == len(mask)
        if not fits or flat.ndim != 1 or (name in ("advantages", "returns") and not per_token):
            raise BatchError(
                f"advantage estimator {found.name!r} returned {name} {column if per_token else type(column).__name__}, "
                f"the response is {mask}: advantages and returns must be ragged like it, other columns that or [rows]."
            )
        flat = (torch.where(mask.values, flat, 0.0) if per_token else flat).to(torch.float32)
        if not bool(torch.isfinite(flat).all()):
            at = int((~torch.isfinite(flat)).nonzero()[0, 0])
            row = int(mask.row_index()[at]) if per_token else at
            raise BatchError(
                f"advantage estimator {found.name!r}: {name} of row {row} is {float(flat[at])}. The rewards are "
                f"finite: look at what else it reads, and at what it computes."
            )
        out[name] = mask.with_values(flat) if per_token else flat
    return out
