"""Timelines: start and stop of each call over several iterations (ReaL, algorithm 1, in program order).

Pure. A call waits for its inputs and for the devices of its mesh; overlapping meshes exclude each other. Weights
trained in another layout are moved before the call, which occupies both meshes. Devices of a node may slow each other
down, like logical devices on the cores of one host: a call takes `slow(n)` times as long when n devices of its node
compute as when one does; a device that waits half of the time counts as half. A call's seconds include its own devices;
the load of other calls changes, so its remaining work is updated at every start or end of a call (processor sharing). A
call of a stream waits for weights of `ahead` further iterations ago; the sync of new ones interrupts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.planner.describe.cluster_spec import ClusterSpec, NodeSpec
from hybridflow.planner.describe.graph import Graph, moves
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, busiest
from hybridflow.settings import require

StartStop = tuple[list[float], list[float]]
Latency = Mapping[int, float]
Reallocation = Callable[[str, CallPlan, CallPlan], float]
IN_FLIGHT = 2  # iterations that the driver's loader lets run at a time; in a stream 1 + `ahead`, if that is more
_DONE = 1e-9  # share of a call's seconds that counts as finished (rounding)


@dataclass(frozen=True)
class Span:
    """When a call ran, or a transfer of weights into its layout."""

    call: str
    iteration: int
    mesh: Mesh | None
    """None: the controller worker, which has no device."""
    start: float
    stop: float
    moves: str | None = None
    """The group whose weights are transferred."""

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    seconds: float
    """Until everything is done."""
    per_iteration: float
    """Seconds once iterations follow each other evenly."""

    def of(self, iteration: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.iteration == iteration)


class Node(NamedTuple):
    """A unit of the schedule in every iteration: call number `call`, or a move of weights from call `moved_from` to it.

    It waits for `before`, pairs (node, distance)."""

    call: int
    moved_from: int | None
    before: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Contention:
    """Nodes that are all like `node`: the devices of each, one bit for each."""

    node: NodeSpec
    devices: tuple[int, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Contention | None:
        """None where no device slows another down."""
        if not cluster.node.slowdown:
            return None
        return cls(cluster.node, tuple(Mesh(tuple(cluster.devices_of(i))).bits for i in range(len(cluster.nodes))))

    def run(
        self, before: Sequence[set[int]], seconds: Sequence[float], masks: Sequence[int], shares: Sequence[float]
    ) -> StartStop:
        """Start and stop of nodes that wait for those `before` them: of the ones that run, the remaining work shrinks
        at their present speed until one ends. Nodes wait for earlier ones only, so one pass in program order starts all
        that can start."""
        # by node of the schedule and of the cluster: the mean number of devices that compute
        loads = [
            [(mask & own).bit_count() * busy for own in self.devices] for mask, busy in zip(masks, shares, strict=True)
        ]
        starts, stops, now = [0.0] * len(before), [0.0] * len(before), 0.0
        queue, done, left = [*range(len(before))], set[int](), dict[int, float]()  # seconds that each needs, alone
        while queue or left:
            claimed, waiting = sum(masks[i] for i in left), list[int]()  # calls that run have no device in common
            for i in queue:
                if masks[i] & claimed or not done.issuperset(before[i]):
                    waiting.append(i)
                elif seconds[i] > 0:
                    starts[i], left[i] = now, seconds[i]
                else:  # without duration: its devices stay free
                    starts[i] = stops[i] = now
                    done.add(i)
                    continue
                claimed |= masks[i]
            queue = waiting
            work = [sum(own) for own in zip(*(loads[i] for i in left), strict=True)]
            factors = {}  # how much longer each takes while all of them work
            for i in left:
                both, slow = zip(loads[i], work, strict=True), self.node.slow
                factors[i] = max([1.0, *(slow(every) / slow(own) for own, every in both if own)])
            passed = min((left[i] * factors[i] for i in left), default=0.0)
            now += passed
            for i, factor in factors.items():
                left[i] -= passed / factor
                if left[i] <= _DONE * seconds[i]:
                    del left[i]
                    stops[i] = now
                    done.add(i)
        return starts, stops


class GraphSchedule:
    """The nodes of a graph, so that one plan after the other can be timed without looking at the graph again.

    A device takes calls in the order in which the driver makes them, as hosts do. With `sharing`, calls that run at
    once slow each other down."""

    def __init__(self, graph: Graph, *, iterations: int = 3, sharing: Contention | None = None) -> None:
        good = type(iterations) is int and iterations >= 1
        require(good, f"iterations={iterations!r}: give a whole number of at least 1.")
        self.iterations, self.sharing, self.nodes = iterations, sharing, _nodes(graph)
        self._within = [[j for j, distance in node.before if not distance] for node in self.nodes]
        # from a node to those of earlier iterations that it waits for, and of how many before
        closing = {i: [(j, back) for j, back in node.before if back] for i, node in enumerate(self.nodes)}
        self._closing = {i: lasts for i, lasts in closing.items() if lasts}
        moved = ((i, graph.calls[node.call]) for i, node in enumerate(self.nodes) if node.moved_from is not None)
        self._interrupting = [i for i, call in moved if call.ahead]
        in_flight = max(IN_FLIGHT, 1 + max((call.ahead for call in graph.calls), default=0))
        count = len(self.nodes)
        self.before: list[set[int]] = []  # what each node of every iteration waits for
        for iteration in range(iterations):
            early = range((iteration - in_flight) * count, (iteration - in_flight + 1) * count)
            for i, node in enumerate(self.nodes):
                first = {(iteration - distance) * count + j for j, distance in node.before if iteration >= distance}
                self.before.append(first if self._within[i] or iteration < in_flight else first | {*early})

    def run(self, seconds: Sequence[float], masks: Sequence[int], shares: Sequence[float] | None = None) -> StartStop:
        """Start and stop of each node of each iteration, from `seconds` and device `masks` of the nodes.

        A node of mask 0 needs no device. `shares` are those of the seconds in which its devices work (default: 1)."""
        if self._interrupting:  # the trainer's side of a sync counts in `least` only: rollouts do not wait for it
            masks = [mask & masks[i + 1] if i in self._interrupting else mask for i, mask in enumerate(masks)]
        count, rounds = len(self.nodes), self.iterations
        if self.sharing is not None:
            shares = [*(shares or [1.0] * count)] * rounds
            return self.sharing.run(self.before, [*seconds] * rounds, [*masks] * rounds, shares)
        starts, stops = list[float](), list[float]()
        taken: list[tuple[int, float]] = []  # latest first: devices, and until when they are busy
        for at, before in enumerate(self.before):
            start = max([stops[j] for j in before], default=0.0)
            if mask := masks[at % count]:
                wanted = mask  # each device was last taken by the first entry that has it
                for other, stop in taken:
                    if other & wanted:
                        start = max(start, stop)
                        wanted &= ~other
                        if not wanted:
                            break
                taken.insert(0, (mask, start + seconds[at % count]))
            starts.append(start)
            stops.append(start + seconds[at % count])
        return starts, stops

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
        """A lower bound for every order of calls, as the last iterations may put off work, but not for ever: the work
        of the busiest device, and the longest chain from a node to itself in a later iteration, by iteration.
        `latency`: seconds of nodes whose rows take longer than they do."""
        longest, took = busiest(seconds, masks), [max(s, latency.get(i, s)) for i, s in enumerate(seconds)]
        for first, lasts in self._closing.items():
            reached = [-math.inf] * len(self.nodes)
            reached[first] = took[first]
            for i in range(first + 1, len(self.nodes)):
                reached[i] = max([reached[j] for j in self._within[i]], default=-math.inf) + took[i]
            longest = max(longest, *(reached[last] / back for last, back in lasts))
        return longest


def simulate(
    graph: Graph,
    plan: ExecutionPlan,
    seconds: Mapping[str, float],
    *,
    reallocation: Reallocation | None = None,
    busy: Mapping[str, float] | None = None,
    latency: Mapping[str, float] = MappingProxyType({}),
    iterations: int = 3,
    sharing: Contention | None = None,
) -> Timeline:
    """The timeline of `plan`, with the `seconds` of each call. Other keywords as for `GraphSchedule`.

    `reallocation(group, source, target)` are the seconds that weights take from one call's layout to another's (None:
    they are there at once). Calls that the plan leaves out need no device, and take no time unless `seconds` names
    them. With `sharing`, `busy` are the shares of their seconds in which devices of calls work (default: 1). `latency`
    as for `GraphSchedule.least`. Errors: ConfigError when a call of a placed group has no plan or no seconds."""
    schedule = GraphSchedule(graph, iterations=iterations, sharing=sharing)
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
    return Timeline(spans, max(stops), max(schedule.gap(stops), schedule.least(durations, masks, longest)))


def _nodes(graph: Graph) -> list[Node]:
    """Calls in program order, each after the move of the weights that it needs."""
    for_call = {move.target: move for move in moves(graph)}
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
