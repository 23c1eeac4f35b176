"""Graph: the calls of one iteration of a driver's loop, and what each waits for (ReaL, section 4).

A `Program` is told the calls of the loop body in their order, iteration after iteration, and becomes a `Graph`: `trace`
tells it what a driver calls, the constructors below what the papers' algorithms do. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from hybridflow.config import TrainStrategy
from hybridflow.errors import ConfigError, nearest
from hybridflow.model_spec import ModelSpec

Kind = Literal["generation", "inference", "training", "function"]
EdgeKind = Literal["data", "parameters"]
HELPER = "hybridflow"
"""The group of the driver's own helper process: it has no device, and is no part of a placement."""


@dataclass(frozen=True)
class Call:
    """One call of a group's method in an iteration.

    `name` is "group.method"; a second call of the same in an iteration is "group.method#2". `rows` are relative to the
    workload's: 1.0 is all responses of an iteration. `minibatches` and `epochs` are those of a training call.
    """

    name: str
    group: str
    method: str
    kind: Kind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    rows: float = 1.0
    minibatches: int = 1
    epochs: int = 1


@dataclass(frozen=True)
class Edge:
    """`target` waits for `source`: for columns that it wrote ("data"), or for the weights that it stepped.

    `distance` is 0 within an iteration and 1 from the iteration before.
    """

    source: str
    target: str
    kind: EdgeKind
    columns: tuple[str, ...] = ()
    distance: int = 0


@dataclass(frozen=True)
class Graph:
    """`calls` in program order. `models` by group: None where a group runs functions. `trained` are the groups whose
    weights a call of the loop steps. `strategies` by group are what its model is trained and kept with: `Megatron`
    where none is given.
    """

    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]
    models: Mapping[str, ModelSpec | None]
    trained: frozenset[str]
    strategies: Mapping[str, TrainStrategy] = field(default_factory=dict)

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
        """The edges that a call waits for."""
        return tuple(edge for edge in self.edges if edge.target == name)


class Source(NamedTuple):
    """Which call wrote something, in which iteration (counted from 1)."""

    call: str
    iteration: int


@dataclass
class Program:
    """Collects the calls of a loop. `begin` an iteration, tell every `call`, then ask for the `graph`.

    The last iteration is taken as the one that all others are like; two are enough to see what reaches from one into
    the next, unless the first is unlike the others.
    """

    models: dict[str, ModelSpec | None] = field(default_factory=dict)
    strategies: dict[str, TrainStrategy] = field(default_factory=dict)
    iteration: int = 0
    _calls: dict[str, Call] = field(default_factory=dict)
    _edges: dict[tuple[Source, str, EdgeKind], dict[str, None]] = field(default_factory=dict)
    _versions: dict[str, Source] = field(default_factory=dict)

    def begin(self) -> None:
        self.iteration += 1
        self._calls, self._edges = {}, {}

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
        """`reads` says who wrote each column (nobody: the prompts brought it). `rows` are in any unit: a graph's are
        relative to the rows that are generated. Returns what later calls name as the writer of these columns.
        """
        reads, count = reads or {}, sum(c.group == group and c.method == method for c in self._calls.values())
        name = f"{group}.{method}" + (f"#{count + 1}" if count else "")
        given = Call(name, group, method, kind, tuple(reads), tuple(writes), rows, minibatches, epochs)
        self._calls[name] = given
        for column, sources in reads.items():
            for source in sources:
                self._edges.setdefault((source, name, "data"), {})[column] = None
        if group in self._versions:
            self._edges.setdefault((self._versions[group], name, "parameters"), {})
        here = Source(name, self.iteration)
        if kind == "training":
            self._versions[group] = here
        return here

    def sync(self, source: str, destination: str) -> None:
        """`destination` has the weights of `source` from now on: what uses them waits for who stepped those."""
        if source in self._versions:
            self._versions[destination] = self._versions[source]

    def graph(self) -> Graph:
        """Errors: ConfigError when nothing was called."""
        if not self._calls:
            raise ConfigError("the loop calls no group: there is nothing to plan.")
        edges = [
            Edge(source.call, target, kind, tuple(columns), self.iteration - source.iteration)
            for (source, target, kind), columns in self._edges.items()
            if source.call in self._calls and self.iteration - source.iteration <= 1
        ]
        edges += self._next_versions({edge.target for edge in edges if edge.kind == "parameters"})
        calls = tuple(self._as_planned(call) for call in self._calls.values())
        models = {call.group: self.models.get(call.group) for call in calls}
        strategies = {group: how for group, how in self.strategies.items() if models.get(group) is not None}
        return Graph(calls, tuple(edges), models, self.trained, strategies)

    def _as_planned(self, call: Call) -> Call:
        """With rows relative to all rows; a group without a model computes a function."""
        functional = call.kind == "inference" and self.models.get(call.group) is None
        return replace(call, rows=call.rows / self.rows, kind="function" if functional else call.kind)

    @property
    def rows(self) -> float:
        """The rows of an iteration: of the largest call that generates, or of the largest where none does."""
        calls = self._calls.values()
        return max([c.rows for c in calls if c.kind == "generation"] or [c.rows for c in calls], default=1.0)

    @property
    def trained(self) -> frozenset[str]:
        """The groups that were trained in this iteration."""
        return frozenset(call.group for call in self._calls.values() if call.kind == "training")

    def _next_versions(self, known: set[str]) -> list[Edge]:
        """What calls wait for whose group was stepped for the first time after them: the next iteration's need it."""
        return [
            Edge(self._versions[call.group].call, call.name, "parameters", distance=1)
            for call in self._calls.values()
            if call.name not in known
            and call.group in self._versions
            and self._versions[call.group].call in self._calls
        ]


