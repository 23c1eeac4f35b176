"""Timelines: when each call of several iterations runs (ReaL, algorithm 1). Pure.

A call waits for what it reads and for the devices of its mesh; meshes that overlap exclude each other. Weights that a
call needs in another layout than the one they are stepped in are moved before it, which takes both meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.planner.cost.contention import ContendedRun, Contention
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh

Order = Literal["ready", "program"]
Reallocation = Callable[[str, CallPlan, CallPlan], float]


@dataclass(frozen=True)
class Span:
    """`call` ran on `mesh` (None: the helper, which has no device) from `start` to `stop` [s].

    `moves` is the group whose weights came into this call's layout, and `call` the one that they came for.
    """

    call: str
    iteration: int
    mesh: Mesh | None
    start: float
    stop: float
    moves: str | None = None

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """`seconds` until everything is done, and `per_iteration` once iterations follow each other evenly."""

    spans: tuple[Span, ...]
    seconds: float
    per_iteration: float

    def of(self, iteration: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.iteration == iteration)


class Node(NamedTuple):
    """What is scheduled in every iteration: call number `call`, or a move of weights from call `moved_from` to it.

    `before` are (node, distance) that it waits for.
    """

    call: int
    moved_from: int | None
    before: tuple[tuple[int, int], ...]


class WeightMove(NamedTuple):
    """Call `target` uses weights of `group` that call `source` stepped or, frozen, had first."""

    group: str
    source: str
    target: str
    distance: int


def home(graph: Graph, group: str) -> str:
    """The call in whose layout a group's weights stay: the last that trains them, else the first that does not
    generate, else the first."""
    calls = graph.of_group(group)
    trains = [call for call in calls if call.kind == "training"]
    others = [call for call in calls if call.kind != "generation"]
    return (trains[-1:] or others or calls)[0].name


def moves(graph: Graph) -> tuple[WeightMove, ...]:
    """Every use of weights that may lie in another layout where they were before, in program order.

    They come from the call that stepped them, those of a frozen group from where they stay.
    """
    found, at = [], {call.name: i for i, call in enumerate(graph.calls)}
    for call in graph.calls:
        steps = [edge for edge in graph.into(call.name) if edge.kind == "parameters"]
        if steps:
            last = max(steps, key=lambda edge: (-edge.distance, at[edge.source]))
            found.append(WeightMove(call.group, last.source, call.name, last.distance))
        elif graph.models.get(call.group) is not None:
            source = home(graph, call.group)
            found.append(WeightMove(call.group, source, call.name, int(at[source] > at[call.name])))
    return tuple(move for move in found if move.source != move.target)


class GraphSchedule:
    """The nodes of a graph, so that one plan after the other can be timed without looking at the graph again.

    `in_flight` iterations may run at a time (None: as many as the graph allows): the driver's loader holds the next
    one back until then. With `order="ready"` a device takes the call that was ready first, as ReaL's runtime does, and
    of those that became ready together one that can start at once; with "program" it takes calls in the order in which
    the driver made them, as hosts here do. With `sharing`, calls that run at once slow each other down.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        iterations: int = 3,
        in_flight: int | None = 2,
        order: Order = "ready",
        sharing: Contention | None = None,
    ) -> None:
        if type(iterations) is not int or iterations < 1:
            raise ConfigError(f"iterations={iterations!r}: give a whole number of at least 1.")
        if in_flight is not None and (type(in_flight) is not int or in_flight < 1):
            raise ConfigError(f"in_flight={in_flight!r}: give a whole number of at least 1, or None.")
        self.graph, self.iterations, self.in_flight, self.order = graph, iterations, in_flight, order
        self.sharing = sharing
        self.moves = moves(graph)
        self.nodes = _nodes(graph, self.moves)
        self.roots = [i for i, node in enumerate(self.nodes) if all(distance for _, distance in node.before)]
        self._waiting, self._after = self._unrolled()
        self._within = [[j for j, distance in node.before if not distance] for node in self.nodes]
        self._closing: dict[int, list[int]] = {}  # from a node to those of the iteration before that it waits for
        for i, node in enumerate(self.nodes):
            if lasts := [j for j, distance in node.before if distance == 1]:
                self._closing[i] = lasts

    def _unrolled(self) -> tuple[list[int], list[list[int]]]:
        """For every node of every iteration: how many it waits for, and which wait for it."""
        count, total = len(self.nodes), len(self.nodes) * self.iterations
        waiting, after = [0] * total, [[] for _ in range(total)]
        for iteration in range(self.iterations):
            for i, node in enumerate(self.nodes):
                before = [(iteration - distance) * count + j for j, distance in node.before if iteration >= distance]
                if self.in_flight is not None and i in self.roots and iteration >= self.in_flight:
                    before += range((iteration - self.in_flight) * count, (iteration - self.in_flight + 1) * count)
                waiting[iteration * count + i] = len(set(before))
                for j in set(before):
                    after[j].append(iteration * count + i)
        return waiting, after

    def run(
        self, seconds: Sequence[float], masks: Sequence[int], shares: Sequence[float] | None = None
    ) -> tuple[list[float], list[float]]:
        """Start and stop of each node of each iteration, from `seconds` and device `masks` of the nodes.

        A node of mask 0 needs no device. `shares` are those of the seconds in which its devices work (default: 1).
        """
        if self.sharing is not None:
            shares = shares or [1.0] * len(masks)
            in_program = self.order == "program"
            return ContendedRun(self.sharing, self._waiting, self._after, seconds, masks, shares, in_program).run()
        count, total = len(self.nodes), len(self._waiting)
        waiting, ready_at = self._waiting.copy(), [0.0] * total
        starts, stops = [0.0] * total, [0.0] * total
        queue = [i for i in range(total) if not waiting[i]]
        taken: list[tuple[int, float]] = []  # latest first: devices, and until when they are busy
        in_program = self.order == "program"
        following = 0
        while queue:
            if in_program:
                at, following = following, following + 1
            else:
                at = queue[0] if len(queue) == 1 else self._next(queue, ready_at, masks, taken)
                queue.remove(at)
            start, mask = ready_at[at], masks[at % count]
            if mask:
                start = max(start, _free_from(mask, taken))
            stop = start + seconds[at % count]
            starts[at], stops[at] = start, stop
            if mask:
                taken.insert(0, (mask, stop))
            for other in self._after[at]:
                waiting[other] -= 1
                if stop > ready_at[other]:
                    ready_at[other] = stop
                if not waiting[other] and not in_program:
                    queue.append(other)
            if in_program and following == total:
                break
        return starts, stops

    def _next(self, queue: list[int], ready_at: list[float], masks: Sequence[int], taken: list) -> int:
        """What was ready first; of those ready at once, what can start first, then what comes first in the program."""
        first = min([ready_at[i] for i in queue])
        together = [i for i in queue if ready_at[i] <= first]
        if len(together) == 1:
            return together[0]
        count = len(masks)
        return min(together, key=lambda i: (max(first, _free_from(masks[i % count], taken)), i))

    def per_iteration(self, stops: Sequence[float], seconds: Sequence[float], masks: Sequence[int]) -> float:
        """Seconds from the end of one iteration to that of the next when the last ones follow each other.

        No less than `least`: the last iterations may put off work, or profit from a slow first one, but not for ever.
        """
        return max(self.gap(stops), self.least(seconds, masks)) if self.iterations > 1 else max(stops)

    def gap(self, stops: Sequence[float]) -> float:
        """Mean seconds between the ends of the later iterations."""
        count, last = len(self.nodes), self.iterations - 1
        if not last:
            return max(stops)
        earlier = last // 2
        # everything up to there: a slow call of an earlier iteration may outlast a later one's
        ends = [max(stops[: (i + 1) * count]) for i in (earlier, last)]
        return (ends[1] - ends[0]) / (last - earlier)

    def least(self, seconds: Sequence[float], masks: Sequence[int]) -> float:
        """What no order of calls can beat: the work of the busiest device, and the longest chain of nodes that leads
        from a node to itself in the next iteration."""
        return max(busiest(seconds, masks), self._longest_cycle(seconds))

    def _longest_cycle(self, seconds: Sequence[float]) -> float:
        longest = 0.0
        for first, lasts in self._closing.items():
            reached = [-math.inf] * len(self.nodes)
            reached[first] = seconds[first]
            for i in range(first + 1, len(self.nodes)):
                before = max([reached[j] for j in self._within[i]], default=-math.inf)
                reached[i] = before + seconds[i]
            longest = max(longest, *(reached[last] for last in lasts))
        return longest


