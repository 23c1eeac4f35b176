"""Backend: the state and messages of a training strategy's ranks, which decide its time and memory. Pure.

With N data parallel ranks (Rajbhandari et al. 2020), beside the cuts by p and t:

    stage 1 (Megatron, ZeRO 1)     optimizer state 1/N; gradients meet once per optimizer step
    stage 2 (ZeRO 2)               gradients 1/N too; they meet after every micro-batch
    stage 3 (FSDP, ZeRO 3)         parameters 1/N too, gathered layer by layer in every pass
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

from hybridflow.config import FSDP, LoRA, Megatron, TrainStrategy, ZeRO
from hybridflow.errors import ConfigError, ModelError, PlacementError, nearest
from hybridflow.models.architecture import architecture
from hybridflow.models.families import is_packable
from hybridflow.models.hf_spec import Decoder, check_shared_heads, frozen_tensors
from hybridflow.models.images import VISION_TOWER
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import OneLayout, Pin
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel, divides
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.topology import divisors


@dataclass(frozen=True)
class Backend:
    """How a training `strategy` is priced; its sizes are left out.

    `pipeline` and `tensor`: it has sizes p and t. `stage` as above. `copies`: whole copies of the parameters that
    FSDP's ranks keep. `often`: gradients are reduced after every micro-batch. `offload`: what the stage cuts waits in
    host memory. `lora`: only adapters are trained; tensors of names as in `freeze` are not. `of_transformers`: layers
    are those of transformers, which keep more for the backward pass than Megatron's."""

    strategy: Megatron | FSDP | ZeRO
    pipeline: bool = False
    tensor: bool = False
    stage: int = 1
    copies: int = 1
    often: bool = False
    offload: bool = False
    lora: LoRA | None = None
    freeze: tuple[str, ...] = ()
    of_transformers: bool = True

    @classmethod
    def of(cls, strategy: TrainStrategy | None) -> Backend:
        """Errors: ConfigError for a strategy that the planner has no prices for."""
        if strategy is None:
            return MEGATRON
        if (made := BACKENDS.get(type(strategy))) is None:
            known = f"it knows {', '.join(kind.__name__ for kind in BACKENDS)}"
            raise ConfigError(f"the planner has no prices for {strategy!r}, {known}. Place this group by hand.")
        return made(strategy)

    @property
    def sharded(self) -> bool:
        return self.stage == 3

    def parallel(self, p: int, t: int, d: int, cp: int = 1, ep: int = 1) -> Parallel | None:
        """The layout of such sizes; None where the backend has no such sizes."""
        unlike = (cp > 1 and not hasattr(self.strategy, "cp")) or (ep > 1 and not hasattr(self.strategy, "ep"))
        if (p > 1 and not self.pipeline) or (t > 1 and not self.tensor) or d % cp or d // cp % self.copies or unlike:
            return None
        etp, shards = getattr(self.strategy, "etp", None), d // self.copies if self.sharded else 1
        if self.sharded and (shards % ep or (ep > 1 and t > 1)):
            return None
        with suppress(PlacementError):  # experts that the ranks of a stage cannot share evenly
            return Parallel(p, t, d, shards, cp, ep, etp)
        return None

    def check(self, model: Decoder, sizes: Parallel, role: str = "the model") -> None:
        """What the strategy's own checks refuse of families and sizes. Errors: ModelError."""
        plain, packed = isinstance(model, ModelSpec), getattr(self.strategy, "packed", True)
        if isinstance(model, ModelSpec) and (sizes.p > model.layers or not model.divides(sizes.t)):
            model.check_parallel(sizes.p, sizes.t, role)
        if not self.of_transformers:
            if not plain or sizes.ep > 1:
                architecture(model).check_parallel(sizes.p, sizes.t, role)
                architecture(model).check_experts(sizes.ep, sizes.columns, role)
        elif not isinstance(model, ModelSpec):
            packed, family = packed and is_packable(model.config), model.family
            if sizes.t not in (1, getattr(self.strategy, "tp", 1)):
                raise ModelError(f"{role}: whether FSDP can cut {family} by t={sizes.t} is not known. Use tp=1.")
        elif model.kv_heads % sizes.t:
            raise ModelError(f"{role} has {model.kv_heads} kv-heads, which t={sizes.t} ranks of FSDP cannot share.")
        count = Sizes.of(model).experts if getattr(model, "experts", ()) else 0
        if self.of_transformers and sizes.ep > 1 and (not count or count % sizes.ep):
            raise ModelError(f"{role} has {count} experts to share, which ep={sizes.ep} ranks cannot.")
        check_shared_heads(model, sizes.cp, sizes.t, packed, role)

    def layouts(self, model: Decoder, sizes: Parallel, contexts: Sequence[int]) -> Iterator[Parallel]:
        """Ways to cut the model by these p, t and d, with one of `contexts` as cp and every ep."""
        experts = Sizes.of(model).experts if hasattr(self.strategy, "ep") else 0
        shares = [ep for ep in divisors(sizes.t * sizes.d) if not experts % ep] if experts else [1]
        for cp, ep in product(contexts, shares):
            if (own := self.parallel(*sizes.sizes, cp, ep)) is not None:
                with suppress(ModelError):
                    self.check(model, own)
                    yield own

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
        sizes: dict[str, Any] = {"pp": parallel.p, "tp": parallel.t, "dp": parallel.d // parallel.cp}
        sizes |= {"cp": parallel.cp, "ep": parallel.ep}
        if getattr(self.strategy, "pp", parallel.p) != parallel.p:
            sizes["stage_layers"] = None  # they were those of other stages
        known = {field.name for field in fields(self.strategy)} & {*sizes}
        return replace(self.strategy, **{name: sizes[name] for name in known})


BACKENDS: Mapping[type, Callable[[Any], Backend]] = MappingProxyType(
    {
        Megatron: lambda given: Backend(given, pipeline=True, tensor=True, lora=given.lora, of_transformers=False),
        ZeRO: lambda given: Backend(
            given, stage=given.stage, often=given.stage > 1, offload=given.offload, freeze=given.freeze
        ),
        FSDP: lambda given: Backend(
            given,
            tensor=given.lora is None,
            stage=3,
            copies=given.replicate,
            often=given.reduce_often,
            offload=given.offload,
            lora=given.lora,
            freeze=given.freeze,
        ),
    }
)
"""The cost model of each type of strategy."""
MEGATRON = Backend.of(Megatron())


@dataclass(frozen=True)
class Frozen:
    """Elements without gradients: of a decoder layer, on average, of these in matrices, of the output, and outside of
    the layers, those of the tower apart."""

    layer: float = 0.0
    matrices: float = 0.0
    output: float = 0.0
    outside: float = 0.0
    tower: float = 0.0

    @staticmethod
    @lru_cache(maxsize=256)
    def of(model: Decoder, backend: Backend) -> Frozen:
        """Errors: those of `frozen_tensors`."""
        if not backend.freeze:
            return Frozen()
        decoder, layers = getattr(model, "decoder", "model"), getattr(model, "layer_list", "model.layers")
        found, shapes = Counter[str](), model.tensors()
        for name in frozen_tensors(backend.strategy, model):  # pyright: ignore[reportArgumentType]  not Megatron's
            of, size = getattr(model, "parameter", str)(name), prod(shapes[name])
            if of.startswith(f"{layers}."):
                found["layer"] += size
                found["matrices"] += size if len(shapes[name]) > 1 else 0
            else:
                found["tower" if of.startswith(VISION_TOWER) else "outside"] += size
                found["output"] += 0 if of.startswith(f"{decoder}.") else size
        each = {"layer": found["layer"] / model.layers, "matrices": found["matrices"] / model.layers}
        return Frozen(**{**found, **each})


@lru_cache(maxsize=256)
def adapters(model: Decoder, lora: LoRA, t: int = 1, shares: int = 1) -> tuple[float, float, float]:
    """Of a decoder layer on one of `t` tensor parallel ranks, `shares` of which share the sequence, on average over the
    layers: elements of its adapters, columns that these read and write per token, and columns between A and B.

    The side that is cut is never the hidden one, and of latent attention's the larger one. Errors: ConfigError for a
    target that is no linear layer of the model."""
    tensors = (tensor for layer in range(model.layers) for tensor in model.layer_tensors(layer).items())
    linear = [(name.removesuffix(".weight"), shape) for name, shape in tensors if len(shape) == 2]
    for target in lora.targets:
        if not any(lora.matches(target, name) for name, _ in linear):
            known = dict.fromkeys(name.rpartition(".")[2] for name, _ in linear)
            raise ConfigError(f"LoRA: {target!r} matches no linear layer of this model.{nearest(target, known)}")
    adapted = [shape for name, shape in linear if lora.adapts(name)]
    whole = sum(model.hidden if model.hidden in shape else min(shape) for shape in adapted) / model.layers
    cut = (sum(map(sum, adapted)) / model.layers - whole) / t
    return lora.rank * (whole + cut), whole / shares + cut, lora.rank * len(adapted) / model.layers


def check_pin(pin: Pin, graph: Graph, backend: Backend, cluster: ClusterSpec, *, one_layout: bool) -> None:
    """Errors: PlacementError for sizes by which the model is not cut, that its strategy has not, or whose tensor
    parallel groups would lie across nodes; for a model that never waits in host memory."""
    model = graph.models[pin.group]
    if pin.offload is not None and pin.group not in graph.offload:
        known = ", ".join(graph.offload) or "critics, reference and reward models"
        raise PlacementError(f"{pin} cannot be: only {known} can wait in host memory as a whole. Leave offload out.")
    for sizes, check in ((pin.parallel, backend.check), (pin.generate, check_split)):
        if sizes is None:
            continue
        if model is None and sizes.p * sizes.t > 1:
            raise PlacementError(f"{pin} cannot be: {pin.group} runs functions, which are not cut. Pin p=1, t=1.")
        try:
            if isinstance(model, ModelSpec):
                model.check_parallel(sizes.p, sizes.t, pin.group)
            if model is not None:
                check(model, sizes, pin.group)
        except ModelError as error:
            raise PlacementError(f"{pin} cannot be: {error}") from None
        _check_nodes(pin, sizes, cluster)
    if model is None or pin.parallel is None:
        return
    if (own := backend.parallel(*pin.parallel.cut)) is None:
        how = f"{pin.group} trains with {backend.strategy}"
        raise PlacementError(f"{pin} cannot be: {how}, which has no such sizes.")
    mesh = Mesh.of(0, own.size)
    if one_layout and pin.generate and not CallPlan(mesh, pin.generate).within(CallPlan(mesh, own)):
        raise PlacementError(
            f"{pin} and {OneLayout(pin.group)} contradict each other: generation sizes divide those of training "
            "where both have one layout."
        )


def check_split(model: Decoder, sizes: Parallel, role: str) -> None:
    """Errors: ModelError for sizes by which no engine can cut the model."""
    if not divides(model, sizes.t) or sizes.p > model.layers:
        raise ModelError(
            f"{role} cannot be split by p={sizes.p}, t={sizes.t}: it has {model.layers} layers, {model.heads} heads, "
            f"{model.kv_heads} kv-heads and {Sizes.of(model).intermediate:g} MLP columns."
        )


def _check_nodes(pin: Pin, sizes: Parallel, cluster: ClusterSpec) -> None:
    count = cluster.node.count
    inside = [min(sizes.size, count)] if pin.devices is None else cluster.counts(pin.devices).values()
    if pin.devices is None and sizes.size > count and sizes.size % count:
        raise PlacementError(
            f"{pin} cannot be: {sizes.size} devices are neither devices of one node nor whole nodes, which have "
            f"{count}. Use other sizes, or pin devices."
        )
    if any(devices % sizes.t for devices in inside):
        raise PlacementError(
            f"{pin} cannot be: tensor parallel groups of t={sizes.t} would lie across nodes, which have {count} "
            "devices. Use a smaller t, or other devices."
        )
