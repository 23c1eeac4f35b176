"""Calibration: fits the coefficients to observed calls, whether profiled here or taken from a paper. Pure.

Least squares of log seconds, with a Gaussian prior on the logarithm of each coefficient around its default: few
observations change only the coefficients that they depend on. Only five are fitted: with more, single calls are matched
better and unseen layouts and devices worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import get_args

import numpy as np

from hybridflow.errors import PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph, Kind
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.settings import Positive, check_fields, require

NOISE = 0.08  # standard deviation of the logarithm of an observation
SPREAD: Mapping[str, float] = MappingProxyType(  # and of each fitted coefficient's
    {"compute": 0.25, "reduce": 0.3, "latency": 1.5, "step_seconds": 1.5, "micro_seconds": 1.5}
)
_STEP = 1e-3  # of finite differences


@dataclass(frozen=True)
class Observation:
    """One call that took `seconds`: `kind` of `model` on the first p*t*d devices of `cluster`, under `workload`.
    Errors: ConfigError for another kind and for seconds that are not positive, PlacementError for more devices than the
    cluster has."""

    cluster: ClusterSpec  # or a description, see `ClusterSpec.of`
    model: ModelSpec
    kind: Kind
    parallel: Parallel
    workload: Workload
    seconds: Positive

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster", ClusterSpec.of(self.cluster))
        require(isinstance(self.model, ModelSpec), f"Observation(model={self.model!r}): give a ModelSpec.")
        kinds = [kind for kind in get_args(Kind) if kind != "function"]
        require(self.kind in kinds, f"an observation of {self.kind!r} says nothing. Known: {', '.join(kinds)}.")
        check_fields(self)
        if self.parallel.size > self.cluster.size:
            asked = f"an observation on p*t*d = {self.parallel.size} devices"
            raise PlacementError(f"{asked} cannot be of a cluster of {self.cluster.size}.")

    def predicted(self, coefficients: Coefficients) -> float:
        """Seconds of the call by `Costs`."""
        call = Call("observed.call", "observed", "call", self.kind)
        trained = frozenset() if self.kind == "inference" else frozenset({"observed"})
        graph = Graph((call,), (), {"observed": self.model}, trained)
        plan = CallPlan(Mesh.of(0, self.parallel.size), self.parallel)
        return Costs(self.cluster, graph, self.workload, coefficients).cost(call.name, plan).seconds


def calibrate(observations: Sequence[Observation], start: Coefficients = DEFAULT) -> Coefficients:
    """Coefficients under which `Costs` predicts `observations`, near `start`. Errors: ConfigError without observations,
    and for those of different devices."""
    from scipy.optimize import least_squares  # takes a while to import

    require(bool(observations), "calibrate needs at least one observation.")
    devices = sorted({seen.cluster.node.device.name for seen in observations})
    require(len(devices) == 1, f"observations are of {', '.join(devices)}; calibrate one device at a time.")
    seen = np.log([one.seconds for one in observations])

    def residual_at(at: np.ndarray) -> np.ndarray:
        """[observations + coefficients]."""
        k = _moved(start, at)
        return np.concatenate([(np.log([one.predicted(k) for one in observations]) - seen) / NOISE, at])

    found = least_squares(residual_at, np.zeros(len(SPREAD)), method="lm", diff_step=_STEP)
    misfit = math.sqrt(float(np.mean(np.square(found.fun[: len(seen)] * NOISE))))
    return replace(_moved(start, found.x), device=devices[0], error=max(start.error, misfit))


def _moved(start: Coefficients, at: np.ndarray) -> Coefficients:
    """`start` at a point [coefficients] of logarithms, in units of their spread; an efficiency ends at 1."""
    scaled = zip(SPREAD.items(), at.tolist(), strict=True)
    found = {name: getattr(start, name) * math.exp(spread * value) for (name, spread), value in scaled}
    return replace(start, **{n: min(x, 1.0) if n in ("compute", "reduce") else x for n, x in found.items()})
