"""10,000 random schedules: nothing is lost, and every iteration ends where it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from benchmarks.clairvoyant import Search, lower_bound
from hybridflow.planner import DecodingSpeed, ResponseLengths
from hybridflow.planner.elastic.policies import balanced, decide, gain, lend, released_rollouts, rlinf, static
from hybridflow.planner.elastic.simulation import (
    ElasticRun,
    ElasticSimulation,
    drawn_lengths,
    simulate_elastic,
    start_of,
)
from hybridflow.planner.elastic.state import (
    Action,
    Allocate,
    Component,
    DeviceSplit,
    Finalize,
    Migrate,
    Policy,
    Release,
    RunningGroup,
    Speeds,
    State,
    Wait,
    applied,
)
from tests.example_iterations import static_state


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refused policies are not reported."""
    caplog.set_level("ERROR")


SPEEDS = Speeds(
    DecodingSpeed(base=0.01, per_row=1e-4, prefill=1e-5),
    train=0.1,
    train_per_token=1e-4,
    resize=0.5,
    hand_over=0.1,
    join=0.2,
)


def random_state(random: Random) -> State:
    devices = random.choice([2, 3, 8, 17, 64, 256, 1024])
    tp, mp = (random.choice([size for size in (1, 2, 4, 8) if size * 2 <= devices]) for _ in range(2))
    inference = random.choice([0, 0, 1]) if devices >= 3 * max(tp, mp) else 0
    most = (devices - inference) // tp
    rollout = random.randint(1, max(1, most - -(-mp // tp)))
    room = (most - rollout) * tp // mp
    actor = random.randint(1, max(1, room))
    minibatches, slots = random.randint(1, 4), random.choice([1, 4, 256])
    return static_state(
        devices=devices,
        rollout=rollout,
        actor=actor,
        tp=tp,
        mp=mp,
        inference=inference,
        prompts=[random.randint(0, 9) for _ in range(minibatches * random.randint(1, 4))],
        n=random.randint(1, 3),
        minibatches=minibatches,
        speeds=replace(SPEEDS, decoding=replace(SPEEDS.decoding, slots=slots)),
        lengths=sorted(random.randint(1, 99) for _ in range(random.choice([0, 5]))),
        switches=[1.0] * random.randint(0, 4),
    )


def anything(random: Random, state: State) -> list[Any]:
    """Actions of which many are illegal."""
    name: Any = random.choice(["rollout", "inference", "actor"])
    count = random.choice([0, 1, 2, -1, state.rollout.instances, state.actor.instances])
    groups = [group.group for present in state.running.values() for group in present]
    some = {group: random.choice([*state.rollout.ids, -1]) for group in groups if random.random() < 0.5}
    choices: list[Any] = [
        Release(name, count),
        Allocate(name, count),
        Migrate(some),
        Wait(name),
        Finalize(),
        None,
        "release",
    ]
    return random.choices(choices, k=random.randint(0, 3))


def some_move(random: Random, state: State) -> list[Action]:
    """Devices move between rollouts and the actor."""
    count = random.randint(0 if not state.running_rows else 1, state.rollout.most)
    own = state.inference.instances * state.inference.devices
    room = (state.rollout.most - count) * state.rollout.devices if count else state.devices - own
    actor = random.randint(0, room // state.actor.devices)
    if random.random() < 0.3 and state.running_rows:
        return [Wait("rollout"), Release("rollout", state.rollout.instances)]
    if random.random() < 0.2 and state.rollout.instances > 1 and state.event != "start":
        return released_rollouts(state, random.randint(1, state.rollout.instances - 1))
    return balanced(state, DeviceSplit(count, actor))


def random_policy(random: Random) -> Policy:
    fixed = random.choice([static, lend, rlinf(), gain() if random.random() < 0.1 else rlinf(wait_before_last=False)])
    wild = random.choice([0.0, 0.0, 0.05, 0.5])

    def policy(state: State) -> Sequence[Action]:
        if random.random() < wild:
            return anything(random, state)
        return some_move(random, state) if wild == 0.0 else fixed(state)

    return policy


def check(state: State) -> None:
    """Devices and rows are conserved, and sizes are valid."""
    ids, tp, own = state.rollout.ids, state.rollout.devices, state.inference.instances * state.inference.devices
    parts = [(0, state.actor.instances * state.actor.devices), (state.devices - own, state.devices)]
    parts += [(ids.start * tp, ids.stop * tp)] if state.rollout.instances else []
    owned = sorted(part for part in parts if part[0] < part[1])
    assert all(0 <= first < end <= state.devices for first, end in owned)
    assert all(before[1] <= after[0] for before, after in pairwise(owned)), "a device has two owners"
    for component in (state.rollout, state.inference, state.actor):
        assert component.instances in (0, *component.sizes)
    assert set(state.running) == set(state.rollout.ids)
    groups = [group.group for present in state.running.values() for group in present]
    assert len(groups) == len(set(groups)), "a group is doubled"
    assert state.finished + state.running_rows == state.rows
    trained = (state.done + state.training) * state.minibatch_groups
    assert len(groups) + state.ready + trained == state.rows // state.n or state.done == state.minibatches


def progress(random: Random, state: State) -> State:
    """Rows finish, or a mini-batch is trained."""
    size = state.minibatch_groups
    if state.ready >= size and state.actor.instances and (random.random() < 0.5 or not state.running_rows):
        return replace(state, event="minibatch", done=state.done + 1, ready=state.ready - size)
    running: dict[int, tuple[RunningGroup, ...]] = {}
    finished = whole = 0
    for instance, groups in state.running.items():
        left = [group._replace(tokens=tuple(t + 3 for t in group.tokens if random.random() < 0.4)) for group in groups]
        running[instance] = tuple(group for group in left if group.tokens)
        whole += sum(not group.tokens for group in left)
        finished += sum(len(g.tokens) for g in groups) - sum(len(g.tokens) for g in left)
    after = {"finished": state.finished + finished, "ready": state.ready + whole}
    return replace(state, event="rows", running=running, **after)


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(st.integers(0, 2**32))
def test_random_schedules_lose_nothing_and_end(seed: int):
    for number in range(100):  # 10,000 schedules in all
        random = Random(seed * 100 + number)
        begun = state = random_state(random)
        policy = random_policy(random)
        for _ in range(500):
            check(state)
            actions, refused = decide(policy, state)
            policy = static if refused else policy
            state = applied(state, actions)
            check(state)
            if state.done == state.minibatches:
                break
            state = progress(random, state)
        assert state.done == state.minibatches, "the iteration does not end"
        assert state.placement == begun.placement
        assert state.finished == state.rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_simulated_iterations_lose_nothing_and_end(seed: int):
    random = Random(seed)
    start = random_state(random)
    lengths = [random.randint(1, 60) for _ in range(start.rows)]
    seen: list[State] = []

    class Watched(ElasticSimulation):
        def execute(self, view: State, after: State, actions: Sequence[Action], delay: float) -> tuple[float, int]:
            check(view)
            check(after)
            seen.append(after)
            for group in (group for present in view.running.values() for group in present):
                own = lengths[group.group * start.n : (group.group + 1) * start.n]
                assert all(0 <= tokens < max(own) for tokens in group.tokens)
            return super().execute(view, after, actions, delay)

    found = Watched(start, lengths, random_policy(random)).run()
    assert seen[-1].done == start.minibatches
    assert seen[-1].placement == start.placement
    assert found.seconds >= lower_bound(start, lengths) * (1 - 1e-9)
    assert len(found.switches) == 0 or found.switches[0].origin == start.placement


def run(seed: int = 0, **given: Any) -> ElasticRun:
    wanted: dict[str, Any] = {"devices": 8, "rollout": 4, "actor": 4, "prompts": 16, "n": 4, "minibatches": 4}
    wanted |= {"speeds": SPEEDS, "lengths": ResponseLengths(median=64, ratio=16.0), "iterations": 3, "seed": seed}
    return ElasticRun(**(wanted | given))


def test_the_static_iteration_is_the_computed_one():
    one = run(devices=2, rollout=1, actor=1, prompts=2, n=1, minibatches=2, lengths=[10, 30], iterations=1, warm_up=0)
    # 10 steps of two rows, a mini-batch of 10 tokens; 20 steps of one row, and one of 30 tokens
    decoding = 10 * 0.0102 + 20 * 0.0101
    assert simulate_elastic(one, static).seconds == pytest.approx((decoding + 0.1 + 30e-4,))


def test_a_migration_pays_for_the_hand_over_and_its_keys_and_values():
    def policy(state: State) -> list[Action]:
        return released_rollouts(state, 1) if state.finished and state.rollout.instances == 2 else []

    speeds = replace(SPEEDS, decoding=DecodingSpeed(base=1.0, per_row=0.0, prefill=0.1))
    given = run(devices=3, rollout=2, actor=1, prompts=2, n=2, minibatches=1, prompt_tokens=5, speeds=speeds)
    start = start_of(given)
    found = ElasticSimulation(start, [40, 20, 10, 40], policy).run()
    # Instance 1 begins with 0.5 s of prefill like 2; at 10.5 s the group of rows 0 and 1 moves: 5 + 2 x 10 tokens
    trained = 0.1 + (110 + 4 * 5) * 1e-4
    assert found.seconds == pytest.approx(0.5 + 40 + 0.1 + 2.5 + trained + 0.2, abs=1e-6)
    (switch, back) = found.switches
    assert (switch.rows, switch.seconds, switch.target["rollout"], back.target["rollout"]) == (2, 0.1, 1, 2)


GRID = [(ratio, actor, resize) for ratio, actor in ((4.0, 2), (64.0, 5)) for resize in (0.1, 20.0)]


@pytest.mark.parametrize(("ratio", "actor", "resize"), GRID)
def test_gain_is_never_more_than_a_hundredth_behind_static(ratio: float, actor: int, resize: float):
    speeds = replace(SPEEDS, resize=resize, join=resize / 2, train_per_token=1e-3)
    given = [
        run(
            seed,
            iterations=1,
            rollout=8 - actor,
            actor=actor,
            lengths=ResponseLengths(median=64, ratio=ratio),
            speeds=speeds,
        )
        for seed in range(2)
    ]
    ours, fixed = (sum(simulate_elastic(each, policy).mean for each in given) for policy in (gain(), static))
    assert ours <= 1.01 * fixed


def test_gain_moves_where_it_pays_and_the_bounds_hold():
    given = run(0, prompts=64, rollout=6, actor=2, speeds=replace(SPEEDS, train_per_token=1e-3))
    ours, fixed = simulate_elastic(given, gain()), simulate_elastic(given, static)
    assert ours.mean < 0.8 * fixed.mean
    assert ours.refused is None
    seen, drawn = drawn_lengths(given)
    start = start_of(given, seen)
    search = Search(width=3, splits=4)
    known = [search.seconds(start, lengths) for lengths in drawn]
    assert all(lower_bound(start, lengths) <= found for lengths, found in zip(drawn, known, strict=True))
    assert all(mine <= 1.1 * found for mine, found in zip(ours.seconds, known, strict=True))


def test_without_lengths_seen_gain_stays():
    assert simulate_elastic(run(warm_up=0, iterations=1), gain()).switches == ((),)


def test_a_refused_policy_is_replaced_for_the_rest_of_its_iteration():
    def breaks(state: State) -> Sequence[Action]:
        return rlinf()(state) if state.event != "minibatch" else [Allocate("actor", 99)]

    found = simulate_elastic(run(), breaks)
    assert "refused" in str(found.refused)
    assert all(found.switches)  # it was asked again


def test_components_without_sizes_have_no_instance():
    assert Component(1, 0, 0, ()).most == 0
