"""StepCheck: all ranks skip an optimizer step when a number that it depends on is not finite on any rank.

Checking the gradients is not enough: `maximum`, `clamp` and `where` can drop a nan or an infinity between the inputs of
a loss and its gradients, which are then finite and wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.losses.aggregation import LossFunction, Totals
from hybridflow.algorithms.masked import not_finite, response_mask
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.agreement import agree, of_every_rank
from hybridflow.engines.process_groups import RankContext

_NAMED = 3  # findings in the text of a refusal


class StepCheck:
    """Checks the mini-batches between two steps of an engine and decides whether the next step is skipped.

    Call `begin` for each mini-batch, `share` for each micro-batch, then `agree`. `agree` uses the all-reduce in which
    ranks report errors, so the check needs no further communication until a rank finds something.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._columns, self._refusal, self._taken = "", "", ""
        self._errors: list[Exception] = []
        self._finite: dict[str, list[Tensor]] = {}

    def begin(self, batch: Batch, loss: LossFunction) -> None:
        """Check the columns that `loss` reads (its attribute `reads`; without it, all columns)."""
        self._errors, self._finite, self._columns = [], {}, ""
        try:
            self._columns = not_finite(batch, getattr(loss, "reads", None))
        except Exception as error:  # told by `agree`: peers need this rank in the pass
            self._errors.append(error)

    def share(
        self, loss: LossFunction, outputs: Mapping[str, Ragged], rows: Batch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The result of `loss` for a micro-batch; None when it raises, because peers need this rank in the pass."""
        try:
            scalar, metrics = loss(outputs, rows, totals)
            valid = response_mask(rows).values
            for name, output in outputs.items():
                kept = torch.where(valid, output.values.detach(), 0.0)
                self._finite.setdefault(f"the model's {name}", []).append(kept.isfinite().all())
            self._finite.setdefault("the loss", []).append(scalar.detach().isfinite().all())
            return scalar, {name: value.detach() for name, value in metrics.items()}
        except Exception as error:
            self._errors.append(error)
            return None

    def agree(self) -> None:
        """Share the findings of all ranks. Errors: as `agreement.agree`, when the loss raised on a rank."""
        mine = ""

        def check() -> float | None:
            nonlocal mine
            if self._errors:
                raise self._errors[0]
            mine = self._columns or self._computed()
            return 1.0 if mine else None

        try:
            refused = agree(self._context, check) is not None
        except Exception:
            self._refusal = ""  # the engine drops the gradients
            raise
        if refused:
            self._refusal = self._refusal or _joined(of_every_rank(self._context, mine))

    def _computed(self) -> str:
        """Names the model outputs and the loss of this rank that are not finite; "" when all are finite."""
        if not self._finite:
            return ""
        finite = torch.stack([torch.stack(found).all() for found in self._finite.values()]).tolist()
        bad = [name for name, good in zip(self._finite, finite, strict=True) if not good]
        return f"{' and '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite" if bad else ""

    def take(self) -> bool:
        """Whether to skip the step that follows, the same on all ranks; resets the check for the next step."""
        self._taken, self._refusal = self._refusal, ""
        return bool(self._taken)

    def reason(self, result: Mapping[str, float]) -> str:
        """Why the step that returned `result` was skipped; "" when it was not."""
        if not result["skipped"]:
            return ""
        return self._taken or f"the norm of the gradients is {result['grad_norm']}"


def _joined(findings: list[str]) -> str:
    """The findings of all ranks in one line; ranks with equal findings are grouped."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(findings):
        if text:
            ranks.setdefault(text, []).append(rank)
    said = [f"{text} on rank {', '.join(map(str, where))}" for text, where in list(ranks.items())[:_NAMED]]
    return "; ".join(said) + (f"; and more on {len(ranks) - _NAMED} other ranks" if len(ranks) > _NAMED else "")
