"""Time and driver memory of a hop from group A to group B, by reference and through the driver.

A has n data parallel ranks; B has (t, d) = (2, n/2) on the same devices. In one hop A writes a batch of the given size,
B reads all of it, and the driver waits for B. `driver` is a hop without references: the driver receives the tensors,
joins and splits them, and sends them to B. `against_ray` is what Ray itself needs in the same run: one actor call per
rank with one result, and the same arrays passed as references. `driver_us_per_rank` is what the driver alone spends on
a call of 8 to 1,024 ranks, whose hosts are stand-ins that pickle what they are sent, as Ray would. Prints one JSON
line; milliseconds, mebibytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle

import hybridflow as hf
from hybridflow.topology import RankGrid

MIB = 1 << 20


class Sender:
    """Returns batches that were created beforehand."""

    def __init__(self) -> None:
        self.made: dict[tuple, hf.Batch] = {}

    @hf.register(hf.ONE_TO_ALL)
    def nothing(self) -> None:
        """An empty call."""

    @hf.register(hf.DP_PROTO, reads=("row",), writes=tuple(f"c{i}" for i in range(10)))
    def send(self, batch: hf.Batch, megabytes: float) -> hf.Batch:
        """Ten float32 columns, `megabytes` in total over all ranks."""
        key = (batch.rows, megabytes)
        if key not in self.made:
            width = max(1, int(megabytes * MIB / 10 / 4 / batch.rows / self.context.grid.size))
            self.made[key] = hf.Batch({f"c{i}": torch.full((batch.rows, width), float(i)) for i in range(10)})
        return self.made[key]

    @hf.register(hf.DP_PROTO, reads=("row",))
    def send_values(self, batch: hf.Batch, megabytes: float) -> dict[str, torch.Tensor]:
        made = self.send(batch, megabytes)
        return {name: made.peek(name) for name in made.columns}


class Receiver:
    """Reads its input batch."""

    @hf.register(hf.ALL_TO_ALL)
    def receive_values(self, columns: dict[str, torch.Tensor]) -> int:
        return sum(column.nbytes + int(column[-1, -1] < 0) for column in columns.values())

    @hf.register(hf.THREE_D_PROTO, reads=tuple(f"c{i}" for i in range(10)))
    def receive(self, batch: hf.Batch) -> int:
        return sum(batch.peek(name).nbytes + int(batch.peek(name)[-1, -1] < 0) for name in batch.columns)

    @hf.register(hf.THREE_D_PROTO, reads=("c3",))
    def receive_one(self, batch: hf.Batch) -> int:
        return batch.peek("c3").nbytes

    @hf.register(hf.THREE_D_PROTO, reads=("c3",))
    def write_in_place(self, batch: hf.Batch) -> float:
        return float(batch["c3"].add_(1).max())


class Raw:
    """A Ray actor that does what Sender and Receiver do."""

    def __init__(self) -> None:
        self.made: list[np.ndarray] = []

    def nothing(self, sent: bytes) -> None:
        del sent

    def send(self, size: int) -> list[np.ndarray]:
        self.made = self.made or [np.full(size // 40, 1.0, np.float32) for _ in range(10)]
        return self.made

    def receive(self, *parts: list[np.ndarray]) -> int:
        return sum(column.nbytes + int(column[-1] < 0) for part in parts for column in part)


class Stage:
    """Three columns go in, two come out and go into a second call."""

    @hf.register(hf.THREE_D_PROTO, reads=("a", "b", "c"), writes=("d", "e"))
    def first(self, batch: hf.Batch) -> hf.Batch: ...

    @hf.register(hf.THREE_D_PROTO, reads=("a", "d", "e"))
    def second(self, batch: hf.Batch) -> None: ...


class StandIn:
    """In place of a host's actor: pickles what Ray would (neither references nor bytes), and answers references to
    nothing."""

    class Method:
        def __init__(self, results: int) -> None:
            self.results = results

        def remote(self, *call: Any) -> Any:
            for one in call:
                if not isinstance(one, ray.ObjectRef | bytes):
                    cloudpickle.dumps(one)
            refs = [ray.ObjectRef(os.urandom(28)) for _ in range(self.results)]
            return refs[0] if self.results == 1 else refs

    call, call_writing = Method(1), Method(2)


def rss() -> float:
    """Private memory of this process, MiB."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) / 1024


