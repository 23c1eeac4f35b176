"""Schedules found by known lengths, against all schedules of tiny iterations, the static one and the lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks import clairvoyant
from benchmarks.clairvoyant import Search, lower_bound, thinned
from hybridflow.planner import DecodingSpeed
from hybridflow.planner.elastic.policies import static
from hybridflow.planner.elastic.simulation import ElasticSimulation
from hybridflow.planner.elastic.state import Action, Speeds, State
from tests.example_iterations import static_state

DECODING = DecodingSpeed(base=0.01, per_row=1e-3, prefill=1e-4)
ALL = Search(width=None, shares=None, splits=9)


def start(random: Random, **given: Any) -> State:
    speeds = Speeds(DECODING, random.choice([0.0, 0.3]), random.choice([1e-3, 1e-2]), **moving(random))
    wanted: Any = {"devices": 8, "rollout": 4, "actor": 4, "prompts": [10] * 8, "n": 2, "minibatches": 2}
    return static_state(**{**wanted, "speeds": speeds, **given})


def moving(random: Random) -> dict[str, float]:
    return {name: random.choice([0.0, 0.05, 0.5]) for name in ("resize", "hand_over", "join")}


def drawn(random: Random, count: int) -> list[int]:
    return [round(random.lognormvariate(3.0, 1.0)) + 1 for _ in range(count)]


def of_all_schedules(begun: State, lengths: Sequence[int]) -> float:
    """By trying all choices at all looks, each time from the start."""
    splits = clairvoyant.splits_of(begun, range(begun.rollout.most + 1))
    chosen, best = [0], math.inf
    there: list[int] = []  # how many choices each look had

    def policy(state: State) -> Sequence[Action]:
        if state.training:
            return []
        choices = list(clairvoyant.choices(state, lengths, splits))
        there.append(len(choices))
        chosen.extend([0] * (len(there) - len(chosen)))
        return choices[chosen[len(there) - 1]]

    while chosen:
        there.clear()
        found = ElasticSimulation(begun, lengths, policy).run()
        assert found.refused is None
        best = min(best, found.seconds)
        while chosen and chosen[-1] == there[len(chosen) - 1] - 1:
            chosen.pop()
        if chosen:
            chosen[-1] += 1
    return best


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32))
def test_the_search_of_all_schedules_finds_the_best(seed: int):
    random = Random(seed)
    begun = start(random, devices=3, rollout=2, actor=1, prompts=[5, 5], n=1)
    lengths = drawn(random, 2)
    assert abs(ALL.seconds(begun, lengths) - of_all_schedules(begun, lengths)) < 1e-9


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
@example(210)  # a lent device costs more than it gains
@example(243)  # the actor's growth after the last row does not pay
def test_schedules_found_are_between_the_lower_bound_and_the_static_one(seed: int):
    random = Random(seed)
    devices = random.choice([2, 3, 8, 32])
    actor, minibatches, n = random.randint(1, devices - 1), random.choice([1, 2, 4]), random.choice([1, 3])
    begun = start(
        random,
        devices=devices,
        rollout=devices - actor,
        actor=actor,
        prompts=[random.randint(0, 9) for _ in range(minibatches * random.choice([2, 8]))],
        n=n,
        minibatches=minibatches,
    )
    lengths = drawn(random, begun.rows)
    found = Search(width=3, shares=(0.5, 0.1), splits=4).seconds(begun, lengths)
    fixed = ElasticSimulation(begun, lengths, static).run().seconds
    assert lower_bound(begun, lengths) * (1 - 1e-9) <= found <= fixed * (1 + 1e-9)


def test_the_search_knows_the_longest_group():
    """It alone decides the end: it gets an instance of its own, and the others end meanwhile."""
    begun = start(
        Random(0), devices=4, rollout=2, actor=2, prompts=[0] * 8, n=4, speeds=Speeds(DECODING, train_per_token=1e-4)
    )
    lengths = [20] * 28 + [400] * 4
    found, fixed = Search().seconds(begun, lengths), ElasticSimulation(begun, lengths, static).run().seconds
    alone = 400 * DECODING.step(4)
    assert alone < lower_bound(begun, lengths) <= found < fixed
    assert found - alone < 0.5 * (fixed - alone)


def test_few_of_many_instances_keep_the_longest_rows_and_the_proportions():
    begun = start(Random(0), devices=64, rollout=32, actor=32, prompts=[1] * 128, n=2, minibatches=4)
    lengths = drawn(Random(0), 256)
    few, fewer, by = thinned(begun, lengths, 8)
    assert (by, few.devices, few.rollout.instances, few.actor.initial, few.rows) == (8, 8, 4, 4, 32)
    assert max(fewer) == max(lengths)
    assert few.rollout.sizes == tuple(range(1, 9))
    assert {group.group for present in few.running.values() for group in present} == set(range(16))
    uneven = start(Random(0), devices=64, rollout=31, actor=33, prompts=[1] * 128)
    assert thinned(uneven, lengths, 8)[1:] == (lengths, 1)
