"""CostWorker: costs of responses, from a model or from Python functions (Safe-RLHF)."""

from __future__ import annotations

from hybridflow.batch import Batch
from hybridflow.workers.scoring import ScoreWorker, scores


class CostWorker(ScoreWorker):
    """One rank of a cost model, or of Python functions that say how much harm a response does.

    Its settings are those of a RewardWorker. A cost above 0 is unwanted: training keeps its mean below a limit (Dai et
    al., "Safe RLHF", 2023).
    """

    role = "cost"

    @scores("cost")
    def compute_cost(self, batch: Batch) -> Batch | None:
        """`costs` [B] float32, or ragged [B, R] float32 at level "token"; as `compute_reward` of a RewardWorker, with
        components `costs/<name>` and `cost_failure`.

        Errors: RewardError naming the function and the row; never a silent 0.
        """
        return self._scored("compute_cost", batch)
