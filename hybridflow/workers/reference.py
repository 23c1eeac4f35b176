"""ReferenceWorker: a frozen policy (paper, table 4), and the teacher of a distillation."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from hybridflow.algorithms.losses.distillation import TEACHER, TOP_K
from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.models.hf_spec import read_spec
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.transfer_protocols import THREE_D_PROTO
from hybridflow.settings import require
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.teacher import plain_output_layer

_READS = ("prompt_ids", "response_ids", "temperature?")


def _check_k(settings: Settings, call: Any) -> None:
    k, vocab = call["k"], read_spec(settings["model"], "lm", settings["train"]).vocab
    good = type(k) is int and 1 <= k <= vocab
    require(good, f"compute_ref_top_k(k={k!r}): give a whole number from 1 to {vocab}, the size of the vocabulary.")


def _check_output_layer(settings: Settings, call: Any) -> None:
    _ = plain_output_layer(settings["model"])


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
        reads=_READS,
        writes=("ref_log_probs",),
        balance="num_tokens",
    )
    def compute_ref_log_prob(self, batch: Batch) -> Batch | None:
        """`ref_log_probs` ragged [B, R] float32, with logits divided by the actor's sampling temperature."""
        return self._computed(batch, "log_probs", "ref_log_probs")

    @register(THREE_D_PROTO, reads=_READS, writes=TOP_K, balance="num_tokens", check=_check_k)
    def compute_ref_top_k(self, batch: Batch, k: int = 64) -> Batch | None:
        """The k most probable tokens before each response token, first the most probable, for distillation.

        `ref_top_ids` ragged [B, R, k] int32, `ref_top_log_probs` ragged [B, R, k] float32, and `ref_tail_log_probs`
        ragged [B, R] float32 of all other tokens together; logits are divided by the actor's sampling temperature.
        """
        temperature = self._agreed(batch, ("log_probs",))
        return self._teaching(batch, partial(self.engine.tokens.top_k, k=k, temperature=temperature))

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids"),
        writes=(TEACHER,),
        balance="num_tokens",
        check=_check_output_layer,
    )
    def compute_ref_hidden_states(self, batch: Batch) -> Batch | None:
        """`ref_hidden_states` ragged [B, R, H] in the dtype that the model computes in: the input of the output layer
        before each response token. With the output layer they give `ref_logits` to a loss (`ActorWorker(teacher=)`):
        H numbers per token travel instead of one for each token of the vocabulary."""
        _ = self._agreed(batch, ("log_probs",))
        return self._teaching(batch, self.engine.tokens.hidden_states, hidden=True)

    def _teaching(self, batch: Batch, read: Any, hidden: bool = False) -> Batch | None:
        with self.resident():
            found = self.engine.infer(batch, read, hidden=hidden)
        return None if found is None else Batch({f"ref_{name}": column for name, column in found.items()})
