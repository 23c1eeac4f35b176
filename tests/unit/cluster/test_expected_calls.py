"""Models that come back behind the call before their own: as the driver said, in vain, and where they do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.expected_calls import ExpectedCalls
from hybridflow.engine3d.offloadable import HostImages, Residency
from tests.throttled_link import Clock, Link

CPU, FLOATS, PARTS = torch.device("cpu"), 256, 4
SECONDS = 1.0
"""Of a call, and of all copies of a model: the link makes 4 * PARTS * FLOATS bytes in a second."""


class Model:
    """A model of some parts that waits on the host and computes a second, part by part."""

    def __init__(self, clock: Clock) -> None:
        self.parts = {str(i): torch.full((FLOATS,), float(i)) for i in range(PARTS)}
        self.link, self.clock = Link(clock, 4.0 * PARTS * FLOATS), clock
        self.memory = Residency(self.parts, CPU, images=HostImages(self.link))
        self.fails: type[Exception] | None = None
        self.leave()

    def fetch(self, what: Sequence[str]) -> None:
        if self.fails:
            raise self.fails("on purpose")
        self.memory.fetch()

    def leave(self) -> None:
        self.memory.offload()

    def away_bytes(self, what: Sequence[str]) -> int:
        return self.memory.total_bytes - self.memory.resident_bytes

    def compute(self) -> float:
        self.memory.fetch()
        total = 0.0
        for name, part in self.parts.items():
            self.memory.arrive([name])
            total += part.sum().item()
            self.clock.now += SECONDS / PARTS
        self.memory.offload()
        return total


def call(seq: int, group: str, method: str = "compute") -> RankCall:
    return RankCall(seq, group, method, {}, ())


@pytest.fixture
def made() -> Callable[..., Any]:
    def make(*groups: str, limit: float | None = None) -> tuple[dict[str, Model], ExpectedCalls, Clock]:
        clock = Clock()
        models = {group: Model(clock) for group in groups}
        return models, ExpectedCalls(models.get, CPU, limit), clock

    return make


def test_a_return_is_hidden_behind_the_call_before_it(made):
    models, expected, clock = made("actor", "reference")
    models["actor"].memory.acquire()
    start = clock.now = 100.0
    expected.add("reference", 2, 1, False)
    with expected.running(call(1, "actor")):
        assert models["reference"].memory.resident_bytes
        clock.now += SECONDS
    with expected.running(call(2, "reference")):
        assert models["reference"].compute() == 6 * FLOATS
    link = models["reference"].link
    assert link.stalled == 0.0
    assert clock.now == start + 2 * SECONDS
    assert not models["reference"].memory.resident_bytes
    with expected.running(call(3, "reference")):  # nothing was said: its first part alone is waited for in full
        models["reference"].compute()
    assert link.stalled == pytest.approx(SECONDS / PARTS)


def test_a_call_may_be_said_while_the_one_before_it_runs(made):
    models, expected, clock = made("actor", "reference")
    with expected.running(call(1, "actor")):
        clock.now += SECONDS / 2
        threading.Thread(target=expected.add, args=("reference", 2, 1, False)).run()
        assert models["reference"].memory.resident_bytes
        clock.now += SECONDS / 2
    with expected.running(call(2, "reference")):
        models["reference"].compute()
    assert models["reference"].link.stalled == 0.0  # its parts come as fast as they are computed


@pytest.mark.parametrize("comes", ["a call of another group", "a call that fails at once", "a call of another kind"])
def test_a_model_that_was_fetched_in_vain_leaves_without_a_copy(made, comes):
    models, expected, _ = made("actor", "reference")
    reference = models["reference"]
    expected.add("reference", 2, 1, False)
    with expected.running(call(1, "actor")):
        assert reference.memory.resident_bytes == reference.memory.total_bytes
    before = reference.memory.images.copied_out
    if comes == "a call of another group":
        with expected.running(call(3, "actor")):
            assert not reference.memory.resident_bytes
    elif comes == "a call that fails at once":
        with pytest.raises(ValueError, match="inputs"), expected.running(call(2, "reference")):
            raise ValueError("its inputs are gone")
    else:
        with expected.running(call(4, "reference", "other")):
            assert not reference.memory.resident_bytes
            reference.compute()
    assert not reference.memory.resident_bytes
    assert reference.memory.images.copied_out == before
    with expected.running(call(9, "reference")):
        assert reference.compute() == 6 * FLOATS


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_an_error_is_left_to_the_call_itself(made, error):
    models, expected, _ = made("actor", "reference")
    models["reference"].fails = error
    expected.add("reference", 2, 1, False)
    with expected.running(call(1, "actor")):
        pass
    with expected.running(call(2, "reference")):
        assert models["reference"].compute() == 6 * FLOATS


def test_a_released_group_and_one_without_a_model_are_left_out(made):
    models, expected, _ = made("actor", "reference")
    reference = models["reference"]
    for group in ("gone", "plain"):
        models["plain"] = object()
        expected.add(group, 2, 1, True)
        with expected.running(call(1, "actor")):
            pass
    expected.add("reference", 5, 4, False)
    with expected.running(call(4, "actor")):
        del models["reference"]
    with expected.running(call(6, "actor")):
        assert reference.memory.resident_bytes  # whoever dropped it frees it


@pytest.mark.parametrize(("limit", "comes"), [(None, True), (1.0, True), (1e-6, False), (0, False)])
def test_a_model_comes_only_where_it_fits(made, limit, comes):
    models, expected, _ = made("actor", "reference", limit=limit)
    expected.add("reference", 2, 1, False)
    with expected.running(call(1, "actor")):
        assert bool(models["reference"].memory.resident_bytes) is comes


def test_what_is_said_late_or_of_a_later_call_changes_nothing(made):
    models, expected, _ = made("actor", "reference", "critic")
    with expected.running(call(2, "reference")):
        models["reference"].compute()
        expected.add("reference", 2, 1, False)
        expected.add("critic", 7, 6, True)
    assert not models["reference"].memory.resident_bytes
    with expected.running(call(4, "actor")):
        assert not models["critic"].memory.resident_bytes
    with expected.running(call(6, "actor")):
        assert models["critic"].memory.resident_bytes


def test_calls_in_several_threads_share_one_account(made):
    """Updates that run together: the model of the next call comes behind the one that it was said for."""
    models, expected, _ = made("actor", "critic", "reference")
    expected.add("reference", 3, 2, False)
    entered, leave = threading.Barrier(3), threading.Event()

    def run(seq: int, group: str) -> None:
        with expected.running(call(seq, group)):
            entered.wait(20)
            leave.wait(20)

    threads = [threading.Thread(target=run, args=args) for args in ((1, "actor"), (2, "critic"))]
    for thread in threads:
        thread.start()
    entered.wait(20)
    assert models["reference"].memory.resident_bytes
    leave.set()
    for thread in threads:
        thread.join(20)
    with expected.running(call(3, "reference")):
        assert models["reference"].compute() == 6 * FLOATS


def test_a_fetched_model_stays_while_it_works_beside_others(made):
    """Two updates that run together, both of whose models came back behind a call before them."""
    models, expected, _ = made("reward", "critic", "cost")
    expected.add("critic", 2, 1, True)
    expected.add("cost", 3, 2, True)
    critic, cost = (models[name].memory for name in ("critic", "cost"))
    with expected.running(call(1, "reward")):
        pass
    with expected.running(call(2, "critic")):
        critic.acquire()
        with expected.running(call(3, "cost")):
            assert critic.resident_bytes == critic.total_bytes
            assert cost.resident_bytes == cost.total_bytes
        assert critic.resident_bytes == critic.total_bytes
        assert not cost.resident_bytes
    assert not critic.resident_bytes


def test_a_model_that_works_is_left_alone(made):
    models, expected, _ = made("critic")
    expected.add("critic", 2, 1, True)
    with expected.running(call(1, "critic")):
        copies = models["critic"].link.copies
        assert models["critic"].compute() == 6 * FLOATS
        assert models["critic"].link.copies == copies + PARTS
