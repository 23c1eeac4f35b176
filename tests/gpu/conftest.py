"""One rank on the first CUDA device, with nccl: what runs on every rank of the CPU suite runs on it as it is."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import TIMEOUT, World

DEVICE, BACKEND = torch.device("cuda", 0), "nccl"


class OneRank(World):
    """The world of a single process; its model groups compute on `DEVICE`."""

    def context(self, name: str, grid: RankGrid, first: int = 0, role: str = "actor", **kept: Any) -> RankContext:
        groups = ProcessGroups(self.store, name, [0], 0, self.device, TIMEOUT)
        context = RankContext(role, 0, grid, self.device, groups)
        self._contexts.append(context)
        return context


@pytest.fixture(scope="session")
def alone() -> Iterator[OneRank]:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world, timeout = dist.PrefixStore("world", store), datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(BACKEND, store=world, rank=0, world_size=1, timeout=timeout)
    yield OneRank(0, store, DEVICE)
    dist.destroy_process_group()


@pytest.fixture
def world(alone: OneRank) -> Iterator[OneRank]:
    """Engines and groups of the test before are closed."""
    yield alone
    alone.close()


@pytest.fixture
def expected_faults() -> Callable[[], list[str]]:
    """What emulated CUDA found since the test began, here and in child processes: "kind: detail at place".

    The test does not fail for it. Skipped on a real device, which checks nothing.
    """
    if "EMULATED_LOG" not in os.environ:
        pytest.skip("a real device does not find faults")
    log = Path(os.environ["EMULATED_LOG"])
    start = log.stat().st_size
    return lambda: [line for line in log.read_text()[start:].splitlines() if not line.startswith(" ")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo) -> Any:
    """The frames of a test that failed let go of their tensors: one failure does not lead to the next."""
    report = yield
    error = call.excinfo and call.excinfo.value
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    return report
