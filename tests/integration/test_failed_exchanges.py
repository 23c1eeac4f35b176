"""hf.sync_weights that fails: on which rank and why, what is left of it, and that the next one works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.cluster import weight_channels
from hybridflow.cluster.weight_channels import ChannelSpec
from hybridflow.engine3d.layout import Layout, Region
from hybridflow.errors import LayoutError, WorkerError
from hybridflow.topology import RankGrid
from tests.integration.matrix import ROW_BLOCKS, Matrix, whole


class Picky(Matrix):
    """The process with pool rank 1 cannot plan; being at work is a collective of the group."""

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        layout = Matrix.weights_layout(ROW_BLOCKS, grid)

        def regions(rank: int) -> list[Region]:
            if dist.is_initialized() and dist.get_rank() == 1:
                raise RuntimeError("no plan here")
            return list(layout.regions(rank))

        return Layout(layout.tensors, layout.ranks, regions)

    def __init__(self) -> None:
        layout = Matrix.weights_layout(ROW_BLOCKS, self.context.grid)
        self.part, self.fails, self.works = torch.zeros(layout.regions(self.context.rank)[0].box.shape), [], 0

    @contextmanager
    def resident(self) -> Iterator[None]:
        self.works += 1
        dist.barrier(self.context.groups.everyone())
        yield

    @hf.register(hf.ONE_TO_ALL)
    def times_at_work(self) -> int:
        return self.works


def test_a_rank_that_cannot_begin_leaves_the_destination_as_it_was(pool, other_pool, place, settle):
    source, destination = place(Matrix, pool[0:3]), place(Matrix, other_pool)
    source.fill(1.0)
    hf.sync_weights(source, destination).get()
    before = whole(destination)
    source.fail_once("before")
    source.fill(2.0)
    with pytest.raises(WorkerError, match=r"sync_weights failed on rank 1.*not ready"):
        hf.sync_weights(source, destination).get()
    assert torch.equal(whole(destination), before)
    settle()
    hf.sync_weights(source, destination).get()
    assert torch.equal(whole(destination), whole(source))


def test_incomplete_weights_are_not_used_until_they_are_whole(pool, place, settle):
    source, destination = place(Matrix, pool[0:2]), place(Matrix, pool[1:4])
    source.fill(1.0)
    destination.fail_once("after")
    with pytest.raises(WorkerError, match="cannot take them") as caught:
        hf.sync_weights(source, destination).get()
    assert caught.value.method == "sync_weights"
    assert (caught.value.role, caught.value.rank) == (destination.name, 1)
    settle()
    with pytest.raises(WorkerError, match=r"incomplete.*sync_weights.*failed on the way"):
        destination.read().get()
    with pytest.raises(WorkerError, match="incomplete"):
        hf.sync_weights(destination, source).get()
    settle()
    hf.sync_weights(source, destination).get()
    assert torch.equal(whole(destination), whole(source))


def test_a_link_whose_first_exchange_failed_works_when_the_reason_is_gone(pool, place, settle):
    """Also for an exchange that was issued before anybody knew."""
    source, middle, destination = place(Matrix, pool[0:2]), place(Matrix, pool[1:3]), place(Matrix, pool[2:4])
    source.fill(1.0)
    middle.fail_once("after")
    middle.rest(1.0)
    incomplete, refused, whole_again, arrived = (
        hf.sync_weights(*pair) for pair in [(source, middle), (middle, destination)] * 2
    )
    for failed in (incomplete, refused):
        with pytest.raises(WorkerError, match="cannot take them"):
            failed.get()
    whole_again.get()
    arrived.get()
    assert torch.equal(whole(destination), whole(source))
    settle()


def test_a_link_that_one_host_cannot_open_is_refused_by_all(pool, other_pool, place, settle, monkeypatch):
    source, destination = place(Matrix, pool[0:2]), place(Matrix, other_pool)
    source.fill(1.0)
    source.rest(1.0)

    def unknown_there(*, processes, **others):
        here = [(pool, rank) if pool == source.pool_name else ("no pool", rank) for pool, rank in processes]
        return ChannelSpec(processes=tuple(here), **others)

    with monkeypatch.context() as context:
        context.setattr(weight_channels, "ChannelSpec", unknown_there)
        tries = [hf.sync_weights(source, destination) for _ in range(2)]
    for failed in tries:
        with pytest.raises(WorkerError, match=rf"{destination.name}.sync_weights failed on rank [01] .*: ValueError"):
            failed.get()
    settle()
    hf.sync_weights(source, destination).get()
    assert torch.equal(whole(destination), whole(source))


def test_nobody_begins_to_work_before_all_have_planned(pool, place, settle):
    source, destination = place(Picky, pool[0:3]), place(Picky, pool[2:4])
    with pytest.raises(WorkerError, match=r"sync_weights failed on rank 1.*no plan here"):
        hf.sync_weights(source, destination).get()
    settle()
    assert source.times_at_work().get() == [0, 0, 0]
    assert destination.times_at_work().get() == [0, 0]


def test_a_rank_that_cannot_be_freed_says_so_and_leaves_its_process_groups(pool, place):
    watcher = place(Matrix, pool[1:2])
    before = watcher.process_groups().get()
    stuck = place(Matrix, pool[0:2])
    hf.sync_weights(stuck, watcher).get()
    stuck.fail_once("close")
    with pytest.raises(WorkerError, match=r"close failed on rank 1.*holds on to it"):
        stuck.close()
    stuck.close()
    assert watcher.process_groups().get() == before


def test_a_destination_of_another_dtype_that_cannot_be_converted_is_refused_before_a_byte_moves(pool, place, settle):
    source, destination = place(Matrix, pool[0:2]), place(Matrix, pool[2:4], dtype="complex64")
    source.fill(1.0)
    with pytest.raises(LayoutError, match="complex64"):
        hf.sync_weights(source, destination).get()
    settle()
    assert not whole(destination).any()
