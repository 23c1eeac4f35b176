"""Training: forward, backward, gradient reduction and optimizer step of every mini-batch. Pure."""

from __future__ import annotations

from hybridflow.planner.cost import CallCost
from hybridflow.planner.stream import Setting, Stream

REDUCED = 4  # bytes per parameter of a gradient on its way: float32
STATE = 30.0  # bytes that Adam reads and writes per parameter: gradient, main parameter, two moments, parameter
CLEARED = 8.0  # bytes per parameter of the gradient buffer: the norm reads it, it is set to zero


def training(setting: Setting, rows: float, minibatches: int, epochs: int) -> CallCost:
    """`rows` rows in `minibatches` optimizer steps, `epochs` times over.

    A step reduces gradients to the ranks that keep their optimizer state, updates these, and gathers the parameters
    (ZeRO stage 1, Rajbhandari et al. 2020); nothing of that is assumed to overlap with computation.
    """
    site, size, k = setting.site, setting.size, setting.coefficients
    steps = min(minibatches, max(1, int(rows)))
    shard = max(size.stage(site.p)) / site.t
    each = -(-rows / steps // site.d)  # the rank with most rows
    parts = Stream.of(setting, max(each, 1.0), training=True).price(setting, training=True)
    parts["data_parallel"] = site.data_parallel(shard * REDUCED) + site.data_parallel(shard * setting.itemsize)
    parts["optimizer"] = shard * (STATE / site.d + CLEARED) / site.bandwidth
    if setting.profile and (took := setting.profile.seconds(setting.model, "update", site.t, shard, site.d)):
        parts["data_parallel"], parts["optimizer"] = 0.0, took  # measured together
    parts = {name: seconds * steps * epochs for name, seconds in parts.items()}
    parts["fixed"] += k.call_seconds * (1 + steps * epochs)
    return CallCost.of(**parts)
