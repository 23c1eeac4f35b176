"""Inference: one forward pass over prompts and responses; or a function of the user's over their texts. Pure."""

from __future__ import annotations

from hybridflow.planner.coefficients import Coefficients
from hybridflow.planner.cost import CallCost
from hybridflow.planner.sharding import unhidden
from hybridflow.planner.stream import Setting, Stream


def inference(setting: Setting, rows: float) -> CallCost:
    """`rows` rows over all data parallel ranks; the pipeline fills once (or once per given micro-batch)."""
    each = max(1.0, -(-rows // setting.site.d))
    stream = Stream.of(setting, each, training=False)
    parts = stream.price(setting, training=False)
    parts["data_parallel"] = stream.fills * stream.micro * unhidden(setting, stream.rows, training=False)[0]
    parts["fixed"] += setting.coefficients.call_seconds
    return CallCost.of(**parts)


def function(rows: float, hosts: int, k: Coefficients) -> CallCost:
    """`rows` rows over so many hosts; devices have no part in it."""
    return CallCost.of(fixed=k.call_seconds + -(-rows // hosts) * k.function_seconds)
