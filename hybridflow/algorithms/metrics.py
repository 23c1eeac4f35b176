"""What a batch says about an iteration: reward, length, KL, advantage, critic and drift figures.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.gae import valid_lengths
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.algorithms.whitening import masked_moments
from hybridflow.batch import Batch
from hybridflow.columns import Column
from hybridflow.ragged import Ragged

METRIC_COLUMNS = (
    "rewards",
    "costs",
    "response_ids",
    "response_mask",
    "finished",
    "log_probs",
    "old_log_probs",
    "ref_log_probs",
    "kl_coef",
    "advantages",
    "values",
    "returns",
)
"""Columns that `batch_metrics` looks at; it uses those that are there."""


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Flat figures of one batch, from whatever columns are there; an empty batch has none.

    `reward/{mean,std,min,max}` (and `cost/...`) over rows, token rewards summed; `response/length_{mean,max}` in
    response tokens, `response/tokens` of the batch (`response/valid_tokens`, the mean per row, where some are masked);
    `response/finished` as a fraction; `kl/ref` in nats per valid token (k1) and `kl/ref_row` per row; `kl/coef`;
    `advantage/{mean,std,max,min}` and `return/mean` over valid tokens; `critic/explained_variance` =
    1 - var(returns - values) / var(returns); `actor/rollout_log_prob_diff` = mean |log_probs - old_log_probs| over
    valid tokens, the drift between the sampling engine and the training engine, and `..._max`, its maximum.
    """
    if len(batch) == 0:
        return {}
    out: dict[str, float] = {}
    mask = response_mask(batch) if "response_mask" in batch or "response_ids" in batch else None
    for column, name in (("rewards", "reward"), ("costs", "cost")):
        if column in batch:
            out |= _row_figures(name, _row_scores(batch.peek(column), mask))
    if "response_ids" in batch:
        out |= _lengths(batch, mask)
    if "finished" in batch:
        out["response/finished"] = _dense(batch.peek("finished")).mean().item()
    if "kl_coef" in batch:
        out["kl/coef"] = _dense(batch.peek("kl_coef")).mean().item()
    if mask is not None and bool(mask.values.any()):
        out |= _token_figures(batch, mask)
    return out


def _row_scores(scores: Column, mask: Ragged | None) -> Tensor:
    """[B] float64: per-row scores, token scores summed over valid tokens."""
    if not isinstance(scores, Ragged):
        return _dense(scores)
    kept = scores.values if mask is None else torch.where(mask.values, scores.values, 0.0)
    return scores.with_values(kept.to(torch.float64)).row_sum()


def _row_figures(name: str, scores_B: Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": scores_B.mean().item(),
        f"{name}/std": scores_B.std(correction=0).item(),
        f"{name}/min": scores_B.min().item(),
        f"{name}/max": scores_B.max().item(),
    }


def _lengths(batch: Batch, mask: Ragged | None) -> dict[str, float]:
    lengths = _dense(token_column(batch, "response_ids").lengths)
    out = {
        "response/length_mean": lengths.mean().item(),
        "response/length_max": lengths.max().item(),
        "response/tokens": lengths.sum().item(),
    }
    if mask is not None and not bool(mask.values.all()):
        out["response/valid_tokens"] = _dense(valid_lengths(mask)).mean().item()
    return out


def _token_figures(batch: Batch, mask: Ragged) -> dict[str, float]:
    valid = mask.values
    flat = {
        name: token_column(batch, name, mask).values[valid].to(torch.float64)
        for name in ("log_probs", "old_log_probs", "ref_log_probs", "advantages", "values", "returns")
        if name in batch
    }
    out: dict[str, float] = {}
    policy = flat.get("old_log_probs", flat.get("log_probs"))
    if policy is not None and "ref_log_probs" in flat:
        kl = kl_estimate(policy, flat["ref_log_probs"], "k1")
        out |= {"kl/ref": kl.mean().item(), "kl/ref_row": kl.sum().item() / len(batch)}
    if (advantages := flat.get("advantages")) is not None:
        out |= {
            "advantage/mean": advantages.mean().item(),
            "advantage/std": advantages.std(correction=0).item(),
            "advantage/min": advantages.min().item(),
            "advantage/max": advantages.max().item(),
        }
    if (returns := flat.get("returns")) is not None:
        out["return/mean"] = returns.mean().item()
        if (values := flat.get("values")) is not None:
            out["critic/explained_variance"] = _explained_variance(values, returns)
    if "log_probs" in flat and "old_log_probs" in flat:
        drift = (flat["log_probs"] - flat["old_log_probs"]).abs()
        out |= {
            "actor/rollout_log_prob_diff": drift.mean().item(),
            "actor/rollout_log_prob_diff_max": drift.max().item(),
        }
    return out


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 for a perfect critic, 0 for a constant one; 0 when all returns are equal and nothing is to be explained."""
    everything = torch.ones_like(returns, dtype=torch.bool)
    _, variance = masked_moments(returns, everything)
    _, residual = masked_moments(returns - values, everything)
    return 1.0 - (residual / variance).item() if variance > 0 else 0.0


def _dense(column: object) -> Tensor:
    return torch.as_tensor(column).to(torch.float64)