def simulate(
    graph: Graph,
    plan: ExecutionPlan,
    seconds: Callable[[str, CallPlan], float] | Mapping[str, float],
    *,
    iterations: int = 3,
    reallocation: Reallocation | None = None,
    in_flight: int | None = 2,
    order: Order = "ready",
    sharing: Contention | None = None,
    busy: Mapping[str, float] | None = None,
) -> Timeline:
    """The timeline of `plan`. `seconds` of a call are given by name, or asked for as seconds(call, its plan).

    `reallocation(group, source, target)` are the seconds that weights take from one call's layout to another's (None:
    they are there at once). Calls that the plan leaves out need no device, and take no time unless `seconds` names
    them. With `sharing`, `busy` are the shares of their seconds in which devices of calls work (default: 1).
    Errors: ConfigError when a call of a placed group has no plan or no seconds.
    """
    schedule = GraphSchedule(graph, iterations=iterations, in_flight=in_flight, order=order, sharing=sharing)
    for call in graph.calls:
        if call.name not in plan and call.group in graph.groups and call.kind != "function":
            raise ConfigError(f"the plan says nothing of {call.name}. It names {', '.join(plan)}.")
    durations, masks, shares, meshes = [], [], [], []
    for node in schedule.nodes:
        call = graph.calls[node.call]
        here = plan.get(call.name)
        mesh = here.mesh if here else None
        if node.moved_from is None:
            durations.append(_seconds(seconds, call.name, here))
            mask = mesh.bits if mesh else 0
        else:
            source = plan[graph.calls[node.moved_from].name]
            took, mask = 0.0, 0
            if reallocation is not None and here is not None and source != here:
                took = reallocation(call.group, source, here)
                mask = source.mesh.bits | here.mesh.bits if took else 0  # no move, no wait
            durations.append(took)
        masks.append(mask)
        shares.append(1.0 if busy is None or node.moved_from is not None else busy.get(call.name, 1.0))
        meshes.append(mesh)
    starts, stops = schedule.run(durations, masks, shares)
    return Timeline(
        _spans(schedule, meshes, starts, stops), max(stops), schedule.per_iteration(stops, durations, masks)
    )


