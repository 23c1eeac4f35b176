"""Graph: the calls of one iteration of a driver's loop, and what each waits for (ReaL, section 4).

A `Program` is told the calls of the loop body in their order, iteration after iteration, and becomes a `Graph`: `trace`
tells it what a driver calls, the constructors below what the papers' algorithms do. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

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
    weights a call of the loop steps.
    """

    calls: tuple[Call, ...]
    edges: tuple[Edge, ...]
    models: Mapping[str, ModelSpec | None]
    trained: frozenset[str]

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
    the next.
    """

    models: dict[str, ModelSpec | None] = field(default_factory=dict)
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
        reads: Mapping[str, Source | None] | None = None,
        writes: Sequence[str] = (),
        *,
        after: Sequence[Source] = (),
        rows: float = 1.0,
        minibatches: int = 1,
        epochs: int = 1,
    ) -> Source:
        """`reads` says who wrote each column (None: the prompts brought it); `after` are calls that the driver itself
        has waited for. Returns what later calls name as the writer of these columns.
        """
        reads, count = reads or {}, sum(c.group == group and c.method == method for c in self._calls.values())
        name = f"{group}.{method}" + (f"#{count + 1}" if count else "")
        given = Call(name, group, method, kind, tuple(reads), tuple(writes), rows, minibatches, epochs)
        self._calls[name] = given
        for column, source in reads.items():
            if source is not None:
                self._edges.setdefault((source, name, "data"), {})[column] = None
        for source in after:
            self._edges.setdefault((source, name, "data"), {})
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
        groups = dict.fromkeys(call.group for call in self._calls.values())
        models = {group: self.models.get(group) for group in groups}
        trained = frozenset(call.group for call in self._calls.values() if call.kind == "training")
        return Graph(tuple(self._calls.values()), tuple(edges), models, trained)


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
    reference = reference or actor
    program = Program({"actor": actor, "critic": critic, "reference": reference, "reward": reward})
    updates = {"minibatches": minibatches, "epochs": epochs}
    for _ in range(2):
        program.begin()
        texts = _generated(program)
        if log_probs:
            texts["log_probs"] = program.call("actor", "compute_log_prob", "inference", _tokens(texts), ["log_probs"])
        _reference(program, texts)
        texts["values"] = program.call("critic", "compute_values", "inference", _tokens(texts), ["values"])
        _reward(program, texts, reward)
        _advantage(program, texts, "values", "log_probs", "ref_log_probs")
        read = ("response_mask", "values", "returns", "advantages", "log_probs")
        program.call("critic", "update_critic", "training", _tokens(texts, *read[:3]), **updates)
        program.call("actor", "update_actor", "training", _tokens(texts, read[0], *read[3:]), **updates)
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
        texts = _generated(program)
        texts["log_probs"] = program.call("actor", "compute_log_prob", "inference", _tokens(texts), ["log_probs"])
        _reference(program, texts)
        _reward(program, texts, reward)
        _advantage(program, texts)
        read = _tokens(texts, "response_mask", "advantages", "log_probs", "ref_log_probs")
        program.call("actor", "update_actor", "training", read, minibatches=minibatches, epochs=epochs)
    return program.graph()


_Columns = dict[str, Source | None]
_GENERATED = ("prompt_ids", "response_ids", "response_mask", "num_tokens", "log_probs")


def _generated(program: Program) -> _Columns:
    """Columns of the responses, with the log-probabilities that the generator found."""
    source = program.call("actor", "generate_sequences", "generation", {"prompt_ids": None}, _GENERATED)
    return dict.fromkeys(_GENERATED, source)


def _tokens(texts: _Columns, *further: str) -> _Columns:
    return {name: texts[name] for name in ("prompt_ids", "response_ids", *further)}


def _reference(program: Program, texts: _Columns) -> None:
    written = ["ref_log_probs"]
    texts[written[0]] = program.call("reference", "compute_ref_log_prob", "inference", _tokens(texts), written)


def _reward(program: Program, texts: _Columns, reward: ModelSpec | None) -> None:
    kind: Kind = "function" if reward is None else "inference"
    texts["rewards"] = program.call("reward", "compute_reward", kind, _tokens(texts), ["rewards"])


def _advantage(program: Program, texts: _Columns, *further: str) -> None:
    written = ("advantages", "returns")
    read = {name: texts[name] for name in ("rewards", "response_mask", *further)}
    source = program.call(HELPER, "compute_advantage", "function", read, written)
    texts |= dict.fromkeys(written, source)
