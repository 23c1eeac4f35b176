"""Pass@k policy gradient: a response's advantage is the loss of the best of k without it.

Shapes: B rows, G groups, V rows that count, sorted by group and, within it, from the best score to the worst.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups
from hybridflow.algorithms.advantages.token_rewards import discounted_sum
from hybridflow.settings import Check, Positive, is_whole, settings


@settings
class GRPOPassK(GroupEstimator):
    """A_i = mean over the sets S of k rows of its group that hold i of [max of S - max of S without i].

    `k=None`, and any k above the rows of a group, takes the whole group: then the best row alone has an advantage, its
    lead over the second (verl's estimator). `normalize` divides by the std of the group (Bessel) + eps. A group of one
    row gets 0 (verl refuses it).

    With n scores sorted from the best, row j leads S by r_j - r_m where m is the next best row of S; summed over all S,

        A_j = sum over l = j..n-1 of (r_l - r_(l+1)) * binom(n - l, k - 1) / binom(n - 1, k - 1)

    Tang et al., "Optimizing language models for inference time objectives using reinforcement learning" (2025,
    arXiv 2503.19595), section 3: the leave-one-out control variate."""

    k: Annotated[int, Check("a whole number of at least 2", lambda k: is_whole(k) and k >= 2)] | None = None
    normalize: bool = True
    eps: Positive = 1e-6

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        rows_V = groups.counts.nonzero()[:, 0]
        rows_V = rows_V[scores[rows_V].argsort(descending=True, stable=True)]
        rows_V = rows_V[groups.number[rows_V].argsort(stable=True)]
        n_V, score_V = groups.size[rows_V], scores[rows_V].to(torch.float64)
        starts_G = groups.sizes.cumsum(0) - groups.sizes
        below_V = n_V - 1 - (torch.arange(len(rows_V)) - starts_G[groups.number[rows_V]])  # n - l for l = 1..n
        lead_V = torch.where(below_V > 0, score_V - score_V.roll(-1), 0.0)
        drawn_V = (n_V if self.k is None else n_V.clamp(max=self.k)) - 1
        log_share_V = _log_binom(below_V, drawn_V) - _log_binom(n_V - 1, drawn_V)
        share_V = torch.where(below_V >= drawn_V, log_share_V.exp(), 0.0)
        out = torch.zeros_like(scores, dtype=torch.float64)
        out[rows_V] = discounted_sum(lead_V * share_V, groups.sizes, 1.0)
        return out / (groups.std(scores) + self.eps) if self.normalize else out


def _log_binom(n: Tensor, k: Tensor) -> Tensor:
    """log binom(n, k) in float64; without meaning where k > n."""
    n, k = n.to(torch.float64), k.to(torch.float64)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