def busiest(seconds: Sequence[float], masks: Sequence[int]) -> float:
    """Seconds that the busiest device works, from those of each node and the devices that it takes."""
    loads: dict[int, float] = {}  # disjoint sets of devices
    for mask, took in zip(masks, seconds, strict=True):
        if not mask or not took:
            continue
        for other in list(loads):
            if common := other & mask:
                load = loads.pop(other)
                loads[common] = load + took
                if rest := other & ~mask:
                    loads[rest] = load
                mask &= ~common
                if not mask:
                    break
        if mask:
            loads[mask] = took
    return max(loads.values(), default=0.0)


def _seconds(seconds: Callable[[str, CallPlan], float] | Mapping[str, float], call: str, plan: CallPlan | None):
    if isinstance(seconds, Mapping):
        if call not in seconds and plan is not None:
            raise ConfigError(f"seconds has no entry for {call!r}. It has {', '.join(seconds)}.")
        return seconds.get(call, 0.0)
    return seconds(call, plan) if plan is not None else 0.0


def _spans(
    schedule: GraphSchedule, meshes: Sequence[Mesh | None], starts: Sequence[float], stops: Sequence[float]
) -> tuple[Span, ...]:
    count, found = len(schedule.nodes), []
    for at, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        node = schedule.nodes[at % count]
        call = schedule.graph.calls[node.call]
        if node.moved_from is not None and stop == start:
            continue
        moved = None if node.moved_from is None else call.group
        found.append(Span(call.name, at // count, meshes[at % count], start, stop, moved))
    return tuple(sorted(found, key=lambda span: (span.start, span.stop)))


def _free_from(mask: int, taken: list[tuple[int, float]]) -> float:
    """When the last of these devices is free: each was last taken by the first entry that has it."""
    free = 0.0
    for other, stop in taken:
        if other & mask:
            if stop > free:
                free = stop
            mask &= ~other
            if not mask:
                break
    return free


def _nodes(graph: Graph, moved: Sequence[WeightMove]) -> list[Node]:
    """Calls in program order, each after the move of the weights that it needs."""
    number = {call.name: i for i, call in enumerate(graph.calls)}
    for_call = {move.target: move for move in moved}
    places: dict[str, int] = {}
    moving: dict[str, int] = {}
    for call in graph.calls:
        if call.name in for_call:
            moving[call.name] = len(places) + len(moving)
        places[call.name] = len(places) + len(moving)
    nodes: list[Node] = []
    for call in graph.calls:
        before = {(places[edge.source], edge.distance) for edge in graph.into(call.name)}
        if move := for_call.get(call.name):
            source = (places[move.source], move.distance)
            nodes.append(Node(number[call.name], number[move.source], (source,)))
            before = (before - {source}) | {(moving[call.name], 0)} | ({source} & _data(graph, call.name, places))
        nodes.append(Node(number[call.name], None, tuple(sorted(before))))
    return nodes


def _data(graph: Graph, call: str, places: Mapping[str, int]) -> set[tuple[int, int]]:
    return {(places[edge.source], edge.distance) for edge in graph.into(call) if edge.kind == "data"}
