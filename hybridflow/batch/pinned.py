"""Copies between host memory and a CUDA device that the host does not wait for. On the CPU nothing is copied."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as the kernels of attention want theirs


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`. Those in host memory lie side by side there, and go to CUDA in one copy: torch keeps its
    pinned source until it is done, so the tensors themselves may change at once."""
    here = [tensor for tensor in tensors if tensor.device.type == "cpu" and not tensor.requires_grad]
    if device.type != "cuda" or not here:
        return [tensor.to(device) for tensor in tensors]
    starts = [0, *itertools.accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in here)]
    pinned = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    for start, tensor in zip(starts, here, strict=False):
        _part(pinned, start, tensor).copy_(tensor)
    moved = pinned.to(device, non_blocking=True)
    parts = {id(tensor): _part(moved, start, tensor) for start, tensor in zip(starts, here, strict=False)}
    return [parts[id(tensor)] if id(tensor) in parts else tensor.to(device) for tensor in tensors]


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, pinned where it was on CUDA: not to be read before `settle`."""
    return tensor.to("cpu", non_blocking=True)


def settle(device: torch.device) -> None:
    """Wait for all that the current stream of `device` was given, such as copies to host memory."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Bytes of `buffer` in the dtype and shape of a tensor."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
