"""Stream: how the rows of one data parallel rank go through its pipeline as micro-batches. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.backends import MEGATRON, Backend, adapters
from hybridflow.planner.cost.hardware import BYTES, Coefficients, Site
from hybridflow.planner.cost.layer_costs import (
    Seconds,
    Sizes,
    causal_pairs,
    layer_backward,
    layer_forward,
    layer_products,
    output_forward,
    product,
)
from hybridflow.planner.cost.layer_profile import LayerProfile
from hybridflow.planner.describe.mesh import Parallel
from hybridflow.planner.describe.workload import Workload

# The causes of time, and how an explanation names them.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "arithmetic of the devices",
        "memory": "reading weights from device memory",
        "prefill": "reading the prompts (arithmetic)",
        "decode": "reading weights and KV cache for every token (memory bandwidth)",
        "tensor_parallel": "tensor parallel all-reduces",
        "pipeline": "pipeline bubbles and messages between stages",
        "data_parallel": "messages of data parallel ranks: gradients and parameters",
        "optimizer": "the optimizer step (memory bandwidth)",
        "fixed": "fixed costs per launch, step and call",
    }
)
WAITS = ("tensor_parallel", "pipeline", "data_parallel")
"""Causes of time in which a device does nothing itself."""


@dataclass(frozen=True)
class CallCost:
    """`seconds` of one call of one iteration; `parts` are their causes and add up to them.

    `busy` is the share of them in which a device works; in the rest it waits for messages or for other stages.
    """

    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, **parts: float) -> CallCost:
        return cls(sum(parts.values()), MappingProxyType({name: value for name, value in parts.items() if value > 0}))

    @property
    def busy(self) -> float:
        waits = sum(self.parts.get(name, 0.0) for name in WAITS)
        return 1.0 - waits / self.seconds if self.seconds else 1.0

    @property
    def limit(self) -> str:
        """The cause that takes longest, as a phrase."""
        if not self.parts:
            return "nothing"
        name = max(self.parts, key=self.parts.__getitem__)
        share = self.parts[name] / self.seconds if self.seconds else 0.0
        return f"{LIMITS.get(name, name)} ({share:.0%})"

    def times(self, factor: float) -> CallCost:
        """The cost of a call that takes `factor` times as long."""
        if factor == 1.0:
            return self
        parts = {name: value * factor for name, value in self.parts.items()}
        return CallCost(self.seconds * factor, MappingProxyType(parts))

    def __reduce__(self):
        return _cost, (self.seconds, dict(self.parts))


def _cost(seconds: float, parts: dict[str, float]) -> CallCost:
    return CallCost(seconds, MappingProxyType(parts))


SUMS = 4  # bytes per parameter of the float32 gradients of a mini-batch


@dataclass(frozen=True)
class CallContext:
    """What all formulas of a call read: where it runs, of what model, under which workload."""

    site: Site
    model: ModelSpec
    size: Sizes
    parallel: Parallel
    workload: Workload
    coefficients: Coefficients
    profile: LayerProfile | None = None
    backend: Backend = MEGATRON

    @property
    def itemsize(self) -> int:
        return BYTES[self.workload.dtype]

    @property
    def trained(self) -> tuple[float, float]:
        """Elements that training steps: of a decoder layer, and of all that lies outside of the layers."""
        size, lora = self.size, self.backend.lora
        if lora is None:
            return size.layer, size.total - size.layers * size.layer
        return adapters(self.model, lora)[0], float(size.hidden if self.model.head == "value" else 0)


@dataclass(frozen=True)
class Stream:
    """`fills` times, one after another, `micro` micro-batches of `rows` rows follow each other through the stages."""

    fills: int
    micro: int
    rows: float

    @classmethod
    def of(cls, setting: CallContext, rows: float, training: bool) -> Stream:
        """Of `rows` rows of one data parallel rank.

        Without `Parallel.micro_batches` they are one stream of micro-batches of at most `micro_tokens` tokens, in a
        pipeline at least 2p of them, as our engines cut them. With it, they are cut into that number of parts, which
        fill the pipeline one after another, each with p micro-batches (2p in training), as ReaL's do.
        """
        p, given, work = setting.parallel.p, setting.parallel.micro_batches, setting.workload
        most = max(1, math.ceil(rows))
        if given is None:
            fitting = math.ceil(rows * work.tokens / work.micro_tokens)
            count = min(most, max(1, fitting, 2 * p if p > 1 else 1))
            return cls(1, count, rows / count)
        fills = min(given, most)
        depth = p if p == 1 or not training else 2 * p
        micro = max(1, min(depth if p > 1 else 1, most // fills))
        return cls(fills, micro, rows / fills / micro)

    def price(self, setting: CallContext, training: bool) -> dict[str, float]:
        """Seconds by cause of all passes over these rows: forward, and in training backward (1F1B or any schedule whose
        bubble is p - 1 micro-batches)."""
        stage, message = stage_pass(setting, self.rows, training)
        p = setting.parallel.p
        bubble = (p - 1) * stage.total
        passing = (self.micro + p - 1) * message
        busy = stage.times(self.micro * self.fills)
        return {
            "compute": busy.compute,
            "memory": busy.memory,
            "tensor_parallel": busy.tensor_parallel,
            "pipeline": self.fills * (bubble + passing),
            "fixed": busy.fixed,
        }


def stage_pass(setting: CallContext, rows: float, training: bool) -> tuple[Seconds, float]:
    """One micro-batch of `rows` rows on the slowest stage, and its messages to the next stage and back [s]."""
    site, size, work, p = setting.site, setting.size, setting.workload, setting.parallel.p
    tokens = rows * work.tokens
    layer = layer_pass(setting, tokens, rows * causal_pairs(size, work.tokens, work.square), training)
    output = output_pass(setting, rows * work.response.mean, training)
    last = layer.times(size.layers // p) + output
    stage = last
    if p > 1 and size.layers % p:
        first = layer.times(-(-size.layers // p))
        stage = first if first.total > last.total else last
    passes = 2 if training else 1
    return stage, passes * site.stage_message(tokens * size.hidden * setting.itemsize)


def layer_pass(setting: CallContext, tokens: float, pairs: float, training: bool) -> Seconds:
    """Forward of a layer over a micro-batch; in training with backward, and forward again where it is recomputed."""
    k, recompute = setting.coefficients, setting.workload.recompute
    forward = layer_forward(setting.site, setting.size, k, tokens, pairs, setting.itemsize)
    frozen = 0.0
    if setting.backend.lora is not None:
        frozen = layer_products(setting.site, setting.size, k, tokens, setting.itemsize)
        forward += beside(setting, tokens)
    backward = layer_backward(forward, frozen) + added_up(setting, setting.trained[0])
    if profile := setting.profile:
        forward = profile.layer(setting.model, "forward", setting.site.t, tokens, forward)
        backward = profile.layer(setting.model, "backward", setting.site.t, tokens, backward)
    if not training:
        return forward
    return forward.times(2 if recompute else 1) + backward


def output_pass(setting: CallContext, tokens: float, training: bool) -> Seconds:
    forward = output_forward(setting.site, setting.size, setting.coefficients, tokens, setting.itemsize)
    frozen = forward.compute if setting.backend.lora is not None else 0.0
    backward = layer_backward(forward, frozen) + added_up(setting, 0.0 if frozen else setting.size.output)
    if profile := setting.profile:
        forward = profile.layer(setting.model, "output", setting.site.t, tokens, forward)
        backward = profile.layer(setting.model, "output_backward", setting.site.t, tokens, backward)
    return forward + backward if training else forward


def beside(setting: CallContext, tokens: float) -> Seconds:
    """Forward of a layer's adapters: two thin products each, whose inputs are read and whose outputs are read, added to
    and written."""
    lora, site, k = setting.backend.lora, setting.site, setting.coefficients
    assert lora is not None
    elements, sides = adapters(setting.model, lora)
    arithmetic = product(site, k, tokens, elements, lora.rank, setting.itemsize)
    return Seconds(arithmetic, tokens * 2 * sides * setting.itemsize / site.bandwidth)


def added_up(setting: CallContext, elements: float) -> Seconds:
    """A micro-batch's gradients of `elements` parameters, cut by t, go into the sums of their mini-batch: written and
    read as they are, the float32 sums read and written."""
    site = setting.site
    return Seconds(memory=elements / site.t * 2 * (setting.itemsize + SUMS) / site.bandwidth)
