"""Backend: the state and messages of a training strategy's ranks, which decide its time and memory. Pure.

With N data parallel ranks (Rajbhandari et al. 2020), beside the cuts by p and t:

    stage 1 (Megatron, ZeRO 1)     optimizer state 1/N; gradients meet once per optimizer step
    stage 2 (ZeRO 2)               gradients 1/N too; they meet after every micro-batch
    stage 3 (FSDP, ZeRO 3)         parameters 1/N too, gathered layer by layer in every pass
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from hybridflow.config import FSDP, LoRA, Megatron, TrainStrategy, ZeRO
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.mesh import Parallel
from hybridflow.planner.describe.workload import Workload


@dataclass(frozen=True)
class Backend:
    """How a training `strategy` is priced; its sizes are left out.

    `pipeline` and `tensor`: it has sizes p and t. `stage` as above. `copies`: whole copies of the parameters that
    FSDP's ranks keep. `often`: gradients are reduced after every micro-batch. `offload`: what the stage cuts waits in
    host memory. `lora`: only adapters are trained. `of_transformers`: layers are those of transformers, which keep more
    for the backward pass than Megatron's."""

    strategy: Megatron | FSDP | ZeRO
    pipeline: bool = False
    tensor: bool = False
    stage: int = 1
    copies: int = 1
    often: bool = False
    offload: bool = False
    lora: LoRA | None = None
    of_transformers: bool = True

    @classmethod
    def of(cls, strategy: TrainStrategy | None) -> Backend:
        """Errors: ConfigError for a strategy that the planner has no prices for."""
        if strategy is None:
            return MEGATRON
        if (made := BACKENDS.get(type(strategy))) is None:
            known = f"it knows {', '.join(kind.__name__ for kind in BACKENDS)}"
            raise ConfigError(f"the planner has no prices for {strategy!r}, {known}. Place this group by hand.")
        if unknown := [name for name in ("cp", "ep", "etp") if getattr(strategy, name, None) not in (None, 1)]:
            raise ConfigError(f"the planner has no prices for {unknown[0]}= of {strategy!r}. Place this group by hand.")
        return made(strategy)

    @property
    def sharded(self) -> bool:
        return self.stage == 3

    def parallel(self, p: int, t: int, d: int) -> Parallel | None:
        """The layout of such sizes; None where the backend has no such sizes."""
        if (p > 1 and not self.pipeline) or (t > 1 and not self.tensor) or d % self.copies:
            return None
        return Parallel(p, t, d, d // self.copies if self.sharded else 1)

    def workload(self, given: Workload) -> Workload:
        """With the settings that the strategy does not leave at their defaults."""
        names, kind = ("dtype", "micro_tokens", "recompute", "sequence_parallel"), type(self.strategy)
        set_here = {name: getattr(self.strategy, name, None) for name in names}
        own: dict[str, Any] = {name: set_to for name, set_to in set_here.items() if set_to != getattr(kind, name, None)}
        if self.of_transformers:
            own["sequence_parallel"] = False
        return replace(given, **own) if own else given

    def sized(self, parallel: Parallel) -> Megatron | FSDP | ZeRO:
        """The strategy with the sizes of a layout, as far as it has such sizes."""
        sizes: dict[str, Any] = {"pp": parallel.p, "tp": parallel.t, "dp": parallel.d}
        if getattr(self.strategy, "pp", parallel.p) != parallel.p:
            sizes["stage_layers"] = None  # they were those of other stages
        known = {field.name for field in fields(self.strategy)} & {*sizes}
        return replace(self.strategy, **{name: sizes[name] for name in known})


BACKENDS: Mapping[type, Callable[[Any], Backend]] = MappingProxyType(
    {
        Megatron: lambda given: Backend(given, pipeline=True, tensor=True, lora=given.lora, of_transformers=False),
        ZeRO: lambda given: Backend(given, stage=given.stage, often=given.stage > 1, offload=given.offload),
        FSDP: lambda given: Backend(
            given,
            tensor=given.lora is None,
            stage=3,
            copies=given.replicate,
            often=given.reduce_often,
            offload=given.offload,
            lora=given.lora,
        ),
    }
)
"""The cost model of each type of strategy."""
MEGATRON = Backend.of(Megatron())


@lru_cache(maxsize=256)
def adapters(model: ModelSpec, lora: LoRA, t: int = 1, shares: int = 1) -> tuple[float, float, float]:
    """Of a decoder layer on one of `t` tensor parallel ranks, `shares` of which share the sequence, on average over the
    layers: elements of its adapters, columns that these read and write per token, and columns between A and B.

    The side that is cut is never the hidden one. Errors: ConfigError for a target that is no linear layer of the
    model."""
    tensors = (tensor for layer in range(model.layers) for tensor in model.layer_tensors(layer).items())
    linear = [(name.removesuffix(".weight"), shape) for name, shape in tensors if len(shape) == 2]
    for target in lora.targets:
        if not any(lora.matches(target, name) for name, _ in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name, _ in linear)
            raise ConfigError(f"LoRA: {target!r} matches no linear layer of this model.{nearest(target, known)}")
    adapted = [sum(shape) - model.hidden for name, shape in linear if lora.adapts(name)]
    hidden, cut = model.hidden * len(adapted) / model.layers, sum(adapted) / t / model.layers
    return lora.rank * (hidden + cut), hidden / shares + cut, lora.rank * len(adapted) / model.layers
