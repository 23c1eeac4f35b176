"""Model FLOP/s utilization (MFU): the arithmetic that models need, as a share of what their devices can do at most."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from hybridflow.engines.call_events import Event
from hybridflow.planner.describe.cluster_spec import PEAKS


def peak_flops(name: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of a device of this name for operands of `dtype`; None if unknown, and for a part of a device."""
    if dtype == "float32" or re.search(r"\bMIG\b", name):
        return None
    return next((peak * 1e12 for known, peak in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


def mfu(events: Iterable[Event], seconds: float, peaks: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Of one iteration of `seconds`: `perf/mfu` of all devices, `perf/mfu/<role>.<method>` of each call's own time.

    `peaks` [FLOP/s] by pool and rank are those of all devices. The arithmetic is that of the models' matrices and
    attention, three times that of the forward pass in an update; recomputed activations do not count.
    """
    total, done, possible = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
    for event in events:
        if event.work.flops and (peak := peaks.get((event.pool, event.rank))) is not None:
            total += event.work.flops
            done[f"{event.role}.{event.method}"] += event.work.flops
            possible[f"{event.role}.{event.method}"] += peak * event.seconds
    if not total or not seconds:
        return {}
    found = {f"perf/mfu/{name}": flops / possible[name] for name, flops in done.items() if possible[name]}
    return {"perf/mfu": total / (seconds * sum(peaks.values())), **found}
