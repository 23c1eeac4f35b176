"""Call costs: seconds of a training, inference or generation call, and their causes. Pure.

Generation reads the prompts, then makes one decode step per token, as far as the KV-cache budget allows. A decode step
reads the weights and the KV cache of every running row once (memory-bound, roofline), or takes the time of its launches
if that is longer. With p stages p micro-batches of the rows are running, so the weights are read once for each, and the
host prepares one while the others decode. Rows beyond the budget wait: a wave of rows ends, another begins. The cache
is paged, so a row takes of it what its own length asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hybridflow.planner.cost.cache_places import CachedRow, CachePrices, cache_places, place_seconds
from hybridflow.planner.cost.hardware import Coefficients, Seconds
from hybridflow.planner.cost.pipeline_cost import (
    LAUNCHES,
    CallContext,
    PipelineSchedule,
    images_forward,
    layer_forward,
    output_forward,
    stage_pass,
)
from hybridflow.planner.pipeline.schedule import Work

# The causes of time, and how an explanation names them.
LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "arithmetic of the devices",
        "memory": "reading weights from device memory",
        "prefill": "reading the prompts (arithmetic)",
        "decode": "reading weights and KV cache for every token (memory bandwidth)",
        "tensor_parallel": "tensor parallel all-reduces",
        "exchange": "all-to-alls of context parallel ranks and of experts",
        "pipeline": "pipeline bubbles and messages between stages",
        "data_parallel": "messages of data parallel ranks: gradients and parameters",
        "optimizer": "the optimizer step (memory bandwidth)",
        "offload": "ways to host memory and back",
        "fixed": "fixed costs per launch, step and call",
    }
)
WAITS = ("tensor_parallel", "exchange", "pipeline", "data_parallel")
"""Causes of time in which a device does nothing itself."""


@dataclass(frozen=True)
class CallCost:
    """Of one call of one iteration."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds by cause, which add up to all."""
    latency: float = 0.0
    """Seconds from the admission of a stream's longest response to its end, perhaps of several iterations."""

    @classmethod
    def of(cls, **parts: float) -> CallCost:
        return cls(sum(parts.values()), {name: value for name, value in parts.items() if value > 0})

    @property
    def busy(self) -> float:
        """The share of the seconds in which a device works instead of waiting for messages or for other stages."""
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

    def beside(self, cause: str, seconds: float) -> CallCost:
        """With a further cause."""
        parts = {**self.parts, cause: self.parts.get(cause, 0.0) + seconds}
        return replace(self, seconds=self.seconds + seconds, parts=parts)

    def times(self, factor: float) -> CallCost:
        if factor == 1.0:
            return self
        parts = {name: value * factor for name, value in self.parts.items()}
        return CallCost(self.seconds * factor, parts, self.latency * factor)


REDUCED = 4  # bytes per parameter of a gradient on its way: float32


