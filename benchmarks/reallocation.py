"""Time of three kinds of weight moves, measured and as the planner predicts it without a profile.

A Llama of 100 M parameters in bfloat16 on eight Ray hosts; five plans of each kind, and the median relative error of
the predictions of each kind. `reallocation`: a whole model between two of all (p, t, d) layouts on 8 ranks; of all
pairs the five with the most received bytes. `transition`: from training at (p, t, d) with Megatron-core to generation
at (p_g, t_g) with vLLM on the same four hosts. `weight_sync`: `hf.sync_weights` from an actor on four hosts to a
rollout on others. Seconds are the slowest rank's.

Of reallocations, `full_tensors` moves the same weights by one broadcast per tensor to all
ranks, each of which keeps its part. `memcpy` copies the received number of bytes, concurrently on all ranks. The
methods are interleaved in one run, medians over `--repeats`. `plan_seconds` is the time to compute and bind one rank's
plan, once. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridflow as hf
from benchmarks.checkpoints import make_model
from benchmarks.designs import whole_layout
from benchmarks.transition import CONFIG, Transitions, slowest
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import Transfer
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.topology import RankGrid

RANKS = 8
CLUSTER = ClusterSpec.of(f"here:{RANKS}")
Sizes = tuple[int, int, int]
TRANSITIONS: tuple[tuple[Sizes, tuple[int, int]], ...] = (
    ((1, 4, 1), (1, 2)), ((1, 4, 1), (1, 1)), ((2, 2, 1), (1, 2)), ((2, 2, 1), (1, 1)), ((1, 2, 2), (1, 1)),
)  # fmt: skip
SYNCS: tuple[tuple[Sizes, Sizes], ...] = (
    ((1, 4, 1), (1, 2, 1)), ((1, 4, 1), (1, 1, 2)), ((2, 2, 1), (1, 2, 1)), ((2, 2, 1), (1, 1, 1)),
    ((1, 2, 2), (1, 1, 2)),
)  # fmt: skip


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
        "seconds": medians["move"],
        "plan_seconds": round(planned, 4),
        "received_mb": round(sum(received), 2),
        "largest_received_mb": round(max(received), 2),
        "buffer_mb": round(buffers, 2),
        "seconds_per_memcpy": round(medians["move"] / medians["memcpy"], 2),
        "speedup_over_full_tensors": round(medians["full_tensors"] / medians["move"], 2),
    }


def timed(move: Callable[[], float], repeats: int) -> float:
    """Median seconds of `move()`, after two for warming up."""
    return statistics.median([move() for _ in range(repeats + 2)][2:])


def predicted(kind: str, source: CallPlan, target: CallPlan) -> float:
    """Seconds that the planner says for logical devices of a host. A transition's ranks are also trained; in the other
    kinds ranks have memory for their weights before."""
    calls = (Call("a.generate", "a", "generate", "generation"), Call("a.train", "a", "train", "training"))
    trained = frozenset({"a"} if kind == "transition" else ())
    graph = Graph(calls[: 1 + len(trained)], (), {"a": spec()}, trained)
    simulator = Costs(CLUSTER, graph, Workload(rows=RANKS, prompt=1, response=1))
    return simulator.reallocation("a", source, target)


def on(first: int, sizes: Sequence[int]) -> CallPlan:
    parallel = Parallel(*sizes)
    return CallPlan(Mesh.of(first, parallel.size), parallel)


def row(kind: str, source: CallPlan, target: CallPlan, seconds: float, **more: Any) -> dict[str, Any]:
    told = predicted(kind, source, target)
    own = {"seconds": round(seconds, 4), "predicted": round(told, 4), "error": round(told / seconds - 1, 3)}
    return {"plan": f"{source.parallel} -> {target.parallel}", **own, **more}


def reallocations(pool: hf.ResourcePool, model: Path, repeats: int) -> list[dict[str, Any]]:
    group, found = hf.place(Reallocations, pool, name="reallocations"), []
    for _, source, destination in largest(5):
        figures = measure(group, source, destination, repeats)
        found.append(row("reallocation", on(0, source), on(0, destination), **figures))
    group.close()
    return found


def transitions(pool: hf.ResourcePool, model: Path, repeats: int) -> list[dict[str, Any]]:
    found = []
    for sizes, (p, t) in TRANSITIONS:
        grid = RankGrid(*sizes, p_g=p, t_g=t)
        settings: dict[str, Any] = {"model": str(model), "optimizer": None, "designs": False}
        group = hf.place(Transitions, pool[: grid.size], name="transitions", grid=grid, **settings)
        seconds = timed(lambda group=group: slowest(group.transit("hybridflow").get())["seconds"], repeats)
        found.append(row("transition", on(0, sizes), on(0, (p, t, grid.size // (p * t))), seconds))
        group.close()
    return found


def weight_syncs(pool: hf.ResourcePool, model: Path, repeats: int) -> list[dict[str, Any]]:
    found = []
    for source, target in SYNCS:
        p, t, d = source
        strategy, at = hf.Megatron(pp=p, tp=t, dp=d, dtype="bfloat16"), on(4, target)
        engine = hf.VLLM(tp=target[1], pp=target[0], dtype="bfloat16", kv_cache_gb=0.05)
        actor = hf.ActorWorker.on(pool[: p * t * d], model=str(model), train=strategy, optim=hf.SGD(lr=1.0))
        rollout = hf.RolloutWorker.on(pool[4 : 4 + at.mesh.size], model=str(model), generate=engine)
        pair = actor, rollout
        seconds = timed(lambda pair=pair: hf.sync_weights(*pair).get()["seconds"], repeats)
        found.append(row("weight_sync", on(0, source), at, seconds))
        actor.close()
        rollout.close()
    return found


KINDS = {"reallocation": reallocations, "transition": transitions, "weight_sync": weight_syncs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "reallocation", "parameters": spec().num_parameters}
    with tempfile.TemporaryDirectory() as directory:
        model, pool = make_model(Path(directory) / "model"), hf.ResourcePool([RANKS])
        for kind in args.kinds:
            plans = KINDS[kind](pool, model, args.repeats)
            result[kind] = {"median_error": statistics.median(abs(one["error"]) for one in plans), "plans": plans}
    hf.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
