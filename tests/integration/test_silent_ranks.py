"""A rank that does not answer is named, whoever waits for it: by errors, and on the console while a wait is long."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.cluster import host_monitor, liveness
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import RewardError, WaitTimeoutError, WorkerError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO, ONE_TO_ALL

RANKS = 4


class Trainer(hf.Worker):
    """Every update is a collective, as a step is."""

    role = "trainer"

    def __init__(self) -> None:
        self.context.groups.timeout = 2.0

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def update(self, batch, busy=None):
        if self.context.rank == busy:
            time.sleep(8.0)
        dist.all_reduce(torch.ones(1), group=self.context.groups.everyone())
        return batch

    @register(ONE_TO_ALL)
    def patient(self):
        self.context.groups.timeout = 600.0

    @register(DP_PROTO, reads=("x",))
    def many_updates(self, batch, slow, seconds):
        """Rank `slow` takes twice the time of its peers in every step."""
        end = time.monotonic() + seconds
        stop = torch.zeros(1)
        while not stop:
            time.sleep(0.4 if self.context.rank == slow else 0.2)
            stop.fill_(time.monotonic() > end)
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=self.context.groups.everyone())

    @register(DP_PROTO, reads=("x",))
    def fails(self, batch):
        if self.context.rank == 2:
            raise RewardError("gloo/ and NCCL are words of this message")

    @register(ONE_TO_ALL)
    def pid(self):
        return os.getpid()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 1.0)


@pytest.fixture
def batch(cluster, pool, settle):
    yield BatchRef.from_batch(hf.Batch({"x": torch.arange(8.0)}))
    settle()


@contextlib.contextmanager
def stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def names(error: BaseException, rank: int) -> None:
    assert isinstance(error, WorkerError | WaitTimeoutError)
    text = str(error).partition("\n")[0]
    assert f"rank {rank}" in text, text
    assert not any(f"rank {other}" in text for other in range(RANKS) if other != rank), text
    assert "no answer" in text
    if isinstance(error, WorkerError):
        assert (error.role, error.rank) == ("trainer", rank)
        assert isinstance(error, TimeoutError)


def stacks_of(error: BaseException) -> str:
    """The file of stacks that an error names."""
    path = str(error).partition("\n")[0].partition("Stacks of its processes: ")[2]
    assert Path(path).name.startswith("stacks-trainer.")
    return Path(path).read_text()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_stopped_rank_is_named_by_errors_and_on_the_console(pool, place, batch, rank, monkeypatch, caplog):
    trainer = place(Trainer, pool, name="trainer")
    if rank:  # with rank 0 it is the first collective, for which the process group is made
        trainer.update(batch).get()
    pids = trainer.pid().get()
    monkeypatch.setattr(liveness, "NOTICE_SECONDS", 0.5)
    with caplog.at_level(logging.WARNING, "hybridflow"), stopped(pids[rank]), pytest.raises(WorkerError) as caught:
        trainer.update(batch).get()
    names(caught.value, rank)
    assert caught.value.node == socket.gethostname()
    stacks = stacks_of(caught.value)
    parts = stacks.split("=" * 16)[1:]
    assert [f"trainer.update on rank {other}" in part for other, part in enumerate(parts)] == [True] * RANKS
    assert ["no answer from its process" in part for part in parts] == [other == rank for other in range(RANKS)]
    assert all("thread liveness" in part for other, part in enumerate(parts) if other != rank)
    said = caplog.records[0].getMessage()
    assert re.match(rf"waited \d+ s so far for trainer\.update \(rank {rank}: no answer", said), said


def test_a_stopped_rank_is_named_where_ranks_agree_on_their_inputs(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    good = trainer.update(batch)
    good.get()
    trainer.update(good).get()
    with stopped(trainer.pid().get()[0]), pytest.raises(WaitTimeoutError) as caught:
        trainer.update(good).get(timeout=2.0)
    names(caught.value, 0)
    assert "member.py" in stacks_of(caught.value)  # where its peers wait


def test_stacks_are_in_the_run_directory_and_a_full_one_hides_no_error(pool, place, batch, cluster, settle, tmp_path):
    trainer = place(Trainer, pool, name="trainer")
    trainer.update(batch).get()
    for directory in (tmp_path, Path("/dev/full")):
        cluster.run_directory = directory
        try:
            with stopped(trainer.pid().get()[3]), pytest.raises(WorkerError) as caught:
                trainer.update(batch).get()
        finally:
            cluster.run_directory = None
        names(caught.value, 3)
        settle()
    [file] = tmp_path.iterdir()
    assert "no answer from its process" in file.read_text()


def test_a_stopped_rank_is_named_by_a_loop_that_waits_for_its_iteration(pool, place, batch, cluster):
    trainer = place(Trainer, pool, name="trainer")
    trainer.update(batch).get()
    with stopped(trainer.pid().get()[1]):
        trainer.update(batch)
        with pytest.raises(WorkerError) as caught:
            cluster.iterations.drain()
    names(caught.value, 1)


def test_a_wait_without_result_names_only_who_is_late(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    pids = trainer.pid().get()
    with stopped(pids[2]):
        with pytest.raises(WaitTimeoutError) as caught:
            trainer.pid().get(timeout=1.0)
        names(caught.value, 2)
    assert trainer.pid().get(timeout=60.0) == pids


def test_a_rank_that_works_on_is_named_with_the_line_that_it_is_at(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    trainer.update(batch).get()
    with pytest.raises(WorkerError) as caught:
        trainer.update(batch, busy=1).get()
    assert caught.value.rank == 1
    assert f"rank 1 (node {socket.gethostname()}) did not take part (at integration/" in str(caught.value)
    assert "in update, in trainer.update)" in str(caught.value)


def test_an_error_of_the_workers_own_is_no_fault_of_a_peer(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    with pytest.raises(RewardError) as caught:
        trainer.fails(batch).get()
    assert not isinstance(caught.value, TimeoutError)


def test_a_slow_rank_is_named_while_the_call_runs(pool, place, batch, monkeypatch, caplog):
    """Samples are taken every 0.2 s here, and a rank is named after 4 s of them."""
    monkeypatch.setattr(host_monitor, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(host_monitor, "LEAST_SECONDS", 4.0)
    trainer = place(Trainer, pool, name="trainer")
    with caplog.at_level(logging.WARNING, "hybridflow.cluster.host_monitor"):
        trainer.many_updates(batch, slow=2, seconds=10.0).get()
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith("trainer is slow: in its calls of the last ")
    assert f"waited for rank 2 (node {socket.gethostname()}) for " in said
    assert "last at integration/test_silent_ranks.py:" in said
    assert said.endswith("in many_updates, in trainer.many_updates.")


def test_a_stopped_host_is_named_although_no_call_waits_for_it(pool, place, settle, monkeypatch, caplog):
    """Its peers may wait for it through other groups' calls, of which it is no part."""
    monkeypatch.setattr(host_monitor, "SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(host_monitor, "SILENT_SECONDS", 1.0)
    trainer = place(Trainer, pool, name="trainer")
    pids = trainer.pid().get()
    end = time.monotonic() + 60.0
    with caplog.at_level(logging.WARNING, "hybridflow.cluster.host_monitor"), stopped(pids[1]):
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.05)
    [record] = caplog.records
    assert record.getMessage().startswith(f"host 1 of pool {pool.name} on node ")
    assert "trainer (rank 1)" in record.getMessage()
    assert "has not answered for " in record.getMessage()
    settle()


@pytest.mark.parametrize("where", ["control_tree", "collective"])
def test_peers_of_a_lost_rank_do_not_wait_for_it(cluster, batch, where):
    """Its machine is silent: no connection ends, and their deadlines are far."""
    monitor = cluster.backend.monitor
    with hf.ResourcePool([2]) as own:
        trainer = hf.place(Trainer, own, name="trainer")
        trainer.patient().get()
        good, hosts = trainer.update(batch), trainer.ranks.hosts
        good.get()
        pid = trainer.pid().get()[1]

        def waits() -> bool:
            doing = liveness.ask(hosts[0].address)
            return isinstance(doing, liveness.Doing) and doing.waiting

        with contextlib.ExitStack() as stack:
            if where == "control_tree":
                stack.enter_context(stopped(pid))
            trainer.update(good, busy=1)
            until(waits)
            if where == "collective":
                stack.enter_context(stopped(pid))
            monitor._lose(monitor._watched[hosts[1].address])
            until(lambda: str(liveness.ask(hosts[0].address)) == "idle")


def until(found: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)
