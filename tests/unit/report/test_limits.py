"""What limits an iteration, against events made so that the answer is known."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridflow.tracking.report.limits import category, critical_path, find_limits

METHODS = {
    "generate_sequences": "generation",
    "compute_log_prob": "preparation",
    "compute_reward": "reward",
    "update_actor": "update",
    "sync_weights": "weight transfer",
    "loader": "data",
}
SECONDS = st.floats(0.01, 100.0)
ITERATION = st.lists(st.tuples(st.sampled_from(sorted(METHODS)), SECONDS), min_size=1, max_size=6)


class Run:
    """Events of a run in the making; `now` is the time."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.seq = 1e9, 0

    def call(self, step: int, method: str, *seconds: float, pool: str = "p", **more: Any) -> None:
        """On one device for each of the `seconds`, from now to the end of the slowest."""
        self.seq += 1
        kind = "transfer" if method == "sync_weights" else "call"
        own = {"kind": kind, "step": step, "seq": self.seq, "role": "actor", "method": method, "pool": pool}
        for rank, each in enumerate(seconds):
            times = {"start": self.now, "ready": self.now, "end": self.now + each}
            figures = {name: value[rank] if isinstance(value, list) else value for name, value in more.items()}
            self.events.append({**own, "rank": rank, **times, **figures})
        self.now += max(seconds)

    def wait(self, step: int, seconds: float) -> None:
        own = {"kind": "wait", "step": step, "what": "loader", "start": self.now, "end": self.now + seconds}
        self.events.append(own)
        self.now += seconds

    def limits(self) -> dict[str, float]:
        return {limit.name: limit.seconds for limit in find_limits(self.events)}


def serial(iterations: list[list[tuple[str, float]]], ranks: int) -> Run:
    run = Run()
    for step, calls in enumerate(iterations, 1):
        for method, seconds in calls:
            run.wait(step, seconds) if method == "loader" else run.call(step, method, *[seconds] * ranks)
        run.call(step, "update_actor", *[0.01] * ranks)  # an iteration ends with a call
    return run


@given(st.lists(ITERATION, min_size=1, max_size=5), st.integers(1, 4), st.randoms())
def test_calls_one_after_the_other_take_their_seconds(iterations, ranks: int, shuffled: random.Random):
    run = serial(iterations, ranks)
    shuffled.shuffle(run.events)
    used = iterations[1:] if len(iterations) > 2 else iterations
    expected = dict.fromkeys(METHODS.values(), 0.0)
    expected["update"] = 0.01 * len(used)
    for calls in used:
        for method, seconds in calls:
            expected[METHODS[method]] += seconds
    limits = find_limits(run.events)
    for limit in limits:
        assert limit.seconds == pytest.approx(expected[limit.name] / len(used), rel=1e-4, abs=1e-5)
        assert limit.share == pytest.approx(expected[limit.name] / sum(expected.values()), rel=1e-4, abs=1e-5)
        assert limit.advice
    assert {limit.name for limit in limits} == {name for name, seconds in expected.items() if seconds}
    assert all(a.seconds >= b.seconds for a, b in pairwise(limits))


@given(st.floats(0.01, 0.9))
def test_a_shorter_call_beside_a_longer_one_does_not_count(share: float):
    run = Run()
    for step in (1, 2, 3, 4):
        run.call(step, "generate_sequences", 1.0, 1.0)
        end, run.now = run.now, run.now - 1.0
        run.call(step, "compute_reward", share, pool="other")
        run.now = end
        run.call(step, "update_actor", 0.5, 0.5)
    assert run.limits() == {"generation": pytest.approx(1.0), "update": pytest.approx(0.5)}


def test_waits_beside_work_do_not_count():
    run = Run()
    for step in (1, 2, 3):
        start = run.now
        run.call(step, "update_actor", 1.0)
        end, run.now = run.now, start
        run.wait(step, 0.9)
        run.now = end
    assert set(run.limits()) == {"update"}


@given(st.floats(0.01, 10.0), st.floats(0.0, 1.0))
def test_time_without_a_call_is_the_drivers_unless_it_waits_for_data(gap: float, waiting: float):
    run = Run()
    for step in (1, 2, 3):
        run.call(step, "generate_sequences", 1.0, 1.0)
        run.wait(step, gap * waiting)
        run.now += gap * (1 - waiting)
        run.call(step, "update_actor", 0.5, 0.5)
    found, own, least = run.limits(), gap * (1 - waiting), 0.005 * (1.5 + gap)
    assume(abs(own - least) > 0.001)
    assert found.get("driver", 0.0) == pytest.approx(own if own > least else 0.0, abs=1e-6)
    assert found.get("data", 0.0) == pytest.approx(gap * waiting, abs=1e-6)


