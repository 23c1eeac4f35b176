"""What a policy is compared with: the best static split, schedules by known lengths, and a lower bound. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from hybridflow.planner.elastic.forecast import DeviceSplit, First, Forecast, RunningRows
from hybridflow.planner.elastic.gain import Gain, considered, moves
from hybridflow.planner.elastic.policies import static
from hybridflow.planner.elastic.simulated_runs import ElasticRun, simulate_elastic
from hybridflow.planner.elastic.simulation import simulate_iteration
from hybridflow.planner.elastic.state import Action, Policy, State
from hybridflow.settings import settings


def best_static(run: ElasticRun, splits: Iterable[tuple[int, int]]) -> tuple[ElasticRun, float]:
    """The run with the (rollout, actor) instances under which the static placement is fastest, and its mean seconds."""
    runs = [replace(run, rollout=rollout, actor=actor) for rollout, actor in splits]
    found = [(simulate_elastic(candidate, static).mean, number) for number, candidate in enumerate(runs)]
    seconds, number = min(found)
    return runs[number], seconds


@settings
class Oracle(Gain):
    """`gain` that knows the rows' lengths; its first move is `first`, if given."""

    lengths: Sequence[int]
    first: First | None = None

    def __call__(self, state: State) -> list[Action]:
        state = replace(state, lengths=sorted(self.lengths))
        if self.first is not None and state.done == 0 and not state.training:
            if state.event == "start":
                at_once = self.first.alive is None
                return moves(state, self.first.split if at_once else min(considered(state), key=lambda s: s.actor))
            if self.first.alive is not None and not state.actor.instances:
                return moves(state, self.first.split) if state.running_rows <= self.first.alive else []
        return super().__call__(state)

    def forecast(self, state: State, splits: Sequence[DeviceSplit]) -> Forecast:
        remaining, n = list[float](), state.n
        for group in (group for present in state.running.values() for group in present):
            longest = sorted(self.lengths[group.group * n : group.group * n + n], reverse=True)
            pairs = zip(longest, sorted(group.tokens, reverse=True), strict=False)
            remaining += [max(1.0, length - tokens) for length, tokens in pairs]
        return Forecast(state, splits, RunningRows.of(state), [np.array(remaining)], fmean(self.lengths))


def clairvoyant(start: State, lengths: Sequence[int], tried: int = 6) -> float:
    """Seconds of the best schedule found by search with known lengths: of `gain` with exact forecasts, freely and with
    each of the `tried` first moves of the best forecasts. Found, not proven to be the best: see `lower_bound`."""
    start = replace(start, speeds=replace(start.speeds, look=0.0), lengths=sorted(lengths))
    free = Oracle(margin=0.0, lengths=lengths)
    splits = considered(start)
    firsts = free.firsts(start, splits)
    forecast = free.forecast(start, splits).seconds(firsts, further=False)
    best = sorted(range(len(firsts)), key=lambda i: float(forecast[i]))[:tried]
    policies: list[Policy] = [free, *(Oracle(margin=0.0, lengths=lengths, first=firsts[i]) for i in best)]
    return min(simulate_iteration(start, lengths, policy).seconds for policy in policies)


def lower_bound(start: State, lengths: Sequence[int]) -> float:
    """Seconds below which no schedule ends, also one that places rows otherwise. For each k, mini-batch k waits for k B
    whole groups, each as long as its longest row alone on an instance, and all together as long as all devices take to
    decode the k B groups of fewest tokens, with all rows spread over them. Mini-batch k and those after it are trained
    later, one after another by the largest actor; and all devices share that work, and the tokens not yet decoded, with
    all slots in use."""
    speeds, decoding, n = start.speeds, start.speeds.decoding, start.n
    prompts = {group.group: group.prompt for present in start.running.values() for group in present}
    of = {group: lengths[group * n : group * n + n] for group in prompts}
    longest = sorted(max(of[group]) * decoding.step(1) + prompts[group] * decoding.prefill for group in prompts)
    decoded = sorted(map(sum, of.values()))
    trained = sorted(sum(of[group]) + n * prompt for group, prompt in prompts.items())
    most, devices = start.devices / start.rollout.devices, start.devices
    beside = min(decoding.slots, max(1.0, start.rows / most))
    together = min(decoding.slots, start.rows)
    rate = most * beside / (decoding.base + beside * decoding.per_row)  # tokens per second of all devices
    each = decoding.step(together) / together * start.rollout.devices  # device seconds of a token
    found, size = 0.0, start.minibatch_groups
    for k in range(1, start.minibatches + 1):
        ready, left = max(longest[k * size - 1], sum(decoded[: k * size]) / rate), start.minibatches - k + 1
        train, tokens = speeds.train * left, sum(trained[: left * size]) * speeds.train_per_token
        rest = max(0.0, sum(decoded) - rate * ready) * each + (train + tokens) * start.actor.devices
        found = max(found, ready + rest / devices, ready + train + tokens / start.actor.most)
    return found
