"""What a driver sees when something fails: the original error, quickly, on every rank, and then work that goes on."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.cluster.backend import Deadlines
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future
from hybridflow.cluster.host_monitor import HostMonitor
from hybridflow.cluster.incidents import LostHost
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.errors import (
    BatchError,
    ConfigError,
    HostLostError,
    MissingColumnError,
    PlacementError,
    RewardError,
    WaitTimeoutError,
    WorkerError,
)
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, ONE_TO_ONE

NODE = socket.gethostname()
WITHIN = 5.0
"""Seconds: issue 2, an error reaches every rank."""


class Vector(hf.Worker):
    """Four numbers, whole on every rank."""

    def __init__(self) -> None:
        self.vector = torch.zeros(4)

    @classmethod
    def worker_spec(cls, settings):
        def layout(grid):
            return Layout({"vector": (4,)}, grid.size, lambda rank: [Region(Box("vector", (0,), (4,)), "vector", (0,))])

        return hf.WorkerSpec(layout=layout)

    def weights_storage(self):
        return {"vector": self.vector}

    @register(ONE_TO_ALL)
    def doze(self, seconds):
        time.sleep(seconds)
        return os.getpid()


class OddError(Exception):
    """Cannot be pickled: its constructor wants more than its arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.lock = threading.Lock()


