"""Several iterations under a device policy, simulated one after another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from random import Random

from hybridflow.planner.elastic.policies import static
from hybridflow.planner.elastic.simulation import ElasticSimulation
from hybridflow.planner.elastic.state import Policy, Speeds, State
from hybridflow.planner.elastic.transitions import Switch, static_state
from hybridflow.planner.stream_simulation import ResponseLengths, drawn
from hybridflow.settings import Count, NonNegative, Positive, Size, settings


@settings
class ElasticRun:
    """Iterations of `prompts` groups of `n` responses, with the static placement of `rollout` instances of `tp`
    devices, `actor` of `mp` and `inference` of `inference_devices`. `lengths` are those of the rows of the iterations
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
    inference_devices: Size = 1
    prompt_tokens: Count = 0
    actor_sizes: tuple[int, ...] | None = None
    rollout_sizes: tuple[int, ...] | None = None
    sync_seconds: NonNegative = 0.0
    cores: Positive | None = None
    iterations: Size = 1
    warm_up: Count = 1
    seed: Count = 0

    def __post_init__(self) -> None:
        drawn(self.lengths, Random(self.seed))


@dataclass(frozen=True)
class SimulatedIterations:
    """Seconds and switches of each iteration; `refused`: why the policy was replaced by `static`."""

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
        chosen = static if refused else policy
        found = ElasticSimulation(start_of(run, seen, costs), lengths, chosen, run.cores).run()
        seconds.append(found.seconds + run.sync_seconds)
        switches.append(tuple(found.switches))
        costs += [switch.seconds for switch in found.switches]
        refused = refused or found.refused
        seen = sorted((*seen, *lengths))
    return SimulatedIterations(tuple(seconds), tuple(switches), refused)


def best_static(run: ElasticRun, splits: Iterable[tuple[int, int]]) -> tuple[ElasticRun, float]:
    """The run with the (rollout, actor) instances under which the static placement is fastest, and its mean seconds."""
    runs = [replace(run, rollout=rollout, actor=actor) for rollout, actor in splits]
    found = [(simulate_elastic(candidate, static).mean, number) for number, candidate in enumerate(runs)]
    seconds, number = min(found)
    return runs[number], seconds


def drawn_lengths(run: ElasticRun) -> tuple[list[int], list[list[int]]]:
    """Those of the warm-up, ascending, and those of the rows of each iteration."""
    rows, tokens = run.prompts * run.n, drawn(run.lengths, Random(run.seed))
    seen = sorted(islice(tokens, run.warm_up * rows))
    return seen, [list(islice(tokens, rows)) for _ in range(run.iterations)]


def start_of(run: ElasticRun, seen: Sequence[int] = (), costs: Sequence[float] = ()) -> State:
    """The state at the start of an iteration."""
    return static_state(
        devices=run.devices,
        rollout=run.rollout,
        actor=run.actor,
        prompts=[run.prompt_tokens] * run.prompts,
        n=run.n,
        minibatches=run.minibatches,
        speeds=run.speeds,
        tp=run.tp,
        mp=run.mp,
        inference=run.inference,
        inference_devices=run.inference_devices,
        actor_sizes=run.actor_sizes,
        rollout_sizes=run.rollout_sizes,
        lengths=seen,
        switches=tuple(costs[-3:]),
        max_running=run.speeds.decoding.slots,
    )
