"""A rank that does not answer is named, whoever waits for it: by errors, and on the console while a wait is long."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.cluster import liveness
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import RewardError, WaitTimeoutError, WorkerError
from hybridflow.protocols import DP_PROTO, ONE_TO_ALL, register

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


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_stopped_rank_is_named_by_errors_and_on_the_console(pool, place, batch, rank, monkeypatch, caplog):
    trainer = place(Trainer, pool, name="trainer")
    if rank:  # with rank 0 it is the first collective, for which the process group is made
        trainer.update(batch).get()
    pids = trainer.pid().get()
    monkeypatch.setattr(liveness, "NOTICE_SECONDS", 0.5)
    with caplog.at_level(logging.WARNING, "hybridflow"), stopped(pids[rank]), pytest.raises(WorkerError) as caught:
        trainer.update(batch).get()
    names(caught.value, rank)
    assert f"waited 1 s so far for trainer.update (rank {rank}: no answer" in caplog.records[0].getMessage()


def test_a_stopped_rank_is_named_where_ranks_agree_on_their_inputs(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    good = trainer.update(batch)
    good.get()
    trainer.update(good).get()
    with stopped(trainer.pid().get()[0]), pytest.raises(WaitTimeoutError) as caught:
        trainer.update(good).get(timeout=2.0)
    names(caught.value, 0)


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
    assert "rank 1 did not take part (at integration/test_silent_ranks.py:" in str(caught.value)
    assert "in update, in trainer.update)" in str(caught.value)


def test_an_error_of_the_workers_own_is_no_fault_of_a_peer(pool, place, batch):
    trainer = place(Trainer, pool, name="trainer")
    with pytest.raises(RewardError) as caught:
        trainer.fails(batch).get()
    assert not isinstance(caught.value, TimeoutError)