class Source:
    """Makes rows that the others read, and fails on request."""

    role = "source"

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def good(self, batch):
        return batch

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def bad(self, batch, rank=1):
        if self.context.rank == rank:
            raise ValueError("the source is dry")
        return batch

    @register(DP_PROTO, reads=("x",), writes=("score",))
    def score(self, batch, kind="reward"):
        if self.context.rank == 1:
            raise {"reward": RewardError("no score for row 5"), "odd": OddError(1, 2)}[kind]
        return hf.Batch({"score": batch["x"]})

    @register(DP_PROTO, reads=("x",), writes=("score",))
    def wrong_result(self, batch, kind):
        return {
            "type": {"score": 1},
            "column": hf.Batch({"scores": batch["x"]}),
            "rows": hf.Batch({"score": batch["x"].repeat(2)}),
        }[kind]

    @register(ONE_TO_ONE)
    def unpicklable_result(self):
        return threading.Lock()

    @register(ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def late(self, batch):
        time.sleep(600.0)

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def die(self, batch):
        if self.context.rank == 1:
            os._exit(3)
        return batch

    @register(ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(ONE_TO_ALL)
    def dies_in_a_collective(self):
        if self.context.rank == 1:
            os._exit(3)
        dist.all_reduce(torch.ones(1), group=self.context.groups.everyone())

    @register(ALL_TO_ALL)
    def lonely(self, join_in):
        if not join_in:
            raise RuntimeError("rank 1 has better things to do")
        dist.all_reduce(torch.ones(1), group=self.context.groups.everyone())


class Trainer:
    """Every method is a collective, as an update is."""

    role = "trainer"

    def __init__(self) -> None:
        self.steps = 0

    @register(DP_PROTO, reads=("x",))
    def update(self, batch):
        self.steps += 1
        total = torch.stack([batch["x"].sum(), torch.tensor(1.0)])
        dist.all_reduce(total, group=self.context.groups.everyone())
        return {"sum": total[0].item(), "ranks": total[1].item(), "steps": float(self.steps)}


class Unbuildable:
    def __init__(self, where: str) -> None:
        if self.context.rank == 1:
            raise MemoryError(f"no room {where}")

    @register(ONE_TO_ALL)
    def nothing(self): ...


class Sleeper:
    def __init__(self) -> None:
        if self.context.rank == 1:
            time.sleep(600.0)

    @register(ONE_TO_ALL)
    def nothing(self): ...


@pytest.fixture(scope="module")
def source(keep, pool):
    return keep(Source, pool, name="source")


@pytest.fixture(scope="module")
def trainer(keep, pool):
    return keep(Trainer, pool, name="trainer")


@pytest.fixture
def batch(cluster):
    yield BatchRef.from_batch(hf.Batch({"x": torch.arange(8.0)}))
    settled = False
    while not settled:  # errors of this test must not surface in the next one
        try:
            cluster.iterations.drain()
            settled = True
        except WorkerError:
            continue


def error_of(result, timeout: float = 60.0) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        result.get(timeout=timeout)
    return caught.value


# Failed inputs


def test_one_failed_input_reaches_every_rank_and_the_next_call_works(source, trainer, batch, cluster):
    """One rank cannot read its rows, while calls with collectives are queued behind it (issue 2)."""
    trainer.update(batch).get()
    start = time.monotonic()
    broken = source.bad(batch)
    queued = [trainer.update(broken) for _ in range(3)]
    after = trainer.update(batch)
    for future in queued:
        for part in future.outputs:
            error = error_of(type(future)((part,)))
            assert f"source.bad failed on rank 1 (node {NODE}), rows 2..3: ValueError: the source is dry" in str(error)
            assert (error.role, error.rank, error.method) == ("source", 1, "bad")
            assert (error.node, error.step) == (NODE, None)
    assert time.monotonic() - start < WITHIN
    metrics = after.get()
    assert (metrics["sum"], metrics["ranks"]) == (28.0, 4.0)
    assert trainer.update(batch).get()["steps"] == metrics["steps"] + 1


def test_failed_updates_leave_all_ranks_at_the_same_step(source, trainer, batch):
    """The calls that were refused ran nowhere: no rank is an update ahead of its peers."""
    before = trainer.update(batch).get()["steps"]
    trainer.update(source.bad(batch, rank=3))
    trainer.update(source.bad(batch, rank=0))
    after = trainer.update(batch)
    assert {Future((part,)).get()["steps"] for part in after.outputs} == {before + 1}


def test_an_error_travels_through_a_chain_of_calls(source, batch):
    out = batch
    for _ in range(5):
        out = source.good(source.bad(out))
    assert "source.bad failed on rank 1" in str(error_of(out))
    assert source.good(batch).get()["x"].tolist() == list(range(8))


def test_a_failed_call_is_told_at_the_driver_and_its_other_rows_can_be_used(source, batch):
    """Whichever rows the driver brings home; a call that reads none of the lost rows runs."""
    broken = source.bad(batch)
    assert source.good(broken[4:8]).get()["x"].tolist() == [4, 5, 6, 7]
    assert "dry" in str(error_of(broken[1:3]))
    assert "dry" in str(error_of(broken[0:2]))


# Errors at the driver


def test_an_error_has_the_class_of_its_cause(source, batch):
    """`except RewardError` catches it, wherever it was raised; so does `except WorkerError`."""
    for result in (source.score(batch), source.good(source.score(batch).rename(score="x"))):
        error = error_of(result)
        assert isinstance(error, RewardError)
        assert isinstance(error.cause, RewardError)
        assert (error.role, error.rank, error.method) == ("source", 1, "score")
        assert "raise {" in error.remote_traceback
        assert "Traceback (most recent call last)" in str(error)
        assert "RewardError: no score for row 5" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert isinstance(again, RewardError)
        assert str(again) == str(error)


def test_an_exception_that_cannot_be_pickled_keeps_its_text(source, batch):
    error = error_of(source.score(batch, kind="odd"))
    assert error.cause is None
    assert f"source.score failed on rank 1 (node {NODE}), rows 2..3: OddError: 1 and 2" in str(error)


def test_a_result_that_cannot_be_pickled_names_the_call(source):
    error = error_of(source.unpicklable_result())
    assert (
        f"source.unpicklable_result on rank 0 (node {NODE}) could not take its arguments or give back its result"
        in str(error)
    )
    assert "lock" in str(error)
    assert source.sleep(0).get() == ["slept"] * 4


@pytest.mark.parametrize(
    ("kind", "cls", "message"),
    [
        ("type", BatchError, r"writes \('score',\) and must return a Batch, got dict"),
        ("column", MissingColumnError, r"declares the columns \['score'\], but returned only \['scores'\]"),
        ("rows", BatchError, "returned 4 rows where 2 were due. Declare @register"),
    ],
)
def test_results_that_do_not_fit_the_declaration(source, batch, kind, cls, message):
    with pytest.raises(cls, match=message) as caught:
        source.wrong_result(batch, kind).get()
    assert isinstance(caught.value, WorkerError)


def test_arguments_that_cannot_be_sent_are_refused_on_the_driver(source):
    with pytest.raises(ConfigError, match=r"source.sleep: seconds=<.*> cannot be sent to a host: cannot pickle .*lock"):
        source.sleep(threading.Lock())
    assert source.sleep(0).get() == ["slept"] * 4


def test_waiting_has_a_limit(source):
    start = time.monotonic()
    slow = source.sleep(2.0)
    with pytest.raises(WaitTimeoutError, match=r"waited 0.1 s for source.sleep \(ranks 0, .*\) without a result"):
        slow.get(timeout=0.1)
    assert time.monotonic() - start < 2.0
    assert not slow.done()
    assert slow.get(timeout=60) == ["slept"] * 4
    assert slow.done()


def test_a_rank_that_cannot_be_built_is_an_error_of_the_placement(pool, place, source):
    with pytest.raises(
        WorkerError, match=r"unbuildable.__init__ failed on rank 1 \(node .*\): MemoryError: no room here"
    ):
        hf.place(Unbuildable, pool, where="here")
    assert "unbuildable" not in pool.session.groups
    assert source.sleep(0).get(timeout=120) == ["slept"] * 4


# Hosts that die or hang


@pytest.fixture(scope="module")
def doomed(cluster):
    pool = hf.ResourcePool([2])
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def doomed_groups(doomed):
    here, there = (hf.place(Vector, doomed, name=name) for name in ("here", "there"))
    hf.sync_weights(here, there).get()
    return hf.place(Source, doomed, name="doomed"), hf.place(Trainer, doomed, name="doomed_trainer"), here, there


def test_a_failure_does_not_wait_for_peers_that_wait_for_it(doomed, doomed_groups):
    """Rank 0 is inside a collective that rank 1 never joins: the error does not wait for its timeout."""
    source, *_ = doomed_groups
    start = time.monotonic()
    error = error_of(source.lonely([True, False]))
    assert "rank 1 has better things to do" in str(error)
    assert time.monotonic() - start < WITHIN


def test_a_dead_host_is_named_and_a_new_pool_works(doomed, doomed_groups, cluster, batch):
    source, trainer, here, there = doomed_groups
    start = time.monotonic()
    error = error_of(source.die(batch))
    assert isinstance(error, HostLostError)
    assert f"doomed.die on rank 1 (node {NODE}) was lost: its host process died" in str(error)
    assert (error.role, error.rank, error.method, error.node) == ("doomed", 1, "die", NODE)
    with pytest.raises(HostLostError, match=r"doomed_trainer.update"):
        trainer.update(batch).get()
    assert time.monotonic() - start < WITHIN
    for _ in range(3):  # over the old link, and over new ones, which cannot be opened
        with pytest.raises(HostLostError, match=r"here.sync_weights on rank 1 .* was lost: its host process died"):
            hf.sync_weights(here, there).get()
    assert [host.node for host in cluster.backend.lost(source.ranks.hosts)] == [0]
    assert [(lost.pool, lost.rank, lost.node) for lost in cluster.lost_hosts] == [(doomed.name, 1, NODE)]
    doomed.close()
    assert not cluster.lost_hosts
    doomed.close()
    assert repr(doomed) == "ResourcePool([2], closed)"
    with pytest.raises(PlacementError, match="doomed is closed with its pool: place it again"):
        source.good(batch)
    with pytest.raises(PlacementError, match="this pool is closed: make a new ResourcePool"):
        hf.place(Source, doomed)
    with pytest.raises(PlacementError, match="this pool is closed"):
        doomed.events()
    assert doomed not in cluster.pools
    assert not {"doomed", "doomed_trainer"} & set(cluster.groups)
    with hf.ResourcePool([1, 1]) as fresh:
        assert fresh.nodes == [0, 1]
        again = hf.place(Source, fresh, name="doomed")
        assert again.good(batch).get()["x"].tolist() == list(range(8))
    with pytest.raises(PlacementError, match="closed"):
        fresh.check_open()


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "not_yet_watched"])
def test_the_death_of_an_idle_host_is_logged_and_ends_the_next_call(
    watched, cluster, batch, settle, caplog, monkeypatch
):
    """A notebook between two cells: nothing runs when the process is killed, maybe soon after its start."""
    connect, killed = HostMonitor._connect, threading.Event()

    def late(monitor, selector, host):
        assert host.rank == 0 or killed.wait(60)
        connect(monitor, selector, host)

    if not watched:
        monkeypatch.setattr(HostMonitor, "_connect", late)
    with hf.ResourcePool([2]) as pool:
        source = hf.place(Source, pool, name="idle_source")
        pids = source.pid().get()
        with caplog.at_level(logging.ERROR, "hybridflow"):
            os.kill(pids[1], signal.SIGKILL)
            killed.set()
            deadline = time.monotonic() + 60
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
        [record] = caplog.records
        said = record.getMessage()
        assert f"host 1 of pool {pool.name} on node {NODE} is lost" in said
        assert "It held idle_source (rank 1), whose calls fail" in said
        [lost] = cluster.lost_hosts
        assert time.time() - lost.at < WITHIN
        with pytest.raises(HostLostError, match=r"idle_source.good on rank 1 .* was lost") as caught:
            source.good(batch)  # raised by the call: nothing is issued
        assert (caught.value.rank, caught.value.node) == (1, NODE)
        assert cluster.backend.lost(source.ranks.hosts) == [source.ranks.hosts[1]]
        with pytest.raises(HostLostError):
            pool.events()
    assert not cluster.lost_hosts


