"""GRPO and its relatives: the advantage of a response over the others to its prompt.

Shapes: B rows, R response tokens, G groups, V rows that count, sorted by group and, within it, from the best score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.prompt_groups import GroupEstimator, PromptGroups, groups_of
from hybridflow.algorithms.advantages.token_rewards import discounted_sum, every_token, row_scores
from hybridflow.algorithms.masked import check_finite, mask_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Check, Positive, is_number, is_whole, require, settings


@settings
class GRPO(GroupEstimator):
    """A_i = (r_i - mean of its group) / (std of its group + eps), the same for every token of the response.

    The standard deviation has Bessel's correction, as in TRL and verl; `eps` is verl's (TRL adds 1e-4). A group of one
    row gets 0, where verl gives it its raw score: without a comparison there is no signal. `normalize=False` leaves out
    the division: `DrGRPO`.
    Shao et al., "DeepSeekMath" (2024), section 4.1."""

    normalize: bool = True
    eps: Positive = 1e-6

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        centred = groups.centred(scores)
        return centred / (groups.std(scores) + self.eps) if self.normalize else centred


@settings
class DrGRPO(GroupEstimator):
    """A_i = r_i - mean of its group.

    Liu et al., "Understanding R1-Zero-like training: a critical perspective" (Dr. GRPO, 2025): dividing by the std
    favours prompts that are nearly always or nearly never solved. The constant length of its loss is the aggregation
    `seq-mean-token-sum-norm`."""


@settings
class RLOO(GroupEstimator):
    """A_i = r_i - mean of r_j over the *other* rows j of its group.

    With n rows that is n / (n - 1) * (r_i - mean of the group). A group of one row has no others and gets 0 (verl gives
    it its raw score).
    Ahmadian et al., "Back to basics: revisiting REINFORCE-style optimization" (2024), section 3.2."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        return groups.centred(scores) * groups.size / (groups.size - 1).clamp(min=1)


@settings
class OPO(GroupEstimator):
    """A_i = r_i - sum_j l_j r_j / sum_j l_j over the rows j of its group.

    The number l_j of valid tokens of a response stands for the squared norm of its gradient. A group of one row gets
    exactly 0 (verl gives it its raw score).
    Hao et al., "On-policy RL with optimal reward baseline" (2025)."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        baseline = groups.mean(scores, groups.tokens)
        return torch.where(groups.size > 1, groups.zeroed(scores - baseline), 0.0)


@settings
class GPG(GroupEstimator):
    """A_i = alpha * (r_i - mean of its group), alpha = B / (B - M).

    M counts the rows of groups in which all scores are equal: their gradient is 0, and alpha takes them out of the mean
    over the batch. verl has B / (number of scores other than 0) in place of alpha. A group of one row gets 0 and counts
    as one of the M (verl: its raw score). The loss that goes with it is "reinforce".
    Chu et al., "GPG: a simple and strong reinforcement learning baseline for model reasoning" (2025)."""

    def row_advantages(self, scores: Tensor, groups: PromptGroups) -> Tensor:
        differing = groups.differs(scores).sum()
        return groups.centred(scores) * groups.counts.sum() / differing.clamp(min=1)


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


@settings
class GDPO(Estimator):
    """A = whiten(sum over c of w_c * A^c), with A^c the GRPO advantage of the column rewards/<c> alone.

    `components` names reward components, such as ("correct", "format"). A component is nan where it does not apply to a
    row: the row is left out of its statistics and gets 0 from it. `weights` has one number for each, 1 without it.
    `eps`, added to the standard deviation of a group, is verl's (TRL: 1e-4). Whitening is over the valid tokens of the
    batch and with Bessel's correction, as in verl; TRL normalises over rows, so that long responses count no more than
    short ones there.
    Liu et al., "GDPO: group reward-decoupled normalization policy optimization" (2026, arXiv 2601.05242), section 3."""

    components: Sequence[str]
    weights: Sequence[float] | None = None
    eps: Positive = 1e-6
    kl = "unused"

    def __post_init__(self) -> None:
        names, weights = self.components, self.weights
        good = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
        require(
            good and len(names) == len(set(names)) > 0,
            f'GDPO(components={names!r}): must be names of reward components, such as ("correct", "format"), each once',
        )
        good = isinstance(weights, Sequence) and not isinstance(weights, str) and all(map(is_number, weights))
        require(
            weights is None or (good and len(weights) == len(names)),
            f"GDPO(weights={weights!r}): must be None (1 each) or one number for each of {len(names)} components.",
        )
        object.__setattr__(self, "components", tuple(names))
        object.__setattr__(self, "weights", weights if weights is None else tuple(map(float, weights)))
        object.__setattr__(self, "reads", ("group_id", *(f"rewards/{name}" for name in names)))

    def __call__(self, rewards: Ragged, batch: Batch, /) -> tuple[Ragged, Ragged]:
        mask, groups, grpo = mask_column(batch), groups_of(batch), GRPO(eps=self.eps)
        weighted: list[Tensor] = []
        for name, weight in zip(self.components, self.weights or [1.0] * len(self.components), strict=True):
            scores = row_scores(batch.peek(f"rewards/{name}"), mask, f"rewards/{name}")
            check_finite(f"rewards/{name}", scores, valid_lengths(mask) > 0, nan=True)
            weighted.append(weight * grpo.row_advantages(scores, groups.only(~scores.isnan())))
        advantages = whiten(every_token(torch.stack(weighted).sum(0), mask), mask)
        return advantages, every_token(row_scores(rewards, mask), mask)
