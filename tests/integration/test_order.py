"""The order of calls: turns on shared hosts, overlap on others, two iterations under way; one call as a whole: every
rank counts, batches of a call stay together, an error is met once."""

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
    ConfigError,
    MissingColumnError,
    WorkerError,
)
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO, ONE_TO_ALL
from hybridflow.topology import RankGrid

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


class Calls:
    """Breaks, joins and repeats."""

    @hf.register(hf.THREE_D_PROTO, reads=("x",), writes=("y",))
    def fail_on_one(self, batch, rank):
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} broke")
        return hf.Batch({"y": batch["x"]})

    @hf.register(hf.THREE_D_PROTO, reads=("x",))
    def fail_before_a_collective(self, batch, rank):
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} broke")
        dist.all_reduce(torch.zeros(1), group=self.context.groups.new("only here", range(4), timeout=8.0))

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("first", "last"), groups=True)
    def ends(self, batch):
        x = batch["x"]
        return hf.Batch({"first": x[:1].expand(len(x)), "last": x[-1:].expand(len(x))})

    @hf.register(
        hf.DP_PROTO, reads=("x",), writes=("y",), balance="tokens", repeat=lambda worker, call: call["n"], carries=True
    )
    def twice(self, batch, n):
        return hf.Batch({"y": batch["x"].repeat_interleave(n)})

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("d",), balance="tokens")
    def difference(self, a, b):
        return hf.Batch({"d": a["x"] - b["x"]})

    @hf.register(hf.DP_PROTO, reads=("x",), chunks="minibatches")
    def chunked(self, batch, minibatches=1):
        return [chunk.rows for chunk in batch.chunks()]


@pytest.fixture(scope="module")
def rows():
    tokens = torch.tensor([9, 1, 1, 1, 1, 1, 1, 9, 3, 3])
    return hf.Batch({"x": torch.arange(10), "tokens": tokens, "group_id": torch.tensor([0] * 5 + [1] * 5)})


@pytest.fixture(scope="module")
def group(keep, pool):
    return keep(Calls, pool, name="calls", grid=RankGrid(t=2, d=2))


@pytest.fixture(scope="module")
def flat(keep, pool):
    return keep(Calls, pool, name="flat_calls")


def test_a_rank_that_nobody_collects_does_not_fail_in_silence(group, rows):
    with pytest.raises(WorkerError, match="rank 3 broke") as caught:
        group.fail_on_one(rows, rank=3).get()
    assert (caught.value.rank, caught.value.rows) == (3, (5, 10))


def test_the_rank_that_broke_is_named_while_its_peers_wait_in_a_collective(group, rows):
    with pytest.raises(WorkerError, match="rank 1 broke"):
        group.fail_before_a_collective(rows, rank=1).get(timeout=6)


def test_an_error_that_was_met_is_not_raised_again(flat, rows, settle):
    settle()
    with pytest.raises(WorkerError):
        flat.fail_on_one(rows, rank=0).get()
    prompts = [{"prompt": str(i)} for i in range(4)]
    assert len(list(hf.PromptLoader(prompts, batch_size=2, steps=2))) == 2


def test_an_error_that_nobody_met_is_raised_by_the_loader(flat, rows, settle):
    settle()
    with pytest.raises(WorkerError, match="rank 2 broke"):  # noqa: PT012
        for _ in hf.PromptLoader([{"prompt": "a"}], batch_size=1, steps=4):
            flat.fail_on_one(rows, rank=2)


def test_groups_stay_whole_although_the_method_does_not_read_them(flat, rows):
    ends = flat.ends(rows).get()
    assert ends["first"].tolist() == [0] * 5 + [5] * 5
    assert ends["last"].tolist() == [4] * 5 + [9] * 5
    with pytest.raises(MissingColumnError, match="group_id"):
        flat.ends(rows.without("group_id"))


def test_a_balanced_call_that_repeats_rows_keeps_them_beside_their_columns(flat, rows):
    out = flat.twice(rows, n=3).get()
    assert out["x"].tolist() == out["y"].tolist() == [i for i in range(10) for _ in range(3)]


def test_two_batches_of_one_call_are_split_alike(flat, rows):
    other = rows.without("tokens")
    assert flat.difference(rows, other).get()["d"].tolist() == [0] * 10
    assert flat.difference(other, rows).get()["d"].tolist() == [0] * 10


def test_part_of_a_balanced_part_is_no_longer_that_part(rows):
    parts = hf.BatchRef.from_batch(rows).split(2, balance="tokens")
    joined = hf.BatchRef.concat([parts[0][0:2], parts[1]])
    assert joined.rows == len(joined.get()) == 7


def test_more_mini_batches_than_rows_are_refused(flat, rows):
    with pytest.raises(ConfigError, match="at most 10"):
        flat.chunked(rows, minibatches=11)


def test_rows_without_an_id_are_numbered():
    ref = hf.BatchRef.from_batch(hf.Batch({"x": torch.zeros(3)})).repeat(2)
    got = ref.get()
    assert got["row_id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert got["group_id"].tolist() == [0, 0, 1, 1, 2, 2]


def test_what_the_caller_writes_later_does_not_reach_the_batch():
    x = torch.zeros(4)
    ref = hf.BatchRef.from_batch(hf.Batch({"x": x}))
    x.add_(1)
    assert ref.get()["x"].tolist() == [0.0] * 4
