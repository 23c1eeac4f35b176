"""Pipeline cost: seconds of one decoder layer, of the output and of a pipeline stage for one micro-batch, and of a data
parallel rank's rows through its pipeline.

Pure. Roofline (Williams et al. 2009): a matrix product takes the time of its arithmetic or of reading its weights,
whichever is more. Operations between products only move memory; norms and residuals do so on every tensor parallel
rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.cost.backends import MEGATRON, Backend, Frozen, adapters
from hybridflow.planner.cost.hardware import BYTES, Coefficients, LayerProfile, LinkModel, Pass, Seconds
from hybridflow.planner.describe.mesh import Parallel
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Workload

# Elements that pass by between products, for each that there is, as one kernel after another reads and writes them:
# two norms and two residuals, on every rank unless these share the sequence; a rotation (a product, then a sum with a
# second one) and the gate (its activation, then a product), of its own shard.
APART, ROTATED, GATED = 10, 5, 5
SUMS = 4  # bytes per parameter of the float32 gradients of a mini-batch
LAUNCHES = 20  # kernels of a layer's forward pass, launched one by one: four products, attention, and what lies between
LOGITS = 4 * 4.0  # bytes of float32 logits that pass by: written, read twice (maximum and sum), gathered


@dataclass(frozen=True)
class CallContext:
    """Inputs of all formulas of a call: its devices, model and workload."""

    links: LinkModel
    model: Decoder
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
        """Elements that training steps on a tensor parallel rank: of a decoder layer, and of all that lies outside of
        the layers."""
        lora, size, t = self.backend.lora, self.size, self.parallel.t
        if lora is None:
            (layer, outside), frozen = self.unit, self.frozen
            return layer - frozen.layer / t, outside - frozen.outside / t - frozen.tower
        return adapters(self.model, lora, t)[0], float(size.hidden if self.model.head == "value" else 0)

    @property
    def frozen(self) -> Frozen:
        return Frozen.of(self.model, self.backend)

    @property
    def trained_share(self) -> float:
        """Of the elements that a rank computes with."""
        if not self.backend.freeze:
            return 1.0
        (trained, ends), (layer, outside), layers = self.trained, self.unit, self.size.layers
        return (layers * trained + ends) / (layers * layer + outside)

    @property
    def trained_tower(self) -> float:
        """Elements that training steps of what encodes images."""
        return 0.0 if self.backend.lora else self.size.tower.elements - self.frozen.tower

    @property
    def towers(self) -> int:
        """Ranks that share what encodes images: those of an engine that generates."""
        return 1 if self.backend.of_transformers else self.parallel.t

    @property
    def unit(self) -> tuple[float, float]:
        """Elements that a rank computes with: of a decoder layer, and of all that lies outside of the layers."""
        size, t = self.size, self.parallel.t
        layer = (size.layer - size.expert) / t + size.expert / self.parallel.experts
        return layer, size.outside_on(t, self.towers)

    @cached_property
    def held(self) -> tuple[float, float]:
        """Elements on the rank with most that computes with them: outside of routed experts, and in these."""
        return self.size.held(self.parallel.p, self.parallel.t, self.parallel.experts, self.towers)

    @property
    def expert_ranks(self) -> float:
        """Ranks that hold the same experts."""
        return self.parallel.t * self.parallel.d / self.parallel.experts

    @property
    def stepped(self) -> float:
        """Elements that training steps on the stage with most, with LoRA."""
        layer, outside = self.trained
        return -(-self.size.layers // self.parallel.p) * layer + outside

    def measured(self, kind: Pass, tokens: float, formula: Seconds) -> Seconds:
        """A profile's seconds of a pass; `formula` if not measured."""
        return self.profile.layer(self.model, kind, self.links.t, tokens, formula) if self.profile else formula


def product(context: CallContext, rows: float, weights: float, columns: float) -> float:
    """Seconds of products of `rows` rows with `weights` elements on this device; `columns` is the side that tensor
    parallelism cuts: thin shards do not fill the device."""
    links, k = context.links, context.coefficients
    arithmetic = 2 * rows * weights / (links.flops * k.compute * columns / (columns + k.half_columns))
    return max(arithmetic, weights * context.itemsize / links.bandwidth)


