"""Searches that put all groups on all devices: every model cut alike, or by similarity of the layouts. Pure.

A placement is compared with three symmetric plans: the plain one, without pipeline stages; the heuristic one, which an
expert would write (ReaL, section 8.1); and the fastest.

The similarity-oriented search (PUZZLE, ATC '24) gives training and generation layouts of their own. The transition is
cheaper the more of its generation shard a device holds from training, so pairs of layouts are visited in order of an
estimate that sends missing weights over a link. Exact pricing needs a weight plan, so it is done only for pairs that
could still be the best. The result equals that of the full grid."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hybridflow.errors import PlacementError
from hybridflow.placement import Colocated
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.constraints import Pin
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.search.deadline import NEVER, Deadline
from hybridflow.planner.search.stages import ACTIVE, STAGES, STATIC, Choice, Floats, Front, Layouts, group_layout
from hybridflow.topology import divisors

_ENOUGH = 1e18  # bytes of KV cache for any rows


@dataclass(frozen=True)
class Symmetric:
    """`plan` has `pp` stages of `tp` ranks, and `used` of `capacity` bytes on its fullest device; the rest holds the
    keys and values of all rows in `waves`."""

    pp: int
    tp: int
    plan: ExecutionPlan
    used: float
    capacity: float
    waves: int

    def fits(self, margin: float = 0.0) -> bool:
        return self.used * (1 + margin) <= self.capacity

    def priced(self, costs: Costs) -> Colocated:
        seconds = costs.timeline(self.plan).per_iteration if self.fits() else 0.0
        return Colocated(self.tp, seconds, self.used, self.capacity, pp=self.pp)


def symmetric_plans(costs: Costs) -> list[Symmetric]:
    """One for each tp inside a node and number of stages, the fewest devices of a model first."""
    found = list[Symmetric]()
    for tp in divisors(costs.cluster.node.count):
        for pp in divisors(costs.cluster.size // tp):
            if (plan := _plan(costs, pp, tp)) is None or any(plan == other.plan for other in found):
                continue
            homes = {call.name: plan[costs.homes[call.group]] for call in costs.calls}
            active = max(costs.added(call.name, plan[call.name], homes[call.name]).active for call in costs.calls)
            kept, waves = costs.kept(plan), 1
            for call in (call for call in costs.calls if call.kind == "generation"):
                room = costs.kv_budget(call.name, plan[call.name], max(kept))
                wanted = costs.added(call.name, plan[call.name], kv_budget=_ENOUGH).kv_cache
                waves = max(waves, math.ceil(wanted / max(room, 1.0)))
            found.append(Symmetric(pp, tp, plan, max(kept) + active, costs.capacity, waves))
    return found


def _plan(costs: Costs, pp: int, tp: int) -> ExecutionPlan | None:
    """Each group has the largest divisors of `tp` and `pp` that its model and its strategy allow. None where a group
    has no such layout."""
    mesh, plan = Mesh.of(0, costs.cluster.size), dict[str, CallPlan]()

    def largest(given: list[Parallel]) -> Parallel | None:
        alike = (sizes for sizes in given if pp % sizes.p == 0 and tp % sizes.t == 0)
        return max(alike, key=lambda sizes: (sizes.t, sizes.p), default=None)

    for group in costs.graph.groups:
        if (home := largest(costs.strategies(group, mesh))) is None:
            return None
        for call in costs.graph.of_group(group):
            here = largest(costs.generation_sizes(group, mesh, home)) if call.kind == "generation" else home
            plan[call.name] = CallPlan(mesh, here or home)
    return plan


def heuristic(costs: Costs, plans: list[Symmetric]) -> Symmetric | None:
    """tp inside a node, stages across nodes, data parallel ranks the rest: as few devices of a model as fit, also where
    the prediction is too low by its error, with room for the keys and values of all rows, or in the fewest waves. None
    where none does."""
    widest = max((one.tp for one in plans), default=0)
    alike = (one for one in plans if (one.pp == 1 or one.tp == widest) and one.fits(costs.margin))
    return min(alike, key=lambda one: (one.waves, one.tp, one.pp), default=None)


def heuristic_map(costs: Costs) -> ExecutionPlan | None:
    """The heuristic plan, if it keeps the constraints."""
    rules, found = costs.rules, heuristic(costs, symmetric_plans(costs))
    if found is None or not rules.allows_sets([costs.graph.groups]):
        return None
    here = ((call, found.plan[call.name]) for call in costs.calls)
    allowed = all(rules.allows(c.group, at.mesh, at.parallel, c.kind == "generation") for c, at in here)
    return found.plan if allowed else None


def compared_with(costs: Costs) -> tuple[Colocated, Colocated, Colocated]:
    """The plain placement with the smallest tp that fits, the heuristic and the fastest symmetric one; where none fits,
    the one that lacks least. Of the constraints only `Apart` counts: two generating groups cannot share hosts."""
    against = f"against {costs.rules.apart[0]}" if costs.rules.apart else "a group has no layout on all of them"
    plans = [] if costs.rules.apart else symmetric_plans(costs)
    least = partial(min, key=lambda one: one.used / one.capacity)
    flat, fitting = ([one for one in plans if one.pp == 1], [one for one in plans if one.fits()])
    priced = {id(one): one.priced(costs) for one in fitting}

    def value(given: list[Symmetric], chosen: Symmetric | None) -> Colocated:
        if not given:
            return Colocated(against=against)
        return priced[id(chosen)] if chosen else least(given).priced(costs)

    fastest = min(priced.values(), key=lambda one: one.seconds, default=None)
    plain = value(flat, next((one for one in flat if one.fits()), None))
    return plain, value(plans, heuristic(costs, plans)), fastest or value(plans, None)


ALONE = Front(np.zeros((1, STAGES + 2)), [Choice()])
"""No peers: no choices, time or memory."""


@dataclass(frozen=True)
class LayoutPair:
    """Layouts of a group, and the seconds of an iteration in which it and its `peers` take turns, with transitions."""

    train: Parallel
    generate: Parallel
    seconds: float
    peers: tuple[Layouts, ...]


def similarity(train: Parallel, generate: Parallel) -> float:
    """Mean share of a device's generation shard that it holds from training; 1: nothing moves.

    Layers and tensors count as divisible anywhere. Generation groups are those of `RankGrid.generation`."""
    grid = train.grid
    rule = "hybridflow" if train.p % generate.p == 0 and train.t % generate.t == 0 else "general"
    here, there = grid.coordinates, grid.generation(generate.p, generate.t, rule).coordinates
    sizes = {"p": (train.p, generate.p), "t": (train.t, generate.t)}
    layers, tensors = (_common(here[axis], own, there[axis], other) for axis, (own, other) in sizes.items())
    return sum((layers * tensors).tolist()) / grid.size


def similarity_map(costs: Costs, deadline: Deadline = NEVER) -> ExecutionPlan | None:
    """All groups on all devices: the generating group in its best pair of layouts, others in the fastest layouts beside
    it. None when constraints or memory forbid it.

    With `Workload.time_sharing` two updates in one layout may be worth slower calls and transitions: every layout that
    both could have is tried, too, and the fastest iteration taken. After the `deadline`, the best of what is known.
    None also unless exactly one group generates, and trains as well."""
    found = [_map(costs, deadline)]
    mesh = Mesh.of(0, costs.cluster.size)
    for names in costs.updates:
        groups = [costs.graph.call(name).group for name in names]
        first, second = (costs.strategies(group, mesh) for group in groups)
        for sizes in [sizes for sizes in first if sizes.p > 1 and sizes in second]:
            if found[0] is not None and deadline.over:
                break
            pins = [Pin(group, parallel=sizes) for group in groups]
            with suppress(PlacementError):  # constraints forbid it
                found.append(_map(costs.keeping(*costs.constraints, *pins), deadline))
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda each: costs.timeline(each).per_iteration, default=None)


def _map(costs: Costs, deadline: Deadline) -> ExecutionPlan | None:
    graph, mesh = costs.graph, Mesh.of(0, costs.cluster.size)
    both = [group for group in graph.groups if group in graph.generating and group in graph.trained]
    if len(both) != 1 or len(graph.generating) != 1:
        return None
    rules, (actor,) = costs.rules, both
    if not rules.allows_sets([graph.groups]) or not all(rules.allows_mesh(group, mesh) for group in graph.groups):
        return None
    peers, others = ALONE, [group for group in graph.groups if group != actor]
    for group in others:
        peers = peers.with_peers(Front.of(costs, group, mesh, costs.capacity), costs.capacity)
    found = best_pair(costs, actor, mesh, peers=peers, deadline=deadline)
    if found is None:
        return None
    layouts = {actor: Layouts(found.train, found.generate), **dict(zip(others, found.peers, strict=True))}
    return {call.name: CallPlan(mesh, layouts[call.group].of(call)) for call in costs.calls}


def best_pair(
    costs: Costs, group: str, mesh: Mesh, *, peers: Front = ALONE, deadline: Deadline = NEVER
) -> LayoutPair | None:
    """The pair of layouts with which all calls of `group` and of its `peers` on `mesh` take least time; None where no
    pair fits into memory. After the `deadline` no switch is priced any more."""
    generation = [call for call in costs.graph.of_group(group) if call.kind == "generation"]
    of_peers = peers.values[:, :STAGES].sum(axis=1)
    pairs = []
    for train in costs.strategies(group, mesh):
        for generate in costs.strategies(group, mesh, generates=True):
            home, here = CallPlan(mesh, train), CallPlan(mesh, generate)
            apart = group in costs.rules.one_layout and not here.within(home)
            own = None if apart else group_layout(costs, group, mesh, Layouts(train, generate))
            if own is None:
                continue
            used = own[STATIC] + peers.values[:, STATIC] + np.maximum(own[ACTIVE], peers.values[:, ACTIVE])
            if not len(rows := np.flatnonzero(used <= costs.capacity)):
                continue
            options = [option for call in generation if (option := costs.option(call, mesh, generate)) is not None]
            alike = 1.0 if train == generate else similarity(train, generate)
            least = sum(own[:STAGES]) + sum(option.seconds for option in options) + of_peers[rows].min()
            pairs.append(
                (
                    least + (1 - alike) * options[0].copy / costs.cluster.node.bandwidth,
                    alike,
                    least,
                    home,
                    here,
                    own,
                    rows,
                )
            )
    best: LayoutPair | None = None
    limit = np.inf
    for _, _, least, home, here, own, rows in sorted(pairs, key=lambda one: one[:2]):
        if best is not None and deadline.over:
            break
        if least >= limit:
            continue
        # peers with less static memory leave generation more KV cache
        static = (own[STATIC] + peers.values[rows, STATIC]).tolist()
        generated = [
            sum(costs.generation(call, here, bytes_kept).seconds for call in generation) for bytes_kept in static
        ]
        seconds = sum(own[:STAGES]) + np.array(generated) + of_peers[rows]
        if seconds.min() >= limit:
            continue
        row, seconds = int(seconds.argmin()), seconds.min() + len(generation) * costs.moved(group, home, here)
        if seconds < limit:
            limit = float(seconds)
            best = LayoutPair(home.parallel, here.parallel, limit, peers.choices[rows[row]].layouts)
    return best


def _common(index: NDArray[np.int64], parts: int, other_index: NDArray[np.int64], other_parts: int) -> Floats:
    """By rank, the share of the other part [i/n, (i+1)/n) inside its own."""
    low = np.maximum(index / parts, other_index / other_parts)
    high = np.minimum((index + 1) / parts, (other_index + 1) / other_parts)
    return np.maximum(0.0, high - low) * other_parts
