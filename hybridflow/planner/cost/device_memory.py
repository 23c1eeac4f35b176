"""Memory: bytes on the fullest device of a call's mesh. Pure.

Static bytes stay between calls: parameters; trained models also keep float32 gradients, and Adam's state cut over the
data parallel ranks; `Backend` says what else is cut. Active bytes are there while a call runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hybridflow.planner.cost.call_cost import LEAST_ROWS, Waves, cache_bytes
from hybridflow.planner.cost.pipeline_cost import CallContext, PipelineSchedule
from hybridflow.planner.describe.graph import Kind
from hybridflow.planner.pipeline.schedule import WINDOW


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    kv_cache: float = 0.0
    logits: float = 0.0
    weights: float = 0.0
    """A second copy of the parameters, in the layout of a call that has its own."""
    gathered: float = 0.0
    """Parameters of other ranks, and gradients that are not theirs yet."""
    average: float = 0.0
    visiting: float = 0.0
    """What a call needs of a group that is in host memory between its calls."""

    @cached_property
    def static(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.average

    @cached_property
    def active(self) -> float:
        return self.activations + self.kv_cache + self.logits + self.weights + self.gathered + self.visiting

    def owned(self, group: str) -> dict[str, float]:
        """Bytes by owner, as the events of a run have them: what has memory while a call of the group runs."""
        kinds = {name: getattr(self, name) for name in ("parameters", "gradients", "optimizer", "average", "kv_cache")}
        kinds |= {"generation": self.weights, "visiting": self.visiting}
        found = {f"{group} {kind}": size for kind, size in kinds.items()}
        found["activations"] = self.activations + self.logits + self.gathered
        return {owner: size for owner, size in found.items() if size}


GRADIENT = 4
MOMENTS = 8  # Adam's two, float32
MAIN = 4  # float32 parameters beside those of 16 bits
BLOCKS = 2 * (64 << 20)
"""At most: logits are read in float32 in blocks of tokens (`engines.token_outputs`)."""
STEP_TOKENS = 8192
"""Of prompts and their images, at most, in a step of vLLM's; an image may have more."""
NORM = 12
"""A norm's backward pass has this number of its inputs at once, in 16 bits: several in float32."""


def weights(context: CallContext) -> float:
    """Bytes of the parameters on the device with most."""
    (outside, experts), parallel = context.held, context.parallel
    return (outside / parallel.shards + experts / parallel.expert_shards) * context.itemsize


def static(context: CallContext, trained: bool, averaged: bool = False) -> DeviceMemory:
    """As the engines hold them, whose bytes per parameter docs/backends.md has."""
    backend, parameters = context.backend, weights(context)
    if backend.offload and backend.sharded:
        return DeviceMemory()
    if not trained:
        return DeviceMemory(parameters=parameters, average=averaged * parameters / context.itemsize * MAIN)
    if backend.lora is not None:
        own = context.stepped / context.parallel.shards
        ranks = 1 if backend.sharded else context.parallel.d
        return DeviceMemory(parameters + own * MAIN, own * GRADIENT, own * MOMENTS / ranks)
    shard, d, (outside, experts) = parameters / context.itemsize, context.parallel.d, context.held
    stepped = shard * context.trained_share
    if backend.sharded:  # parameters are their own float32 main ones
        return DeviceMemory(shard * MAIN, stepped * GRADIENT, stepped * MOMENTS)
    state = MOMENTS + (MAIN if context.itemsize < MAIN else 0)
    gradients = GRADIENT / d if backend.stage == 2 else GRADIENT
    if backend.offload:
        return DeviceMemory(parameters, 0.0 if backend.stage == 2 else stepped * gradients)
    own = (outside / d + experts / context.expert_ranks) * context.trained_share
    return DeviceMemory(parameters, stepped * gradients, own * state)