def measure(hop: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Up to `repeats` hops in ten seconds, but at least five."""
    for _ in range(5):  # processes grow to the memory that a hop takes
        hop()
    gc.collect()
    before, times = rss(), []
    while len(times) < repeats and (len(times) < 5 or sum(times) < 10_000):
        start = time.perf_counter()
        hop()
        times.append(1000 * (time.perf_counter() - start))
    gc.collect()
    return {
        "median_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3),
        "driver_growth_mib": round(rss() - before, 2),
    }


def measure_ranks(ranks: int, sizes: list[float], repeats: int) -> dict[str, Any]:
    with hf.ResourcePool([ranks]) as pool:
        a = hf.place(Sender, pool, name="a")
        b = hf.place(Receiver, pool, name="b", grid=RankGrid(t=2, d=ranks // 2))
        rows = hf.BatchRef.from_batch(hf.Batch({"row": torch.arange(8 * ranks)}))

        def by_reference(size: float) -> None:
            b.receive(a.send(rows, size)).get()

        def through_driver(size: float) -> None:
            parts = a.send_values(rows, size).get()
            joined = {name: torch.cat([part[name] for part in parts]) for name in COLUMNS}
            split = [{name: column.chunk(b.grid.d)[d] for name, column in joined.items()} for d in range(b.grid.d)]
            b.receive_values([split[b.grid.coords(rank).d] for rank in range(ranks)]).get()

        out: dict[str, Any] = {"empty": measure(lambda: a.nothing().get(), 10 * repeats)}
        for size in sizes:
            n = repeats if size < 50 else max(5, repeats // 2)
            entry = {
                "reference": measure(lambda size=size: by_reference(size), n),
                "driver": measure(lambda size=size: through_driver(size), n),
            }
            entry["speedup"] = round(entry["driver"]["median_ms"] / entry["reference"]["median_ms"], 2)
            out[f"{size:g}MB"] = entry
        sent = a.send(rows, sizes[-1])
        out["bytes_read_fraction_one_of_ten"] = b.receive_one(sent).get()[0] / b.receive(sent).get()[0]
        out["changed_by_a_reader"] = b.write_in_place(sent).get() and float(sent.get("c3")["c3"].max()) != 3.0
        return out


def measure_against_ray(ranks: int, repeats: int) -> dict[str, Any]:
    """An empty call and a hop of 1 MB, each interleaved with Ray's own."""
    with hf.ResourcePool([ranks]) as pool:
        a = hf.place(Sender, pool, name="a")
        b = hf.place(Receiver, pool, name="b", grid=RankGrid(t=2, d=ranks // 2))
        rows = hf.BatchRef.from_batch(hf.Batch({"row": torch.arange(8 * ranks)}))
        raw = [ray.remote(Raw).options(num_cpus=0).remote() for _ in range(ranks)]

        def raw_hop() -> None:
            made = [each.send.remote(MIB // ranks) for each in raw]
            ray.get([raw[i].receive.remote(*made[i // 2 * 2 : i // 2 * 2 + 2]) for i in range(ranks)])

        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
            "empty": (a.nothing, lambda: ray.get([each.nothing.remote(b"x" * 300) for each in raw]), 10 * repeats),
            "1MB": (lambda: b.receive(a.send(rows, 1)), raw_hop, 3 * repeats),
        }
        out = {}
        for name, (ours, theirs, times) in pairs.items():
            found = [(measure(lambda: ours().get(), times), measure(theirs, times)) for _ in range(2)]  # noqa: B023
            mine, rays = (min(pair[i]["median_ms"] for pair in found) for i in (0, 1))
            out[name] = {"ms": mine, "ray_ms": rays, "over_ray": round(mine / rays, 2)}
        for each in raw:
            ray.kill(each)
        return out


def measure_many_ranks(ranks: int) -> float:
    """The driver's microseconds per rank and call; the fastest of three pairs of calls."""
    with hf.ResourcePool([1]) as pool:
        group = hf.place(Stage, pool, name="group")
        before = group.ranks
        hosts = tuple(replace(before.hosts[0], handle=StandIn()) for _ in range(ranks))
        group.ranks = replace(before, hosts=hosts, grid=RankGrid(t=8, d=ranks // 8))
        rows = hf.BatchRef.from_batch(hf.Batch({name: torch.zeros(8 * ranks, 4) for name in "abc"}))
        iterations, seconds = group.session.iterations, []
        for _ in range(4):  # the first one finds what later calls know
            iterations._look_at = 10**9
            start = time.perf_counter()
            group.second(rows | group.first(rows))
            seconds.append((time.perf_counter() - start) / 2)
            for one in iterations._all.values():  # nothing answers
                one.waiting.clear()
        group.ranks = before
        return round(1e6 * min(seconds[1:]) / ranks, 1)


def many_calls(ranks: int, calls: int) -> float:
    """Growth of the driver's memory (MiB) over `calls` calls with ten columns of 20 to 200 kB."""
    with hf.ResourcePool([ranks]) as pool:
        a = hf.place(Sender, pool, name="a")
        b = hf.place(Receiver, pool, name="b", grid=RankGrid(t=2, d=ranks // 2))
        rows = hf.BatchRef.from_batch(hf.Batch({"row": torch.arange(8 * ranks)}))
        for size in (0.2, 2.0):
            b.receive(a.send(rows, size)).get()
        gc.collect()
        before = rss()
        for i in range(calls):
            b.receive(a.send(rows, 0.2 + 1.8 * (i % 10) / 9)).get()
        gc.collect()
        return round(rss() - before, 2)


COLUMNS = tuple(f"c{i}" for i in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--many-ranks", type=int, nargs="*", default=[8, 64, 256, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "controller"}
    for ranks in args.ranks:
        result[f"{ranks}_ranks"] = measure_ranks(ranks, args.megabytes, args.repeats)
        result[f"{ranks}_ranks"]["against_ray"] = measure_against_ray(ranks, args.repeats)
    result[f"driver_growth_mib_{args.calls}_calls"] = many_calls(args.ranks[0], args.calls)
    result["driver_us_per_rank"] = {ranks: measure_many_ranks(ranks) for ranks in args.many_ranks}
    hf.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
