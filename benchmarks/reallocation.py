"""Time to move a whole model between 3D layouts, for the five plans on 8 ranks that move the most bytes.

A Llama of 100 M parameters in bfloat16 on eight Ray hosts. Of all pairs of (p, t, d) layouts on 8 ranks, the benchmark
uses the five with the most received bytes. `full_tensors` moves the same weights by one broadcast per tensor to all
ranks, each of which keeps its part. `memcpy` copies the received number of bytes, concurrently on all ranks. The
methods are interleaved in one run; seconds are the slowest rank's, medians over `--repeats`. `plan_seconds` is the time
to compute and bind one rank's plan, once. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridflow as hf
from benchmarks.designs import whole_layout
from benchmarks.transition import CONFIG
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import Transfer
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

RANKS = 8
Sizes = tuple[int, int, int]


def spec() -> ModelSpec:
    return ModelSpec.from_hf_config(CONFIG)


def layout_of(sizes: Sizes) -> Layout:
    return megatron_layout(spec(), RankGrid(*sizes))


def storage_of(layout: Layout, rank: int) -> dict[str, Tensor]:
    """Tensors of the minimal size for the regions of `rank`, bfloat16."""
    out = {}
    for name, regions in layout.storages(rank).items():
        ends = [[part.stop for part in region.index()] for region in regions]
        out[name] = torch.full([max(end) for end in zip(*ends, strict=True)], float(rank), dtype=torch.bfloat16)
    return out


def largest(count: int) -> list[tuple[int, Sizes, Sizes]]:
    """(total bytes received, source, destination) of the plans that move the most bytes."""
    model = spec()
    sizes = [
        (p, t, RANKS // (p * t))
        for p, t in itertools.product((1, 2, 4, 8), (1, 2, 4))
        if RANKS % (p * t) == 0 and model.layers % p == 0
    ]
    found = []
    for source, destination in itertools.permutations(sizes, 2):
        traffic = plan(layout_of(source), layout_of(destination)).traffic(itemsize=2)
        found.append((sum(one.received_bytes for one in traffic), source, destination))
    return sorted(found, reverse=True)[:count]


class Reallocations:
    """One rank that moves weights between layouts."""

    def __init__(self) -> None:
        context = self.context  # type: ignore[attr-defined]
        self.rank, self.group = context.rank, context.groups.everyone()

    @hf.register(hf.ONE_TO_ALL)
    def prepare(self, source: Sizes, destination: Sizes) -> float:
        """Compute and bind the plan; returns seconds."""
        self.layouts = layout_of(source), layout_of(destination)
        self.source, self.destination = (storage_of(layout, self.rank) for layout in self.layouts)
        dist.barrier(self.group)
        start = time.perf_counter()
        part = plan(*self.layouts, rank=self.rank)
        self.transfer = Transfer(part, self.source, self.destination, self.group, self.rank)
        return time.perf_counter() - start

    @hf.register(hf.ONE_TO_ALL)
    def move(self) -> dict[str, float]:
        before = self.transfer.received_bytes
        dist.barrier(self.group)
        start = time.perf_counter()
        self.transfer.run()
        return {
            "seconds": time.perf_counter() - start,
            "received_mb": (self.transfer.received_bytes - before) / 1e6,
            "buffer_mb": self.transfer.buffer_bytes / 1e6,
        }

    @hf.register(hf.ONE_TO_ALL)
    def full_tensors(self) -> dict[str, float]:
        """One broadcast per tensor, from a rank that has the full tensor (gathering it is not timed)."""
        shapes = self.layouts[0].tensors
        whole = whole_layout(shapes, RANKS)
        wanted = self.layouts[1].regions(self.rank)
        dist.barrier(self.group)
        start = time.perf_counter()
        for name in whole.tensors:
            full = torch.empty(shapes[name], dtype=torch.bfloat16)
            dist.broadcast(full, group=self.group, group_src=0)
            for region in wanted:
                if region.box.tensor == name:
                    index = tuple(map(slice, region.box.start, region.box.stop))
                    region.view(self.destination[region.storage]).copy_(full[index])
        return {"seconds": time.perf_counter() - start}

    @hf.register(hf.ONE_TO_ALL)
    def memcpy(self, megabytes: list[float]) -> dict[str, float]:
        source = torch.ones(max(1, int(megabytes[self.rank] * 1e6)), dtype=torch.uint8)
        into = torch.empty_like(source).zero_()
        dist.barrier(self.group)
        start = time.perf_counter()
        into.copy_(source)
        return {"seconds": time.perf_counter() - start}


def measure(group: hf.WorkerGroup, source: Sizes, destination: Sizes, repeats: int) -> dict[str, Any]:
    planned = max(group.prepare(source, destination).get())
    times: dict[str, list[float]] = {"move": [], "full_tensors": [], "memcpy": []}
    received: list[float] = []
    buffers = 0.0
    for turn in range(repeats + 1):
        moved = group.move().get()
        received, buffers = [rank["received_mb"] for rank in moved], max(rank["buffer_mb"] for rank in moved)
        found = {"move": moved, "full_tensors": group.full_tensors().get(), "memcpy": group.memcpy(received).get()}
        for way, ranks in found.items():
            if turn:
                times[way].append(max(rank["seconds"] for rank in ranks))
    medians = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "layouts": "-".join(map(str, source)) + " -> " + "-".join(map(str, destination)),
        "seconds": round(medians["move"], 4),
        "plan_seconds": round(planned, 4),
        "received_mb": round(sum(received), 2),
        "largest_received_mb": round(max(received), 2),
        "buffer_mb": round(buffers, 2),
        "seconds_per_memcpy": round(medians["move"] / medians["memcpy"], 2),
        "speedup_over_full_tensors": round(medians["full_tensors"] / medians["move"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plans", type=int, default=5)
    args = parser.parse_args()
    pool = hf.ResourcePool([RANKS])
    group = hf.place(Reallocations, pool, name="reallocations")
    plans = [measure(group, *pair, args.repeats) for _, *pair in largest(args.plans)]  # type: ignore[arg-type]
    hf.shutdown()
    result = {"benchmark": "reallocation", "parameters": spec().num_parameters, "plans": plans}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
