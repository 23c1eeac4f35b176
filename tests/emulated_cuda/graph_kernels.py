"""Kernels of captured graphs: what a replay runs in Python, by number."""

from __future__ import annotations

import ctypes
import itertools
import sys
import traceback
from collections.abc import Callable

from tests.emulated_cuda.runtime import cudart

Replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)
_numbers = itertools.count()
_kernels: dict[int, Callable[[], None]] = {}


@Replay
def _replay(number: int) -> int:
    try:
        _kernels[number]()
    except Exception:  # the runtime, in C++, reports cudaErrorLaunchFailure
        print("emulated CUDA: a kernel of a graph failed\n" + traceback.format_exc(), file=sys.stderr)
        return 1
    return 0


def connect() -> None:
    cudart.emu_replay_with(_replay)


def record(stream: int, kernel: Callable[[], None]) -> None:
    """`kernel` joins the graph that is captured on the stream. It may hold aliases of memory, no device tensors."""
    number = next(_numbers)
    if cudart.emu_record(ctypes.c_void_p(stream), ctypes.c_long(number)):
        _kernels[number] = kernel


def refuse(stream: int, operator: str) -> None:
    """`operator` makes the host wait, which ends a capture."""
    cudart.emu_refuse_in_capture(ctypes.c_void_p(stream))
    raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({operator} waits for its sizes)")
