"""The two baseline designs of the transition from training to generation (paper, section 5.4 and table 2).

    design      bytes received per device      peak parameters   training copy during generation
    hybridflow  (d_g - 1) / (t p) * M          M / (t_g p_g)     no copy: part of the generation shard
    vanilla     (t p - 1) / (t p) * M          M                 M / (t p)
    gather_all  (t p d - 1) / (t p d) * M      M                 M / (t p) here (the paper's system keeps M / (t p d))

`hybridflow` is `HybridEngine`. The others gather the whole model on every rank and slice out the generation shard.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, get_args

import torch.distributed as dist

from hybridflow.engine3d.hybrid_engine import TransitionReport
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.offloadable import MemoryAccount, Residency, TrackedMemory
from hybridflow.engine3d.plan import BUCKET_BYTES, WeightPlan, plan
from hybridflow.engine3d.transfer.transfer import Transfer, received_by_tensor
from hybridflow.engine3d.transition import Generator, Trainer
from hybridflow.topology import RankGrid

WeakerDesign = Literal["vanilla", "gather_all"]
WEAKER: tuple[WeakerDesign, ...] = get_args(WeakerDesign)


class WeakerTransition:
    """One rank's transition by `design`, with the interface of `HybridEngine`; training weights stay in memory.

    The generation groups of these designs take ranks in training order (`RankGrid.generation(rule="vanilla")`). The
    weights of both engines must have memory at construction, which is collective over `group`.
    """

    def __init__(
        self,
        design: WeakerDesign,
        train: Trainer,
        generate: Generator,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._generate, self._account = generate, MemoryAccount()
        source, destination = train.storage(), generate.storage()
        like = next(iter(source.values()))
        tensors = {name: like.new_empty(shape) for name, shape in train.layout().tensors.items()}
        gather, cut = plans(design, train.layout(), generate.layout(), train.grid)
        TrackedMemory(train.memory(), source, self._account, ())
        self._shard = TrackedMemory(generate.memory(), destination, self._account, destination)
        self._whole = TrackedMemory(Residency(tensors, like.device), tensors, self._account, tensors)
        settings = (group, rank, bucket_bytes)
        self._transfers = [
            Transfer(gather, source, tensors, *settings, acquire=self._whole),
            Transfer(cut, tensors, destination, *settings, release=self._whole, acquire=self._shard),
        ]
        self._whole.release()
        self._shard.release()
        generate.sleep()
        self.report = TransitionReport()

    def trained(self) -> None:
        """As in HybridEngine; weights always move."""

    def to_generation(self) -> None:
        before = received_by_tensor(self._transfers)
        sent = sum(transfer.sent_bytes for transfer in self._transfers)
        self._account.restart()
        start = time.perf_counter()
        for transfer in self._transfers:
            transfer.run()
        self._whole.release()
        seconds = time.perf_counter() - start
        self._generate.wake()
        self._generate.weights_changed()
        received = received_by_tensor(self._transfers) - before
        self.report = TransitionReport(
            received_bytes=received.total(),
            sent_bytes=sum(transfer.sent_bytes for transfer in self._transfers) - sent,
            received=dict(received),
            resident_bytes=self._account.resident_bytes,
            peak_bytes=self._account.peak_bytes,
            seconds=seconds,
        )

    def to_training(self) -> None:
        self._generate.sleep()
        self._shard.release()


def plans(design: WeakerDesign, train: Layout, generate: Layout, grid: RankGrid) -> tuple[WeightPlan, WeightPlan]:
    """Plans from the training layout to the whole model on every rank, and from there to the generation layout."""
    source = zero_layout(train, grid) if design == "gather_all" else train
    whole = whole_layout(train.tensors, train.ranks)
    return plan(source, whole, exact=True), plan(whole, generate, exact=True)


def zero_layout(layout: Layout, grid: RankGrid) -> Layout:
    """Each rank's 1/(t*p*d) part: its training boxes, sharded over the d replicas along their first dimension.

    Rows that do not divide by d are spread as evenly as possible; tensors that several tensor parallel ranks hold
    (norms) stay on all of them.
    """

    def regions(rank: int) -> list[Region]:
        replica = grid.coords(rank).d
        return [part for region in layout.regions(rank) if (part := _cut(region, replica, grid.d)) is not None]

    part = layout.part or (lambda rank: rank)
    return Layout(layout.tensors, layout.ranks, regions, lambda rank: (part(rank), grid.coords(rank).d))


def _cut(region: Region, index: int, parts: int) -> Region | None:
    box = region.box
    if not box.start:  # a scalar cannot be cut
        return region if index == 0 else None
    first, last = box.rows
    skip, end = ((last - first) * i // parts for i in (index, index + 1))
    if skip == end:
        return None
    own = Box(box.tensor, (first + skip, *box.start[1:]), (first + end, *box.stop[1:]))
    moved = skip if region.strides is None else skip * region.strides[0]
    return Region(own, region.storage, (region.offset[0] + moved, *region.offset[1:]), region.strides)


def whole_layout(tensors: Mapping[str, tuple[int, ...]], ranks: int) -> Layout:
    """Every rank holds every tensor, in a storage with its canonical name and shape."""
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in tensors.items()]
    return Layout(tensors, ranks, lambda rank: regions, lambda rank: 0)
