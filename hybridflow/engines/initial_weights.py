"""Weights of a model without a checkpoint, equal however it is split."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout

STANDARD_DEVIATION = 0.02


def initialise(layout: Layout, rank: int, storage: Mapping[str, Tensor], zeros: Collection[str] = frozenset()) -> None:
    """Normal weights with deviation 0.02, norms 1, biases, value heads and `zeros` 0; equal however the model is split.

    Every tensor is drawn whole on the CPU from a seed of its name, one at a time, and this rank keeps its boxes.
    """
    by_tensor: dict[str, list] = {}
    for region in layout.regions(rank):
        by_tensor.setdefault(region.box.tensor, []).append(region)
    for name, regions in by_tensor.items():
        shape = layout.tensors[name]
        if name == "score.weight" or (len(shape) == 1 and (name.endswith("bias") or name in zeros)):
            whole = torch.zeros(shape)
        elif len(shape) == 1:
            whole = torch.ones(shape)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
        for region in regions:
            box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            storage[region.storage][region.index()].copy_(whole[box])
