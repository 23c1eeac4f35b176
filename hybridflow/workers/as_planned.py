"""Settings of a group that is where a placement says: its own, with the sizes of the placement."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridflow.config import FSDP, VLLM, Megatron, TrainStrategy, ZeRO
from hybridflow.placement import GroupPlacement

logger = logging.getLogger(__name__)
PRICED = ("micro_tokens", "recompute", "sequence_parallel")
"""Settings beside the sizes that decide on time and memory: the placement's, unless the driver has chosen others."""


def as_planned(where: GroupPlacement, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the sizes of `where` in `train` and `generate`, and those of `PRICED` and the share of memory for
    generation that have their default values; everything else stays as the driver says."""
    out = dict(settings)
    if where.train is not None and isinstance(given := settings.get("train"), TrainStrategy):
        out["train"] = _train(where.train, given)
    if where.generate is not None and isinstance(given := settings.get("generate"), VLLM):
        share = chosen(given, "memory_fraction") or where.memory_fraction or given.memory_fraction
        out["generate"] = replace(given, pp=where.generate[0], tp=where.generate[1], memory_fraction=share)
    return out


def chosen(strategy: Any, name: str) -> Any:
    """The setting of a strategy where it is not the default one, else None."""
    value = getattr(strategy, name, None)
    return None if value == getattr(type(strategy), name, None) else value


def _train(found: Any, given: Any) -> Any:
    """The strategy `given` with the sizes of the one that was found."""
    alike = type(found) is type(given)
    if not alike:
        logger.warning("%s is placed as %s was found for, whose times are those of other sizes.", given, found)
    kept = {name for name in PRICED if not alike or not hasattr(found, name) or chosen(given, name) is not None}
    priced = {name: getattr(found, name) for name in PRICED if name not in kept}
    p, t = getattr(found, "pp", 1), getattr(found, "tp", 1)
    if isinstance(given, Megatron):
        stages = given.stage_layers if given.pp == p else None
        return replace(given, tp=t, pp=p, dp=found.dp, stage_layers=stages, **priced)
    if isinstance(given, FSDP):
        return replace(given, tp=t if p == 1 and given.lora is None else 1, dp=None, **priced)
    return replace(given, dp=None, **priced) if isinstance(given, ZeRO) else found
