"""LayerProfile: measured seconds of a model's layer, used instead of the roofline where there are some. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from hybridflow.errors import ConfigError
from hybridflow.model_spec import ModelSpec
from hybridflow.planner.layer_costs import Seconds
from hybridflow.settings import require

Pass = Literal["forward", "backward", "output", "output_backward", "decode"]


@dataclass(frozen=True)
class Curve:
    """Seconds at some numbers of tokens (of rows, for "decode"), ascending; `t` devices share the layer."""

    model: str
    kind: Pass
    t: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((float(n), float(seconds)) for n, seconds in self.points)
        object.__setattr__(self, "points", points)
        require(
            self.kind in get_args(Pass), f"a profile has no pass {self.kind!r}. Known: {', '.join(get_args(Pass))}."
        )
        good = bool(points) and all(n > 0 and seconds > 0 and math.isfinite(seconds) for n, seconds in points)
        rising = all(a[0] < b[0] for a, b in pairwise(points))
        require(good and rising, f"the profile of {self.kind!r} needs ascending, positive numbers, got {points[:4]}.")

    def at(self, tokens: float) -> float:
        """Between two points on the straight line through both; below the first one its seconds, above the last one
        in proportion."""
        points = self.points
        if tokens <= points[0][0]:
            return points[0][1]
        if tokens >= points[-1][0]:
            return points[-1][1] * tokens / points[-1][0]
        above = bisect_left(points, (tokens, 0.0))
        (n, low), (m, high) = points[above - 1], points[above]
        return low + (high - low) * (tokens - n) / (m - n)


@dataclass(frozen=True)
class LayerProfile:
    """Curves measured on `device`. Those with t > 1 contain their collectives.

    Errors: ConfigError for a file that is missing or holds something else.
    """

    device: str
    curves: tuple[Curve, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", tuple(self.curves))
        object.__setattr__(self, "_index", {(c.model, c.kind, c.t): c for c in self.curves})

    def layer(self, model: ModelSpec, kind: Pass, t: int, tokens: float, formula: Seconds) -> Seconds:
        """What was measured; `formula` where nothing was."""
        index: Mapping[tuple[str, str, int], Curve] = self.__dict__["_index"]
        curve = index.get((architecture(model), kind, t))
        if curve is None:
            return formula
        seconds = curve.at(tokens)
        known = formula.compute + formula.memory
        share = formula.compute / known if known else 1.0
        inside = 0.0 if t > 1 else formula.tensor_parallel
        return replace(formula, compute=seconds * share, memory=seconds * (1 - share), tensor_parallel=inside, fixed=0)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(yaml.safe_dump({"device": self.device, "curves": [_plain(c) for c in self.curves]}))

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        try:
            found: Any = yaml.safe_load(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no profile {path}. Run `hybridflow profile` to make one.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}.") from None
        good = isinstance(found, dict) and {"device", "curves"} <= set(found) and isinstance(found["curves"], Sequence)
        require(good, f"{path} is not a profile: it needs `device` and `curves`.")
        try:
            return cls(found["device"], tuple(Curve(**curve) for curve in found["curves"]))
        except TypeError as error:
            raise ConfigError(f"{path} is not a profile: {error}.") from None


def architecture(model: ModelSpec) -> str:
    """What two models with equal layers share: the name under which a profile keeps their curves."""
    sizes = (model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim)
    output = f"-{model.vocab}" if model.head == "lm" else ""
    return f"{model.family}-" + "-".join(map(str, sizes)) + output


def _plain(curve: Curve) -> dict[str, Any]:
    return {**asdict(curve), "points": [list(point) for point in curve.points]}
