"""Inference: one forward pass over prompts and responses. Pure."""

from __future__ import annotations

from hybridflow.planner.cost import CallCost
from hybridflow.planner.stream import Setting, Stream


def inference(setting: Setting, rows: float) -> CallCost:
    """`rows` rows over all data parallel ranks; the pipeline fills once (or once per given micro-batch)."""
    each = max(1.0, -(-rows // setting.site.d))
    parts = Stream.of(setting, each, training=False).price(setting, training=False)
    parts["fixed"] += setting.coefficients.call_seconds
    return CallCost.of(**parts)