def test_a_host_lost_while_a_link_is_opened_is_not_waited_for(cluster, settle):
    """Its peer hears of it while it computes, before its own end is open, and runs its next calls at once."""
    with hf.ResourcePool([1]) as pool, hf.ResourcePool([1]) as other:
        stays, leaves = hf.place(Vector, pool, name="stays"), hf.place(Vector, other, name="leaves")
        [pid] = leaves.doze(0).get()
        stays.doze(4)
        moved = hf.sync_weights(stays, leaves)
        time.sleep(1)  # its end is open, and waits
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(HostLostError, match=r"leaves.sync_weights on rank 0 .* was lost"):
            moved.get()
        stays.doze(0).get(timeout=20)
        settle()


def test_a_host_that_dies_inside_a_collective_is_named_instead_of_its_peers(cluster, batch, settle):
    with hf.ResourcePool([2]) as pool:
        trainer, source = (hf.place(cls, pool, name=f"dying_{cls.role}") for cls in (Trainer, Source))
        trainer.update(batch).get()
        cluster.iterations.begin()
        cluster.iterations.begin()
        with pytest.raises(HostLostError) as caught:
            source.dies_in_a_collective().get()
        assert (caught.value.role, caught.value.rank, caught.value.step) == ("dying_source", 1, 2)
        assert f"rank 1 (node {NODE}, step 2)" in str(caught.value)
        settle()


