"""Training: forward, backward, gradient reduction and optimizer step of every mini-batch. Pure."""

from __future__ import annotations

from hybridflow.planner.cost import CallCost
from hybridflow.planner.sharding import REDUCED, unhidden
from hybridflow.planner.stream import Setting, Stream

STATE = 30.0  # bytes that Adam reads and writes per parameter: gradient, main parameter, two moments, parameter
CLEARED = 8.0  # bytes per parameter of the gradient buffer: the norm reads it, it is set to zero


def training(setting: Setting, rows: float, minibatches: int, epochs: int) -> CallCost:
    """`rows` rows in `minibatches` optimizer steps, `epochs` times over.

    A step reduces gradients to the ranks that keep their optimizer state, updates these, and gathers the parameters
    (ZeRO stage 1, Rajbhandari et al. 2020); nothing of that is assumed to overlap with computation. For stages 2 and 3
    see `sharding`.
    """
    site, size, k, backend = setting.site, setting.size, setting.coefficients, setting.backend
    steps = min(minibatches, max(1, int(rows)))
    shard = max(size.stage(site.p)) / site.t
    each = -(-rows / steps // site.d)  # the rank with most rows
    stream = Stream.of(setting, max(each, 1.0), training=True)
    parts = stream.price(setting, training=True)
    most, last = unhidden(setting, stream.rows, training=True)
    parts["data_parallel"] = (stream.fills * stream.micro - 1) * most + last
    if backend.stage == 1:
        parts["data_parallel"] += site.data_parallel(shard * REDUCED)
    if not backend.sharded:
        parts["data_parallel"] += site.data_parallel(shard * setting.itemsize)
    parts["optimizer"] = update(setting)
    if (
        setting.profile
        and backend.stage == 1
        and (took := setting.profile.parted(setting.model, "update", site.t, shard, site.d))
    ):
        parts["optimizer"], parts["data_parallel"] = took
    parts = {name: seconds * steps * epochs for name, seconds in parts.items()}
    parts["fixed"] += k.call_seconds * (1 + steps * epochs)
    return CallCost.of(**parts)


def update(setting: Setting) -> float:
    """Seconds of an optimizer step on a device, beside messages."""
    site, backend = setting.site, setting.backend
    if backend.lora is None:
        stepped = max(setting.size.stage(site.p)) / site.t
    else:
        layer, outside = setting.trained
        stepped = setting.size.layers * layer + outside
    own = stepped / (setting.parallel.shards if backend.sharded else site.d)
    summed = stepped if backend.stage == 1 else own  # gradients that a rank keeps
    if not backend.offload:
        return (own * STATE + summed * CLEARED) / site.bandwidth
    return own * STATE / site.host + summed * CLEARED / (site.bandwidth if backend.stage == 1 else site.host)
