"""The stand-in for CUDA's runtime, as Python calls it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.emulated_cuda import findings

Listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
cudart = ctypes.CDLL("libcudart.so.13")


@Listener
def _listener(kind: bytes, detail: bytes) -> None:
    findings.tell(kind.decode(), detail.decode())


def connect() -> None:
    """Reports reach Python, and the libraries that are looked up by name are loaded."""
    with open("/proc/self/maps") as maps:
        folder = Path(next(line.split()[-1] for line in maps if "libcudart.so" in line)).parent
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    cudart.emu_listen(_listener)
    atexit.register(cudart.emu_listen, None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, nothing is reported: copies that a device would not make."""
    findings.local.quiet = getattr(findings.local, "quiet", 0) + 1
    cudart.emu_quiet(1)
    try:
        yield
    finally:
        findings.local.quiet -= 1
        cudart.emu_quiet(1 if findings.local.quiet else 0)


def current_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def launch(stream: int, operator: str) -> bool:
    """A kernel starts on the stream, after its queued work. True: the stream is captured."""
    findings.local.operator = operator
    return bool(cudart.emu_launch(ctypes.c_void_p(stream)))


def touch(x: Tensor, stream: int, write: bool, operator: str) -> None:
    """The kernel accesses the bytes between the first and the last element."""
    if x.numel():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        cudart.emu_access(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_size_t(extent * x.element_size()),
            ctypes.c_void_p(stream),
            int(write),
            operator.encode(),
        )


def alias(x: Tensor) -> Tensor:
    """The same memory as a CPU tensor, which does not keep it alive."""
    size = x.untyped_storage().nbytes()
    if not size or not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    pointer = x.untyped_storage().data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(pointer, torch.device("cpu"), size)
    found = torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())
    found = found.conj() if x.is_conj() else found  # views, which memory knows nothing of
    return torch._neg_view(found) if x.is_neg() else found
