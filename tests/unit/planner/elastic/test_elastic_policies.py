"""Published policies on states computed by hand, and the law of actions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.planner import DecodingSpeed
from hybridflow.planner.elastic.policies import decide, lend, rlinf, static, valid_sizes
from hybridflow.planner.elastic.state import (
    Allocate,
    Event,
    Finalize,
    Migrate,
    Release,
    RunningGroup,
    Speeds,
    State,
    Wait,
    applied,
)
from tests.example_iterations import static_state

SPEEDS = Speeds(DecodingSpeed(base=1.0, per_row=0.01, prefill=0.001), train=1.0, train_per_token=0.01, resize=2.0)


def start(**given: Any) -> State:
    """Eight devices: the actor has 0 and 1, rollout instances 1 to 3 of two devices the others."""
    wanted: Any = {"devices": 8, "rollout": 3, "actor": 2, "tp": 2, "prompts": [10] * 8, "n": 2, "minibatches": 4}
    return static_state(**{**wanted, "speeds": SPEEDS, **given})


def at(
    event: Event, running: dict[int, list[int]], *, done: int = 0, rollout: int = 3, actor: int = 2, **given: Any
) -> State:
    """`running`: unfinished rows of each group of each instance; groups are numbered in this order."""
    state, numbers = start(**given), iter(range(100))
    groups = {i: tuple(RunningGroup(next(numbers), 10, (5,) * rows) for rows in each) for i, each in running.items()}
    rows, whole = sum(map(sum, running.values())), 8 - sum(map(len, running.values()))
    return replace(
        state,
        event=event,
        running=groups,
        finished=16 - rows,
        done=done,
        ready=whole - 2 * done,
        rollout=replace(state.rollout, instances=rollout),
        actor=replace(state.actor, instances=actor),
    )


def inferring(event: Event, running: dict[int, list[int]], **given: Any) -> State:
    """Inference has the last two devices, rollouts 1 and 2 the four before them."""
    state = at(event, running, rollout=2, **given)
    own = start(rollout=2, inference=2)
    return replace(state, inference=own.inference, rollout=own.rollout)


def test_valid_sizes_are_the_published_ones():
    assert valid_sizes(n=2, minibatches=4, rows=16, devices=4) == (1, 2, 4)
    assert valid_sizes(n=16, minibatches=4, rows=512, devices=8, mp=2) == (1, 2, 4)
    assert valid_sizes(n=8, minibatches=4, rows=96, devices=12) == (1, 2, 3, 4, 6, 8, 12)
    with pytest.raises(ConfigError, match="n=0"):
        valid_sizes(n=0, minibatches=4, rows=96, devices=12)


def test_rlinf_lends_the_actors_devices_until_half_of_the_rows_run():
    state = start()
    lent = [Release("actor", 2), Allocate("rollout", 1)]
    assert rlinf()(state) == lent
    assert {i: len(groups) for i, groups in applied(state, lent).running.items()} == {0: 2, 1: 2, 2: 2, 3: 2}
    over_half = at("rows", {0: [2], 1: [2, 2], 2: [2], 3: [1]}, rollout=4, actor=0)
    assert rlinf()(over_half) == []
    half = at("rows", {0: [2, 1], 1: [2], 2: [1], 3: [2]}, rollout=4, actor=0)  # expected: 8 // 3 rows each
    assert rlinf()(half) == [Migrate({0: 2, 1: 3}), Release("rollout", 1), Allocate("actor", 2)]
    assert rlinf(threshold=0.25)(half) == []
    assert applied(half, rlinf()(half)).placement == {"rollout": 3, "inference": 0, "actor": 2}


def test_rlinf_raises_the_actor_at_boundaries():
    state = at("minibatch", {1: [1], 2: [1], 3: [1, 2]}, done=1)  # 5 rows need one instance: two may go
    assert rlinf()(state) == [Migrate({0: 3, 1: 3}), Release("rollout", 2), Allocate("actor", 4)]
    to_four = replace(state, actor=replace(state.actor, sizes=(1, 2, 4, 8)))
    assert rlinf()(to_four) == [Migrate({0: 2}), Release("rollout", 1), Allocate("actor", 2)]
    full = replace(
        state, speeds=replace(SPEEDS, decoding=replace(SPEEDS.decoding, slots=2))
    )  # they need three instances: none may go
    assert rlinf()(full) == []
    single = at("minibatch", {3: [1, 1]}, done=1, rollout=1, actor=6)
    assert rlinf()(single) == []
    empty = at("minibatch", {1: [], 2: [], 3: []}, done=2)
    assert rlinf()(empty) == [Release("rollout", 3), Allocate("actor", 6)]
    assert rlinf()(at("rows", {1: [1], 2: [], 3: []}, done=1)) == []


def test_rlinf_waits_for_all_rows_before_the_last_minibatch():
    state = at("minibatch", {1: [1], 2: [], 3: [1]}, done=3)
    assert rlinf()(state) == [Wait("rollout"), Release("rollout", 3), Allocate("actor", 6)]
    after = applied(state, rlinf()(state))
    assert (after.finished, after.ready, after.running_rows) == (16, 2, 0)
    stays = rlinf(wait_before_last=False)(state)
    assert stays == [Migrate({0: 3}), Release("rollout", 2), Allocate("actor", 4)]
    assert decide(rlinf(), at("minibatch", {}, done=4, rollout=0, actor=8)) == ((Finalize(),), None)


def test_rlinf_releases_inference_that_has_waited():
    state = inferring("minibatch", {1: [1], 2: [1]}, done=3)
    waits = [Wait("rollout"), Release("rollout", 2), Wait("inference"), Release("inference", 2)]
    assert rlinf()(state) == [*waits, Allocate("actor", 6)]
    assert rlinf()(inferring("minibatch", {1: [], 2: []}, done=1)) == [*waits[1:], Allocate("actor", 6)]


def test_rlinf_without_waiting_releases_inference_when_no_row_runs():
    policy = rlinf(wait_before_last=False)
    runs = inferring("minibatch", {1: [1], 2: [1]}, done=3)
    assert not any(action.component == "inference" for action in policy(runs) if isinstance(action, Wait | Release))
    assert applied(runs, policy(runs)).inference.instances == 2
    for done in (1, 3):
        over = inferring("minibatch", {1: [], 2: []}, done=done)
        waits = [Release("rollout", 2), Wait("inference"), Release("inference", 2), Allocate("actor", 6)]
        assert policy(over) == waits


def test_rlinf_without_pre_process_trains_from_the_start():
    policy = rlinf(pre_process=False)
    assert rlinf()(start()) != [] == policy(start())
    assert policy(at("rows", {1: [1], 2: [1], 3: [1]})) == []
    state = at("minibatch", {1: [1], 2: [1], 3: [1, 2]}, done=1)
    assert policy(state) == rlinf()(state)


def test_lend_switches_if_it_saves_more_than_switches_took():
    assert lend(start()) == []  # no lengths seen: nothing is predicted
    seen = start(lengths=[100, 200])
    assert lend(seen) == [Release("actor", 2), Allocate("rollout", 1)]
    assert lend(replace(seen, switches=(0.0, 900.0, 900.0, 900.0))) == []
    assert lend(replace(seen, speeds=replace(seen.speeds, join=900.0))) == []  # none has been measured yet
    waits = at("rows", {0: [1], 1: [2], 2: [1, 1], 3: [1, 1, 1]}, rollout=4, actor=0)
    assert lend(waits) == []
    ready = at("rows", {0: [1], 1: [2], 2: [1], 3: [1]}, rollout=4, actor=0)
    assert applied(ready, lend(ready)).placement == start().placement


def test_groups_are_spread_anew_when_rollouts_change_at_the_start():
    there_and_back = applied(start(), [Release("rollout", 1), Allocate("rollout", 1)])
    assert there_and_back.running == start().running
    fewer = applied(start(), [Release("rollout", 1), Allocate("actor", 2)])
    assert {i: len(groups) for i, groups in fewer.running.items()} == {2: 4, 3: 4}


ILLEGAL = {
    "this is no action": ["release"],
    "there is no component": [Release("critic", 1)],  # type: ignore[arg-type]
    "give a whole number above 0": [Release("actor", 0)],
    "actor has 2 instances": [Release("actor", 3)],
    "0 devices after the actor's are free": [Allocate("actor", 1)],
    "the free devices allow 0": [Allocate("rollout", 1)],
    "migrate them first": [Release("rollout", 1)],
    "does not run": [Migrate({77: 2})],
    "there is no rollout instance 0": [Migrate({0: 0})],
    "runs on instance 1 already": [Migrate({0: 1})],
    "give a mapping": [Migrate({})],
    "not trained yet": [Finalize()],
    "inference releases all": [Allocate("inference", 1)],
}


@pytest.mark.parametrize("message", ILLEGAL)
def test_illegal_actions_are_named(message: str):
    state = at("rows", {1: [1, 2], 2: [2], 3: [1, 1]})
    component = replace(state.inference, sizes=(1,), devices=1)
    state = replace(state, inference=component) if "inference" in message else state
    with pytest.raises(ConfigError, match=message):
        applied(state, ILLEGAL[message])  # type: ignore[arg-type]


def test_placements_without_a_trainer_or_out_of_order_are_illegal():
    state = at("rows", {1: [1, 2], 2: [2], 3: [1, 1]})
    with pytest.raises(ConfigError, match="the actor trains"):
        applied(replace(state, training=True), [Release("actor", 1)])
    with pytest.raises(ConfigError, match="migrate them first"):
        applied(state, [Release("rollout", 3)])
    with pytest.raises(ConfigError, match="no devices to train on"):
        applied(at("rows", {1: [], 2: [], 3: []}), [Release("actor", 2)])
    with pytest.raises(ConfigError, match="only Finalize"):
        applied(at("minibatch", {}, done=4), [Release("actor", 1)])
    with pytest.raises(ConfigError, match="devices return"):
        applied(at("minibatch", {}, done=4, rollout=0, actor=8), [])
    with pytest.raises(ConfigError, match="inference may be at work"):
        applied(inferring("minibatch", {1: [], 2: []}), [Release("inference", 2)])
    with pytest.raises(ConfigError, match="cannot have 1"):
        applied(replace(state, actor=replace(state.actor, sizes=(2, 4))), [Release("actor", 1)])
    with pytest.raises(ConfigError, match="return a list"):
        applied(state, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"rollout": 4}, {"prompts": [1] * 7}, {"actor": 0}, {"tp": 3}, {"n": True}])
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any]):
    with pytest.raises(ConfigError):
        start(**given)


def raises(state: State) -> list[Any]:
    raise ValueError("out of luck")


def answers_illegally(state: State) -> list[Any]:
    return [Allocate("actor", 99)]


def answers_nothing(state: State) -> Any:
    return None


@pytest.mark.parametrize("policy", [raises, answers_illegally, answers_nothing])
def test_a_policy_that_fails_is_refused_and_the_static_placement_returns(policy: Any):
    actions, error = decide(policy, start())
    assert actions == ()
    assert policy.__name__ in str(error)
    assert "is refused" in str(error)
    lent = at("rows", {0: [2, 1], 1: [2], 2: [1], 3: [2]}, rollout=4, actor=0)
    actions, _ = decide(policy, lent)
    assert applied(lent, actions).placement == start().placement
    shrunk = at("minibatch", {3: [1, 2]}, done=1, rollout=1, actor=6)
    actions, _ = decide(policy, shrunk)
    assert applied(shrunk, actions).placement == start().placement
    assert decide(static, start()) == ((), None)
