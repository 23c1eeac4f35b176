"""ReferenceWorker: a frozen policy (paper, table 4), and the teacher of a distillation."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

from hybridflow.algorithms.losses.distillation import TEACHER, TOP_K
from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.engines.contract import PARAMETERS
from hybridflow.engines.weight_average import WeightAverage
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.models.hf_spec import read_spec
from hybridflow.models.images import IMAGES
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.transfer_protocols import THREE_D_PROTO
from hybridflow.settings import is_number, require
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.teacher import plain_output_layer

_READS = ("prompt_ids", "response_ids", "temperature?", *IMAGES)


def _check_k(settings: Settings, call: Any) -> None:
    k, vocab = call["k"], read_spec(settings["model"], "lm").vocab
    good = type(k) is int and 1 <= k <= vocab
    require(good, f"compute_ref_top_k(k={k!r}): give a whole number from 1 to {vocab}, the size of the vocabulary.")


def _check_output_layer(settings: Settings, call: Any) -> None:
    _ = plain_output_layer(settings["model"])


class ReferenceWorker(ModelWorker):
    """One rank of a frozen language model; `offload=True` keeps it in host memory between calls.

    With `ema_decay` its weights are an exponential moving average: `hf.sync_weights(actor, reference)` sets them to
    ema_decay * reference + (1 - ema_decay) * actor, in float32 (4 more bytes per parameter, with `offload` in host
    memory), and the model computes with that, rounded to its dtype. Checkpoints have the average, `save` writes it.
    """

    role = "reference"
    _average: WeightAverage | None = None

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        spec, decay = super().worker_spec(settings), settings.get("ema_decay")

        def check(grid: RankGrid, device_type: str) -> None:
            good = decay is None or (is_number(decay) and 0 <= decay < 1)
            require(good, f"{cls.__name__}(ema_decay={decay!r}): give a number in [0, 1), or None.")
            require(decay is None or not spec.fixed, spec.fixed)
            spec.check(grid, device_type)

        return replace(spec, check=check)

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        offload: bool = False,
        ema_decay: float | None = None,
    ) -> None:
        self._build(model, train, None, offload)
        if ema_decay is not None:
            self.engine.reload(self._idle)
            self._average = WeightAverage(self.engine, ema_decay, on_host=offload)
            self.engine.offload(self._idle)

    def on_weights_loaded(self) -> None:
        super().on_weights_loaded()
        if self._average is not None:
            self._average.update()

    def fixed_weights(self) -> tuple[frozenset[str], Any]:
        return super().fixed_weights() if self._average is None else (frozenset(), None)

    def optimizing_engine(self) -> Any:
        self.engine.reload(self._idle)
        return self._average

    def resident_bytes(self) -> dict[str, int]:
        average = {} if self._average is None else {"average": self._average.memory.resident_bytes}
        return super().resident_bytes() | average

    def sleep(self) -> None:
        super().sleep()
        if self._average is not None:
            self._average.memory.release()

    def wake_up(self) -> None:
        super().wake_up()
        if self._average is not None:
            self._average.memory.acquire()

    def close(self) -> None:
        super().close()
        if self._average is not None:
            self._average.memory.release()

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
        reads=("prompt_ids", "response_ids", *IMAGES),
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
        with self.resident(PARAMETERS):
            found = self.engine.infer(batch, read, hidden=hidden)
        return None if found is None else Batch({f"ref_{name}": column for name, column in found.items()})