def layer_forward(context: CallContext, tokens: float, pairs: float, launch: float | None = None) -> Seconds:
    """A decoder layer over `tokens` tokens with `pairs` (causal) pairs in attention."""
    links, size, k, itemsize = context.links, context.size, context.coefficients, context.itemsize
    queries, wide = size.queries / links.t, size.intermediate / links.t
    attention = 4 * pairs * queries / (links.flops * k.attention)
    moved = APART * size.hidden / links.shares + ROTATED * (queries + size.keys_on(links.t)) + GATED * wide
    if size.experts:
        moved += size.chosen * size.sparse * (APART * size.hidden + GATED * size.columns) / links.t
    return Seconds(
        compute=layer_products(context, tokens) + attention,
        memory=tokens * moved * itemsize / links.bandwidth,
        tensor_parallel=2 * links.tensor_all_reduce(tokens * size.hidden * itemsize),
        exchange=exchanges(context, tokens) if context.parallel.cp * context.parallel.ep > 1 else 0.0,
    ).launched(LAUNCHES * k.latency if launch is None else launch)


def exchanges(context: CallContext, tokens: float) -> float:
    """Seconds of a layer's all-to-alls: heads of a context parallel rank's `tokens` tokens to and from attention, and
    tokens to their experts and back, spread evenly."""
    links, size, parallel, seconds = context.links, context.size, context.parallel, 0.0
    if (cp := parallel.cp) > 1:  # too few kv-heads are repeated
        columns = 2 * size.queries / links.t + 2 * max(size.keys_on(links.t), cp * size.head_dim)
        seconds += 2 * links.all_to_all(tokens * columns / 2 * context.itemsize, cp, links.p * links.t)
    if parallel.ep > 1:  # each rank sends its part of the tokens, once for each expert that they meet
        sent = tokens / links.t * size.chosen * size.sparse * parallel.columns * size.hidden * context.itemsize
        seconds += 2 * links.all_to_all(sent, parallel.experts, links.p if parallel.experts > links.t else 1)
    return seconds


def layer_products(context: CallContext, tokens: float) -> float:
    """Seconds of a decoder layer's products with its weights."""
    size, t = context.size, context.links.t
    queries, wide, keys = size.queries / t, size.intermediate / t, 2 * size.hidden * size.keys_on(t)
    found = product(context, tokens, size.attention / t + keys, queries)
    found += product(context, tokens, size.mlp / t, wide) if size.mlp else 0.0
    if not size.experts:
        return found
    parts = context.parallel.experts  # of tokens that come together, each expert of a rank meets its share
    touched = 1 - (1 - size.met) ** max(1.0, tokens * parts / t)
    rows, weights = tokens * parts / t * size.met / touched, size.expert / parts * touched
    return found + product(context, rows, weights, size.columns / context.parallel.columns)


def backward(context: CallContext, forward: Seconds, trained: float, frozen: float = 0.0) -> Seconds:
    """Twice the products (by inputs and by weights), traffic and launches, one all-reduce for each of the forward's,
    and the gradients of `trained` parameters of this rank: they go into the sums of their mini-batch, written and read
    as they are, the float32 sums read and written. `frozen`: seconds of products with weights without a gradient."""
    links, launches = context.links, 2 * LAUNCHES * context.coefficients.latency if forward.total else 0.0
    waits = forward.tensor_parallel, forward.exchange
    twice = Seconds(2 * forward.compute - frozen, 2 * forward.memory, *waits).launched(launches)
    return twice.plus(Seconds(memory=trained * 2 * (context.itemsize + SUMS) / links.bandwidth))


def output_forward(context: CallContext, tokens: float) -> Seconds:
    """Logits and log-probabilities of `tokens` tokens, cut by t along the vocabulary; next to nothing for a value."""
    links, size = context.links, context.size
    if size.vocab == 1 or tokens == 0:
        return Seconds()
    columns = size.vocab / links.t
    return Seconds(
        compute=product(context, tokens, size.hidden * columns, columns),
        memory=tokens * columns * LOGITS / links.bandwidth,
        tensor_parallel=links.tensor_all_reduce(3 * 4 * tokens),
    ).launched(LAUNCHES * context.coefficients.latency)


def images_forward(context: CallContext, rows: float) -> Seconds:
    """What encodes images over those of `rows` rows."""
    links, k, tower, patches = context.links, context.coefficients, context.size.tower, context.workload.patches
    if not tower.layers or not patches or not rows:
        return Seconds()
    width, wide = tower.width / context.towers, tower.intermediate / context.towers
    moved = tower.layers * (APART * tower.width + 2 * ROTATED * width + GATED * wide)
    attention = 4 * rows * tower.pairs(patches) * width / (links.flops * k.attention)
    return Seconds(
        compute=product(context, rows * patches, tower.meets / context.towers, width) + attention,
        memory=rows * patches * moved * context.itemsize / links.bandwidth,
    ).launched(LAUNCHES * tower.layers * k.latency)