def active(context: CallContext, kind: Kind, rows: float, copy: bool, kv_budget: float | None = None) -> DeviceMemory:
    """The least that a call of `rows` rows (of an optimizer step, in training) adds; `copy`: it has weights of its own.

    Generation needs a KV cache for a few rows at least, and uses what its rows need of `kv_budget`."""
    own = weights(context) if copy else 0.0
    each = max(1.0, -(-rows * context.parallel.cp // context.parallel.d))
    if kind == "generation":
        cache = min(each, LEAST_ROWS * context.parallel.p) * context.workload.longest * cache_bytes(context)
        if kv_budget is not None:
            used = Waves.of(context, each, kv_budget).concurrent * context.workload.under_way * cache_bytes(context)
            cache = max(cache, used)
        return DeviceMemory(activations=step_images(context), kv_cache=cache, weights=own)
    if kind == "function":
        return DeviceMemory()
    size, work, t, p = context.size, context.workload, context.parallel.t, context.parallel.p
    schedule = PipelineSchedule.of(context, each, kind == "training")
    if work.micro_batches is not None:  # tokens of the fullest micro-batch that rows of usual lengths make
        tokens = math.ceil(schedule.rows - 1e-9) * work.tokens
    else:
        share = math.ceil(each / (2 * p)) if p > 1 else each
        tokens = max(work.tokens, min(work.micro_tokens, share * work.tokens))
    longer = max(0.0, work.longest - tokens)  # a row that is longer than a micro-batch is one of its own
    answers = max(tokens * work.response.mean / work.tokens, work.response.max)
    if (cp := context.parallel.cp) > 1:  # a rank may have the answers of a row alone
        tokens, longer = tokens / cp, longer / cp
        answers = min(answers, tokens + longer)
    logits, layer = answers * size.vocab / t if size.vocab > 1 else 0.0, saved_activations(context)
    read = logits * context.itemsize + min(BLOCKS, 4 * logits) + answers * size.hidden * context.itemsize
    hidden = size.hidden / context.links.shares * context.itemsize
    sent = min(WINDOW + 2, schedule.micro) * tokens * hidden if p > 1 else 0.0  # on their way to the next stage
    # where ranks share the sequence, Megatron's buffer for all of it
    read += (whole := (tokens + longer) * size.hidden * context.itemsize if context.links.shares > 1 else 0.0)
    sent += whole
    patches = (tokens + longer) / work.tokens * work.patches
    kept_images, encoding = image_activations(context, patches, training=kind == "training")
    # two layers (one computes, the next is on its way) and all that lies outside of the layers
    unit, outside = context.unit
    gathered = (2 * unit + outside) * context.itemsize if context.backend.sharded else 0.0
    if kind == "inference":  # logits come when a layer's are gone
        first, last = (tokens + longer) * (4 * size.intermediate / t * context.itemsize + 2 * hidden) + sent, read
        first = max(first, encoding)
        if context.backend.sharded:  # what lies outside comes first, as one message that is taken apart
            first = max(first, outside * context.itemsize)
        return DeviceMemory(activations=max(0.0, first - last), logits=last, weights=own, gathered=gathered)
    flight = min(p, schedule.micro)  # micro-batches of which the first stage keeps activations (1F1B)
    kept = -(-size.layers // p) * (hidden if work.recompute else layer)
    passing = (tokens + longer) * (backward_activations(context) + layer * work.recompute)
    ends = [0.0 if context.backend.lora else side / t * context.itemsize for side in (size.embedding, size.output)]
    ends[0] += context.trained_tower * context.itemsize
    # gradients of logits, beside these or the gradient of what made them; gone when a layer's backward pass comes
    read = max(read, ends[1]) + logits * context.itemsize
    begun = (flight - 1) * tokens * kept + ends[0] + (tokens * size.hidden * context.itemsize if ends[0] else 0.0)
    first = max(max(flight * tokens * kept + passing, begun) + longer * kept + sent + kept_images, encoding)
    last = (tokens + longer) * kept + read + kept_images
    activations, logits = (last - read, read) if last > first else (first, 0.0)
    if context.backend.stage > 1:  # whole gradients that wait to be added up over ranks: of two units of the model;
        (unit, outside), micro = context.trained, schedule.micro * schedule.flushes
        some = micro == 1 or context.backend.often  # of all where micro-batches are added up on each rank first
        gathered += (unit + max(unit, outside) if some else size.layers * unit + outside) * GRADIENT
    return DeviceMemory(activations=activations, logits=logits, weights=own, gathered=gathered)


def step_images(context: CallContext) -> float:
    """Bytes that vLLM leaves to what encodes the images of a step (`VLLM(image_tokens=)`), whether rows have any or
    not."""
    tokens = min(context.workload.image_tokens, max(context.workload.longest, STEP_TOKENS))
    return image_activations(context, tokens * context.size.tower.merge**2, training=False)[1]


def image_activations(context: CallContext, patches: float, *, training: bool) -> tuple[float, float]:
    """Bytes of `patches` patches that what encodes images keeps for its backward pass, and at most while it encodes, as
    transformers' blocks do: measured for 16 and 32 bits, with gated MLPs and plain ones."""
    tower, itemsize = context.size.tower, context.itemsize
    block = 11 * tower.width + 2 * tower.intermediate
    if tower.gated:
        block = (13 if itemsize == 4 else 15) * tower.width + 4 * tower.intermediate
    pixels, kept = patches * tower.patch * 4.0, 0.0  # whole rows: float32, as they come
    if training and context.trained_tower:
        each = tower.width if context.workload.recompute else block
        kept = patches * (tower.layers * each + tower.patch + 6 * tower.width) * itemsize
    return pixels + kept, pixels + kept + patches * block * itemsize


def backward_activations(context: CallContext) -> float:
    """Bytes per token that a layer's backward pass has at once beside what is saved."""
    size, t, hidden = context.size, context.parallel.t, context.size.hidden / context.links.shares
    return max(NORM * hidden * 2, (2 * size.intermediate / t + 2 * hidden) * context.itemsize)


def saved_activations(context: CallContext) -> float:
    """Bytes per token that a layer keeps for its backward pass (Korthikanti et al. 2023, section 4, with flash
    attention and a gated MLP): inputs of norms and products (whole unless the ranks share the sequence), and everything
    between, of which a rank has its own shard.

    Layers of transformers also keep what a norm makes, its input in float32, and the activation of the gate; those of
    Megatron queries and keys before their rotation, which are one tensor with the values."""
    size, t, itemsize = context.size, context.parallel.t, context.itemsize
    norms, wide, heads = 4.0, 3, 3
    if context.backend.of_transformers:
        norms, wide = (6.0 if itemsize == 4 else 4 + 2 * 4 / itemsize), 4
        heads = 2
    own = heads * size.queries / t + heads * size.keys_on(t) + wide * size.intermediate / t + 2 * size.latent / t
    if size.experts:  # of each token a copy for each expert that it meets
        own += size.chosen * size.sparse * (2 * size.hidden + wide * size.columns) / t
    return (norms * size.hidden / context.links.shares + own) * itemsize