def exposed_communication(context: CallContext, rows: float, training: bool) -> tuple[float, float]:
    """Seconds beside the computation of a micro-batch of `rows` rows: of most of them, and of the last before an
    optimizer step."""
    backend, links, size, shards = context.backend, context.links, context.size, context.parallel.shards
    if backend.stage == 1:
        return 0.0, 0.0

    def gathered(elements: float, ep: int = 1) -> float:  # parameters, in the dtype that computes
        nbytes, ranks = elements * context.itemsize, shards // ep
        brought = nbytes / ranks / links.host if backend.offload else 0.0
        return links.collective(nbytes, ranks, links.t * ep) + brought

    def summed(elements: float, ep: int = 1) -> float:  # gradients, and among copies of the parameters, if any
        nbytes, every = elements * REDUCED, shards if backend.sharded else links.d
        own = nbytes / (every // ep)
        copies = 2 * links.collective(own, links.d // every, links.t * every)
        brought = own / links.host if backend.offload else 0.0
        return links.collective(nbytes, every // ep, links.t * ep) + copies + brought

    ep = context.parallel.ep  # experts are exchanged by the ranks that have the same ones only
    routed = size.expert / ep if ep > 1 else 0.0

    def of_layer(send: Callable[..., float], elements: float) -> float:
        return send(elements - routed) + send(routed, ep) if routed else send(elements)

    def exposed(layer: float, ends: float, computation: float) -> float:  # all messages that computation does not hide
        return layer + ends + max(0.0, (size.layers - 1) * layer - computation)

    forward = stage_pass(context, rows, training=False)[0].total
    (unit, outside), trained = context.unit, context.trained
    layer, ends = (of_layer(gathered, unit), gathered(outside)) if backend.sharded else (0.0, 0.0)
    first = exposed(layer, ends, forward)
    if not training:
        return first, first
    backward = stage_pass(context, rows, training=True)[0].total - forward
    # what lies outside of the layers stays gathered from one pass to the next
    last = exposed(layer + of_layer(summed, trained[0]), summed(trained[1]), backward)
    return first + (last if backend.often else exposed(layer, 0.0, backward)), first + last


def _each(context: CallContext, rows: float) -> float:
    """Rows of a data parallel rank, or of the ranks that share theirs, with most."""
    return -(-rows * context.parallel.cp // context.parallel.d)


def inference(context: CallContext, rows: float) -> CallCost:
    """`rows` rows over all data parallel ranks; the pipeline is filled once (or once per given micro-batch)."""
    schedule = PipelineSchedule.of(context, max(1.0, _each(context, rows)), training=False)
    parts = schedule.price(context, training=False)
    each = exposed_communication(context, schedule.rows, training=False)[0]
    parts["data_parallel"] = schedule.flushes * schedule.micro * each
    parts["fixed"] += context.coefficients.call_seconds
    return CallCost.of(**parts)


def function(rows: float, hosts: int, k: Coefficients) -> CallCost:
    """`rows` rows over `hosts` host processes, without their devices."""
    return CallCost.of(fixed=k.call_seconds + -(-rows // hosts) * k.function_seconds)


STATE = 30.0  # bytes that Adam reads and writes per parameter: gradient, main parameter, two moments, parameter
CLEARED = 8.0  # bytes per parameter of the gradient buffer: the norm reads it, it is set to zero


def training(context: CallContext, rows: float, minibatches: int, epochs: int) -> CallCost:
    """`rows` rows in `minibatches` optimizer steps, `epochs` times over.

    A step reduces gradients to the ranks that keep their optimizer state, updates these, and gathers the parameters
    (ZeRO stage 1, Rajbhandari et al. 2020); nothing of that is assumed to overlap with computation. For stages 2 and 3
    see `exposed_communication`."""
    links, size, k, backend = context.links, context.size, context.coefficients, context.backend
    steps = min(minibatches, max(1, int(rows)))
    (shard, experts), width = context.held, context.itemsize
    shard, experts = shard * context.trained_share, experts * context.trained_share
    if backend.lora is not None:
        shard, experts, width = context.stepped, 0.0, REDUCED  # adapters are float32 too
    buffers = -(-size.layers // links.p) + 1  # of each layer, and of what lies outside
    schedule = PipelineSchedule.of(context, max(_each(context, rows / steps), 1.0), training=True)
    parts = schedule.price(context, training=True)
    most, last = exposed_communication(context, schedule.rows, training=True)
    parts["data_parallel"] = (schedule.flushes * schedule.micro - 1) * most + last
    sums = [(shard, links.d, links.p * links.t)]
    if experts:
        sums.append((experts, int(context.expert_ranks), links.p * context.parallel.experts))
    for elements, ranks, apart in sums:
        if backend.stage == 1:
            parts["data_parallel"] += links.collective(elements * REDUCED, ranks, apart, buffers)
        if not backend.sharded:
            parts["data_parallel"] += links.collective(elements * width, ranks, apart, buffers)
    parts["optimizer"] = update(context)
    if context.profile and backend.stage == 1:
        took = context.profile.parted(context.model, "update", links.t, shard + experts, links.d)
        parts["optimizer"], parts["data_parallel"] = took or (parts["optimizer"], parts["data_parallel"])
    parts = {name: seconds * steps * epochs for name, seconds in parts.items()}
    parts["fixed"] += k.call_seconds * (1 + steps * epochs)
    return CallCost.of(**parts)


def update_work(context: CallContext, rows: float, minibatches: int, epochs: int) -> Work:
    """What `training` gives its pipeline stages to do; activations are in proportion to a micro-batch's tokens, hidden
    size and layers."""
    steps = min(minibatches, max(1, int(rows)))
    schedule = PipelineSchedule.of(context, max(1.0, _each(context, rows / steps)), training=True)
    forward = stage_pass(context, schedule.rows, training=False)[0].total
    both = stage_pass(context, schedule.rows, training=True)[0].total
    parts = training(context, rows, minibatches, epochs).parts
    ends = parts.get("optimizer", 0.0) + parts.get("data_parallel", 0.0)
    micro, activations = schedule.flushes * schedule.micro, schedule.rows * context.size.hidden * context.size.layers
    times, finish = (micro,) * steps * epochs, ends / (steps * epochs)
    return Work(micro_batches=times, forward=forward, backward=both - forward, activations=activations, finish=finish)


def update(context: CallContext) -> float:
    """Seconds of an optimizer step on a device, beside messages."""
    links, backend = context.links, context.backend
    outside, experts = (each * context.trained_share for each in context.held)
    if backend.lora is not None:
        outside, experts = context.stepped, 0.0
    stepped, sharded = outside + experts, backend.sharded
    own = outside / (context.parallel.shards if sharded else links.d)
    own += experts / (context.parallel.expert_shards if sharded else context.expert_ranks)
    summed = stepped if backend.stage == 1 else own  # gradients that a rank keeps
    if not backend.offload:
        return (own * STATE + summed * CLEARED) / links.bandwidth
    return own * STATE / links.host + summed * CLEARED / (links.bandwidth if backend.stage == 1 else links.host)


MOST_ROWS = 256  # sequences that an engine works on at a time (vLLM's max_num_seqs)
LEAST_ROWS = 8  # what a replica must have kv_budget for to be worth its devices
PREFILL_TOKENS = 8192  # of the prompts that are read in one pass


@dataclass(frozen=True)
class Waves:
    """Decoding of the rows of one replica."""

    concurrent: float
    """Rows that are under way at a time."""
    steps: float
    active: float
    """Rows in an average step."""

    @classmethod
    def of(cls, context: CallContext, rows: float, kv_budget: float, ahead: int = 0) -> Waves:
        """`rows` rows of one replica with `kv_budget` bytes of KV cache on each of its devices.

        Whole waves of rows that start together, or rows that follow each other without a gap: whichever ends sooner
        (Graham's bound for list scheduling). Of a stream, rows of `ahead` further batches are under way, and the
        longest response may take as many more iterations."""
        work, response = context.workload, context.workload.response
        groups = work.micro_batches or 1
        fitting = math.floor(kv_budget / (work.under_way * cache_bytes(context)))
        most = MOST_ROWS * context.parallel.p if work.micro_batches is None else math.inf
        concurrent = float(max(1, min(math.ceil(rows * (1 + ahead) / groups), most, fitting)))
        if ahead:
            steps = max(rows * response.mean / concurrent, response.max / (1 + ahead))
        else:
            waves = math.ceil(rows / concurrent) * response.max
            steady = rows * response.mean / concurrent + (1 - 1 / concurrent) * response.max
            steps = max(response.max, min(waves, steady) if groups == 1 else waves)
        return cls(concurrent, steps, rows * response.mean / steps)


def cache_bytes(context: CallContext) -> float:
    """Bytes of keys and values of one token on the device with most layers."""
    layers = -(-context.size.layers // context.parallel.p)
    return 2 * layers * context.size.keys_on(context.links.t) * context.itemsize


def generation(context: CallContext, rows: float, kv_budget: float, ahead: int = 0, shared: bool = False) -> CallCost:
    """`rows` rows over all replicas, each of which has `kv_budget` bytes of KV cache on every device; `ahead` as for
    `Waves`, other calls have the devices of a `shared` one in between."""
    links, k = context.links, context.coefficients
    each = max(1.0, -(-rows // links.d))
    waves = Waves.of(context, each, kv_budget, ahead)
    p = links.p
    step, passed, host = decode(context, waves.active / p)
    cycle = step.times(p)  # p micro-batches follow each other through p stages, which work on each of them once
    host = max(host, p * host - cycle.total - p * passed)  # it prepares the others while one decodes
    prompts = each / context.workload.responses_per_prompt
    again, moved = through_update(context, waves.active, shared) if ahead else (0.0, 0.0)
    reading, filling = prefill(context, prompts + again)
    found = CallCost.of(
        prefill=reading.total - reading.tensor_parallel,
        decode=waves.steps * (cycle.memory + cycle.compute),
        tensor_parallel=reading.tensor_parallel + waves.steps * cycle.tensor_parallel,
        pipeline=filling + waves.steps * p * passed,
        offload=moved,
        fixed=waves.steps * (cycle.fixed + host) + k.call_seconds,
    )
    if not ahead:
        return found
    queued = max(0.0, each * (1 + ahead) - waves.concurrent) / waves.concurrent * context.workload.response.mean
    return replace(found, latency=(queued + context.workload.response.max) * (cycle.total + p * passed + host))


def through_update(context: CallContext, rows: float, shared: bool) -> tuple[float, float]:
    """Of `rows` rows that are under way when new weights come: the prompts as which their tokens are read again, and
    the seconds in which their keys and values leave their places and are back."""
    work, links = context.workload, context.links
    length = work.prompt.mean + work.response.square_mean / work.response.mean / 2
    again = rows * length / work.prompt.mean
    if work.kv != "recompute" and not shared:
        return 0.0, 0.0
    row = CachedRow(length * cache_bytes(context), prefill(context, again)[0].total / rows)
    prices = CachePrices.of(links.bandwidth, links.host)
    [place] = cache_places(work.kv, [row], prices, 0.0 if work.kv == "auto" else math.inf)  # it trusts in no room
    return (again, 0.0) if place == "recompute" else (0.0, rows * place_seconds([row], [place], prices))


def decode(context: CallContext, rows: float) -> tuple[Seconds, float, float]:
    """One token for `rows` rows on the slowest stage, the message to the next one, and what the host does in a step,
    unless it was measured with the step."""
    links, size, work, k, p = context.links, context.size, context.workload, context.coefficients, context.parallel.p
    layers = -(-size.layers // p)
    length = size.seen(work.prompt.mean + work.response.square_mean / work.response.mean / 2)  # of an average step
    layer = context.measured("decode", rows, layer_forward(context, rows, 0.0, launch=0.0))
    cache = Seconds(memory=rows * length * cache_bytes(context) / layers / links.bandwidth)
    layer = layer.plus(cache).launched(k.decode_layer_seconds if work.cuda_graphs else LAUNCHES * k.latency)
    output = context.measured("step", rows, output_forward(context, rows))
    measured = context.profile and context.profile.parted(context.model, "step", links.t, rows / p)
    host = 0.0 if measured else k.step_seconds + k.row_seconds * rows
    return layer.times(layers).plus(output), links.stage_message(rows * size.hidden * context.itemsize), host


def prefill(context: CallContext, prompts: float) -> tuple[Seconds, float]:
    """A replica reads `prompts` prompts (those of several responses once): what a stage does, and how long it waits for
    other stages and their messages."""
    size, work, p = context.size, context.workload, context.parallel.p
    tokens = prompts * work.prompt.mean
    passes = max(1.0, tokens / PREFILL_TOKENS)
    pairs = prompts * size.pairs(work.prompt.mean, work.prompt.square_mean) / passes
    layer = context.measured("forward", tokens / passes, layer_forward(context, tokens / passes, pairs))
    message = context.links.stage_message(tokens / passes * size.hidden * context.itemsize)
    stage = layer.times(-(-size.layers // p)).plus(images_forward(context, prompts / passes))
    return stage.times(passes), (p - 1) * stage.total + (passes + p - 1) * message
