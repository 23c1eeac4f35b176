"""Memory: bytes on the fullest device of a call's mesh. Pure.

Static bytes stay between calls: parameters; trained models also keep float32 gradients, and Adam's state cut over the
data parallel ranks; `Backend` says what else is cut. Active bytes are there while a call runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from hybridflow.planner.cost.call_cost import LEAST_ROWS, Waves, cache_bytes
from hybridflow.planner.cost.pipeline_cost import CallContext, Stream
from hybridflow.planner.describe.graph import Kind


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device. `static` stays between calls, `active` is there while the call runs."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    logits: float = 0.0
    weights: float = field(default=0.0)  # a second copy of the parameters, in the layout of a call that has its own
    gathered: float = 0.0  # parameters of other ranks, and gradients that are not theirs yet

    @cached_property
    def static(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    @cached_property
    def active(self) -> float:
        return self.activations + self.kv_cache + self.logits + self.weights + self.gathered

    @property
    def total(self) -> float:
        return self.static + self.active


GRADIENT = 4
MOMENTS = 8  # Adam's two, float32
MAIN = 4  # float32 parameters beside those of 16 bits
# Bytes per logit while log-probabilities are taken of it: what the product wrote and two float32 copies; in training
# probabilities and their gradient in float32, and this once more as the product takes it.
READ, TRAINED = 2 + 4 + 4, 2 + 4 + 4 + 2


def weights(setting: CallContext) -> float:
    """Bytes of the parameters on the device with most."""
    return max(setting.size.stage(setting.parallel.p)) / setting.parallel.weights[1] * setting.itemsize


def static(setting: CallContext, trained: bool) -> DeviceMemory:
    """As the engines hold them, whose bytes per parameter docs/backends.md has."""
    backend, parameters = setting.backend, weights(setting)
    if backend.offload and backend.sharded:
        return DeviceMemory()
    if not trained:
        return DeviceMemory(parameters=parameters)
    if backend.lora is not None:
        layer, outside = setting.trained
        own = (setting.size.layers * layer + outside) / setting.parallel.shards
        return DeviceMemory(parameters + own * MAIN, own * GRADIENT, own * MOMENTS)
    shard, d = parameters / setting.itemsize, setting.parallel.d
    if backend.sharded:  # parameters are their own float32 main ones
        return DeviceMemory(shard * MAIN, shard * GRADIENT, shard * MOMENTS)
    state = (MOMENTS + (MAIN if setting.itemsize < MAIN else 0)) / d
    gradients = GRADIENT / d if backend.stage == 2 else GRADIENT
    if backend.offload:
        return DeviceMemory(parameters, 0.0 if backend.stage == 2 else shard * gradients)
    return DeviceMemory(parameters, shard * gradients, shard * state)


def active(setting: CallContext, kind: Kind, rows: float, copy: bool) -> DeviceMemory:
    """The least that a call of `rows` rows (of an optimizer step, in training) adds; `copy`: it has weights of its own.

    Generation needs a KV cache for a few rows at least; `cache` says what it uses where there is more room.
    """
    own = weights(setting) if copy else 0.0
    each = max(1.0, -(-rows // setting.parallel.d))
    if kind == "generation":
        rows_kept = min(each, LEAST_ROWS * setting.parallel.p)
        return DeviceMemory(kv_cache=rows_kept * setting.workload.longest * cache_bytes(setting), weights=own)
    if kind == "function":
        return DeviceMemory()
    size, work, t, p = setting.size, setting.workload, setting.parallel.t, setting.parallel.p
    stream = Stream.of(setting, each, kind == "training")
    tokens = fullest(setting, stream, each)
    longer = max(0.0, work.longest - tokens)  # a row that is longer than a micro-batch is one of its own
    answers = max(tokens * work.response.mean / work.tokens, work.response.max)
    logits = answers * size.vocab / t if size.vocab > 1 else 0.0
    if kind == "inference":
        gathered, activations = shared(setting), 2 * (tokens + longer) * kept(setting)
        return DeviceMemory(activations=activations, logits=logits * READ, weights=own, gathered=gathered)
    flight = min(p, stream.micro)  # micro-batches of which the first stage keeps activations (1F1B)
    layers = -(-size.layers // p)
    held = flight * tokens + longer
    if work.recompute:
        inputs = held * layers * size.hidden / setting.site.shares * setting.itemsize
        activations = inputs + (tokens + longer) * kept(setting)
    else:
        activations = held * layers * kept(setting)
    gathered = shared(setting) + unsent(setting, stream.micro * stream.fills)
    return DeviceMemory(activations=activations, logits=logits * TRAINED, weights=own, gathered=gathered)


def fullest(setting: CallContext, stream: Stream, rows: float) -> float:
    """Tokens of the fullest micro-batch that `rows` rows of usual lengths make."""
    work, p = setting.workload, setting.parallel.p
    if work.micro_batches is not None:
        return math.ceil(stream.rows - 1e-9) * work.tokens
    share = math.ceil(rows / (2 * p)) if p > 1 else rows
    return max(work.tokens, min(work.micro_tokens, share * work.tokens))


def shared(setting: CallContext) -> float:
    """Bytes of parameters that ranks with shards have gathered at a time: two layers (one computes, the next is on its
    way) and all that lies outside of the layers."""
    if not setting.backend.sharded:
        return 0.0
    size = setting.size
    return (2 * size.layer + size.outside) / setting.parallel.t * setting.itemsize


def unsent(setting: CallContext, micro: int) -> float:
    """Bytes of whole gradients that wait to be added up over ranks: of two units of the model; of all of it where
    several micro-batches are added up on each rank first."""
    backend, (layer, outside) = setting.backend, setting.trained
    if backend.stage == 1:
        return 0.0
    some = micro == 1 or backend.often
    elements = layer + max(layer, outside) if some else setting.size.layers * layer + outside
    return elements / setting.parallel.t * GRADIENT


def kept(setting: CallContext) -> float:
    """Bytes per token that a layer keeps for its backward pass (Korthikanti et al. 2023, section 4, with flash
    attention and a gated MLP): inputs of norms and products (whole unless the ranks share the sequence), and everything
    between, of which a rank has its own shard.

    Layers of transformers also keep what a norm makes, its input in float32, and the activation of the gate.
    """
    size, t, itemsize = setting.size, setting.parallel.t, setting.itemsize
    norms, wide = 4.0, 3
    if setting.backend.of_transformers:
        norms, wide = (6.0 if itemsize == 4 else 4 + 2 * 4 / itemsize), 4
    own = 2 * size.queries / t + 2 * size.keys_on(t) + wide * size.intermediate / t
    return (norms * size.hidden / setting.site.shares + own) * itemsize


def cache(setting: CallContext, rows: float, room: float) -> float:
    """Bytes of KV cache that generation uses on a device when there is `room`."""
    each = max(1.0, -(-rows // setting.parallel.d))
    waves = Waves.of(setting, each, room)
    return waves.concurrent * setting.workload.under_way * cache_bytes(setting)