def images_pass(context: CallContext, rows: float, training: bool) -> Seconds:
    """Those of a micro-batch: nothing that is frozen lies before it, so without gradients it has no backward pass."""
    forward = images_forward(context, rows)
    if not training or not forward.total or not (trained := context.trained_tower):
        return forward
    return forward.times(2 if context.workload.recompute else 1).plus(backward(context, forward, trained))


@dataclass(frozen=True)
class PipelineSchedule:
    """`flushes` times, one after another, `micro` micro-batches of `rows` rows follow each other through the stages."""

    flushes: int
    micro: int
    rows: float

    @classmethod
    def of(cls, context: CallContext, rows: float, training: bool) -> PipelineSchedule:
        """Of `rows` rows of one data parallel rank.

        Without `Workload.micro_batches` they are one schedule of micro-batches of at most `micro_tokens` tokens, in a
        pipeline at least 2p of them, as our engines cut them. With it, they are cut into that number of parts, which
        fill the pipeline one after another, each with p micro-batches (2p in training), as ReaL's do."""
        p, work = context.parallel.p, context.workload
        most = max(1, math.ceil(rows))
        if work.micro_batches is None:
            fitting = math.ceil(rows * work.tokens / work.micro_tokens)
            count = min(most, max(1, fitting, 2 * p if p > 1 else 1))
            return cls(1, count, rows / count)
        flushes = min(work.micro_batches, most)
        depth = p if p == 1 or not training else 2 * p
        micro = max(1, min(depth if p > 1 else 1, most // flushes))
        return cls(flushes, micro, rows / flushes / micro)

    def price(self, context: CallContext, training: bool) -> dict[str, float]:
        """Seconds by cause of all passes over these rows: forward, and in training backward (1F1B or any schedule whose
        bubble is p - 1 micro-batches)."""
        stage, message = stage_pass(context, self.rows, training)
        p, busy = context.parallel.p, stage.times(self.micro * self.flushes)
        waits = (p - 1) * stage.total + (self.micro + p - 1) * message
        parts = busy._asdict()
        return parts | {"pipeline": self.flushes * waits, "fixed": parts.pop("fixed")}


def stage_pass(context: CallContext, rows: float, training: bool) -> tuple[Seconds, float]:
    """One micro-batch of `rows` rows on the slowest stage, and its messages to the next stage and back [s]."""
    links, size, work, p = context.links, context.size, context.workload, context.parallel.p
    rows /= context.parallel.cp  # their tokens are shared
    tokens = rows * work.tokens
    layer = layer_pass(context, tokens, rows * size.pairs(work.tokens, work.square), training)
    read = rows * work.response.mean
    forward = output_forward(context, read)
    own = Seconds(fixed=context.coefficients.micro_seconds)
    frozen = 1.0 if context.backend.lora is not None else context.frozen.output / max(size.output, 1)
    output = context.measured("output", read, forward.plus(own))
    if training:
        back = backward(context, forward, (1 - frozen) * size.output / links.t, frozen * forward.compute)
        output = output.plus(context.measured("output_backward", read, back.plus(own)))
    last = layer.times(size.layers // p).plus(output).plus(images_pass(context, rows, training))
    stage = last
    if p > 1 and size.layers % p:
        first = layer.times(-(-size.layers // p))
        stage = first if first.total > last.total else last
    passes = 2 if training else 1
    return stage, passes * links.stage_message(tokens * size.hidden * context.itemsize)


def layer_pass(context: CallContext, tokens: float, pairs: float, training: bool) -> Seconds:
    """Forward of a layer over a micro-batch; in training with backward, and forward again where it is recomputed."""
    forward, frozen, lora = layer_forward(context, tokens, pairs), 0.0, context.backend.lora
    if lora is not None:  # each adapter: two thin products, whose inputs are read, and outputs read, added to, written
        links, frozen = context.links, layer_products(context, tokens)
        _, sides, between = adapters(context.model, lora, links.t, links.shares)
        moved = tokens * 2 * sides * context.itemsize / links.bandwidth
        summed = links.tensor_all_reduce(tokens * between * context.itemsize)
        forward = forward.plus(Seconds(product(context, tokens, lora.rank * sides, lora.rank), moved, summed))
    elif context.frozen.matrices:
        frozen = layer_products(context, tokens) * context.frozen.matrices / context.size.layer
    back = backward(context, forward, context.trained[0], frozen)
    forward = context.measured("forward", tokens, forward)
    if not training:
        return forward
    return forward.times(2 if context.workload.recompute else 1).plus(context.measured("backward", tokens, back))
