"""Generation: from prompts to responses, as an actor and a standalone rollout do it (paper, table 4)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridflow.algorithms.masked import row_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.config import FSDP, VLLM, Sampling
from hybridflow.data.tokenizer import has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Completion, GenerateEngine
from hybridflow.engines.vllm.requirements import check_response
from hybridflow.errors import ConfigError, PlacementError, PromptError
from hybridflow.models.hf_spec import read_spec
from hybridflow.protocols import THREE_D_ALL_MICRO_DP, register
from hybridflow.protocols.operation import Settings

_WRITTEN = ("prompt_ids", "response_ids", "log_probs", "response_mask", "num_tokens", "finished", "temperature")


def _sampling(settings: Settings, call: Settings) -> Sampling:
    if settings["generate"] is None:
        raise ConfigError("this actor does not generate: give ActorWorker.on(..., generate=hf.VLLM(...)).")
    own: VLLM = settings["generate"]
    return replace(own.sampling, **{name: value for name, value in call.items() if name != "batch"})


def _check(settings: Settings, call: Settings) -> None:
    asked = _sampling(settings, call)
    if "max_tokens" in call and (Path(settings["model"]) / "config.json").is_file():  # a trace knows models by name too
        check_response(read_spec(settings["model"], "lm", FSDP()), settings["generate"], asked.max_tokens)
    batch = call["batch"]
    texts = isinstance(batch, BatchRef) and "prompt" in batch and "prompt_ids" not in batch
    if texts and not has_tokenizer(settings["model"]):
        raise PromptError(
            f"prompts are text and {settings['model']} has no tokenizer. Give prompt_ids, or add a tokenizer."
        )


def _writes(settings: Settings, call: Settings) -> tuple[str, ...]:
    return (*_WRITTEN, "response") if has_tokenizer(settings["model"]) else _WRITTEN


generates = register(
    THREE_D_ALL_MICRO_DP,
    reads=("prompt_ids|prompt", "row_id?"),
    writes=_writes,
    repeat=lambda settings, call: _sampling(settings, call).n,
    carries=True,
    check=_check,
)
"""Declares `generate_sequences` of a worker whose settings are `model` and `generate`."""


def check_alone(name: str, neighbours: Sequence[RankGroup]) -> None:
    """One process holds one vLLM engine, which keeps its groups in globals. Errors: PlacementError."""
    for group in neighbours:
        if isinstance(group.settings.get("generate"), VLLM):
            raise PlacementError(
                f"{name}(generate=...) asks for a vLLM engine in hosts where {group.name} has one already, "
                f"and a process can hold one. Close that group first ({group.name}.close()), place this one on "
                f"other devices, or leave generate= out."
            )


class Generation:
    """One rank's generation engine, with the tokenizer of its checkpoint and the defaults of its strategy.

    `engine` may be exchanged for another one of the same model; it is closed when the tokenizer cannot be read.
    """

    def __init__(self, engine: GenerateEngine, strategy: VLLM, checkpoint: str | os.PathLike[str]) -> None:
        self.engine, self.strategy = engine, strategy
        try:
            self.tokenizer = load_tokenizer(checkpoint) if has_tokenizer(checkpoint) else None
        except BaseException:
            engine.close()
            raise

    def responses(self, batch: Batch, **sampling: Any) -> Batch:
        """`n` responses per prompt of `batch`, as the columns of `generate_sequences`.

        A row's random numbers depend on the seed of `sampling` and on its `row_id`, not on how rows were split.
        """
        chosen = replace(self.strategy.sampling, **sampling)
        prompts = self._prompt_ids(batch)
        rows = row_column(batch, "row_id").tolist() if "row_id" in batch else None
        seeds = None
        if chosen.seed is not None and rows is not None:
            seeds = [chosen.seed * 1_000_003 + row for row in rows]
        return self._columns(prompts, self.engine.generate(prompts, chosen, seeds, rows), chosen)

    def _prompt_ids(self, batch: Batch) -> list[list[int]]:
        if "prompt_ids" in batch:
            return token_column(batch, "prompt_ids").tolist()
        assert self.tokenizer is not None  # checked on the driver
        return self.tokenizer.encode(batch["prompt"])

    def _columns(self, prompts: list[list[int]], drawn: Sequence[list[Completion]], sampling: Sampling) -> Batch:
        rows = [(prompt, one) for prompt, several in zip(prompts, drawn, strict=True) for one in several]
        response_ids = Ragged.from_rows([one.token_ids for _, one in rows], torch.int64)
        columns: dict[str, Any] = {
            "prompt_ids": Ragged.from_rows([prompt for prompt, _ in rows], torch.int64),
            "response_ids": response_ids,
            "log_probs": Ragged.from_rows([one.log_probs for _, one in rows], torch.float32),
            "response_mask": response_ids.map(lambda ids: torch.ones_like(ids, dtype=torch.bool)),
            "num_tokens": torch.tensor([len(prompt) + len(one.token_ids) for prompt, one in rows], dtype=torch.int64),
            "finished": torch.tensor([one.finished for _, one in rows], dtype=torch.bool),
            "temperature": torch.full((len(rows),), 1.0 if sampling.greedy else sampling.temperature),
        }
        if self.tokenizer is not None:
            columns["response"] = self.tokenizer.decode([one.token_ids for _, one in rows])
        return Batch(columns)
