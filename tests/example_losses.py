"""Every loss with options that matter, every aggregation, and batches for them."""

from __future__ import annotations

from typing import Any

import torch

import hybridflow as hf
from hybridflow.algorithms.losses.loss import Loss
from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SHARED = {"entropy_coef": 0.02, "kl_coef": 0.1}


def row_ratio(log_probs: Ragged, old_log_probs: Ragged, advantages: Ragged, mask: Ragged) -> torch.Tensor:
    """A user's loss of whole rows: the ratio of the row's geometric mean probabilities, at every token of the row."""
    difference = log_probs.with_values(log_probs.values - old_log_probs.values)
    per_row = difference.row_sum() / mask.lengths.clamp(min=1)
    return -mask.expand(per_row.exp()) * advantages.values


LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "ppo-shared": ("ppo", {"dual_clip": 1.5, "clip_high": 0.3, "rollout_correction": "token", **SHARED}),
    "gspo": ("gspo", {"clip": 0.1, "clip_high": 0.1}),
    "gspo-shared": ("gspo", {"clip": 0.2, "clip_high": 0.2, "rollout_correction": "sequence", **SHARED}),
    "cispo": ("cispo", {"rollout_correction": hf.algorithms.RolloutCorrection("geometric", mode="reject", high=1.1)}),
    "ppo-masks": (
        "ppo",
        {
            "rollout_correction": hf.algorithms.RolloutCorrection(
                divergence="k3", divergence_limit=0.1, negative_limit=0.02
            )
        },
    ),
    "geo_mean": ("geo_mean", {"clip": 0.2, **SHARED}),
    "sapo": ("sapo", {}),
    "reinforce": (
        "reinforce",
        {"rollout_correction": hf.algorithms.RolloutCorrection("sequence", mode="reject", high=1.5)},
    ),
    "pretrain": ("pretrain", {"coef": 0.3}),
    "row_ratio": (row_ratio, SHARED),
    "value": ("value", {"clip": 0.1}),
    "value-plain": ("value", {"clip": None}),
}


def make_loss(case: str, aggregation: str, norm: float | None = None) -> Loss:
    """The loss of a case; `norm` is used where the aggregation takes one."""
    loss, options = LOSSES[case]
    norms = {"norm": norm} if norm and aggregation == "seq-mean-token-sum-norm" else {}
    make = value_loss if loss == "value" else policy_loss
    return make(loss, **options, aggregation=aggregation, **norms)


def made(mask: Ragged, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Batch, dict[str, Ragged]]:
    """Columns of random numbers for rows with this mask, and the engine's outputs of them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(7, len(mask.values), generator=generator, dtype=torch.float64).to(dtype)
    old = -1.5 + 0.3 * noise[0]
    columns = {
        "old_log_probs": old,
        "log_probs": old + 0.5 * noise[1],
        "ref_log_probs": old + 0.4 * noise[2],
        "advantages": noise[3],
        "values": 0.5 * noise[1],
        "returns": noise[2],
    }
    outputs = {"log_probs": old + 0.3 * noise[4], "entropy": noise[5].abs(), "values": 0.5 * noise[1] + 0.3 * noise[6]}
    batch = Batch({name: mask.with_values(x) for name, x in columns.items()} | {"response_mask": mask})
    return batch, {name: mask.with_values(x) for name, x in outputs.items()}
