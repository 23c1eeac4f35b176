"""ReferenceWorker: a frozen policy (paper, table 4), and the teacher of a distillation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from hybridflow.algorithms.losses.distillation import TEACHER, TOP_K
from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.data.tokenizer import other_token
from hybridflow.engines.agreement import agree
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.contract import PARAMETERS
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.sharded_model import compute_dtype
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.engines.weight_average import WeightAverage
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder, read_spec
from hybridflow.models.images import IMAGES
from hybridflow.models.spec import FAMILIES, ModelSpec, read_config
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import THREE_D_PROTO
from hybridflow.settings import is_number, require
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker

_READS = ("prompt_ids", "response_ids", "temperature?", *IMAGES)


class TeacherHead:
    """Reads this rank's rows of the output layer of `teacher` into host memory, on first use."""

    def __init__(self, context: RankContext, teacher: str | os.PathLike[str] | None) -> None:
        self._context, self._teacher = context, teacher
        self._rows: dict[tuple[int, int], Tensor] = {}  # by the range of token ids, which another layout changes

    @contextmanager
    def on(self, engine: TrainEngine) -> Iterator[None]:
        """Inside, losses of `engine` can read `ref_logits`. Errors: CheckpointError of one rank, on all ranks."""

        def load() -> None:
            if engine.last_stage:
                if (part := engine.tokens.vocabulary) not in self._rows:
                    self._rows = {part: self._read(engine)}
                engine.tokens.teacher = self._rows[part].to(engine.device)

        try:
            agree(self._context, load)
            yield
        finally:
            engine.tokens.teacher = None

    def _read(self, engine: TrainEngine) -> Tensor:
        assert self._teacher is not None  # checked on the driver
        name, (first, last) = plain_output_layer(self._teacher), engine.tokens.vocabulary
        entry = Checkpoint(self._teacher).find(name)
        assert entry is not None  # checked on the driver
        with entry.opened() as file:
            return file.get_slice(entry.name)[first:last].to(compute_dtype(engine.strategy, engine.device))


def plain_output_layer(model: str | os.PathLike[str]) -> str:
    """The canonical name of the output layer's weights, for a model whose logits are these times hidden states.

    Errors: ConfigError for another family: it may scale, cap or shift its logits.
    """
    config = read_config(os.fspath(model))
    if config.get("model_type") not in FAMILIES:
        raise ConfigError(
            f"the {config.get('model_type')} model {model} may scale or cap its logits, so its hidden states do not "
            f"give them: ref_logits needs a teacher of {', '.join(FAMILIES)}. Distill with compute_ref_top_k and "
            f"update_actor(loss='gkd', over='top_k'), which takes any model."
        )
    tied = ModelSpec.from_hf_config(config).tied
    return "model.embed_tokens.weight" if tied else "lm_head.weight"


def check_teacher(spec: Decoder, settings: Mapping[str, Any]) -> None:
    """Errors: ConfigError for a teacher whose vocabulary is not that of the student `spec`, and those of
    `plain_output_layer`; CheckpointError for one without its output layer."""
    if (teacher := settings.get("teacher")) is None:
        return
    _, other = plain_output_layer(teacher), ModelSpec.from_checkpoint(teacher)
    if other.vocab != spec.vocab:
        raise ConfigError(
            f"teacher={teacher} has a vocabulary of {other.vocab} tokens, the model {settings['model']} one of "
            f"{spec.vocab}: a distribution over one is not one over the other. Use models of one tokenizer, with "
            f"output layers of one size."
        )
    Checkpoint(teacher).check(other)
    if (odd := other_token(settings["model"], teacher)) is not None:
        raise ConfigError(
            f"teacher={teacher} has another tokenizer than {settings['model']}: {odd}. Use models of one tokenizer."
        )


def _check_k(settings: Settings, call: Any) -> None:
    k, vocab = call["k"], read_spec(settings["model"], "lm").vocab
    good = type(k) is int and 1 <= k <= vocab
    require(good, f"compute_ref_top_k(k={k!r}): give a whole number from 1 to {vocab}, the size of the vocabulary.")


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
        check=lambda settings, call: plain_output_layer(settings["model"]),
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
