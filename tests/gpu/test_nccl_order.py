"""NCCL's order: an operation waits for its stream, for its communicator and for all ranks, and the host does not."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Task = Callable[[int, dist.Store, list[dist.ProcessGroup]], object]


def run(*tasks: Task, values: dict[str, str] | None = None, **environment: str) -> list[tuple[int, list[object]]]:
    """(exit code, results) of each rank, which runs the tasks in turn; an error is returned as its text.

    A task gets its rank, a store, which has `values`, and two process groups of both ranks.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (values or {}).items():
        store.set(name, value)
    context = mp.get_context("spawn")
    queues = [context.SimpleQueue() for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        ranks = [context.Process(target=work, args=(rank, store.port, tasks, queues[rank])) for rank in range(2)]
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join()
    return [(rank.exitcode or 0, [] if queue.empty() else queue.get()) for rank, queue in zip(ranks, queues)]


def work(rank: int, port: int, tasks: tuple[Task, ...], queue: Any) -> None:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the tests end what hangs
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=200)
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("world", store), rank=rank, world_size=2, timeout=timeout, device_id=rank
    )
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    try:
        queue.put([task(rank, store, groups) for task in tasks])
    except Exception:
        queue.put([traceback.format_exc()])
    finally:
        os._exit(0)


def calls_return_at_once(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    """Rank 1 comes only when rank 0's calls have returned: a collective, a wait of its stream, another collective."""
    x = torch.full((4,), rank + 1.0, device="cuda")
    if rank == 1:
        store.get("rank 0 has called")
    dist.all_reduce(x, group=groups[0])
    dist.all_reduce(x, group=groups[1])
    done = torch.cuda.Event()
    done.record()
    early = done.query()
    if rank == 0:
        store.set("rank 0 has called", "1")
    return (early if rank == 0 else False), x.tolist()


def messages_both_ways(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    sent, received = torch.full((4,), rank + 1.0, device="cuda"), torch.zeros(4, device="cuda")
    pair = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()
    return received.tolist()


def orders_that_differ(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    """Each rank's second collective waits for its first, and the ranks disagree which is first."""
    x = torch.ones(4, device="cuda")
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    return "no deadlock"


def operations_that_differ(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    x = torch.ones(4, device="cuda")
    if rank == 0:
        dist.all_reduce(x, group=groups[0])
    else:
        dist.broadcast(x, 0, group=groups[0])
    torch.cuda.synchronize()
    return "done"


def an_abort(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    """Rank 1 never comes; another thread of rank 0 aborts the group that its host waits for."""
    if rank == 1:
        store.get("rank 0 goes on")
        return None
    x = torch.ones(4, device="cuda")
    work = dist.all_reduce(x, group=groups[0], async_op=True)
    threading.Timer(1.0, groups[0]._get_backend(x.device).abort).start()
    began = time.monotonic()
    work.wait()
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    y = torch.ones(4, device="cuda") * 2  # the device works on
    store.set("rank 0 goes on", "1")
    return waited > 0.5, y.tolist()


pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_the_host_does_not_wait_in_calls_and_an_abort_releases_it():
    found = run(calls_return_at_once, messages_both_ways, an_abort)
    assert found == [
        (0, [(False, [6.0] * 4), [2.0] * 4, (True, [2.0] * 4)]),
        (0, [(False, [6.0] * 4), [1.0] * 4, None]),
    ]


def test_orders_that_differ_are_reported_as_a_deadlock(expected_faults):
    found = run(orders_that_differ, EMULATED_DEADLINE="4")
    assert [code for code, _ in found] == [-signal.SIGABRT] * 2, found
    reports = [fault for fault in expected_faults() if fault.startswith("deadlock")]
    assert len(reports) == 2
    waiting = [report.partition(" still waits")[0].partition("communicator ")[2].split(",")[0] for report in reports]
    assert waiting[0] != waiting[1]  # each rank in the other's second operation


def test_different_operations_of_one_communicator(expected_faults):
    run(operations_that_differ, EMULATED_DEADLINE="4")
    assert any(fault.startswith("collective") and "ncclBroadcast" in fault for fault in expected_faults())
