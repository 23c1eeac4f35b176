"""Timelines: start and stop of each call over several iterations (ReaL, algorithm 1).

Pure. A call waits for its inputs and for the devices of its mesh; overlapping meshes exclude each other. Weights
trained in another layout are moved before the call, which occupies both meshes. Devices of a node may slow each other
down, like logical devices on the cores of one host: a call takes `slow(n)` times as long when n devices of its node
compute as when one does; a device that waits half of the time counts as half. A call's seconds include its own devices;
the load of other calls changes, so its remaining work is updated at every start or end of a call (processor sharing).
A call of a stream waits for weights of `ahead` further iterations ago; the sync of new ones interrupts it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.planner.describe.cluster_spec import ClusterSpec, NodeSpec
from hybridflow.planner.describe.graph import Graph, WeightMove, moves
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, busiest
from hybridflow.settings import require

Order = Literal["ready", "program"]
Latency = Mapping[int, float]
Reallocation = Callable[[str, CallPlan, CallPlan], float]
_DONE = 1e-9  # share of a call's seconds that counts as finished (rounding)


@dataclass(frozen=True)
class Span:
    """`call` ran on `mesh` (None: the helper, which has no device) from `start` to `stop` [s].

    `moves`: the span is a transfer of this group's weights into the layout of `call`.
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
    """A unit of the schedule in every iteration: call number `call`, or a move of weights from call `moved_from` to it.

    It waits for `before`, pairs (node, distance).
    """

    call: int
    moved_from: int | None
    before: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Contention:
    """Nodes with their devices, one bit for each."""

    nodes: tuple[tuple[int, NodeSpec], ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Contention | None:
        """None where no device slows another down."""
        if not any(node.slowdown for node in cluster.nodes):
            return None
        devices = [Mesh(tuple(cluster.devices_of(i))).bits for i in range(len(cluster.nodes))]
        return cls(tuple(zip(devices, cluster.nodes, strict=True)))

    def load(self, mask: int, busy: float) -> tuple[float, ...]:
        """For each node, the mean number of computing devices in `mask` if each computes for the share `busy`."""
        return tuple((mask & devices).bit_count() * busy for devices, _ in self.nodes)

    def factor(self, own: Sequence[float], total: Sequence[float]) -> float:
        """How much longer a call with the load `own` takes while `total` works, its own part included."""
        most = 1.0
        for (_, node), mine, all_of_it in zip(self.nodes, own, total, strict=True):
            if mine:
                most = max(most, node.slow(all_of_it) / node.slow(mine))
        return most


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
        for name, count in (("iterations", iterations), ("in_flight", 1 if in_flight is None else in_flight)):
            require(type(count) is int and count >= 1, f"{name}={count!r}: give a whole number of at least 1.")
        ahead = max((call.ahead for call in graph.calls), default=0)
        in_flight = in_flight and max(in_flight, 1 + ahead)
        self.graph, self.iterations, self.in_flight, self.order = graph, iterations, in_flight, order
        self.sharing = sharing
        self.moves = moves(graph)
        self.nodes = _nodes(graph, self.moves)
        self.roots = [i for i, node in enumerate(self.nodes) if all(distance for _, distance in node.before)]
        self.waiting, self.after = self._unrolled()
        self._within = [[j for j, distance in node.before if not distance] for node in self.nodes]
        # from a node to those of earlier iterations that it waits for, and of how many before
        closing = [(i, [(j, back) for j, back in node.before if back]) for i, node in enumerate(self.nodes)]
        self._closing = {i: lasts for i, lasts in closing if lasts}
        moved = ((i, graph.calls[node.call]) for i, node in enumerate(self.nodes) if node.moved_from is not None)
        self._interrupting = [i for i, call in moved if call.continuous]

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
        if self._interrupting:  # the trainer's side of a sync counts in `least` only: rollouts do not wait for it
            masks = [mask & masks[i + 1] if i in self._interrupting else mask for i, mask in enumerate(masks)]
        if self.sharing is not None:
            return ContendedRun(self, seconds, masks, shares).run()
        count, total = len(self.nodes), len(self.waiting)
        waiting, ready_at = self.waiting.copy(), [0.0] * total
        starts, stops = [0.0] * total, [0.0] * total
        taken: list[tuple[int, float]] = []  # latest first: devices, and until when they are busy
        in_program = self.order == "program"
        queue = [i for i in range(total) if in_program or not waiting[i]]
        while queue:
            at = queue[0] if in_program or len(queue) == 1 else self._next(queue, ready_at, masks, taken)
            queue.remove(at)
            start, mask = ready_at[at], masks[at % count]
            if mask:
                start = max(start, _free_from(mask, taken))
            stop = start + seconds[at % count]
            starts[at], stops[at] = start, stop
            if mask:
                taken.insert(0, (mask, stop))
            for other in self.after[at]:
                waiting[other] -= 1
                if stop > ready_at[other]:
                    ready_at[other] = stop
                if not waiting[other] and not in_program:
                    queue.append(other)
        return starts, stops

    def _next(self, queue: list[int], ready_at: list[float], masks: Sequence[int], taken: list) -> int:
        """The node that was ready first; ties go to the earliest start, then to program order."""
        first = min([ready_at[i] for i in queue])
        together = [i for i in queue if ready_at[i] <= first]
        if len(together) == 1:
            return together[0]
        count = len(masks)
        return min(together, key=lambda i: (max(first, _free_from(masks[i % count], taken)), i))

    def per_iteration(
        self,
        stops: Sequence[float],
        seconds: Sequence[float],
        masks: Sequence[int],
        latency: Latency = MappingProxyType({}),
    ) -> float:
        """Seconds from the end of one iteration to that of the next when the last ones follow each other.

        No less than `least`: the last iterations may put off work, or profit from a slow first one, but not for ever.
        """
        return max(self.gap(stops), self.least(seconds, masks, latency))

    def gap(self, stops: Sequence[float]) -> float:
        """Mean seconds between the ends of the later iterations."""
        count, last = len(self.nodes), self.iterations - 1
        if not last:
            return max(stops)
        earlier = last // 2
        # everything up to there: a slow call of an earlier iteration may outlast a later one's
        ends = [max(stops[: (i + 1) * count]) for i in (earlier, last)]
        return (ends[1] - ends[0]) / (last - earlier)

    def least(self, seconds: Sequence[float], masks: Sequence[int], latency: Latency = MappingProxyType({})) -> float:
        """A lower bound for every order of calls: the work of the busiest device, and the longest chain from a node to
        itself in a later iteration, by iteration. `latency`: seconds of nodes whose rows take longer than they do."""
        return max(
            busiest(seconds, masks), self._longest_cycle([max(s, latency.get(i, s)) for i, s in enumerate(seconds)])
        )

    def _longest_cycle(self, seconds: Sequence[float]) -> float:
        longest = 0.0
        for first, lasts in self._closing.items():
            reached = [-math.inf] * len(self.nodes)
            reached[first] = seconds[first]
            for i in range(first + 1, len(self.nodes)):
                before = max([reached[j] for j in self._within[i]], default=-math.inf)
                reached[i] = before + seconds[i]
            longest = max(longest, *(reached[last] / back for last, back in lasts))
        return longest


class ContendedRun:
    """One run of a schedule with contention; arguments as for `GraphSchedule.run`."""

    def __init__(
        self, schedule: GraphSchedule, seconds: Sequence[float], masks: Sequence[int], shares: Sequence[float] | None
    ) -> None:
        assert schedule.sharing is not None
        self.sharing, self.after, self.in_program = schedule.sharing, schedule.after, schedule.order == "program"
        self.waiting, total = schedule.waiting.copy(), len(schedule.waiting)
        self.seconds, self.masks = [*seconds] * schedule.iterations, [*masks] * schedule.iterations
        shares = [*(shares or [1.0] * len(masks))] * schedule.iterations
        self.loads = [self.sharing.load(mask, share) for mask, share in zip(self.masks, shares, strict=True)]
        self.starts, self.stops = [0.0] * total, [0.0] * total
        # nodes not begun, in the order in which they may claim devices
        self.queue = [(0.0, i) for i in range(total) if self.in_program or not self.waiting[i]]
        self.left: dict[int, float] = {}  # seconds that each running call still needs, alone
        self.busy, self.now = 0, 0.0

    def run(self) -> tuple[list[float], list[float]]:
        """Start and stop of each node."""
        self._begin()
        while self.left:
            loads = {i: self.loads[i] for i in self.left}
            total = [sum(own) for own in zip(*loads.values(), strict=True)]
            factors = {i: self.sharing.factor(own, total) for i, own in loads.items()}
            passed = min(self.left[i] * factors[i] for i in self.left)
            self.now += passed
            for i, factor in factors.items():
                self.left[i] -= passed / factor
            for i in [i for i, left in self.left.items() if left <= _DONE * self.seconds[i]]:
                del self.left[i]
                self.busy &= ~self.masks[i]
                self._end(i)
            self._begin()
        return self.starts, self.stops

    def _begin(self) -> None:
        """Start every call that waits for nothing and whose devices no earlier call claims.

        Of those that became ready together, none claims a device before all that can start have started.
        """
        begun = True
        while begun:  # nodes without duration let others begin at once
            begun, claimed = False, self.busy
            for _, together in groupby(list(self.queue), key=lambda entry: entry if self.in_program else entry[0]):
                left = 0
                for entry in together:
                    i = entry[1]
                    if self.waiting[i] or self.masks[i] & claimed:
                        left |= self.masks[i]
                        continue
                    self.queue.remove(entry)
                    self.starts[i], begun = self.now, True
                    if self.seconds[i] > 0:
                        self.left[i] = self.seconds[i]
                        self.busy |= self.masks[i]
                        claimed |= self.masks[i]
                    else:
                        self._end(i)
                claimed |= left

    def _end(self, i: int) -> None:
        self.stops[i] = self.now
        for other in self.after[i]:
            self.waiting[other] -= 1
            if not self.waiting[other] and not self.in_program:
                insort(self.queue, (self.now, other))


def simulate(
    graph: Graph,
    plan: ExecutionPlan,
    seconds: Mapping[str, float],
    *,
    reallocation: Reallocation | None = None,
    busy: Mapping[str, float] | None = None,
    latency: Mapping[str, float] = MappingProxyType({}),
    **how,
) -> Timeline:
    """The timeline of `plan`, with the `seconds` of each call. Keywords as for `GraphSchedule`.

    `reallocation(group, source, target)` are the seconds that weights take from one call's layout to another's (None:
    they are there at once). Calls that the plan leaves out need no device, and take no time unless `seconds` names
    them. With `sharing`, `busy` are the shares of their seconds in which devices of calls work (default: 1).
    `latency` as for `GraphSchedule.least`. Errors: ConfigError when a call of a placed group has no plan or no seconds.
    """
    schedule = GraphSchedule(graph, **how)
    for call in graph.calls:
        if call.name not in plan and call.group in graph.groups and call.kind != "function":
            raise ConfigError(f"the plan says nothing of {call.name}. It names {', '.join(plan)}.")
        if call.name in plan and call.name not in seconds:
            raise ConfigError(f"seconds has no entry for {call.name!r}. It has {', '.join(seconds)}.")
    durations, masks, shares, longest = [], [], [], dict[int, float]()
    for node in schedule.nodes:
        call = graph.calls[node.call]
        here, took, mask, share = plan.get(call.name), 0.0, 0, 1.0
        if node.moved_from is None:
            took, mask = seconds.get(call.name, 0.0), here.mesh.bits if here else 0
            share = 1.0 if busy is None else busy.get(call.name, 1.0)
            longest[len(masks)] = latency.get(call.name, 0.0)
        elif here is not None and reallocation is not None:
            source = plan[graph.calls[node.moved_from].name]
            took = reallocation(call.group, source, here) if source != here else 0.0
            mask = source.mesh.bits | here.mesh.bits if took else 0  # no move, no wait
        durations.append(took)
        masks.append(mask)
        shares.append(share)
    starts, stops = schedule.run(durations, masks, shares)
    found = []
    for at, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        iteration, number = divmod(at, len(schedule.nodes))
        node = schedule.nodes[number]
        call, moves_weights = graph.calls[node.call], node.moved_from is not None
        if stop > start or not moves_weights:
            mesh = plan[call.name].mesh if call.name in plan else None
            found.append(Span(call.name, iteration, mesh, start, stop, call.group if moves_weights else None))
    spans = tuple(sorted(found, key=lambda span: (span.start, span.stop)))
    return Timeline(spans, max(stops), schedule.per_iteration(stops, durations, masks, longest))


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
    for_call = {move.target: move for move in moved}
    number, places, count = {call.name: i for i, call in enumerate(graph.calls)}, dict[str, int](), 0
    for call in graph.calls:
        count += call.name in for_call
        places[call.name] = count
        count += 1
    nodes: list[Node] = []
    for call in graph.calls:
        edges = graph.into(call.name)
        before = {(places[edge.source], edge.distance) for edge in edges}
        if move := for_call.get(call.name):
            first = {(places[edge.source], edge.distance) for edge in edges if edge.kind == "driver"}
            first.add((places[move.source], move.distance))
            nodes.append(Node(number[call.name], number[move.source], tuple(sorted(first))))
            before = before - first | {(places[call.name] - 1, 0)}
        nodes.append(Node(number[call.name], None, tuple(sorted(before))))
    return nodes
