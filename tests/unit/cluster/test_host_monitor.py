"""HostMonitor: machines that cannot be reached for a moment, and who learns of a loss."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cluster import host_monitor
from hybridflow.cluster.backend import HostProcess, RankCall
from hybridflow.cluster.host_monitor import WINDOW_SECONDS, HostMonitor, Sample, SlowRanks, sample, slow
from hybridflow.cluster.incidents import Incidents
from hybridflow.cluster.liveness import Doing, LivenessServer

TOLERATE = 2.0


@pytest.fixture
def addresses(monkeypatch) -> dict[str, Any]:
    """What `ray` knows of hosts: the addresses of those that have started."""
    known: dict[str, Any] = {}
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        wait=lambda refs, **_: ([ref for ref in refs if ref in known], []),
        get=lambda ref, **_: known[ref],
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(host_monitor, "ray", fake)
    return known


@pytest.fixture
def monitor() -> Iterator[HostMonitor]:
    found = HostMonitor(Incidents(), TOLERATE)
    yield found
    found.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., LivenessServer]]:
    servers: list[LivenessServer] = []

    def start(*lost) -> LivenessServer:
        servers.append(LivenessServer("127.0.0.1", *lost))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def until(met: Callable[[], object], seconds: float = 15.0) -> bool:
    end = time.monotonic() + seconds
    while not met() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met())


def test_a_machine_without_a_route_is_lost_after_the_time_that_is_tolerated(monkeypatch, addresses, monitor, serve):
    attempts: list[float] = []

    class Unreachable(socket.socket):
        def connect_ex(self, address: Any, /) -> int:
            attempts.append(time.monotonic())
            return errno.ENETUNREACH if len(attempts) > 1 else super().connect_ex(address)

    def new_socket(host: str) -> socket.socket:
        made = Unreachable(socket.AF_INET)
        made.setblocking(False)
        return made

    monkeypatch.setattr(host_monitor, "_new_socket", new_socket)
    server, lost = serve(), monitor._incidents.lost
    addresses["a"] = *server.address, server.key
    monitor.watch("train", [HostProcess(None, "a")])
    assert until(lambda: monitor._watched["a"].seen)
    server.close()
    assert until(lambda: lost)
    assert attempts[-1] - attempts[1] >= TOLERATE - 1.0
    assert 3 <= len(attempts) <= 2 + TOLERATE / host_monitor._TICK_SECONDS + 1  # with a pause between them


def test_a_host_that_connects_later_learns_of_earlier_losses(addresses, monitor, serve):
    first, heard = serve(), list[tuple[str, int, float]]()
    second = serve(lambda *lost: heard.append(lost))
    addresses["a"] = *first.address, first.key
    monitor.watch("train", [HostProcess(None, "a"), HostProcess(None, "b")])
    assert until(lambda: monitor._watched["a"].seen)
    first.close()
    assert until(lambda: monitor._incidents.lost)
    assert not heard
    addresses["b"] = *second.address, second.key
    assert until(lambda: heard)
    assert heard == [("train", 0, lost.at) for lost in monitor._incidents.lost.values()]


def test_a_host_learns_of_a_call_that_was_issued_to_it(addresses, monitor, serve):
    heard = list[tuple[str, int, int, bool]]()
    server, host = serve(lambda *_: None, lambda *issued: heard.append(issued)), HostProcess(None, "a")
    call = RankCall(7, "critic", "update_critic", {}, (), phase="training")
    monitor.announce(host, call, 5)  # a host that is not known, and one that has not started
    monitor.watch("train", [host])
    monitor.announce(host, call, 5)
    addresses["a"] = *server.address, server.key
    assert until(lambda: monitor._watched["a"].open)
    monitor.announce(host, call, 6)
    assert until(lambda: heard)
    assert heard == [("critic", 7, 6, True)]


CALL = "actor.update"
WAITS, WORKS, IDLE = Doing(CALL, "x.py:1 in f", True), Doing(CALL, "own.py:12 in step", False), Doing()


def samples(working: Sequence[set[int]], every: float = 2.0) -> list[Sample]:
    return [Sample(every * i, CALL, dict.fromkeys(ranks, "here")) for i, ranks in enumerate(working)]


@pytest.mark.parametrize(
    ("doing", "working"),
    [
        ([WAITS, WORKS, WAITS, WAITS], {1: "own.py:12 in step"}),
        ([WAITS, None, WAITS, WAITS], {1: "no answer from its process"}),
        ([WORKS, WORKS, WAITS, WAITS], {}),  # half of them is the pipeline of any training step
        ([WORKS, WORKS, WORKS, WORKS], {}),
        ([WAITS, WAITS, WAITS, WAITS], {}),
        ([IDLE, WORKS, IDLE, IDLE], {}),  # nobody waits for it
        ([IDLE, WORKS, WAITS, IDLE], {1: "own.py:12 in step"}),
        ([WAITS, Doing("critic.update", "y.py:1 in g"), WAITS, WAITS], {}),  # its host is busy with another group
    ],
)
def test_a_sample_has_the_ranks_that_the_others_wait_for(doing, working):
    found = sample("actor", 5.0, doing)
    assert found == Sample(5.0, CALL, working)


def test_idle_groups_give_no_samples():
    assert sample("actor", 0.0, [IDLE, IDLE]) is None
    assert sample("actor", 0.0, [None, None]) is None
    assert sample("act", 0.0, [WAITS, WORKS]) is None


def test_one_rank_that_stands_out_is_slow():
    half = [{2} if i % 2 else set() for i in range(20)]
    assert slow(samples(half), 4) == {2: 0.5}
    assert slow(samples(half[:10]), 4) == {}  # 18 s
    assert slow(samples([{2} if i % 10 == 0 else set() for i in range(20)]), 4) == {}  # a tenth of the time


def test_ranks_that_take_turns_are_not_slow():
    assert slow(samples([{i % 2} for i in range(30)]), 2) == {}
    assert slow(samples([{i % 4} for i in range(30)]), 4) == {}
    assert slow(samples([{0} if i % 5 else {1} for i in range(30)]), 2) == {0: 0.8}


@given(st.lists(st.sets(st.integers(0, 7)), max_size=40), st.integers(8, 16))
def test_few_are_named_and_each_has_its_share(working, ranks):
    found = slow(samples(working), ranks)
    assert len(found) <= max(1, ranks // 4)
    for rank, share in found.items():
        assert share == sum(rank in at for at in working) / len(working) >= 0.2


def test_a_notice_names_rank_node_share_and_line_once_a_minute():
    ranks, said = SlowRanks("actor", ["a", "b", "", "d"]), []
    for i in range(91):  # three minutes
        ranks.add(2.0 * i, [WAITS, WORKS if i % 4 else WAITS, WAITS, WAITS])
        if text := ranks.notice(2.0 * i):
            said.append((2.0 * i, text))
    assert len(said) == 3
    assert all(b - a >= WINDOW_SECONDS for (a, _), (b, _) in pairwise(said))
    assert "rank 1 (node b) for 75% of the time, last at own.py:12 in step, in actor.update" in said[0][1]
    assert not any(name in text for _, text in said for name in ("rank 0", "rank 2", "rank 3"))
