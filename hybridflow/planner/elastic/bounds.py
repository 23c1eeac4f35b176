"""What a policy is compared with: the best static split, and a lower bound. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hybridflow.planner.elastic.policies import static
from hybridflow.planner.elastic.simulated_runs import ElasticRun, simulate_elastic
from hybridflow.planner.elastic.state import State


def best_static(run: ElasticRun, splits: Iterable[tuple[int, int]]) -> tuple[ElasticRun, float]:
    """The run with the (rollout, actor) instances under which the static placement is fastest, and its mean seconds."""
    runs = [replace(run, rollout=rollout, actor=actor) for rollout, actor in splits]
    found = [(simulate_elastic(candidate, static).mean, number) for number, candidate in enumerate(runs)]
    seconds, number = min(found)
    return runs[number], seconds


def lower_bound(start: State, lengths: Sequence[int]) -> float:
    """Seconds below which no schedule ends, also one that places groups otherwise. For each k, mini-batch k waits for
    k B whole groups, each as long as it takes alone on an instance (a step takes the base, and more for each row in
    it), and all together as long as all devices take to decode the k B groups of fewest tokens, with all rows spread
    over them. Mini-batch k and those after it are trained later, one after another by the largest actor; and all
    devices share that work, and the tokens not yet decoded, with all slots in use. The last mini-batch has the actor of
    the start, or one that returns to it afterwards, as no actor changes while it trains."""
    speeds, decoding, n = start.speeds, start.speeds.decoding, start.n
    prompts = {group.group: group.prompt for present in start.running.values() for group in present}
    of = {group: lengths[group * n : group * n + n] for group in prompts}
    alone = sorted(
        max(of[group]) * decoding.base + sum(of[group]) * decoding.per_row + prompts[group] * decoding.prefill
        for group in prompts
    )
    decoded = sorted(map(sum, of.values()))
    trained = sorted(sum(of[group]) + n * prompt for group, prompt in prompts.items())
    most, devices, actor = start.devices / start.rollout.devices, start.devices, start.actor
    beside = min(decoding.slots, max(1.0, start.rows / most))
    together = min(decoding.slots, start.rows)
    rate = most * beside / (decoding.base + beside * decoding.per_row)  # tokens per second of all devices
    each = decoding.step(together) / together * start.rollout.devices  # device seconds of a token
    found, size = 0.0, start.minibatch_groups
    last = sum(trained[:size]) * speeds.train_per_token
    home = min(speeds.resize, last / actor.initial - last / actor.most)
    home_shared = min(
        speeds.resize, (speeds.train + last / actor.initial) * (1 - actor.initial * actor.devices / devices)
    )
    for k in range(1, start.minibatches + 1):
        ready, left = max(alone[k * size - 1], sum(decoded[: k * size]) / rate), start.minibatches - k + 1
        train, tokens = speeds.train * left, sum(trained[: left * size]) * speeds.train_per_token
        rest = max(0.0, sum(decoded) - rate * ready) * each + (train + tokens) * actor.devices
        found = max(found, ready + rest / devices + home_shared, ready + train + tokens / actor.most + home)
    return found
