"""TeacherHead: the output layer of a teacher on the ranks of its student, for losses that read `ref_logits`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hybridflow.data.tokenizer import other_token
from hybridflow.engines.agreement import agree
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.sharded_model import compute_dtype
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import FAMILIES, ModelSpec, read_config


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
