"""Generation of an actor (paper, table 4), and RolloutWorker, which only generates, on devices of its own or beside
other models (OpenRLHF's arrangement)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.algorithms.masked import row_column, token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.config import FSDP, VLLM, Sampling
from hybridflow.data.tokenizer import has_tokenizer, load_tokenizer
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.contract import Completion, GenerateEngine
from hybridflow.engines.lora.adapters import is_adapter_directory
from hybridflow.engines.vllm.layout import unbuilt_layout, vllm_layout
from hybridflow.engines.vllm.requirements import check as check_vllm
from hybridflow.engines.vllm.requirements import check_response
from hybridflow.errors import ConfigError, PlacementError, PromptError
from hybridflow.models.hf_spec import Decoder, read_spec
from hybridflow.models.spec import ModelSpec
from hybridflow.protocols import ONE_TO_ALL, THREE_D_ALL_MICRO_DP, Settings, register
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import find_checkpoint, local_checkpoint
from hybridflow.workers.worker import Worker

_WRITTEN = ("prompt_ids", "response_ids", "log_probs", "response_mask", "num_tokens", "finished", "temperature")


def _sampling(settings: Settings, call: Settings) -> Sampling:
    if settings["generate"] is None:
        raise ConfigError("this actor does not generate: give ActorWorker.on(..., generate=hf.VLLM(...)).")
    own: VLLM = settings["generate"]
    return replace(own.sampling, **{name: value for name, value in call.items() if name != "batch"})


def _check(settings: Settings, call: Settings) -> None:
    asked = _sampling(settings, call)
    if (
        "max_tokens" in call and (Path(settings["model"]) / "config.json").is_file()
    ):  # a trace may have a model's name only
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
    """A process can hold one vLLM engine, which keeps its groups in globals. Errors: PlacementError."""
    for group in neighbours:
        if isinstance(group.settings.get("generate"), VLLM):
            raise PlacementError(
                f"{name}(generate=...) asks for a vLLM engine in hosts where {group.name} has one already, "
                f"and a process can hold one. Close that group first ({group.name}.close()), place this one on "
                f"other devices, or leave generate= out."
            )


class Generation:
    """One rank's generation engine, its checkpoint's tokenizer and its strategy's defaults.

    `engine` may be replaced by another of the same model; it is closed when the tokenizer cannot be read.
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

        A row's random numbers depend on the seed of `sampling` and its `row_id`, not on the split.
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


class RolloutWorker(Worker):
    """One rank of a model that generates and never trains.

    It starts with the checkpoint's weights; `hf.sync_weights(actor, rollout)` gives it an actor's weights. Its ranks
    form engines of `VLLM(pp=..., tp=...)` ranks each, as many as the pool holds. `offload=True` keeps its weights in
    host memory between calls and frees the KV cache.
    """

    role = "rollout"

    @classmethod
    def resolve(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        found = find_checkpoint(settings["model"])
        if is_adapter_directory(found):
            raise ConfigError(
                f"{cls.__name__}(model={found}): these are LoRA adapters, which it does not generate with. Give it the "
                f"model that they belong to and hf.sync_weights(actor, rollout), or what actor.save(path, merged=True) "
                f"wrote."
            )
        return {**settings, "model": str(found)}

    @classmethod
    def grid(cls, devices: int, settings: Mapping[str, Any]) -> RankGrid:
        generate = settings["generate"]
        if not isinstance(generate, VLLM):
            raise ConfigError(f"{cls.__name__}(generate={generate!r}): give hf.VLLM(...).")
        p, t = generate.pp, generate.tp
        if devices % (p * t):
            raise PlacementError(
                f"{cls.role}: VLLM(tp={t}, pp={p}) makes engines of {p * t} devices, the pool has {devices}. "
                f"Use a multiple of {p * t} devices or other sizes."
            )
        return RankGrid(p, t, devices // (p * t), p_g=p, t_g=t)

    @classmethod
    def check(cls, grid: RankGrid, settings: Mapping[str, Any], device_type: str) -> None:
        spec = cls.model_spec(settings)
        Checkpoint(settings["model"]).check(spec)
        check_vllm(spec, settings["generate"], device_type)

    @classmethod
    def check_neighbours(cls, settings: Mapping[str, Any], neighbours: Sequence[RankGroup]) -> None:
        check_alone(cls.__name__, neighbours)

    @classmethod
    def model_spec(cls, settings: Mapping[str, Any]) -> Decoder:
        return _spec(settings["model"])

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        spec = cls.model_spec(settings)
        if isinstance(spec, ModelSpec):
            return vllm_layout(spec, grid.generation())
        return unbuilt_layout(spec.tensors(), grid.generation())

    @classmethod
    def has_runtime_layout(cls, settings: Mapping[str, Any]) -> bool:
        return not isinstance(cls.model_spec(settings), ModelSpec)

    def runtime_layout(self) -> Layout:
        return self.engine.layout()

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        generate: VLLM = VLLM(),  # noqa: B008  a frozen value
        offload: bool = False,
    ) -> None:
        from hybridflow.engines.vllm.engine import VLLMEngine

        checkpoint, context = local_checkpoint(model), self.context
        self.engine = VLLMEngine(context, generate, context.grid.generation(), _spec(checkpoint), checkpoint)
        self.generation, self._rests = Generation(self.engine, generate, checkpoint), offload
        if not context.uninitialized:
            Checkpoint(checkpoint).read_into(self.engine.layout(), context.rank, self.engine.storage())
            self.engine.weights_changed()
        self._rest()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keeps the weights in device memory."""
        if self._rests:
            self.engine.memory().acquire()
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        self.engine.sleep()  # frees the cache's memory for other groups
        if self._rests:
            self.engine.memory().offload()

    @generates
    def generate_sequences(self, batch: Batch, **sampling: Any) -> Batch:
        """`n` responses per prompt; columns and settings are those of `ActorWorker.generate_sequences`.

        Errors: PromptError for a prompt that is empty or leaves no room for a response, ConfigError.
        """
        with self.resident():
            self.engine.wake()
            with self.context.stage("generation"):
                return self.generation.responses(batch, **sampling)

    @register(ONE_TO_ALL, blocking=True)
    def memory(self) -> dict[str, float]:
        """GiB now in device memory on each rank: `memory/generation` (its weights) and `memory/kv_cache`."""
        return {f"memory/{name}": size / (1 << 30) for name, size in self.resident_bytes().items()}

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each kind of state now in device memory."""
        return {"generation": self.engine.memory().resident_bytes, "kv_cache": self.engine.cache_bytes}

    def weights_storage(self) -> Mapping[str, Tensor]:
        return self.engine.storage()

    @property
    def has_tensors(self) -> bool:
        return True

    def on_weights_loaded(self) -> None:
        self.engine.weights_changed()

    def close(self) -> None:
        if (engine := getattr(self, "engine", None)) is not None:
            engine.close()


def _spec(checkpoint: str | os.PathLike[str]) -> Decoder:
    """The spec of any decoder, as FSDP would read it: nothing is trained here."""
    return read_spec(Path(checkpoint), "lm", FSDP())
