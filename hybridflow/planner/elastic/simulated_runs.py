"""Several iterations under a device policy, simulated one after another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from hybridflow.planner.elastic.policies import static
from hybridflow.planner.elastic.simulation import ElasticSimulation
from hybridflow.planner.elastic.state import Component, Policy, RunningGroup, Speeds, State
from hybridflow.planner.elastic.transitions import Switch, listed, spread
from hybridflow.planner.stream_simulation import ResponseLengths, drawn
from hybridflow.settings import Count, NonNegative, Positive, Size, require, settings


@settings
class ElasticRun:
    """Iterations of `prompts` groups of `n` responses, with the static placement of `rollout` instances of `tp`
    devices, `actor` of `mp` and `inference` of one. `actor_sizes`: numbers of instances that the actor may have (None:
    any). `lengths` are those of the rows of the iterations
    one after another, again from the first when they end, or a distribution; those of the `warm_up` iterations before
    are only seen. `sync_seconds`: the weight sync at the end of an iteration. On a machine with `cores`, which its
    processes share, all busy ones are slower alike where they are more than the cores."""

    devices: Size
    rollout: Size
    actor: Size
    prompts: Size
    n: Size
    minibatches: Size
    speeds: Speeds
    lengths: ResponseLengths | Sequence[int]
    tp: Size = 1
    mp: Size = 1
    inference: Count = 0
    prompt_tokens: Count = 0
    actor_sizes: tuple[int, ...] | None = None
    sync_seconds: NonNegative = 0.0
    cores: Positive | None = None
    iterations: Size = 1
    warm_up: Count = 1
    seed: Count = 0

    def __post_init__(self) -> None:
        drawn(self.lengths, Random(self.seed))


@dataclass(frozen=True)
class SimulatedIterations:
    """Seconds and switches of each iteration; `refused`: why the policy was replaced by `static` in an
    iteration, the first time."""

    seconds: tuple[float, ...]
    switches: tuple[tuple[Switch, ...], ...]
    refused: str | None

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def simulate_elastic(run: ElasticRun, policy: Policy) -> SimulatedIterations:
    """The run under the policy; equal for equal seeds."""
    seen, iterations = drawn_lengths(run)
    seconds, switches, costs = list[float](), list[tuple[Switch, ...]](), list[float]()
    refused: str | None = None
    for lengths in iterations:
        found = ElasticSimulation(start_of(run, seen, costs), lengths, policy, run.cores).run()
        seconds.append(found.seconds + run.sync_seconds)
        switches.append(tuple(found.switches))
        costs += [switch.seconds for switch in found.switches]
        refused = refused or found.refused
        seen = sorted((*seen, *lengths))
    return SimulatedIterations(tuple(seconds), tuple(switches), refused)


def best_static(run: ElasticRun, splits: Iterable[tuple[int, int]]) -> tuple[ElasticRun, float]:
    """The run with the (rollout, actor) instances under which the static placement is fastest, and its mean seconds."""
    runs = [replace(run, rollout=rollout, actor=actor) for rollout, actor in splits]
    return min(((each, simulate_elastic(each, static).mean) for each in runs), key=lambda found: found[1])


def drawn_lengths(run: ElasticRun) -> tuple[list[int], list[list[int]]]:
    """Those of the warm-up, ascending, and those of the rows of each iteration."""
    rows, tokens = run.prompts * run.n, drawn(run.lengths, Random(run.seed))
    seen = sorted(islice(tokens, run.warm_up * rows))
    return seen, [list(islice(tokens, rows)) for _ in range(run.iterations)]


def start_of(
    run: ElasticRun, seen: Sequence[int] = (), costs: Sequence[float] = (), prompts: Sequence[int] | None = None
) -> State:
    """The state at the start of an iteration, when response lengths `seen` (ascending) and `costs`, the seconds of
    switches, are known; `prompts`: the tokens of each one, if they differ.

    Errors: ConfigError for sizes that the devices do not allow."""
    require(
        run.prompts % run.minibatches == 0,
        f"{run.prompts} prompts do not make {run.minibatches} mini-batches of equal size: give a multiple of "
        f"{run.minibatches}.",
    )
    most = (run.devices - run.inference) // run.tp
    require(
        run.actor * run.mp <= (most - run.rollout) * run.tp,
        f"{run.actor} actor instances of {run.mp}, {run.rollout} rollout instances of {run.tp} and {run.inference} "
        f"devices for inference do not fit {run.devices} devices: the rollouts end at device {most * run.tp}, and the "
        f"actor before them.",
    )
    largest = run.devices // run.mp
    sizes = run.actor_sizes or tuple(range(1, largest + 1))
    require(
        list(sizes) == sorted(set(sizes)) and sizes[0] > 0 and sizes[-1] <= largest and run.actor in sizes,
        f"actor_sizes={listed(sizes)}: give ascending numbers from 1 to {largest}, {run.actor} among them.",
    )
    rollout = Component(run.tp, run.rollout, run.rollout, tuple(range(1, most + 1)))
    tokens = [run.prompt_tokens] * run.prompts if prompts is None else prompts
    return State(
        event="start",
        devices=run.devices,
        rollout=rollout,
        inference=Component(1, run.inference, run.inference, tuple({run.inference} - {0})),
        actor=Component(run.mp, run.actor, run.actor, sizes),
        rows=run.prompts * run.n,
        n=run.n,
        minibatches=run.minibatches,
        running=spread([RunningGroup(group, each, (0,) * run.n) for group, each in enumerate(tokens)], rollout.ids),
        speeds=run.speeds,
        lengths=seen,
        switches=tuple(costs[-3:]),
    )
