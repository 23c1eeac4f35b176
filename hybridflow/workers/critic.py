"""CriticWorker: values of response tokens (paper, table 4)."""

from __future__ import annotations

import os
from typing import Any

from hybridflow.algorithms.loss import value_loss
from hybridflow.batch import Batch
from hybridflow.config import Megatron, Optimizer, TrainStrategy
from hybridflow.protocols import THREE_D_PROTO, register
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.update import UpdateCall

_UPDATE = UpdateCall("critic", value_loss)


class CriticWorker(ModelWorker):
    """One rank of a value model: the decoder of a checkpoint with a value head (zeros where it has none).

    With `offload=True` parameters, gradients and optimizer state wait in host memory between calls.
    """

    role = "critic"
    head = "value"

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        optim: Optimizer | None = None,
        offload: bool = False,
    ) -> None:
        self._build(model, train, optim, offload)

    @register(THREE_D_PROTO, reads=("prompt_ids", "response_ids"), writes=("values",), balance="num_tokens")
    def compute_values(self, batch: Batch) -> Batch | None:
        """`values` ragged [B, R] float32: the value before each response token is drawn."""
        with self.at_work():
            _ = self._agreed("compute_values", batch, ("values",))
            out = self.engine.forward(batch, ("values",))
        return None if out is None else Batch({"values": out["values"]})

    @register(THREE_D_PROTO, reads=_UPDATE.reads, chunks="minibatches", balance="num_tokens", check=_UPDATE.check)
    def update_critic(
        self, batch: Batch, minibatches: int = 1, epochs: int = 1, loss: Any = "value", **options: Any
    ) -> dict[str, float]:
        """Steps on the value loss over `epochs` x `minibatches`; `options` are those of the loss (e.g. `clip`)."""
        with self.at_work():
            return self._update("update_critic", batch, value_loss(loss, **options), epochs)
