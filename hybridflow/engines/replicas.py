"""Weights that data parallel ranks hold alike: compared by checksums, so that corrupted memory does not train on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Box, Layout
from hybridflow.engines.agreement import agree
from hybridflow.engines.process_groups import RankContext, gather
from hybridflow.errors import ReplicaError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(context: RankContext, engine: Any) -> None:
    """Compare the weights of data parallel ranks, adapters too, bit for bit up to one checksum per tensor and rank.
    Collective over the group; waits for the device once.

    Sharded weights have no second copy and are not compared. Errors: ReplicaError on all ranks, which names the first
    tensor that differs and the ranks that are in the minority (two that differ: both).
    """
    members, grid = context.grid.group(context.rank, "d"), context.grid.experts
    same_experts = grid.group(context.rank, "edp")
    others = same_experts if same_experts != members else [context.rank]  # that hold the same experts
    mine = dict[Box, int]()

    def add() -> None:
        if len(members) > 1 or len(others) > 1:
            mine.update(checksums(engine.layout(), engine.storage(), context.rank))
            if (adapters := engine.adapters) is not None:
                mine.update(checksums(adapters.layout, adapters.storage, context.rank))

    def compare() -> None:
        if len(members) > 1:
            group = context.groups.new("replicas", members, "gloo")
            _raise_differing(context.role, members, gather(mine, group))
        if len(others) > 1:
            group = context.groups.new("replicas of experts", others, "gloo")
            experts = {box: value for box, value in mine.items() if ".experts." in box.tensor}
            _raise_differing(context.role, others, gather(experts, group))

    agree(context, add)  # before its peers wait for a rank that could not
    agree(context, compare)


def checksums(layout: Layout, storage: Mapping[str, Tensor], rank: int) -> dict[Box, int]:
    """Of each box of this rank: the sum of its elements' bits as integers, modulo 2**64. One bit changes it."""
    boxes, sums = list[Box](), list[Tensor]()
    for name, regions in layout.storages(rank).items():
        for region in regions:
            bits = region.view(storage[name]).detach().contiguous().view(INTEGERS[storage[name].element_size()])
            boxes.append(region.box)
            sums.append(bits.sum(dtype=torch.int64))
    return dict(zip(boxes, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _raise_differing(role: str, members: Sequence[int], found: Sequence[Mapping[Box, int]]) -> None:
    holders: dict[Box, dict[int, int]] = defaultdict(dict)
    for rank, sums in zip(members, found, strict=True):
        for box, value in sums.items():
            holders[box][rank] = value
    for box, by_rank in holders.items():
        (value, count), *others = Counter(by_rank.values()).most_common()
        if not others:
            continue
        tie = count == others[0][1]
        ranks = [rank for rank, own in by_rank.items() if tie or own != value]
        raise ReplicaError(
            f"{role}: {box} differs between data parallel ranks, which must hold the same bits: on rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {sorted(by_rank)}. A device or a program "
            f"has changed it: continue from a checkpoint, without that machine."
        )
