"""Gloo groups of one process."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hybridflow.engines import process_groups  # noqa: F401  its import shares the device


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
