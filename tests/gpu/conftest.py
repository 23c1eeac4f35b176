"""One rank on the first CUDA device, with nccl: what runs on every rank of the CPU suite runs on it as it is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
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
