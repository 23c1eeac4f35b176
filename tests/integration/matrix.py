"""A group whose weights are one matrix, for tests of weights that go from group to group."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch.distributed import distributed_c10d as c10d

import hybridflow as hf
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.topology import RankGrid

ROWS, COLUMNS = 13, 5
ROW_BLOCKS = {"by": "rows", "rows": ROWS, "tensor": "matrix"}


class Matrix(hf.Worker):
    """Holds rows (or columns) of one matrix, split over its ranks."""

    asked: ClassVar[int] = 0  # for layouts, in this process

    def __init__(self, by: str = "rows", rows: int = ROWS, tensor: str = "matrix", dtype: str = "float32") -> None:
        layout = self.weights_layout({"by": by, "rows": rows, "tensor": tensor}, self.context.grid)
        (region,) = layout.regions(self.context.rank)
        self.part = torch.zeros(region.box.shape, dtype=getattr(torch, dtype))
        self.fails: list[str] = []

    @classmethod
    def worker_spec(cls, settings: Mapping[str, Any]) -> hf.WorkerSpec:
        return hf.WorkerSpec(layout=partial(cls.weights_layout, settings))

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        cls.asked += 1
        shape, axis = (settings["rows"], COLUMNS), 0 if settings["by"] == "rows" else 1
        bounds = [shape[axis] * i // grid.size for i in range(grid.size + 1)]

        def regions(rank: int) -> list[Region]:
            ends = (bounds[rank], bounds[rank + 1])
            start, stop = [0, 0], list(shape)
            start[axis], stop[axis] = ends
            return [Region(Box(settings["tensor"], tuple(start), tuple(stop)), "part", (0, 0))]

        return Layout({settings["tensor"]: shape}, grid.size, regions)

    def weights_storage(self) -> Mapping[str, torch.Tensor]:
        if self.fails == ["before"]:
            self.fails.clear()
            raise RuntimeError("not ready")
        return {"part": self.part}

    def on_weights_loaded(self) -> None:
        if self.fails == ["after"]:
            self.fails.clear()
            raise RuntimeError("cannot take them")

    def close(self) -> None:
        if self.fails == ["close"]:
            raise RuntimeError("holds on to it")

    @hf.register(hf.ONE_TO_ALL)
    def fill(self, factor: float) -> None:
        self.part.copy_(torch.arange(self.part.numel()).view(self.part.shape) * factor + 1000 * self.context.rank)

    @hf.register(hf.ONE_TO_ALL)
    def read(self) -> torch.Tensor:
        return self.part.clone()

    @hf.register(hf.ONE_TO_ALL)
    def fail_once(self, when: str) -> None:
        self.fails = [when] if self.context.rank == 1 else []

    @hf.register(hf.ONE_TO_ALL)
    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    @hf.register(hf.ONE_TO_ALL)
    def process_groups(self) -> int:
        return len(c10d._world.pg_map)


def whole(group: hf.WorkerGroup) -> torch.Tensor:
    return torch.cat(group.read().get(), dim=0 if group.settings["by"] == "rows" else 1)