@pytest.mark.parametrize("what", ["restart", "continued"])
def test_time_in_which_hosts_are_replaced_or_the_run_stands_still_does_not_count(what: str):
    run = Run()
    for step in (1, 2, 3, 4):
        run.call(step, "generate_sequences", 1.0, 1.0)
        if step == 3:
            start, run.now = run.now, run.now + 60.0
            if what == "restart":
                run.events.append({"kind": "restart", "step": step, "what": "", "start": start, "end": run.now})
            else:
                run.events.append({"kind": "run", "step": step, "time": run.now - 1.0, "devices": [], "roles": {}})
        run.call(step, "update_actor", 0.5, 0.5)
    assert run.limits() == {"generation": pytest.approx(1.0), "update": pytest.approx(0.5)}
    assert sum(limit.share for limit in find_limits(run.events)) == pytest.approx(1.0)


def test_the_slow_device_is_found_by_time_per_work():
    """Rank 1 generates longer responses and is no slower; rank 2 is slow in all."""
    slow, busy = Run(), Run()
    for step in (1, 2, 3):
        slow.call(step, "generate_sequences", 1.0, 2.0, 3.0, longest=[100, 200, 100])
        slow.call(step, "compute_reward", 0.1, 0.1, 0.3)
        slow.call(step, "update_actor", 1.0, 1.0, 1.0)  # a collective
        busy.call(step, "generate_sequences", 1.0, 2.0, 1.0, longest=[100, 200, 100])
        busy.call(step, "update_actor", 1.0, 1.0, 1.0)
    found = find_limits(slow.events)
    assert found[0].name == "slow host"
    assert "rank 2 of pool p takes 3.0 times" in found[0].advice
    assert found[0].seconds == pytest.approx(2.0 + 0.2)
    assert set(busy.limits()) == {"generation tail", "generation", "update"}
    assert busy.limits()["generation tail"] == pytest.approx(1.0)


@pytest.mark.parametrize(("minibatches", "seconds", "found"), [(32, 9.0, True), (32, 3.5, False), (2, 9.0, False)])
def test_tiny_minibatches_are_slower_than_their_arithmetic(minibatches: int, seconds: float, found: bool):
    run = Run()
    for step in (1, 2):
        run.call(step, "compute_log_prob", 1.0, phase="inference", flops=1e12)
        run.call(step, "update_actor", seconds, phase="training", flops=3e12, minibatches=minibatches)
    limits = run.limits()
    assert ("tiny mini-batches" in limits) is found
    assert limits.get("tiny mini-batches", 0.0) == pytest.approx(seconds - 4.0 if found else 0.0)
    assert sum(limits.values()) == pytest.approx(seconds + 1.0)


def test_switches_inside_a_call_are_weight_transfer_and_the_rest_is_not():
    run = Run()
    for step in (1, 2):
        at = run.now
        run.call(step, "generate_sequences", 1.0, tail=0.5)
        switch = run.events[-1] | {"kind": "switch", "method": "generate_sequences/transition"}
        run.events.append(switch | {"start": at, "ready": at, "end": at + 0.6})
    expected = {"weight transfer": 0.6, "generation": 0.2, "generation tail": 0.2}
    assert run.limits() == {name: pytest.approx(seconds, abs=1e-6) for name, seconds in expected.items()}


def test_a_transfer_begins_when_its_last_rank_does():
    run = Run()
    for step in (1, 2):
        run.call(step, "generate_sequences", 1.0, pool="receiver")
        run.call(step, "sync_weights", 0.1, 0.1)
        run.events[-1] |= {"start": run.now - 1.0, "ready": run.now - 1.0}  # the sender was there early
    assert run.limits() == {"generation": pytest.approx(1.0), "weight transfer": pytest.approx(0.1, abs=1e-6)}


def test_nothing_is_known_of_no_iteration():
    assert find_limits([]) == []
    outside = Run()
    outside.call(0, "generate_sequences", 1.0)
    assert find_limits(outside.events) == []


def test_the_path_ends_even_among_calls_without_duration():
    run = Run()
    for step in (1, 2, 3):
        for _ in range(5):
            run.call(step, "compute_log_prob", 0.0, 0.0)
    assert find_limits(run.events) == []
    assert sum(end - start for start, end, _ in critical_path(run.events, run.now)) == 0


def test_methods_without_a_phase_are_known_by_name():
    known = {m: METHODS[m] for m in METHODS if m not in ("loader", "sync_weights")}
    assert {m: category({"kind": "call", "role": "x", "method": m}) for m in known} == known
    assert category({"kind": "call", "role": "my_reward", "method": "score"}) == "reward"
