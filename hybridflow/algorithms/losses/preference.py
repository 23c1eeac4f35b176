"""Pairwise losses of preferences: DPO's, and Bradley-Terry's of reward models.

A pair is a trajectory: a row with the preferred response and a row with the other one, `preference` [B, R] is 1.0 at
the tokens of the first and -1.0 at those of the second. Shapes: P pairs, N response tokens of all rows.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.losses.loss import Loss, Outputs, Share, Totals
from hybridflow.algorithms.masked import response_mask, token_column
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError
from hybridflow.settings import Check, NonNegative, Positive, is_number, settings

PREFERENCE = "preference"
Smoothing = Annotated[float, Check("from 0 to below 0.5", lambda value: is_number(value) and 0 <= value < 0.5)]


class PairLoss(Loss):
    """Base of losses of pairs."""

    reads = (PREFERENCE, "response_mask?")

    def check(self, rows: Batch) -> None:
        """Errors: BatchError for a trajectory that is not a pair, besides those of a loss."""
        super().check(rows)
        sign, mask, whole = token_column(rows, PREFERENCE), response_mask(rows), Trajectories.of(rows)
        if whole is not None:
            sign, mask = whole.joined(sign), whole.joined(mask)
        for here in (sign.values > 0, sign.values < 0):
            counts = mask.with_values((mask.values & here).long()).row_sum()
            if bool((counts == 0).any()):
                at = int((counts == 0).nonzero()[0, 0])
                raise BatchError(
                    f"pair {at} of the batch has no valid token with a positive and a negative `preference`: rows of "
                    f"one `trajectory_id` are the preferred response (1.0) and the other (-1.0), as a "
                    f"TextLoader(completion=('chosen', 'rejected')) writes them."
                )

    @staticmethod
    def sides(rows: Batch) -> tuple[Ragged, Tensor, Tensor]:
        """The mask of the joined rows, and which tokens [N] bool are of the preferred and of the other response."""
        mask = response_mask(rows)
        sign = token_column(rows, PREFERENCE, mask).values
        return mask, mask.values & (sign > 0), mask.values & (sign < 0)

    @staticmethod
    def shares(totals: Totals, **per_pair: Tensor) -> dict[str, Tensor]:
        """This micro-batch's share of the means over the pairs of the mini-batch, of [P]."""
        return {name: value.sum() / max(totals.rows, 1.0) for name, value in per_pair.items()}


@settings
class DPO(PairLoss):
    """Direct preference optimization, the loss of a pair with responses y (preferred) and z:

        h    = beta * [(log p(y) - log p_ref(y)) - (log p(z) - log p_ref(z))]
        loss = -(1 - s) * log sigmoid(h) - s * log sigmoid(-h)          (s = label_smoothing)

    with sums of log-probabilities over the tokens of a response, averaged over pairs. Rows are those of a
    `TextLoader(completion=("chosen", "rejected"))` with `ref_log_probs`. Equal to TRL's `sigmoid` loss, and with
    smoothing to cDPO.

    Metrics: `actor/loss`; `actor/accuracy`, the share of pairs with h > 0; `actor/margin`, the mean of h;
    `actor/chosen_reward` and `actor/rejected_reward`, its two parts.
    Rafailov et al., "Direct preference optimization" (2023), eq. 7; Mitchell, "cDPO" (2023), eq. 3."""

    beta: Positive = 0.1
    label_smoothing: Smoothing = 0.0
    reads = (PREFERENCE, "response_mask?", "ref_log_probs")

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask, chosen, rejected = self.sides(rows)
        ratio = outputs["log_probs"].values - token_column(rows, "ref_log_probs", mask).values
        y, z = (self.beta * mask.with_values(torch.where(side, ratio, 0.0)).row_sum() for side in (chosen, rejected))
        h, s = y - z, self.label_smoothing
        loss = -(1.0 - s) * logsigmoid(h) - s * logsigmoid(-h)
        share = self.shares(totals, loss=loss)["loss"]
        found = self.shares(totals, accuracy=(h > 0).float(), margin=h, chosen_reward=y, rejected_reward=z)
        return share, {f"actor/{name}": value.detach() for name, value in {"loss": share, **found}.items()}


@settings
class BradleyTerry(PairLoss):
    """The loss of a reward model r on a pair, averaged over pairs:

        loss = -log sigmoid(r(y) - r(z)) + center * (r(y) + r(z))^2

    The score of a response is the value before the last token of its row, which a
    `TextLoader(completion=("chosen", "rejected"), scored=True)` adds: the head at the last token of the response, where
    a RewardWorker reads it. A trained critic is saved as a reward model. Equal to the loss of TRL's RewardTrainer.

    Metrics: `critic/loss`; `critic/accuracy`, the share of pairs with r(y) > r(z); `critic/margin`, the mean of the
    difference; `critic/reward`, that of all scores.
    Bradley and Terry (1952); Ouyang et al., "InstructGPT" (2022), eq. 1; Eisenstein et al. (2023) for `center`."""

    center: NonNegative = 0.0
    outputs = ("values",)

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        mask, *sides = self.sides(rows)
        order = torch.arange(len(mask.values), device=mask.values.device)
        last = [order.new_zeros(len(mask)).scatter_reduce(0, mask.row_index(), order * side, "amax") for side in sides]
        y, z = (outputs["values"].values[at] for at in last)
        loss = -logsigmoid(y - z) + self.center * (y + z).square()
        share = self.shares(totals, loss=loss)["loss"]
        found = self.shares(totals, accuracy=(y > z).float(), margin=y - z, reward=0.5 * (y + z))
        return share, {f"critic/{name}": value.detach() for name, value in {"loss": share, **found}.items()}
