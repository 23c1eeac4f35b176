"""The first weights of a rank: from a checkpoint, or drawn from a fixed seed."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.models.spec import Decoder

STANDARD_DEVIATION = 0.02


def load(directory: str | Path, spec: Decoder, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> None:
    """Read this rank's boxes of the safetensors; padding of the vocabulary becomes zero."""
    _clear(storage)
    Checkpoint(directory).read_into(layout, rank, storage)


def initialise(layout: Layout, rank: int, storage: Mapping[str, Tensor], zeros: Collection[str] = frozenset()) -> None:
    """Normal weights with deviation 0.02, norms 1, biases, value heads and `zeros` 0; equal however the model is split.

    Every tensor is drawn whole on the CPU from a seed of its name, one at a time, and this rank keeps its boxes.
    """
    _clear(storage)
    by_tensor: dict[str, list] = {}
    for region in layout.regions(rank):
        by_tensor.setdefault(region.box.tensor, []).append(region)
    for name, regions in by_tensor.items():
        shape = layout.tensors[name]
        if len(shape) == 1:
            whole = torch.zeros(shape) if name.endswith("bias") or name in zeros else torch.ones(shape)
        elif name == "score.weight":
            whole = torch.zeros(shape)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
        for region in regions:
            box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            storage[region.storage][region.index()].copy_(whole[box])


def _clear(storage: Mapping[str, Tensor]) -> None:
    for tensor in storage.values():
        tensor.zero_()
