"""What to say of groups that fit nowhere: the missing memory, and the smallest cluster that fits. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hybridflow.errors import PlacementError
from hybridflow.placement import GIB
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint, OneLayout, Together
from hybridflow.planner.describe.mesh import Mesh
from hybridflow.planner.search.auto_mapping import AutoMapping
from hybridflow.planner.search.call_search import mcmc
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.stages import STATIC, Front, undominated

MOST_DEVICES = 1 << 15
MOST_SAMPLED = 32
SAMPLES, SECONDS = 1500, 5.0  # plans with a layout per call, on this number of devices at most
MOST_SEARCHED = 128
"""Devices on which all ways to place groups are tried; on more, all groups on all devices."""


class Need(NamedTuple):
    """The least `bytes` that groups need on each of `devices` devices, of `usable` bytes."""

    bytes: float
    usable: float
    devices: int

    @property
    def lack(self) -> float:
        return self.bytes - self.usable


def infeasibility_report(costs: Costs, *, per_call: bool = False) -> PlacementError:
    """The error for a problem that has no placement; `per_call`: calls of a group may have layouts of their own."""
    costs, free, given = _emptied(costs), _emptied(costs.keeping()), _limiting(costs)
    where = f"{costs.cluster.size} device{'s' if costs.cluster.size > 1 else ''} of {costs.cluster}"
    if given and fits(free, per_call):
        named = [one for one in given if not fits(_emptied(costs.keeping(one)), per_call)]
        if not named:
            without = (_emptied(costs.keeping(*(c for c in costs.constraints if c is not one))) for one in given)
            named = [one for one, rest in zip(given, without, strict=True) if fits(rest, per_call)] or given
        return PlacementError(
            f"no placement on {where} keeps {' and '.join(map(str, named))}: all groups fit there "
            f"without {'it' if len(named) == 1 else 'them'}. Loosen a constraint, or use more devices."
        )
    limits = " and ".join(map(str, given))
    more = f"No number of nodes is enough{limits and f' while {limits} must hold'}."
    if smallest := smallest_cluster(costs, per_call):
        more = f"The smallest cluster of such nodes that fits is {smallest}."
    text = f"the cluster is too small: {_missing(free, where)}. {more}"
    return PlacementError(f"{text} Or use smaller models, batches or lengths.")


def _emptied(costs: Costs) -> Costs:
    """With all models in host memory between their calls that may wait there."""
    return costs.offloading(costs.may_wait)


def _missing(costs: Costs, where: str) -> str:
    needs = {group: _need(costs, group) for group in costs.graph.groups}
    for group, need in needs.items():
        if need is None:
            return f"{group} cannot be cut for {where} in any way"
    largest, need = max(needs.items(), key=lambda one: one[1].lack if one[1] else 0.0)
    assert need is not None
    model = costs.graph.models[largest]
    billions = f" ({model.num_parameters / 1e9:.1f} billion parameters)" if model else ""
    who = f"{largest}{billions} needs"
    if need.lack <= 0:
        need, who = _together(costs), f"all models together, of which {largest}{billions} is the largest, need"
    if need.lack in (float("inf"), 0) or need.lack < 0:  # each model fits alone, and all of them never at once
        return f"{who} more than {where} have, in whatever way they share them"
    some = where if need.devices == costs.cluster.size else f"{need.devices} of the {where}"
    return (
        f"{who} at least {need.bytes / GIB:.1f} GiB on each of {some}, {need.usable / GIB:.1f} GiB are usable: "
        f"{need.lack / GIB:.1f} GiB a device are missing"
    )


def _limiting(costs: Costs) -> list[Constraint]:
    """Constraints that all groups on all devices, each in one layout, may not keep."""
    return [one for one in costs.constraints if not isinstance(one, OneLayout | Together)]


def fits(costs: Costs, per_call: bool = False) -> bool:
    """Some placement keeps the constraints and fits into memory, as far as searches see."""
    size = costs.cluster.size
    if not _limiting(costs) and _together(costs).lack <= 0:
        return True
    if size <= MOST_SEARCHED and AutoMapping(costs).first is not None:
        return True
    sampled = per_call and size <= MOST_SAMPLED
    return sampled and mcmc(costs, deadline=Deadline.of(SECONDS), evaluations=SAMPLES) is not None


def smallest_cluster(costs: Costs, per_call: bool = False) -> ClusterSpec | None:
    """The cluster with the fewest further nodes on which everything fits."""
    low, high = len(costs.cluster.nodes), 2 * len(costs.cluster.nodes)
    most = max(MOST_SEARCHED if _limiting(costs) else MOST_DEVICES, 2 * costs.cluster.size)
    while not fits(grown(costs, high), per_call):
        low, high = high, 2 * high
        if grown(costs, high).cluster.size > most:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(grown(costs, middle), per_call) else (middle, high)
    return grown(costs, high).cluster


def grown(costs: Costs, nodes: int) -> Costs:
    """The problem on `nodes` nodes."""
    return costs.on(replace(costs.cluster, nodes=(costs.cluster.node,) * nodes))


def _need(costs: Costs, group: str) -> Need | None:
    """The least need of a group alone; None if its model does not divide."""
    search, found = AutoMapping(costs), []
    for size in search.sizes:
        if (mesh := search.place((search.kinds[group],), size)) is not None:
            asked = Front.of(costs, group, mesh, math.inf).values[:, STATIC:].sum(axis=1)
            found += [Need(float(asked.min()), costs.capacity, size)] if len(asked) else []
    return min(found, key=lambda need: need.lack, default=None)


def _together(costs: Costs) -> Need:
    """The need of all groups on all devices."""
    mesh, both = Mesh.of(0, costs.cluster.size), np.zeros((1, 2))  # static and active bytes
    for group in costs.graph.groups:
        asked = Front.of(costs, group, mesh, math.inf).values[:, STATIC:]
        static = (both[:, None, 0] + asked[None, :, 0]).reshape(-1)
        active = np.maximum(both[:, None, 1], asked[None, :, 1]).reshape(-1)
        both = np.stack([static, active], axis=1)
        both = both[undominated(both)]
    return Need(float(both.sum(axis=1).min(initial=math.inf)), costs.capacity, mesh.size)
