"""SkippedSteps: records the optimizer steps that all ranks skipped, and stops a run that only skips."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridflow import config
from hybridflow.engines.agreement import of_every_rank
from hybridflow.engines.process_groups import RankContext, SkippedStep
from hybridflow.errors import DivergenceError

logger = logging.getLogger(__name__)


class SkippedSteps:
    """Counts the steps in a row that were skipped for numbers that are not finite, over all calls of a worker."""

    def __init__(self, context: RankContext, settings: config.Optimizer | None) -> None:
        self._context, self._settings, self.streak = context, settings, 0

    @property
    def diverged(self) -> bool:
        """Whether the last `max_skipped` steps were skipped; equal on all ranks."""
        most = None if self._settings is None else self._settings.max_skipped
        return most is not None and self.streak >= most

    def made(self) -> None:
        """A step was made."""
        self.streak = 0

    def skipped(self, number: int, steps: int, reason: str, row_ids: Sequence[int], overflow: bool) -> None:
        """Step `number` of the call's `steps` was skipped, on all ranks; `row_ids` are this rank's rows. Collective.

        An `overflow` of float16, which the loss scale cures, neither counts nor ends a streak. Errors: DivergenceError
        on all ranks after `max_skipped` steps in a row.
        """
        context, settings = self._context, self._settings
        ids = dict.fromkeys(row for rows in of_every_rank(context, tuple(row_ids)) for row in rows)
        where = (context.role, context.method, context.step, context.call)
        context.skipped.append(SkippedStep(*where, number, reason, tuple(ids)))
        if context.rank == 0:
            logger.warning(
                "%s.%s skipped step %d of %d; no weight and no optimizer state has changed: %s.",
                *(context.role, context.method, number, steps, reason),
            )
        self.streak += not overflow
        if not self.diverged:
            return
        assert settings is not None
        raise DivergenceError(
            f"{context.role} skipped {self.streak} optimizer steps in a row, the last because {reason}. Its weights "
            f"are those of the last step that was made, which may have broken them: continue from a checkpoint before "
            f"it. Use a lower lr (now {settings.lr:g}), more warmup_steps or a smaller clip_grad (now "
            f"{settings.clip_grad:g}), and look at the rows that skipped.jsonl in the run directory names. "
            f"{type(settings).__name__}(max_skipped=...) sets the number; None never stops."
        )