def test_a_lost_writer_of_inputs_is_named_while_their_reader_waits(cluster, trainer, batch, settle):
    """Ray does not know for up to a minute that a machine vanished, and who waits for its rows has timeouts."""
    with hf.ResourcePool([2]) as pool:
        source = hf.place(Source, pool, name="far")
        kept = source.good(batch)
        kept.get()
        result = trainer.update(source.late(kept))
        cluster.iterations.incidents.lost[pool.hosts[1].address] = LostHost(pool.name, 1, NODE, time.time())
        with pytest.raises(HostLostError, match=r"far.late on rank 1 .* was lost"):
            result.get(timeout=60.0)
        with pytest.raises(HostLostError, match=r"far.late on rank 1 .* was lost"):  # a loop that reads no result
            cluster.iterations.drain()
    settle()


def test_a_lost_input_of_one_rank_is_a_failure_of_all_and_the_next_call_works(cluster, trainer, batch, settle):
    """Ray itself would skip the call on this rank, and the others would wait for it."""
    with hf.ResourcePool([2]) as pool:
        source = hf.place(Source, pool, name="near")
        source.good(batch).get()
        trainer.update(batch).get()
        before = cluster.backend.calls(trainer.ranks)
        start, result = time.monotonic(), trainer.update(source.die(batch))
        with pytest.raises(HostLostError, match=r"near.die on rank 1 .* was lost: its host process died"):
            result.get()
        assert cluster.backend.calls(trainer.ranks) == before
        assert time.monotonic() - start < WITHIN
        trainer.update(batch).get()
    settle()


def test_an_error_names_the_step_of_the_loop(source, batch, cluster, settle):
    for step in (1, 2):
        cluster.iterations.begin()
        error = error_of(source.good(source.bad(batch)))
        assert error.step == step
        assert f"source.bad failed on rank 1 (node {NODE}, step {step}), rows" in str(error)
    settle()
    assert error_of(source.bad(batch)).step is None


def test_pools_that_are_closed_are_not_lost(cluster, caplog):
    with caplog.at_level(logging.WARNING, "hybridflow"), hf.ResourcePool([1]) as pool:
        hf.place(Vector, pool, name="short")
    time.sleep(1.0)
    assert not caplog.records
    assert not cluster.lost_hosts


def test_building_has_a_limit_and_names_who_does_not_answer(cluster, batch, monkeypatch):
    """One rank never ends its __init__: the pool can be closed, and the next one works."""
    with hf.ResourcePool([2]) as doomed:
        before = hf.place(Source, doomed, name="before")
        monkeypatch.setattr(cluster.backend, "deadlines", Deadlines(peers=5.0))
        monkeypatch.setattr(cluster.iterations, "timeout", 5.0)
        with pytest.raises(WaitTimeoutError, match=r"waited 5 s for sleeper.__init__ \(rank 1: at .* in __init__,"):
            hf.place(Sleeper, doomed)
        assert "sleeper" not in cluster.groups
        start = time.monotonic()
        before.close()
        assert time.monotonic() - start < 30.0
        monkeypatch.undo()
    with hf.ResourcePool([2]) as fresh:
        assert hf.place(Source, fresh, name="after").good(batch).get()["x"].tolist() == list(range(8))
