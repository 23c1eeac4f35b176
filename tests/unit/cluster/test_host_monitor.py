"""HostMonitor: machines that cannot be reached for a moment, and who learns of a loss."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from hybridflow.cluster import host_monitor
from hybridflow.cluster.backend import HostProcess, RankCall
from hybridflow.cluster.host_monitor import HostMonitor
from hybridflow.cluster.incidents import Incidents
from hybridflow.cluster.liveness import LivenessServer

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
