"""A link between host and device of fixed bytes per second, on a clock that passes only where something waits or
computes: what a copy on the CPU would take on a device, the same in every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridflow.engine3d.copy_stream import CopyStream


@dataclass
class Clock:
    """Seconds of what was computed and waited for; of one process."""

    now: float = 0.0


class Link(CopyStream):
    """Copies one after the other, beside what passes on `clock`. `seconds` are those of copies to the device, `stalled`
    those that the device waited for them."""

    def __init__(self, clock: Clock, rate: float) -> None:
        super().__init__(torch.device("cpu"))
        self.clock, self.rate, self.free = clock, rate, 0.0
        self.seconds = self.stalled = 0.0
        self.copies = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(destination, source)
        self.copies += 1
        self.seconds += destination.nbytes / self.rate
        self.free = max(self.free, self.clock.now) + destination.nbytes / self.rate

    def mark(self) -> float:
        return self.free

    def wait(self, mark: float) -> None:
        late = max(0.0, mark - self.clock.now)
        self.stalled += late
        self.clock.now += late

    def join(self) -> None:
        self.clock.now = max(self.clock.now, self.free)
