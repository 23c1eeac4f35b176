"""CopyStream: the queue of a device's copies, which run beside what the device computes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.transfer.handshake import check_complete
from hybridflow.errors import WaitTimeoutError


def reached_by(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after everything queued so far on `stream`."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class CopyStream:
    """The queue of copies of a transfer, with its messages over `group`, or of copies from and to host memory.

    On the host, calls complete before they return. On CUDA a separate stream runs beside the caller's: `follow` and
    `join` order the two, `mark` reports its progress, to the host with `reached` and to the caller's stream with
    `wait`. Memory is allocated for the caller's stream: `follow` before it is written here, `join` before it is freed.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group

    @cached_property
    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def behind(self) -> int:
        """Number of steps queued ahead of the host, so that the stream never runs empty."""
        return 0 if self._stream is None else 2

    def follow(self) -> None:
        """Later queued work waits for the caller's stream so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """Later work of the caller's stream waits for everything queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Work of this block goes to the stream."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            yield

    def mark(self) -> Any:
        """An event after everything queued so far; None on the host."""
        return None if self._stream is None else reached_by(self._stream)

    def wait(self, mark: Any) -> None:
        """Later work of the caller's stream waits for `mark`; the host does not."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queue a copy."""
        with self.queued():
            destination.copy_(source, non_blocking=True)

    def reached(self, mark: torch.cuda.Event | None, timeout: float | None = None) -> None:
        """Wait for `mark`, at most `timeout` seconds (None: until NCCL aborts a late message). Errors:
        WaitTimeoutError, also when a message before `mark` was aborted."""
        if mark is None:
            return
        if timeout is None:
            mark.synchronize()
        end = time.monotonic() + (timeout or 0.0)
        while not mark.query():
            if time.monotonic() > end:
                raise WaitTimeoutError(f"weights were not moved within {timeout} s on {self._device}.")
            time.sleep(0.0005)
        check_complete(self._group)
