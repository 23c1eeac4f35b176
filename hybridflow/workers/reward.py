"""RewardWorker: rewards of responses, from a model or from a Python function (paper, table 4)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridflow.algorithms.typed_columns import row_column, token_column
from hybridflow.batch import Batch
from hybridflow.config import Megatron, TrainStrategy
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.checkpoint import Checkpoint
from hybridflow.errors import CheckpointError, ConfigError, RewardError
from hybridflow.protocols import THREE_D_PROTO, register
from hybridflow.protocols.operation import Settings
from hybridflow.rewards.function import FunctionReward
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker


def _reads(settings: Settings, call: Settings) -> tuple[str, ...] | None:
    if settings["function"] is None:
        return ("prompt_ids", "response_ids")
    extra = FunctionReward(settings["function"]).reads
    if extra is None:
        return None
    return ("prompt|prompt_ids", "response|response_ids", "row_id?", *extra)


class RewardWorker(ModelWorker):
    """One rank of a reward model (a sequence-classification checkpoint), or of a Python function.

    `function(prompts, completions, **columns) -> list[float]` gets texts and the columns of the batch that it names;
    with a first parameter named `prompt` it is called row by row. Ranks work on their share of the rows, so a function
    must not rely on seeing the whole batch. `tokenizer` is needed when the batch has token ids and no texts. With
    `offload=True` a reward model waits in host memory between calls.
    """

    role = "reward"
    head = "value"

    @classmethod
    def grid(cls, devices: int, settings: Mapping[str, Any]) -> RankGrid:
        if settings["function"] is not None:
            return RankGrid(d=devices)
        return super().grid(devices, settings)

    @classmethod
    def check(cls, grid: RankGrid, settings: Mapping[str, Any], device_type: str) -> None:
        if (settings["model"] is None) == (settings["function"] is None):
            raise ConfigError(f"{cls.__name__}: give either model= (a checkpoint) or function= (a Python function).")
        if settings["function"] is not None:
            _ = FunctionReward(settings["function"])
            if settings["offload"]:
                raise ConfigError(f"{cls.__name__}(offload=True): a function has nothing to move to host memory.")
            return
        super().check(grid, settings, device_type)
        checkpoint = Checkpoint(settings["model"])
        if checkpoint.find("score.weight") is None:
            found = "a language model's lm_head.weight" if checkpoint.find("lm_head.weight") else "no head"
            raise CheckpointError(
                f"{cls.role}: {settings['model']} has {found} and no score.weight: as a reward model it would give 0 "
                f"for every row. Give a sequence-classification checkpoint (one label), or function=."
            )

    def __init__(
        self,
        *,
        model: str | os.PathLike[str] | None = None,
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        function: Callable[..., Any] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        offload: bool = False,
    ) -> None:
        self.function = None if function is None else FunctionReward(function)
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        if model is not None:
            self._build(model, train, None, offload)

    @register(THREE_D_PROTO, reads=_reads, writes=("rewards",), balance=None)
    def compute_reward(self, batch: Batch) -> Batch | None:
        """`rewards` [B] float32. Errors: RewardError naming the function and the row; never a silent 0."""
        if self.function is None:
            with self.at_work():
                _ = self._agreed("compute_reward", batch, ("values",))
                scores = self.engine.score(batch)
        else:
            scores = self._call(self.function, batch)
        return None if scores is None else Batch({"rewards": scores})

    def _call(self, function: FunctionReward, batch: Batch) -> torch.Tensor:
        prompts, responses = (self._texts(batch, name) for name in ("prompt", "response"))
        row_ids = row_column(batch, "row_id").tolist() if "row_id" in batch else None
        columns = {name: batch[name] for name in batch.columns}
        return torch.as_tensor(function(prompts, responses, columns, row_ids), dtype=torch.float32)

    def _texts(self, batch: Batch, name: str) -> list[str]:
        if name in batch:
            return batch[name]
        if self.tokenizer is None:
            raise RewardError(f"the batch has {name}_ids and no {name} text: give RewardWorker.on(..., tokenizer=...).")
        return self.tokenizer.decode(token_column(batch, f"{name}_ids").tolist())
