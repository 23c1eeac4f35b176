"""Weights that a model begins with, from a checkpoint or drawn, equal however it is split."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.rank_state import dtype_name
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.contract import Uninitialized
from hybridflow.models.hf_spec import ROUTER_BIAS, Decoder

STANDARD_DEVIATION = 0.02
Origin = str | Path | Uninitialized | None


def fill(spec: Decoder, checkpoint: Origin, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> None:
    """With the weights of a Hugging Face directory, without one those of `initialise`; UNINITIALIZED: not at all."""
    if checkpoint is None:
        initialise(layout, rank, storage, spec.zeros)
    elif not isinstance(checkpoint, Uninitialized):
        Checkpoint(checkpoint).read_into(layout, rank, storage)


def rounded(spec: Decoder, checkpoint: Origin, dtype: torch.dtype) -> bool:
    """Whether these weights may have more bits than `dtype`."""
    if not isinstance(checkpoint, str | Path):
        return checkpoint is None
    return set(Checkpoint(checkpoint).dtypes(spec.tensors()).values()) != {dtype_name(dtype)}


def initialise(layout: Layout, rank: int, storage: Mapping[str, Tensor], zeros: Collection[str] = frozenset()) -> None:
    """Normal weights with deviation 0.02, norms 1, biases, value heads and `zeros` 0; equal however the model is split.

    Every tensor is drawn whole on the CPU from a seed of its name, one at a time, and this rank keeps its boxes.
    """
    for name, regions in layout.by_tensor(rank).items():
        shape = layout.tensors[name]
        plain = len(shape) == 1 and (name.endswith("bias") or name in zeros)
        if plain or name == "score.weight" or name.endswith(ROUTER_BIAS):
            whole = torch.zeros(shape)
        elif len(shape) == 1:
            whole = torch.ones(shape)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.empty(shape).normal_(0.0, STANDARD_DEVIATION, generator=generator)
        for region in regions:
            region.view(storage[region.storage]).copy_(whole[region.box.index])
