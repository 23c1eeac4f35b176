"""GDPO: several rewards, each normalised in its group before they are added. Shapes: B rows, R response tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.grpo import GRPO
from hybridflow.algorithms.advantages.prompt_groups import groups_of
from hybridflow.algorithms.advantages.token_rewards import every_token, row_scores
from hybridflow.algorithms.masked import check_finite, mask_column, valid_lengths, whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.settings import Positive, is_number, require, settings


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