def ppo(
    actor: ModelSpec,
    critic: ModelSpec,
    reference: ModelSpec | None = None,
    reward: ModelSpec | None = None,
    *,
    minibatches: int = 1,
    epochs: int = 1,
    log_probs: bool = True,
) -> Graph:
    """PPO with four groups. `reference` defaults to the actor's model; without `reward` a function gives rewards.

    `log_probs=False`: generation gives them, and there is no pass of the actor for them (ReaL's six calls).
    """
    program = Program({"actor": actor, "critic": critic, "reference": reference or actor, "reward": reward})
    for _ in range(2):
        program.begin()
        batch = _Columns(program)
        batch.generate()
        if log_probs:
            batch.infer("actor", "compute_log_prob", "old_log_probs")
        batch.infer("reference", "compute_ref_log_prob", "ref_log_probs")
        batch.infer("critic", "compute_values", "values")
        batch.infer("reward", "compute_reward", "rewards", "inference" if reward else "function")
        batch.advantages("values", batch.policy, "ref_log_probs")
        batch.train("critic", "update_critic", ("values", "returns"), minibatches, epochs)
        batch.train("actor", "update_actor", ("advantages", batch.policy), minibatches, epochs)
    return program.graph()


def grpo(
    actor: ModelSpec,
    reference: ModelSpec | None = None,
    reward: ModelSpec | None = None,
    *,
    minibatches: int = 1,
    epochs: int = 1,
) -> Graph:
    """GRPO: no critic. `reference` defaults to the actor's model; without `reward` a function gives rewards."""
    program = Program({"actor": actor, "reference": reference or actor, "reward": reward})
    for _ in range(2):
        program.begin()
        batch = _Columns(program)
        batch.generate()
        batch.infer("actor", "compute_log_prob", "old_log_probs")
        batch.infer("reference", "compute_ref_log_prob", "ref_log_probs")
        batch.infer("reward", "compute_reward", "rewards", "inference" if reward else "function")
        batch.advantages()
        batch.train("actor", "update_actor", ("advantages", batch.policy, "ref_log_probs"), minibatches, epochs)
    return program.graph()


_GENERATED = ("prompt_ids", "response_ids", "response_mask", "num_tokens", "log_probs")


@dataclass
class _Columns:
    """The columns of one iteration's batch, by who wrote them."""

    program: Program
    writers: dict[str, tuple[Source, ...]] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """The column with the log-probabilities of the policy before its update."""
        return "old_log_probs" if "old_log_probs" in self.writers else "log_probs"

    def call(self, group: str, method: str, kind: Kind, reads: Sequence[str], *writes: str, **sizes: int) -> None:
        known = {name: self.writers.get(name, ()) for name in reads}
        source = self.program.call(group, method, kind, known, writes, **sizes)
        self.writers |= dict.fromkeys(writes, (source,))

    def generate(self) -> None:
        self.call("actor", "generate_sequences", "generation", ("prompt_ids",), *_GENERATED)

    def infer(self, group: str, method: str, column: str, kind: Kind = "inference") -> None:
        self.call(group, method, kind, ("prompt_ids", "response_ids"), column)

    def advantages(self, *further: str) -> None:
        reads = ("rewards", "response_mask", *further)
        self.call(HELPER, "compute_advantage", "function", reads, "advantages", "returns")

    def train(self, group: str, method: str, further: Sequence[str], minibatches: int, epochs: int) -> None:
        reads = ("prompt_ids", "response_ids", "response_mask", *further)
        self.call(group, method, "training", reads, minibatches=minibatches, epochs=epochs)
