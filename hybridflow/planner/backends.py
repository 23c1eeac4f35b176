"""Backend: what a training strategy means for time and memory: what its ranks hold, and what they send when. Pure.

With N data parallel ranks (Rajbhandari et al. 2020), beside the cuts by p and t:

    stage 1 (Megatron, ZeRO 1)     optimizer state 1/N; gradients meet once per optimizer step
    stage 2 (ZeRO 2)               gradients 1/N too; they meet after every micro-batch
    stage 3 (FSDP, ZeRO 3)         parameters 1/N too, gathered layer by layer in every pass
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hybridflow.config import FSDP, LoRA, Megatron, TrainStrategy, ZeRO
from hybridflow.errors import ConfigError, nearest
from hybridflow.model_spec import ModelSpec
from hybridflow.planner.plans import Parallel
from hybridflow.planner.workload import Workload


@dataclass(frozen=True)
class Backend:
    """What prices read of a `strategy`, whose sizes they do not. `copies` are how many whole copies of the parameters
    FSDP's ranks keep; `often`: gradients meet those of other ranks after every micro-batch; `offload`: what the stage
    cuts waits in host memory; `lora`: only adapters are trained."""

    strategy: Megatron | FSDP | ZeRO
    stage: int = 1
    copies: int = 1
    often: bool = False
    offload: bool = False
    lora: LoRA | None = None

    @classmethod
    def of(cls, strategy: TrainStrategy | None) -> Backend:
        """Errors: ConfigError for a strategy that the planner has no prices for."""
        match strategy:
            case None:
                return MEGATRON
            case Megatron():
                return cls(strategy)
            case ZeRO(stage=stage, offload=offload):
                return cls(strategy, stage, often=stage > 1, offload=offload)
            case FSDP(replicate=copies, reduce_often=often, offload=offload, lora=lora):
                return cls(strategy, 3, copies, often, offload, lora)
        raise ConfigError(
            f"the planner has no prices for {strategy!r}, it knows Megatron, FSDP and ZeRO. Place this group by hand."
        )

    @property
    def of_transformers(self) -> bool:
        """Layers are those of transformers; Megatron's are built so that they keep less for the backward pass."""
        return not isinstance(self.strategy, Megatron)

    @property
    def sharded(self) -> bool:
        return self.stage == 3

    def parallel(self, p: int, t: int, d: int, micro_batches: int | None = None) -> Parallel | None:
        """The layout of such sizes; None where the backend has no such sizes."""
        cut = not isinstance(self.strategy, ZeRO) and self.lora is None
        if not isinstance(self.strategy, Megatron) and (p > 1 or (t > 1 and not cut) or d % self.copies):
            return None
        return Parallel(p, t, d, micro_batches, d // self.copies if self.sharded else 1)

    def workload(self, given: Workload) -> Workload:
        """With the settings that the strategy has chosen for itself, those that are not its default ones."""
        own: dict[str, Any] = {
            name: value
            for name in ("dtype", "micro_tokens", "recompute", "sequence_parallel")
            if (value := getattr(self.strategy, name, None)) != getattr(type(self.strategy), name, None)
        }
        if self.of_transformers:
            own["sequence_parallel"] = False
        return replace(given, **own) if own else given

    def sized(self, parallel: Parallel) -> Megatron | FSDP | ZeRO:
        """The strategy with the sizes of a layout."""
        given = self.strategy
        if isinstance(given, Megatron):
            same = given.pp == parallel.p
            stages = given.stage_layers if same else None
            return replace(given, pp=parallel.p, tp=parallel.t, dp=parallel.d, stage_layers=stages)
        if isinstance(given, FSDP):
            return replace(given, tp=parallel.t, dp=parallel.d)
        return replace(given, dp=parallel.d)


MEGATRON = Backend(Megatron())


@lru_cache(maxsize=256)
def adapters(model: ModelSpec, lora: LoRA) -> tuple[float, float]:
    """Elements of a decoder layer's adapters, and columns that these read and write, on average over the layers.

    Errors: ConfigError for a target that is no linear layer of the model.
    """
    linear = [
        (name.removesuffix(".weight"), shape)
        for layer in range(model.layers)
        for name, shape in model.layer_tensors(layer).items()
        if len(shape) == 2
    ]
    for target in lora.targets:
        if not any(lora.matches(target, name) for name, _ in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name, _ in linear)
            raise ConfigError(f"LoRA: {target!r} matches no linear layer of this model.{nearest(target, known)}")
    sides = sum(sum(shape) for name, shape in linear if lora.adapts(name)) / model.layers
    return lora.rank * sides, sides
