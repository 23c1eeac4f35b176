"""RolloutWorker, which only generates, on devices of its own or beside other models (OpenRLHF's arrangement)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.config import KV, VLLM
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.contract import STATES, TrainState
from hybridflow.engines.lora.adapters import is_adapter_directory
from hybridflow.engines.vllm.layout import unbuilt_layout, vllm_layout
from hybridflow.engines.vllm.requirements import check as check_vllm
from hybridflow.engines.vllm.requirements import check_config
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.models.hf_spec import Decoder, check_reading, read_spec, use_of
from hybridflow.models.spec import ModelSpec
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import ONE_TO_ALL
from hybridflow.topology import GenerationGrid, RankGrid
from hybridflow.workers.generation import Generation, RowSession
from hybridflow.workers.model_worker import find_checkpoint, local_checkpoint
from hybridflow.workers.worker import Worker


class RolloutWorker(RowSession, Worker):
    """One rank of a model that generates and never trains.

    It starts with the checkpoint's weights; `hf.sync_weights(actor, rollout)` gives it an actor's weights. Its ranks
    form engines of `VLLM(pp=..., tp=...)` ranks each, as many as the pool holds. `offload=True` keeps its weights in
    host memory between calls and frees the KV cache: that of unfinished rows waits where `VLLM(kv=...)` says, with
    "recompute" in host memory until new weights arrive.
    """

    role = "rollout"

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        model = partial(_spec, settings["model"])

        def check(grid: RankGrid, device_type: str) -> None:
            check_reading(settings["model"], spec := model())
            check_config(settings["model"])
            Checkpoint(settings["model"]).check(spec)
            check_vllm(spec, settings["generate"], device_type)

        return WorkerSpec(
            resolve=partial(_resolved, cls.__name__),
            grid=partial(_grid, cls, settings["generate"]),
            check=check,
            model=model,
            layout=lambda grid: _layout(model(), grid.generation()),
            waits=settings.get("offload"),
        )

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
        self.spec = _spec(checkpoint)
        self.engine = VLLMEngine(context, generate, context.grid.generation(), self.spec, checkpoint)
        self.generation, self._rests = Generation(self.engine, generate, checkpoint), offload
        if not context.uninitialized:
            Checkpoint(checkpoint).read_into(self.engine.layout(), context.rank, self.engine.storage())
            self.engine.weights_changed()
        self._rest()

    @contextmanager
    def resident(self, what: Collection[TrainState] = STATES) -> Iterator[None]:
        """Keeps the weights in device memory."""
        del what
        try:
            if self._rests:
                self.engine.together(self.engine.memory().acquire)
            yield
        except BaseException:
            self._rest("recompute")  # what choosing another place takes from the others, they may not do
            raise
        self._rest()

    def rows_withdrawn(self) -> None:
        self._rest()

    def _rest(self, kv: KV | None = None) -> None:
        if self._rests or not self.rollout.unfinished:  # a session continues from its KV cache
            own = self.rollout.strategy.kv
            self.engine.sleep(kv or ("offload" if own == "recompute" else own))  # frees memory for other groups
        if self._rests:
            self.engine.memory().offload()

    @contextmanager
    def generating(self, alone: bool = False) -> Iterator[Generation]:
        del alone
        with self.resident():
            self.engine.wake()
            with self.context.stage("generation"):
                yield self.rollout

    @register(ONE_TO_ALL, blocking=True)
    def memory(self) -> dict[str, float]:
        """GiB now in device memory on each rank: `memory/generation` (its weights) and `memory/kv_cache`."""
        return {f"memory/{name}": size / (1 << 30) for name, size in self.resident_bytes().items()}

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of each kind of state now in device memory."""
        return {"generation": self.engine.memory().resident_bytes, "kv_cache": self.engine.cache_bytes}

    def forward_flops(self, tokens: Tensor) -> float:
        """Floating point operations of a forward pass over sequences of these lengths."""
        return float(self.spec.cost(tokens).sum())

    def weights_storage(self) -> Mapping[str, Tensor]:
        return self.engine.storage()

    @property
    def has_tensors(self) -> bool:
        return True

    def use(self) -> Mapping[str, Any]:
        return use_of(self.spec)

    def while_waiting(self, waits: Callable[[], bool]) -> bool:
        """Decode unfinished rows, if the version of the present weights is known."""
        if not self.rollout.unfinished or self.rollout.outdated:
            return False
        with self.generating() as generation:
            generation.advance_while(waits)
        return True

    def on_weights_loaded(self) -> None:
        self.rollout.weights_changed()

    def close(self) -> None:
        if self.generation is not None:
            self.generation.close()
        elif (engine := getattr(self, "engine", None)) is not None:
            engine.close()


def _resolved(name: str, settings: Settings) -> dict[str, Any]:
    found = find_checkpoint(settings["model"])
    if is_adapter_directory(found):
        raise ConfigError(
            f"{name}(model={found}): these are LoRA adapters, which it does not generate with. Give it the "
            f"model that they belong to and hf.sync_weights(actor, rollout), or what actor.save(path, merged=True) "
            f"wrote."
        )
    return {**settings, "model": str(found)}


def _grid(worker: type[RolloutWorker], generate: Any, devices: int) -> RankGrid:
    if not isinstance(generate, VLLM):
        raise ConfigError(f"{worker.__name__}(generate={generate!r}): give hf.VLLM(...).")
    p, t = generate.pp, generate.tp
    if devices % (p * t):
        raise PlacementError(
            f"{worker.role}: VLLM(tp={t}, pp={p}) makes engines of {p * t} devices, the pool has {devices}. "
            f"Use a multiple of {p * t} devices or other sizes."
        )
    return RankGrid(p, t, devices // (p * t), p_g=p, t_g=t)


def _layout(spec: Decoder, grid: GenerationGrid) -> Layout:
    return vllm_layout(spec, grid) if isinstance(spec, ModelSpec) else unbuilt_layout(spec.tensors(), grid)


def _spec(checkpoint: str | os.PathLike[str]) -> Decoder:
    """The spec of any decoder, as FSDP would read it: nothing is trained here."""
    return read_spec(Path(checkpoint), "lm")
