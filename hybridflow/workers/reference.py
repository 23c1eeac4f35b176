"""ReferenceWorker: log-probabilities of a frozen policy (paper, table 4)."""

from __future__ import annotations

import os

from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.protocols import THREE_D_PROTO, register
from hybridflow.workers.model_worker import ModelWorker


class ReferenceWorker(ModelWorker):
    """One rank of a frozen language model; `offload=True` keeps it in host memory between calls."""

    role = "reference"

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        offload: bool = False,
    ) -> None:
        self._build(model, train, None, offload)

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids", "temperature?"),
        writes=("ref_log_probs",),
        balance="num_tokens",
    )
    def compute_ref_log_prob(self, batch: Batch) -> Batch | None:
        """`ref_log_probs` ragged [B, R] float32, with logits divided by the actor's sampling temperature."""
        return self._computed(batch, "log_probs", "ref_log_probs")
