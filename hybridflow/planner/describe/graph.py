"""Graph: the calls of one iteration of a driver's loop, and what each waits for (ReaL, section 4).

A `GraphBuilder` records the calls of the loop body, iteration after iteration, and returns a `Graph`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from hybridflow.config import TrainStrategy
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.hf_spec import Decoder

Kind = Literal["generation", "inference", "training", "function"]
EdgeKind = Literal["data", "parameters", "driver"]
HELPER = "hybridflow"
"""The group of the controller worker: it has no device, and is no part of a placement."""


@dataclass(frozen=True)
class Call:
    """One call of a group's method in an iteration."""

    name: str
    """"group.method"; a second call of the same in an iteration is "group.method#2"."""
    group: str
    method: str
    kind: Kind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    rows: float = 1.0
    """Relative to the workload's: 1.0 is all responses of an iteration."""
    minibatches: int = 1
    epochs: int = 1
    ahead: int = 0
    """Updates (`max_staleness`) by which a stream's weights may be older than in a synchronous loop."""
    continuous: bool = False
    """It generates without a pause between batches, not one whole batch after the other."""


class Width(NamedTuple):
    """Bytes of a column in a row, for each token of the prompt and of the response, and beside these."""

    prompt: float = 0.0
    response: float = 0.0
    row: float = 0.0


@dataclass(frozen=True)
class Edge:
    """`target` waits for `source`: for columns that it wrote ("data"), for the weights that it stepped ("parameters"),
    or because the driver reads what it wrote before it issues `target` ("driver"); then so do moves of its weights."""

    source: str
    target: str
    kind: EdgeKind
    columns: tuple[str, ...] = ()
    distance: int = 0
    """0 within an iteration, 1 from the iteration before, and more for weights of a stream."""


@dataclass(frozen=True)
class Graph:
    calls: tuple[Call, ...]
    """In program order."""
    edges: tuple[Edge, ...]
    models: Mapping[str, Decoder | None]
    """By group; None where it runs functions."""
    trained: frozenset[str]
    """Groups whose weights a call of the loop steps."""
    strategies: Mapping[str, TrainStrategy] = field(default_factory=dict)
    """By group, what its model is trained and kept with: `Megatron` where none is given."""
    averaged: frozenset[str] = frozenset()
    """Groups that keep a moving average of their weights on their devices."""
    offload: Mapping[str, bool] = field(default_factory=dict)
    """Groups whose model can wait in host memory between their calls, and whether the driver says that it does."""
    widths: Mapping[str, Width] = field(default_factory=dict)
    """Of the columns whose size is known."""

    @cached_property
    def by_name(self) -> Mapping[str, Call]:
        return {call.name: call for call in self.calls}

    def call(self, name: str) -> Call:
        """Errors: ConfigError for a name that no call has, with the nearest."""
        if name not in self.by_name:
            raise ConfigError(f"no call of the loop is named {name!r}.{nearest(name, self.by_name)}")
        return self.by_name[name]

    def of_group(self, group: str) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.group == group)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups that are placed on devices, in the order of their first call: all but the helper."""
        return tuple(dict.fromkeys(call.group for call in self.calls if call.group != HELPER))

    @property
    def generating(self) -> frozenset[str]:
        return frozenset(call.group for call in self.calls if call.kind == "generation")

    def into(self, name: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == name)


def keeps_average(settings: Mapping[str, Any]) -> bool:
    return settings.get("ema_decay") is not None and settings.get("offload") is not True


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

    They come from the call that stepped them, those of a frozen group from where they stay."""
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


class Source(NamedTuple):
    """Which call wrote something, in which iteration (counted from 1)."""

    call: str
    iteration: int


