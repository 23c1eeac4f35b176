"""Metrics of an iteration from its batch: reward, cost, length, KL, advantage, critic and drift.

Shapes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.token_rewards import row_scores
from hybridflow.algorithms.kl import MAX_LOG_RATIO, kl_estimate
from hybridflow.algorithms.masked import masked_moments, response_mask, sequence_mean, token_column, valid_lengths
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged

_SCORES = {"rewards": "reward", "costs": "cost"}
_MEANS = {name: f"environment/{name}" for name in ("turns", "tool_calls", "tool_errors")}
_MEANS |= {"finished": "response/finished", "kl_coef": "kl/coef", "lagrange": "lagrange/multiplier"}
_MEANS |= {"reward_norm_mean": "reward/norm_mean", "reward_norm_std": "reward/norm_std"}
_CRITICS = {"critic": ("values", "returns"), "cost_critic": ("cost_values", "cost_returns")}
_SOURCES = 32  # a column `source` of more kinds is not a Mixture's
_TOKEN_COLUMNS = ("log_probs", "old_log_probs", "ref_log_probs", "advantages", *sum(_CRITICS.values(), ()))
METRIC_COLUMNS = (
    *(*_SCORES, *_MEANS, *_TOKEN_COLUMNS),
    *("response_ids", "response_mask", "reward_failure", "cost_failure", "environment_failure"),
    *("trajectory_id", "row_id", "num_tokens", "source"),
)
"""Columns that `batch_metrics` looks at besides components; it uses those that are there."""


def metric_columns(available: Iterable[str]) -> tuple[str, ...]:
    """Those of the available columns that `batch_metrics` uses, components (`rewards/<name>`) included."""
    return tuple(name for name in available if name in METRIC_COLUMNS or name.partition("/")[0] in _SCORES)


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Flat metrics of one batch, from whatever columns are there; an empty batch has none. Rows with one
    `trajectory_id` count as one.

    `reward/{mean,std,min,max}` (and `cost/...`) over rows, token rewards summed; `reward/<name>/mean` of a component
    over the rows that it applies to; neither counts rows without a valid token or that could not be graded, of which
    `reward/failed` is the share of all rows; `prompt/tokens` of the batch; `response/length_{mean,max}` in response
    tokens, `response/tokens` of the batch (`response/valid_tokens`, the mean per row, where some are masked),
    `response/not_finite` of tokens that are masked because their log-probability in sampling is not finite (if there
    are any); `response/finished` as a fraction; `environment/{turns,tool_calls,tool_errors}` per row and
    `environment/failed` as a fraction; `kl/ref` in nats per valid token (k1) and `kl/ref_row` per row; `kl/coef`;
    `lagrange/multiplier`; `reward/norm_{mean,std}`; `advantage/{mean,std,max,min}` and `return/mean` over valid tokens;
    `critic/explained_variance` = 1 - var(returns - values) / var(returns), and that of `cost_critic`.

    With a column `source` (a Mixture's, of up to 32 names) `source/<name>/share` of the rows, and `reward_mean` and
    `length_mean` of its rows as above.

    From `log_probs` of the sampling engine and `old_log_probs` of the training engine, over valid tokens:
    `actor/rollout_log_prob_diff` = mean |d| with d = log_probs - old_log_probs, and `..._max`; `rollout/kl` = mean d
    and `rollout/kl_k3`, estimates of KL(sampling || training) in nats per token; with w = exp(-d), d kept within +-20,
    `rollout/chi2` = mean w^2 - 1 and `rollout/ess` = (mean w)^2 / mean w^2, the share of tokens that count;
    `rollout/ppl_ratio` = mean over rows of exp(mean d), the training engine's perplexity over the sampling engine's.
    Standard deviations have Bessel's correction."""
    if len(batch) == 0:
        return {}
    out: dict[str, float] = {}
    if "num_tokens" in batch and "response_ids" in batch:
        responses = token_column(batch, "response_ids").values
        out["prompt/tokens"] = float(_dense(batch.peek("num_tokens")).sum()) - len(responses)
    mask = response_mask(batch) if "response_mask" in batch or "response_ids" in batch else None
    if mask is not None and (whole := Trajectories.of(batch)) is not None:
        batch, mask = whole.join(batch), whole.joined(mask)
    for column, name in _SCORES.items():
        out |= _score_metrics(batch, column, name, mask)
    if "response_ids" in batch:
        out |= _lengths(batch, mask)
    if "source" in batch:
        out |= _by_source(batch, mask)
    if "environment_failure" in batch and isinstance(reasons := batch.peek("environment_failure"), list):
        out["environment/failed"] = sum(reason is not None for reason in reasons) / len(reasons)
    out |= {name: _dense(batch.peek(column)).mean().item() for column, name in _MEANS.items() if column in batch}
    if "log_probs" in batch and (lost := int((~token_column(batch, "log_probs").values.isfinite()).sum())):
        out["response/not_finite"] = float(lost)
    if mask is not None and bool(mask.values.any()):
        out |= _token_metrics(batch, mask)
        if "log_probs" in batch and "old_log_probs" in batch:
            out |= _mismatch(token_column(batch, "log_probs", mask), token_column(batch, "old_log_probs", mask), mask)
    return out


