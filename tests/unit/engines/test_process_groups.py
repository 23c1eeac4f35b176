"""Gloo groups in one process."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybridflow.engines import process_groups  # its import shares the device
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.engines.time_sharing import PipelineTurn
from hybridflow.errors import WaitTimeoutError


def device_threads() -> int:
    return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))


def gloo_group() -> c10d.ProcessGroupGloo:
    return c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=20))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_share_the_thread_of_their_device():
    first = gloo_group()
    first.allreduce([torch.ones(3)]).wait()  # type: ignore[attr-defined]  by now the thread has taken its name
    threads = device_threads()
    assert threads > 0
    others = [gloo_group() for _ in range(8)]
    assert device_threads() == threads
    for group in (first, *others):
        ones = torch.ones(3)
        group.allreduce([ones]).wait()  # type: ignore[attr-defined]  the stubs lack it
        assert ones.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds sockets in /proc")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_connection_notices_that_a_machine_is_gone(monkeypatch, ranks):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(process_groups, "gloo_address", "127.0.0.2")
    process_groups._gloo_devices.cache_clear()
    store, before = dist.HashStore(), process_groups._sockets()
    try:
        with ThreadPoolExecutor(ranks) as threads:
            limit = datetime.timedelta(seconds=20)
            groups = list(threads.map(lambda rank: c10d.ProcessGroupGloo(store, rank, ranks, limit), range(ranks)))
        seen = []
        for descriptor, _ in process_groups._sockets() - before:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                seen.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert seen == [1] * (ranks * (ranks - 1))  # each rank's end of each pair
        del groups
    finally:
        process_groups._gloo_devices.cache_clear()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds sockets in /proc")
def test_connections_of_other_threads_are_left_alone(monkeypatch):
    """Those that were opened while a group waited for its members."""
    made, create = list[socket.socket](), c10d.ProcessGroupGloo.__mro__[1].__init__

    def slowly(*args):
        create(*args)
        server = socket.create_server(("127.0.0.1", 0))
        made.extend((server, socket.create_connection(server.getsockname()), server.accept()[0]))

    monkeypatch.setattr(c10d.ProcessGroupGloo.__mro__[1], "__init__", slowly)
    store, limit = dist.HashStore(), datetime.timedelta(seconds=20)
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: c10d.ProcessGroupGloo(store, rank, 2, limit), range(2)))
    numbers = {descriptor for descriptor, _ in process_groups._SharedGloo.opened}
    assert numbers
    assert numbers.isdisjoint(one.fileno() for one in made)
    for one in made:
        one.close()
    del groups


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_files_stay_as_they_are(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "file").open("w") as file:
        for _ in range(5):
            process_groups._with_socket((file.fileno(), ""), process_groups.end_waits)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def stores() -> Callable[[], dist.TCPStore]:
    """Connections to one store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)


@pytest.mark.parametrize("known", ["before", "while it waits"])
def test_a_group_is_not_formed_with_a_rank_that_is_lost(stores, known):
    groups = ProcessGroups(stores(), "actor", range(2), 0, torch.device("cpu"), 60.0)
    if known == "before":
        groups.abort()
    with ThreadPoolExecutor(1) as threads:
        formed = threads.submit(groups.everyone)
        if known != "before":
            with pytest.raises(TimeoutError):
                formed.result(0.5)
            groups.abort()
        with pytest.raises(WaitTimeoutError, match="a rank was lost before"):
            formed.result(10)


@pytest.mark.parametrize("met", [False, True], ids=["before all have met", "after"])
def test_no_rank_that_hears_of_a_loss_later_waits_for_one_that_heard_of_it(stores, met, monkeypatch):
    """Three ranks form a group, of which the last is lost. After all have met, a backend waits for them."""

    def form(size, rank, world, backend, store, *, timeout, **_):  # threads cannot have a torch world each
        return c10d.ProcessGroupGloo(store, rank, size, timeout), None

    monkeypatch.setattr(c10d, "_new_process_group_helper", form)
    ranks = [ProcessGroups(stores(), "actor", range(3), rank, torch.device("cpu"), 60.0) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        formed = [threads.submit(groups.everyone) for groups in ranks[:2]]
        if met:
            name = f"{ranks[2].full_name('computing', range(3))}/gloo"
            threads.submit(ranks[2].meeting.enter, name, 2, 3, 60.0, "[]").result(20)
        for groups, wanted in zip(ranks[:2], formed, strict=True):
            with pytest.raises(TimeoutError):
                wanted.result(0.3)
            groups.abort()
        for wanted in formed:
            with pytest.raises(WaitTimeoutError, match="a rank was lost before"):
                wanted.result(10)


@pytest.mark.skipif(not Path("/proc/self/net").exists(), reason="finds connections in /proc")
def test_other_connections_are_made_while_a_group_with_a_lost_rank_ends(stores):
    """A server with a full queue: the attempt of another thread waits, as one to a machine without an answer does."""
    groups = ProcessGroups(stores(), "actor", range(2), 0, torch.device("cpu"), 60.0)
    groups._connecting, groups._listening = True, {("127.0.0.1", 1)}
    with socket.socket() as server, ThreadPoolExecutor(2) as threads:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        with socket.create_connection(server.getsockname()):
            other = threads.submit(socket.create_connection, server.getsockname(), 20)
            while (server.getsockname()) not in {to for _, to in process_groups._attempts()}:
                pass
            ended = threads.submit(groups.abort)
            with pytest.raises(TimeoutError):
                ended.result(2 * process_groups._ATTEMPT_SECONDS)
            groups._connecting = False
            ended.result(10)
            server.accept()[0].close()
            other.result(10).close()


def test_an_error_elsewhere_reaches_an_update_that_has_computed():
    turn = PipelineTurn()
    turn.announce([2], 1.0)
    assert turn.settle() is None
    error = LookupError("a backward of the other model")
    turn.abandon(error)
    turn.all_done()
    assert turn.settle() is error
