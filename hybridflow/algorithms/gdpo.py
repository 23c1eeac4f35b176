"""GDPO: several rewards, each normalised in its group before they are added. Shapes: B rows, C components, R tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.credit import every_token
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.grpo import grpo
from hybridflow.algorithms.precision import result_dtype
from hybridflow.algorithms.whitening import whiten
from hybridflow.ragged import Ragged


def gdpo(
    components: Sequence[Tensor],
    groups: Groups,
    mask: Ragged,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> Ragged:
    """Ragged [B, R]: A = whiten(sum over c of w_c * A^c), with A^c the GRPO advantage of component c alone.

    `components` are C tensors [B] float, nan where a reward does not apply to a row: that row is left out of the
    component's statistics and gets 0 from it. `weights` has C numbers, 1 each without it. `eps`, added to the standard
    deviation of a group, is verl's (TRL: 1e-4). Whitening is over the valid tokens of the batch and with Bessel's
    correction, as in verl; TRL normalises over rows, so that long responses count no more than short ones there.
    Liu et al., "GDPO: group reward-decoupled normalization policy optimization" (2026, arXiv 2601.05242), section 3.
    """
    weights = [1.0] * len(components) if weights is None else weights
    weighted = [
        float(weight) * grpo(scores.to(torch.float64), groups.only(~scores.isnan()), eps=eps)
        for weight, scores in zip(weights, components, strict=True)
    ]
    white = whiten(every_token(torch.stack(weighted).sum(0), mask), mask)
    return white.to(result_dtype(*(scores.dtype for scores in components)))
