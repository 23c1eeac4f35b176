"""The order of calls: turns on shared hosts, overlap on others, and two iterations under way."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import (
    WorkerError,
)
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO, ONE_TO_ALL

ROWS = 10


def wait_for(path: str) -> None:
    """Hold a call until the test lets it go on."""
    for _ in range(6000):
        if os.path.exists(path):
            return
        time.sleep(0.01)
    raise TimeoutError(f"nobody opened {path}")


class Gate:
    """Calls that the test holds and lets go."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def hold(self, batch, name):
        wait_for(f"{self.folder}/{name}")
        return batch

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def step(self, batch):
        return batch

    @register(DP_PROTO, reads=("x",), writes=("x",))
    def fail(self, batch):
        raise ValueError("on purpose")

    @register(ONE_TO_ALL)
    def tick(self):
        return time.time()

    @register(ONE_TO_ALL)
    def add(self, value):
        total = torch.tensor([float(value)])
        dist.all_reduce(total, group=self.context.groups.everyone())
        return total.item()


def spans(events, role: str, method: str | None = None):
    return [e for e in events if e.role == role and method in (None, e.method) and e.method != "__init__"]


def test_groups_on_one_pool_take_turns_in_call_order(pool, place, cluster, tmp_path):
    """A call whose input is late holds the calls behind it: nothing is reordered, nothing overlaps on a host."""
    half, other = pool[0:2], pool[2:3]
    a, b = place(Gate, half, name="a", folder=str(tmp_path)), place(Gate, half, name="b", folder=str(tmp_path))
    slow = place(Gate, other, name="slow", folder=str(tmp_path))
    late = slow.hold(BatchRef.from_batch(hf.Batch({"x": torch.zeros(4)})), "gate")
    first, second = a.step(late), b.tick()
    results = [group.tick() for group in (a, b, a, b)]
    time.sleep(0.3)  # the calls reach their hosts
    assert not second.done()
    (tmp_path / "gate").touch()
    first.get()
    times = [second.get(), *(result.get() for result in results)]
    for rank in (0, 1):
        ticks = [t[rank] for t in times]
        assert ticks == sorted(ticks)
        mine = [e for e in pool.events() if e.rank == rank and e.role in ("a", "b") and e.method in ("step", "tick")]
        assert [e.role for e in mine] == ["a", "b", "a", "b", "a", "b"]
        assert [e.seq for e in mine] == sorted(e.seq for e in mine)
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
        (held,) = spans(pool.events(), "slow", "hold")
        assert held.end <= mine[0].ready


def test_groups_on_disjoint_slices_overlap(pool, place, cluster, tmp_path):
    """Each waits for a file that only the other's being in its call brings: they can only finish side by side."""

    class Meet:
        @register(ONE_TO_ALL)
        def meet(self, mine, other):
            (Path(mine)).touch()
            wait_for(other)

    left, right = place(Meet, pool[0:2], name="left"), place(Meet, pool[2:4], name="right")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    one, other = left.meet(a, b), right.meet(b, a)
    one.get(timeout=60)
    other.get(timeout=60)
    (one, *_), (two, *_) = spans(pool.events(), "left"), spans(pool.events(), "right")
    assert one.ready < two.end
    assert two.ready < one.end


def test_collectives_of_colocated_groups_do_not_cross(pool, place, cluster):
    """Two groups on the same hosts and one on a slice across them, their all-reduces interleaved."""
    groups = [place(Gate, pool, name="all", folder=""), place(Gate, pool[0:2], name="low", folder="")]
    groups.append(place(Gate, pool[1:3], name="middle", folder=""))
    results = [(group, i, group.add(i)) for i in range(5) for group in groups]
    for group, i, result in results:
        assert result.get() == [float(i * group.grid.size)] * group.grid.size


def finished(batch: BatchRef) -> bool:
    ready, _ = ray.wait([batch.column_refs["x"].node.ref], timeout=0)
    return bool(ready)


def test_at_most_two_iterations_are_under_way(pool, place, cluster, tmp_path):
    """The third begins when the first is over, whatever the second does."""
    group = place(Gate, pool[0:1], folder=str(tmp_path))
    batch = BatchRef.from_batch(hf.Batch({"x": torch.zeros(1)}))
    cluster.iterations.drain()
    cluster.iterations.begin()
    first = group.hold(batch, "first")
    cluster.iterations.begin()
    second = group.hold(batch, "second")
    opened = threading.Timer(0.5, (tmp_path / "first").touch)
    opened.start()
    cluster.iterations.begin()
    assert finished(first)
    assert not finished(second)
    (tmp_path / "second").touch()
    cluster.iterations.drain()
    assert finished(second)


def test_errors_of_an_iteration_surface_when_it_is_over(pool, place, cluster):
    group = place(Gate, pool[0:1], folder="")
    batch = BatchRef.from_batch(hf.Batch({"x": torch.zeros(1)}))
    cluster.iterations.drain()
    cluster.iterations.begin()
    group.fail(batch)
    cluster.iterations.begin()
    with pytest.raises(WorkerError, match="ValueError: on purpose"):
        cluster.iterations.begin()
    cluster.iterations.drain()


def test_a_driver_without_a_loader_hears_of_an_error_once(pool, place, cluster):
    """References of thousands of calls do not pile up, and an old error does not come back with every call."""
    group = place(Gate, pool[0:1], folder="")
    batch = BatchRef.from_batch(hf.Batch({"x": torch.zeros(1)}))
    cluster.iterations.drain()
    group.fail(batch)

    def many_calls() -> None:
        for _ in range(4200):
            group.tick()

    with pytest.raises(WorkerError, match="ValueError: on purpose"):
        many_calls()
    for _ in range(10):
        group.tick()
    cluster.iterations.drain()
