"""Memory: bytes on the fullest device of a call's mesh. Pure.

Static bytes stay between calls: parameters; trained models also keep float32 gradients, and Adam's state cut over the
data parallel ranks. Active bytes are there while a call runs.
"""

from __future__ import annotations

from hybridflow.planner.cost import DeviceMemory
from hybridflow.planner.generation import LEAST_ROWS, Waves, cache_bytes
from hybridflow.planner.graph import Kind
from hybridflow.planner.stream import Setting, Stream

GRADIENT = 4
MOMENTS = 8  # Adam's two, float32
MAIN = 4  # float32 parameters beside those of 16 bits
LOGITS = 4 + 4 + 2  # bytes per logit in training: float32, its gradient, what the product wrote


def weights(setting: Setting) -> float:
    """Bytes of the parameters on the device with most."""
    return max(setting.size.stage(setting.parallel.p)) / setting.parallel.t * setting.itemsize


def static(setting: Setting, trained: bool) -> DeviceMemory:
    parameters = weights(setting)
    if not trained:
        return DeviceMemory(parameters=parameters)
    shard = parameters / setting.itemsize
    state = MOMENTS + (MAIN if setting.itemsize < 4 else 0)
    return DeviceMemory(parameters, shard * GRADIENT, shard * state / setting.parallel.d)


def active(setting: Setting, kind: Kind, rows: float, copy: bool) -> DeviceMemory:
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
    size, work, t = setting.size, setting.workload, setting.parallel.t
    stream = Stream.of(setting, each, kind == "training")
    tokens, answers = stream.rows * work.tokens, stream.rows * work.response.mean
    logits = answers * size.vocab / t if size.vocab > 1 else 0.0
    if kind == "inference":
        return DeviceMemory(activations=2 * tokens * kept(setting), logits=logits * 6, weights=own)
    flight = min(setting.parallel.p, stream.micro)  # micro-batches of which the first stage keeps activations (1F1B)
    layers = -(-size.layers // setting.parallel.p)
    if work.recompute:
        activations = tokens * (flight * layers * size.hidden / setting.site.shares * setting.itemsize + kept(setting))
    else:
        activations = flight * layers * tokens * kept(setting)
    return DeviceMemory(activations=activations, logits=logits * LOGITS, weights=own)


def kept(setting: Setting) -> float:
    """Bytes per token that a layer keeps for its backward pass (Korthikanti et al. 2023, section 4, with flash
    attention and a gated MLP): inputs of norms and products (whole unless the ranks share the
    sequence), and everything between, of which a rank has its own shard."""
    size, t = setting.size, setting.parallel.t
    own = 2 * size.queries / t + 2 * size.keys_on(t) + 3 * size.intermediate / t
    return (4 * size.hidden / setting.site.shares + own) * setting.itemsize


def cache(setting: Setting, rows: float, room: float) -> float:
    """Bytes of KV cache that generation uses on a device when there is `room`."""
    each = max(1.0, -(-rows // setting.parallel.d))
    waves = Waves.of(setting, each, room)
    return waves.concurrent * setting.workload.longest * cache_bytes(setting)
