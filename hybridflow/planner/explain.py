"""Infeasibility report: the model that does not fit, the missing memory, and the smallest cluster that fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hybridflow.errors import PlacementError
from hybridflow.placement import GIB, ranges
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Constraint, OneLayout, Together
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import ExecutionPlan, Mesh
from hybridflow.planner.search.auto_mapping import AutoMapping
from hybridflow.planner.search.call_search import mcmc
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.evaluation import Evaluator, options_of
from hybridflow.planner.search.problem import Option, Problem
from hybridflow.planner.search.stages import group_layouts, undominated


def alternatives(problem: Problem, plan: ExecutionPlan) -> dict[str, tuple[str, str]]:
    """By call: the runner-up and why it lost, as texts. Functions, which need no device, and calls without another
    layout that can run are left out.
    """
    evaluator = Evaluator(problem, options_of(problem, also=[plan]))
    state = evaluator.state(plan)
    if state is None:
        return {}
    own, found, static = evaluator.score(state), {}, problem.static(plan)
    assert own is not None
    for i, call in enumerate(evaluator.calls):
        if problem.graph.models[call.group] is None:
            continue
        best, seconds = (math.inf, math.inf, -1), 0.0
        for number, option in enumerate(evaluator.options[i]):
            if number == state[i] or option.seconds > best[0]:  # an iteration takes longer than its calls
                continue
            score = evaluator.score([*state[:i], number, *state[i + 1 :]], best[0] * (1 + 1e-9))
            if score is not None and score.good and (score.cost, option.seconds) < best[:2]:
                best, seconds = (score.cost, option.seconds, number), score.seconds
        if best[2] >= 0:
            taken, other = evaluator.options[i][state[i]], evaluator.options[i][best[2]]
            taken, other = (_with_room(problem, call, option, static) for option in (taken, other))
            found[call.name] = (str(other.plan), _why(problem, call.name, taken, other, seconds - own.seconds))
    return found


def stream_shape(problem: Problem, plan: ExecutionPlan, iteration: float) -> str:
    """How the calls of a stream follow each other in iterations of `iteration` seconds, and which side limits them;
    empty for a synchronous loop."""
    streamed = [call for call in problem.calls if call.ahead and call.kind == "generation"]
    if not streamed or not iteration:
        return ""
    seconds = problem.seconds(plan)
    others = [call for call in problem.calls if not call.ahead and problem.graph.models[call.group] is not None]
    busy = np.zeros((2, problem.cluster.size))
    for side, calls in enumerate((streamed, others)):
        for call in calls:
            busy[side, list(plan[call.name].mesh.devices)] += seconds[call.name]
    names = [", ".join(dict.fromkeys(call.group for call in calls)) for calls in (streamed, others)]
    where = [ranges(np.flatnonzero(own).tolist()) for own in busy]
    text = (
        f"stream: {names[0]} generates on {where[0]}, at most {streamed[0].ahead} weight updates ahead (max_staleness)"
    )
    if busy.prod(axis=0).any():
        shares = ", ".join(f"{name} {own.max() / iteration:.0%}" for name, own in zip(names, busy, strict=True))
        idle = max(0.0, 1 - busy.sum(axis=0)[busy.any(axis=0)].mean() / iteration)
        return f"{text}, and takes turns with {names[1]} on common devices: {shares} of the time; idle: {idle:.0%}"
    most, idle = busy.max(axis=1), [1 - own[own > 0].mean() / iteration if own.any() else 0.0 for own in busy]
    limit = f"{names[int(most[1] > most[0])]} limits" if most.max() > 0.9 * iteration else "the longest responses limit"
    shares = ", ".join(f"{name} {max(0.0, share):.0%}" for name, share in zip(names, idle, strict=True))
    return f"{text}, while {names[1]} works on {where[1]}: {limit}; idle: {shares}"


def _with_room(problem: Problem, call: Call, option: Option, static: Sequence[float]) -> Option:
    """Generation with the KV cache that static bytes leave."""
    if call.kind != "generation":
        return option
    beside = max(static[device] for device in option.plan.mesh.devices)
    return option._replace(seconds=problem.generation(call, option.plan, beside).seconds)


def _why(problem: Problem, name: str, taken: Option, other: Option, more: float) -> str:
    call = problem.graph.call(name)
    itself = f"the call alone would take {other.seconds:.4g} s instead of {taken.seconds:.4g} s"
    if more < -1e-9 * max(taken.seconds, 1e-9):
        return f"the iteration would take {-more:.3g} s less, which is within the error of predictions; {itself}"
    if more <= 1e-9 * max(taken.seconds, 1e-9):
        return f"the iteration would take as long, {itself}"
    text = f"the iteration would take {more:.3g} s more, "
    if other.seconds > taken.seconds * (1 + 1e-9):
        return f"{text}{itself}, mostly {problem.limit(call, other.plan, 0.0)}"
    if other.plan.mesh == taken.plan.mesh:
        return f"{text}for {itself}, but weights or KV cache would not lie as they do now"
    return f"{text}for {itself}, but its devices are those that other calls or weights need"


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


def infeasibility_report(problem: Problem, *, per_call: bool = False) -> PlacementError:
    """The error for a problem that has no placement; `per_call`: calls of a group may have layouts of their own."""
    free = replace(problem, constraints=())
    if _limiting(problem) and fits(free, per_call):
        return PlacementError(_at_fault(problem, per_call))
    limits = " and ".join(map(str, _limiting(problem)))
    more = f"No number of nodes is enough{limits and f' while {limits} must hold'}."
    if smallest := smallest_cluster(problem, per_call):
        more = f"The smallest cluster of such nodes that fits is {smallest}."
    return PlacementError(
        f"the cluster is too small: {_missing(free)}. {more} Or use smaller models, batches or lengths."
    )


def _missing(problem: Problem) -> str:
    needs, where = dict[str, Need](), _devices(problem.cluster)
    for group in problem.graph.groups:
        if (need := _need(problem, group)) is None:
            return f"{group} cannot be cut for {where} in any way"
        needs[group] = need
    largest = max(needs, key=lambda group: needs[group].lack)
    need, model = needs[largest], problem.graph.models[largest]
    billions = f" ({model.num_parameters / 1e9:.1f} billion parameters)" if model else ""
    if need.lack <= 0:
        need, who = _together(problem), f"all models together, of which {largest}{billions} is the largest, need"
    else:
        who = f"{largest}{billions} needs"
    if need.lack in (float("inf"), 0) or need.lack < 0:  # each model fits alone, and all of them never at once
        return f"{who} more than {where} have, in whatever way they share them"
    some = where if need.devices == problem.cluster.size else f"{need.devices} of the {where}"
    return (
        f"{who} at least {need.bytes / GIB:.1f} GiB on each of {some}, {need.usable / GIB:.1f} GiB are usable: "
        f"{need.lack / GIB:.1f} GiB a device are missing"
    )


def _at_fault(problem: Problem, per_call: bool) -> str:
    """Message when only the constraints make the problem infeasible."""
    given = _limiting(problem)
    alone = [one for one in given if not fits(replace(problem, constraints=(one,)), per_call)]
    if alone:
        named: Sequence[Constraint] = alone
    else:
        without = (replace(problem, constraints=tuple(c for c in problem.constraints if c is not one)) for one in given)
        named = [one for one, rest in zip(given, without, strict=True) if fits(rest, per_call)] or given
    what = " and ".join(map(str, named))
    return (
        f"no placement on {_devices(problem.cluster)} keeps {what}: all groups fit there "
        f"without {'it' if len(named) == 1 else 'them'}. Loosen a constraint, or use more devices."
    )


def _devices(cluster: ClusterSpec) -> str:
    return f"{cluster.size} device{'s' if cluster.size > 1 else ''} of {cluster}"


def _limiting(problem: Problem) -> list[Constraint]:
    """Constraints that all groups on all devices, each in one layout, may not keep."""
    return [one for one in problem.constraints if not isinstance(one, OneLayout | Together)]


def fits(problem: Problem, per_call: bool = False) -> bool:
    """Some placement keeps the constraints and fits into memory, as far as searches see."""
    size = problem.cluster.size
    if not _limiting(problem) and problem.homogeneous and _together(problem).lack <= 0:
        return True
    if size <= MOST_SEARCHED and AutoMapping(problem).first is not None:
        return True
    return (
        per_call
        and size <= MOST_SAMPLED
        and mcmc(problem, deadline=Deadline.of(SECONDS), evaluations=SAMPLES) is not None
    )


def smallest_cluster(problem: Problem, per_call: bool = False) -> ClusterSpec | None:
    """The cluster with the fewest further nodes, like its last, on which everything fits."""
    low = high = len(problem.cluster.nodes)
    most = max(MOST_SEARCHED if _limiting(problem) else MOST_DEVICES, 2 * problem.cluster.size)
    while (larger := grown(problem, high * 2)).cluster.size <= most:
        high = high * 2
        if fits(larger, per_call):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(grown(problem, middle), per_call) else (middle, high)
    return grown(problem, high).cluster


def grown(problem: Problem, nodes: int) -> Problem:
    """The problem on `nodes` nodes; further nodes are like the last of its cluster."""
    own = problem.cluster.nodes
    larger = replace(problem.cluster, nodes=own + own[-1:] * (nodes - len(own)))
    return replace(problem, costs=problem.costs.on(larger))


def _need(problem: Problem, group: str) -> Need | None:
    """The least need of a group alone; None if its model does not divide."""
    search, found = AutoMapping(problem), []
    for size in search.sizes:
        for mesh in search.places((search.keys[group],), size):
            usable = min(problem.capacity[device] for device in mesh.devices)
            asked = [layout.static + layout.active for layout in group_layouts(problem, group, mesh)]
            found += [Need(min(asked), usable, size)] if asked else []
    return min(found, key=lambda need: need.lack, default=None)


def _together(problem: Problem) -> Need:
    """The need of all groups on all devices."""
    mesh, both = Mesh.of(0, problem.cluster.size), np.zeros((1, 2))  # static and active bytes
    for group in problem.graph.groups:
        asked = np.array([layout.values[-2:] for layout in group_layouts(problem, group, mesh)]).reshape(-1, 2)
        static = (both[:, None, 0] + asked[None, :, 0]).reshape(-1)
        active = np.maximum(both[:, None, 1], asked[None, :, 1]).reshape(-1)
        both = np.stack([static, active], axis=1)
        both = both[undominated(both)]
    least = float(both.sum(axis=1).min()) if len(both) else float("inf")
    return Need(least, min(problem.capacity), mesh.size)