@dataclass
class GraphBuilder:
    """Collects the calls of a loop. `begin` an iteration, tell every `call`, then ask for the `graph`.

    The last iteration is taken as the one that all others are like; two are enough to see what reaches from one into
    the next, unless the first is unlike the others."""

    models: dict[str, Decoder | None] = field(default_factory=dict)
    strategies: dict[str, TrainStrategy] = field(default_factory=dict)
    averaged: frozenset[str] = frozenset()
    offload: dict[str, bool] = field(default_factory=dict)
    widths: dict[str, Width] = field(default_factory=dict)
    iteration: int = 0
    stream: tuple[int, bool] = (0, False)  # `ahead` and `continuous` of the calls to come
    _calls: dict[str, Call] = field(default_factory=dict)
    _edges: dict[tuple[Source, str, EdgeKind], dict[str, None]] = field(default_factory=dict)
    _versions: dict[str, Source] = field(default_factory=dict)
    _waits: set[Source] = field(default_factory=set)
    _upstream: dict[Source, set[Source]] = field(default_factory=dict)
    _latest: dict[str, Source] = field(default_factory=dict)

    def begin(self) -> None:
        self.iteration += 1
        self._calls, self._edges = {}, {}
        self._waits = {source for source in self._waits if source.iteration >= self.iteration - 1}
        self._upstream = {s: before for s, before in self._upstream.items() if s.iteration >= self.iteration - 1}

    def wait(self, sources: Iterable[Source]) -> None:
        """The driver reads results of these calls: it issues all later calls after them."""
        self._waits |= set(sources)
        self._waits -= self._behind(self._waits)

    def _behind(self, sources: Iterable[Source]) -> set[Source]:
        """The calls that these wait for, directly or not."""
        return set().union(*(self._upstream.get(source, ()) for source in sources))

    def call(
        self,
        group: str,
        method: str,
        kind: Kind,
        reads: Mapping[str, Sequence[Source]] | None = None,
        writes: Sequence[str] = (),
        *,
        rows: float = 1.0,
        minibatches: int = 1,
        epochs: int = 1,
    ) -> Source:
        """`reads` gives the writers of each column (none: the prompts have it). `rows` are in any unit: a graph's are
        relative to the rows that are generated. Returns what later calls name as the writer of these columns."""
        reads, count = reads or {}, sum(c.group == group and c.method == method for c in self._calls.values())
        name = f"{group}.{method}" + (f"#{count + 1}" if count else "")
        given = Call(name, group, method, kind, tuple(reads), tuple(writes), rows, minibatches, epochs, *self.stream)
        self._calls[name] = given
        for column, sources in reads.items():
            for source in sources:
                self._edges.setdefault((source, name, "data"), {})[column] = None
        if group in self._versions:
            self._edges[self._versions[group], name, "parameters"] = {}
        self._edges.update({(source, name, "driver"): {} for source in self._waits})
        here, before = Source(name, self.iteration), {source for source, target, _ in self._edges if target == name}
        self._upstream[here] = before | self._behind(before)
        self._latest[group] = here
        if kind == "training":
            self._versions[group] = here
        return here

    def latest(self, *groups: str) -> tuple[Source, ...]:
        """The last call of each of these groups: what the groups do next comes after it."""
        return tuple(self._latest[group] for group in groups if group in self._latest)

    def sync(self, source: str, destination: str) -> tuple[Source, ...]:
        """`destination` has the weights of `source` from now on: what uses them waits for who stepped those. Returns
        the calls that come before the move."""
        calls = self.latest(source, destination)
        if source in self._versions:
            self._versions[destination] = self._versions[source]
            calls += (self._versions[source],)
        return calls

    def graph(self) -> Graph:
        """Errors: ConfigError when nothing was called."""
        if not self._calls:
            raise ConfigError("the loop calls no group: there is nothing to plan.")
        edges = [
            Edge(source.call, target, kind, tuple(columns), self.iteration - source.iteration)
            for (source, target, kind), columns in self._edges.items()
            if source.call in self._calls and self.iteration - source.iteration <= 1
        ]
        known = {edge.target for edge in edges if edge.kind == "parameters"}
        for call in self._calls.values():  # whose group was stepped for the first time after it: the next iteration's
            stepped = self._versions.get(call.group)
            if call.name not in known and stepped is not None and stepped.call in self._calls:
                edges.append(Edge(stepped.call, call.name, "parameters", distance=1))
        models = {call.group: self.models.get(call.group) for call in self._calls.values()}
        calls = tuple(replace(call, rows=call.rows / self.rows) for call in self._calls.values())
        functions = {call for call in calls if call.kind == "inference" and models[call.group] is None}
        calls = tuple(replace(call, kind="function") if call in functions else call for call in calls)
        strategies = {group: how for group, how in self.strategies.items() if models.get(group) is not None}
        waits = {group: asked for group, asked in self.offload.items() if models.get(group) is not None}
        kept = self.averaged & models.keys()
        graph = Graph(calls, tuple(edges), models, self.trained, strategies, kept, waits, self.widths)
        ahead = {call.name: call.ahead for call in calls}
        needed = self._without_implied(graph)
        later = (replace(e, distance=e.distance + ahead[e.target]) if e.distance else e for e in needed)
        return replace(graph, edges=tuple(later))

    def _without_implied(self, graph: Graph) -> Iterator[Edge]:
        """The edges, without those of the driver that follow from what the call waits for; where its weights may move
        first, from what these wait for."""
        moved = {move.target: {Source(move.source, self.iteration - move.distance)} for move in moves(graph)}
        of = {edge: Source(edge.source, self.iteration - edge.distance) for edge in graph.edges}
        for edge in graph.edges:
            others = {of[other] for other in graph.into(edge.target) if other.kind != "driver"}
            before = moved.get(edge.target, others)
            if edge.kind != "driver" or of[edge] not in before | self._behind(before):
                yield edge

    @property
    def rows(self) -> float:
        """The rows of an iteration: of the largest call that generates, or of the largest where none does."""
        calls = self._calls.values()
        return max([c.rows for c in calls if c.kind == "generation"] or [c.rows for c in calls], default=1.0)

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(call.group for call in self._calls.values() if call.kind == "training")
