"""Copies between views, and the lane that they run in: the host's thread, or a CUDA stream of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.errors import WaitTimeoutError


@dataclass
class Copies:
    """Pairs of equally shaped views that are copied in one call, with dtype conversion."""

    into: list[Tensor] = field(default_factory=list)
    from_: list[Tensor] = field(default_factory=list)

    def add(self, into: Tensor, from_: Tensor) -> bool:
        """Whether there is something to copy: not where both are the same memory. Both must have memory now."""
        same = into.data_ptr() == from_.data_ptr() and into.device == from_.device
        if same and into.dtype == from_.dtype and into.stride() == from_.stride():
            return False
        self.into.append(into)
        self.from_.append(from_)
        return True

    def run(self) -> None:
        if self.into:
            torch._foreach_copy_(self.into, self.from_)  # pyright: ignore[reportPrivateImportUsage]


class Lane:
    """Where a transfer's copies and messages are queued.

    On the host everything is done when the call returns. On CUDA work goes to a stream of the lane's own, beside what
    the caller's stream does: `follow` and `join` order the two, `mark` and `reached` tell the host how far it got.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def behind(self) -> int:
        """How many steps the lane is given beyond the one that the host waits for, so that it never runs dry."""
        return 0 if self._stream is None else 2

    def follow(self) -> None:
        """What is queued from now on sees what the caller's stream has done so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join(self) -> None:
        """What the caller's stream does from now on sees everything that is queued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Work of this block goes to the lane."""
        with torch.cuda.stream(self._stream):  # does nothing for None
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point that is reached when everything queued so far is done; None when it is done."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def reached(self, mark: torch.cuda.Event | None, timeout: float | None = None) -> None:
        """Wait for `mark`, at most `timeout` seconds. Errors: WaitTimeoutError."""
        if mark is None:
            return
        if timeout is None:
            mark.synchronize()
            return
        end = time.monotonic() + timeout
        while not mark.query():
            if time.monotonic() > end:
                raise WaitTimeoutError(f"weights were not moved within {timeout} s on {self._device}.")
            time.sleep(0.0005)
