"""Generation: reading the prompts, then one decode step per token, as far as the KV cache has room. Pure.

A decode step reads the weights and the KV cache of every row that is under way once (memory-bound, roofline). With p
stages p micro-batches of the rows are under way, so the weights are read once for each. Rows that find no room in the
cache wait: a wave of rows ends, another begins. The cache is paged, so a row takes of it what its own length asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridflow.planner.cost import CallCost
from hybridflow.planner.layer_costs import Seconds, causal_pairs, layer_forward, output_forward
from hybridflow.planner.stream import Setting

MOST_ROWS = 256  # sequences that an engine works on at a time (vLLM's max_num_seqs)
LEAST_ROWS = 8  # what a replica must have room for to be worth its devices
PREFILL_TOKENS = 8192  # of the prompts that are read in one pass


@dataclass(frozen=True)
class Waves:
    """`concurrent` rows of a replica are under way at a time, for `steps` decode steps in all."""

    concurrent: float
    steps: float
    active: float  # rows in an average step

    @classmethod
    def of(cls, setting: Setting, rows: float, room: float) -> Waves:
        """`rows` rows of one replica with `room` bytes of KV cache on each of its devices.

        Whole waves of rows that start together, or rows that follow each other without a gap: whichever ends sooner
        (Graham's bound for list scheduling).
        """
        work, response = setting.workload, setting.workload.response
        groups = setting.parallel.micro_batches or 1
        fitting = math.floor(room / (work.under_way * cache_bytes(setting)))
        most = MOST_ROWS * setting.parallel.p if setting.parallel.micro_batches is None else math.inf
        concurrent = float(max(1, min(math.ceil(rows / groups), most, fitting)))
        waves = math.ceil(rows / concurrent) * response.max
        steady = rows * response.mean / concurrent + (1 - 1 / concurrent) * response.max
        steps = max(response.max, min(waves, steady) if groups == 1 else waves)
        return cls(concurrent, steps, rows * response.mean / steps)


def cache_bytes(setting: Setting) -> float:
    """Bytes of keys and values of one token on the device with most layers."""
    layers = -(-setting.size.layers // setting.parallel.p)
    return 2 * layers * setting.size.keys_on(setting.site.t) * setting.itemsize


def generation(setting: Setting, rows: float, room: float) -> CallCost:
    """`rows` rows over all replicas, each of which has `room` bytes of KV cache on every device."""
    site, k = setting.site, setting.coefficients
    each = max(1.0, -(-rows // site.d))
    waves = Waves.of(setting, each, room)
    p = site.p
    step, passed = _decode(setting, waves.active / p)
    # p micro-batches follow each other through p stages: every stage works on each of them once in a cycle
    cycle = step.times(p)
    prefill, filling = _prefill(setting, each / setting.workload.responses_per_prompt)
    host = k.step_seconds + k.row_seconds * waves.active
    if setting.profile and setting.profile.seconds(setting.model, "step", site.t, waves.active / p) is not None:
        host = 0.0  # measured with the step
    return CallCost.of(
        prefill=prefill.total - prefill.tensor_parallel,
        decode=waves.steps * (cycle.memory + cycle.compute),
        tensor_parallel=prefill.tensor_parallel + waves.steps * cycle.tensor_parallel,
        pipeline=filling + waves.steps * p * passed,
        fixed=waves.steps * (cycle.fixed + host) + k.call_seconds,
    )


def _decode(setting: Setting, rows: float) -> tuple[Seconds, float]:
    """One token for `rows` rows on the slowest stage, and the message to the next one."""
    site, size, work, k, p = setting.site, setting.size, setting.workload, setting.coefficients, setting.parallel.p
    layers = -(-size.layers // p)
    context = work.prompt.mean + work.response.square_mean / work.response.mean / 2  # of an average step
    if size.window is not None:
        context = min(context, size.window)
    layer = layer_forward(site, size, k, rows, 0.0, setting.itemsize, launch=k.decode_layer_seconds)
    if setting.profile:
        layer = setting.profile.layer(setting.model, "decode", site.t, rows, layer)
    output = output_forward(site, size, k, rows, setting.itemsize)
    if setting.profile:
        output = setting.profile.layer(setting.model, "step", site.t, rows, output)
    cache = Seconds(memory=rows * context * cache_bytes(setting) / site.bandwidth)
    return layer.times(layers) + output + cache, site.stage_message(rows * size.hidden * setting.itemsize)


def _prefill(setting: Setting, prompts: float) -> tuple[Seconds, float]:
    """A replica reads `prompts` prompts (those of several responses once): what a stage does, and how long it waits for
    other stages and their messages."""
    size, work, p = setting.size, setting.workload, setting.parallel.p
    tokens = prompts * work.prompt.mean
    passes = max(1.0, tokens / PREFILL_TOKENS)
    pairs = prompts * causal_pairs(size, work.prompt.mean, work.prompt.square_mean) / passes
    layer = layer_forward(setting.site, size, setting.coefficients, tokens / passes, pairs, setting.itemsize)
    if setting.profile:
        layer = setting.profile.layer(setting.model, "forward", setting.site.t, tokens / passes, layer)
    message = setting.site.stage_message(tokens / passes * size.hidden * setting.itemsize)
    stage = layer.times(-(-size.layers // p))
    return stage.times(passes), (p - 1) * stage.total + (passes + p - 1) * message
