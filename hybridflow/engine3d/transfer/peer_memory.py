"""Reading another rank's memory on the same host: one copy by the kernel (process_vm_readv) instead of two by TCP.

A sender announces the address of its bytes, the receiver reads them and acknowledges. No shared segments need clean-up,
and tensors are allocated as usual. A test read finds readable ranks: each rank stores a random number in its memory and
reports its process id and the address. On another host, in another PID namespace or under a kernel that forbids it
(Yama's ptrace_scope) the number cannot be read; these pairs use torch.distributed's messages, as do CUDA tensors.
HYBRIDFLOW_PEER_MEMORY=0 switches it off.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MOST = 1 << 20  # bytes per call: the kernel pins all pages of a call, and larger ones exceed the caches


@dataclass(frozen=True)
class PeerProcess:
    """A rank's process: its host (one boot of one kernel), and the address of a number in its memory."""

    host: str
    pid: int
    address: int
    number: int

    def readable(self) -> bool:
        """Whether this process can read its memory; True for itself."""
        found = torch.zeros(1, dtype=torch.int64)
        try:
            read(self.pid, self.address, found.data_ptr(), found.nbytes)
        except OSError:
            return False
        return int(found) == self.number


class PeerMemory:
    """The ranks that exchange bytes with this one by reading memory, and the validity of its announcements.

    A number in this process's memory changes when a run begins and ends, before memory is freed: a reader that finds
    the announced number after reading the bytes has read valid bytes. The number is random, so a process that reuses a
    dead one's id does not have it."""

    def __init__(self) -> None:
        self._number = torch.tensor([secrets.randbits(62)])
        self.readable: Mapping[int, int] = {}  # process ids of the ranks that this one reads
        self.readers: Collection[int] = ()  # the ranks that read this one

    def advance(self) -> None:
        """Invalidate earlier announcements."""
        self._number += 1

    def announce(self, tensors: Iterable[Tensor], into: Tensor) -> None:
        """Write the number and the addresses of contiguous `tensors` into `into` [2 + tensors] int64."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        into.copy_(torch.tensor([self._number.data_ptr(), int(self._number), *addresses]))

    def process(self) -> PeerProcess | None:
        """The data that peers need to read this process's memory; None if switched off."""
        if sys.platform != "linux" or os.environ.get("HYBRIDFLOW_PEER_MEMORY") == "0":
            return None
        boot = Path("/proc/sys/kernel/random/boot_id")
        host = boot.read_text() if boot.is_file() else ""
        return PeerProcess(host, os.getpid(), self._number.data_ptr(), int(self._number))


def read_announced(pid: int, announced: Tensor, into: Iterable[Tensor]) -> None:
    """Read what `announced` of process `pid` names into contiguous tensors of the same sizes, in the same order.
    Errors: OSError when the process is gone or its memory was given back meanwhile."""
    where, number, *addresses = announced.tolist()
    for address, tensor in zip(addresses, into, strict=True):
        read(pid, address, tensor.data_ptr(), tensor.nbytes)
    now = torch.zeros(1, dtype=torch.int64)
    read(pid, where, now.data_ptr(), now.nbytes)
    if int(now) != number:
        raise OSError(f"process {pid} has ended this transfer, so what was read from it is not valid")


def read(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copy `nbytes` at `address` of process `pid` to `into` of this one. Errors: OSError."""
    for start in range(0, nbytes, _MOST):
        size = min(_MOST, nbytes - start)
        local, remote = _Span(into + start, size), _Span(address + start, size)
        done = _libc().process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if done != size:
            code = ctypes.get_errno() if done < 0 else 0
            raise OSError(code, f"read {done} of {size} bytes of process {pid}: {os.strerror(code)}")


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    return libc