def _score_metrics(batch: Batch, column: str, name: str, mask: Ragged | None) -> dict[str, float]:
    """Those of the columns `rewards`, `rewards/<component>` and `reward_failure`, or the same of costs."""
    counts = torch.ones(len(batch), dtype=torch.bool) if mask is None else valid_lengths(mask) > 0
    out: dict[str, float] = {}
    if f"{name}_failure" in batch and isinstance(reasons := batch.peek(f"{name}_failure"), list):
        failed = torch.tensor([reason is not None for reason in reasons])
        out[f"{name}/failed"] = _dense(failed).mean().item()
        counts &= ~failed
    if column in batch and bool(counts.any()):
        out |= _summary(name, row_scores(batch.peek(column), mask, column)[counts])
    for found in batch.columns:
        if found.startswith(f"{column}/"):
            scores = row_scores(batch.peek(found), mask, found)
            if bool((applies := counts & ~scores.isnan()).any()):  # nan: the component does not apply to the row
                out[f"{name}/{found.removeprefix(f'{column}/')}/mean"] = scores[applies].mean().item()
    return out


def _by_source(batch: Batch, mask: Ragged | None) -> dict[str, float]:
    names, out = batch.peek("source"), dict[str, float]()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return out
    if len(kinds := sorted(set(names))) > _SOURCES:
        return out
    for kind in kinds:
        rows = [i for i, name in enumerate(names) if name == kind]
        part, its = batch.reorder(rows), None if mask is None else Batch({"mask": mask}).reorder(rows)["mask"]
        found = {"share": len(rows) / len(batch), **_score_metrics(part, "rewards", "reward", its)}
        found |= _lengths(part, None) if "response_ids" in part else {}
        for name, own in (("share", "share"), ("reward/mean", "reward_mean"), ("response/length_mean", "length_mean")):
            if name in found:
                out[f"source/{kind}/{own}"] = found[name]
    return out


def _summary(name: str, values: Tensor) -> dict[str, float]:
    std = values.std().item() if len(values) > 1 else 0.0  # with Bessel's correction
    low, high = values.aminmax()
    found = {"mean": values.mean().item(), "std": std, "min": low.item(), "max": high.item()}
    return {f"{name}/{kind}": value for kind, value in found.items()}


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


def _token_metrics(batch: Batch, mask: Ragged) -> dict[str, float]:
    flat = {
        name: token_column(batch, name, mask).values[mask.values].to(torch.float64)
        for name in _TOKEN_COLUMNS
        if name in batch
    }
    out: dict[str, float] = {}
    policy = flat.get("old_log_probs", flat.get("log_probs"))
    if policy is not None and "ref_log_probs" in flat:
        kl = kl_estimate(policy, flat["ref_log_probs"], "k1")
        out |= {"kl/ref": kl.mean().item(), "kl/ref_row": kl.sum().item() / len(batch)}
    if "advantages" in flat:
        out |= _summary("advantage", flat["advantages"])
    if "returns" in flat:
        out["return/mean"] = flat["returns"].mean().item()
    for critic, (values, returns) in _CRITICS.items():
        if values in flat and returns in flat:
            everything = torch.ones_like(flat[returns], dtype=torch.bool)
            _, variance = masked_moments(flat[returns], everything)
            _, residual = masked_moments(flat[returns] - flat[values], everything)
            out[f"{critic}/explained_variance"] = 1.0 - (residual / variance).item() if variance > 0 else 0.0
    return out


def _mismatch(sampled: Ragged, trained: Ragged, mask: Ragged) -> dict[str, float]:
    """How far the engine that sampled is from the one that trains, at the tokens that were sampled."""
    sampled_N, trained_N = sampled.values.to(torch.float64), trained.values.to(torch.float64)
    drift_N = torch.where(mask.values, sampled_N - trained_N, 0.0)
    drift = drift_N[mask.values]
    weights = (-drift).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    moment = weights.square().mean()
    counts = valid_lengths(mask)
    row_drift = (mask.with_values(drift_N).row_sum() / counts)[counts > 0]
    return {
        "actor/rollout_log_prob_diff": drift.abs().mean().item(),
        "actor/rollout_log_prob_diff_max": drift.abs().max().item(),
        "rollout/kl": drift.mean().item(),
        "rollout/kl_k3": kl_estimate(sampled_N[mask.values], trained_N[mask.values], "k3").mean().item(),
        "rollout/chi2": moment.item() - 1.0,
        "rollout/ess": (weights.mean().square() / moment).item(),
        "rollout/ppl_ratio": row_drift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().mean().item(),
    }


def log_prob_mismatch(batch: Batch, shown: int = 4) -> tuple[float, int, list[tuple[float, int]]]:
    """Sum of |log_probs - old_log_probs| in nats over valid tokens, their number, and the largest means of rows.

    Tokens with a number that is not finite do not count."""
    mask = response_mask(batch)
    sampled, trained = (token_column(batch, name, mask).values.double() for name in ("log_probs", "old_log_probs"))
    drift_N = (sampled - trained).abs()
    kept = mask.with_values(mask.values & drift_N.isfinite())
    mean_B = sequence_mean(drift_N, kept)
    value, row = mean_B.topk(min(shown, len(mean_B)))
    rows = [(float(each), int(at)) for at, each in zip(row, value, strict=True)]
    return float(drift_N[kept.values].sum()), int(kept.values.sum()), rows


def _dense(column: object) -> Tensor:
    return torch.as_tensor(column).to(torch.float64)
