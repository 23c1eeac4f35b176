"""LayerProfile: measured seconds of a model's layer, which replace the roofline where available.

Pure. Measured for each tensor parallel size: a decoder layer forward and backward, the rest of a micro-batch ("output":
logits, loss, the engine's own work), a layer in a decode step, the rest of such a step ("step"), and an optimizer step
with its data parallel messages ("update"). Seconds hold for devices alone on their node; `slowdown` is the factor for
busy neighbours."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.hardware import Coefficients, Seconds
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.settings import read_yaml, require

Pass = Literal["forward", "backward", "output", "output_backward", "decode", "step", "update"]


@dataclass(frozen=True)
class Curve:
    """Seconds at some numbers of tokens (of rows for "decode" and "step", of elements on a device for "update"),
    ascending; `t` devices share the layer, and an update has `d` data parallel ranks. `busy` is the share of the time
    in which a device computes instead of waiting."""

    model: str
    kind: Pass
    t: int
    points: tuple[tuple[float, float], ...]
    d: int = 1
    busy: float = 1.0

    def __post_init__(self) -> None:
        points = tuple((float(n), float(seconds)) for n, seconds in self.points)
        object.__setattr__(self, "points", points)
        known = get_args(Pass)
        require(self.kind in known, f"a profile has no pass {self.kind!r}. Known: {', '.join(known)}.")
        good = bool(points) and all(n > 0 and seconds > 0 and math.isfinite(seconds) for n, seconds in points)
        rising = all(a[0] < b[0] for a, b in pairwise(points))
        require(0 < self.busy <= 1, f"the profile of {self.kind!r} needs a share in (0, 1], got busy={self.busy}.")
        require(good and rising, f"the profile of {self.kind!r} needs ascending, positive numbers, got {points[:4]}.")

    def at(self, tokens: float) -> float:
        """Linear interpolation between points; below the first its seconds, above the last extrapolation with the slope
        from the first to the last."""
        points = self.points
        if tokens <= points[0][0]:
            return points[0][1]
        if tokens >= points[-1][0]:
            (n, low), (m, high) = points[0], points[-1]
            return high * tokens / m if n == m else high + max(0.0, high - low) * (tokens - m) / (m - n)
        above = bisect_left(points, (tokens, 0.0))
        (n, low), (m, high) = points[above - 1], points[above]
        return low + (high - low) * (tokens - n) / (m - n)


@dataclass(frozen=True)
class LayerProfile:
    """Curves measured on `device`. Those with t > 1 contain their collectives.

    `slowdown` is that of a node (see `NodeSpec`), `latency` [s] and `bandwidth` [bytes/s] those of messages inside it,
    `call_seconds` those of a call beside what its engine does, `host` [bytes/s] that of host memory (None: not
    measured). Errors: ConfigError for a file that
    is missing or holds something else."""

    device: str
    curves: tuple[Curve, ...] = ()
    slowdown: tuple[tuple[float, float], ...] = ()
    latency: float | None = None
    bandwidth: float | None = None
    call_seconds: float | None = None
    host: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", tuple(self.curves))
        object.__setattr__(self, "slowdown", tuple((float(n), float(factor)) for n, factor in self.slowdown))
        object.__setattr__(self, "_index", {(c.model, c.kind, c.t, c.d): c for c in self.curves})

    def measured(self, cluster: ClusterSpec) -> ClusterSpec:
        """`cluster` with the measured node values. Errors: ConfigError for other devices."""
        found = sorted({node.device.name for node in cluster.nodes})
        require(
            found == [self.device],
            f"the profile was measured on {self.device!r}, the cluster has {', '.join(found)}. "
            "Run `hybridflow profile` there, or plan without it.",
        )
        own = {"latency": self.latency, "bandwidth": self.bandwidth, "slowdown": self.slowdown or None}
        changes = {name: value for name, value in own.items() if value is not None}
        nodes = (replace(node, **changes) for node in cluster.nodes)
        if (host := self.host) is not None:
            nodes = (replace(node, device=replace(node.device, host=host)) for node in nodes)
        return replace(cluster, nodes=tuple(nodes))

    def coefficients(self, given: Coefficients) -> Coefficients:
        """`given` with measured values: messages reach the measured bandwidth, not a share of the data sheet's."""
        reached = None if self.bandwidth is None else 1.0
        known = {"call_seconds": self.call_seconds, "link": reached, "reduce": reached}
        return replace(given, **{name: value for name, value in known.items() if value is not None})

    def parted(self, model: Decoder, kind: Pass, t: int, number: float, d: int = 1) -> tuple[float, float] | None:
        """Measured seconds at `number` tokens, rows or elements: (computing, waiting for others); None if not
        measured."""
        key = (architecture(model), kind, t, d) if isinstance(model, ModelSpec) else None
        curve: Curve | None = self.__dict__["_index"].get(key)
        return None if curve is None else (curve.at(number) * curve.busy, curve.at(number) * (1 - curve.busy))

    def layer(self, model: Decoder, kind: Pass, t: int, tokens: float, formula: Seconds) -> Seconds:
        """The measured seconds; `formula` if not measured."""
        found = self.parted(model, kind, t, tokens)
        if found is None:
            return formula
        works, waits = found if t > 1 else (sum(found), formula.tensor_parallel)
        known = formula.compute + formula.memory
        share = formula.compute / known if known else 1.0
        return Seconds(works * share, works * (1 - share), waits, formula.exchange)

    def __str__(self) -> str:
        lines = [f"profile of {self.device}"]
        if self.slowdown:
            busy = ", ".join(f"{n:g} at once {factor:.3g}x" for n, factor in self.slowdown)
            lines.append(f"devices that work at once take longer: {busy}")
        if self.latency is not None and self.bandwidth is not None:
            lines.append(f"messages: {self.latency * 1e6:.3g} us, {self.bandwidth / 1e9:.3g} GB/s")
        if self.call_seconds is not None:
            lines.append(f"a call: {self.call_seconds * 1e3:.3g} ms beside its engine")
        if self.host is not None:
            lines.append(f"host memory: {self.host / 1e9:.3g} GB/s")
        lines.append(f"{'model':38} {'pass':15} {'t':>3} {'d':>3}   ms at the fewest and at the most")
        for c in self.curves:
            (n, low), (m, high) = c.points[0], c.points[-1]
            ends = f"{low * 1e3:.3g} at {n:g}, {high * 1e3:.3g} at {m:g}"
            lines.append(f"{c.model:38} {c.kind:15} {c.t:3} {c.d:3}   {ends}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        own = json.loads(json.dumps(asdict(self)))  # YAML has no tuples
        Path(path).write_text(yaml.safe_dump(own, sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        found = read_yaml(path, "profile (`hybridflow profile` makes one)")
        good = isinstance(found, dict) and {"device", "curves"} <= set(found) and isinstance(found["curves"], Sequence)
        require(good, f"{path} is not a profile: it needs `device` and `curves`.")
        try:
            own: dict[str, Any] = found | {"curves": tuple(Curve(**curve) for curve in found["curves"])}
            return cls(**own)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a profile: {error}.") from None


def architecture(model: ModelSpec) -> str:
    """A profile's key for the curves of a model, equal for models with equal layers."""
    sizes = (model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim)
    output = f"-{model.vocab}" if model.head == "lm" else ""
    return f"{model.family}-" + "-".join(map(str, sizes)) + output
