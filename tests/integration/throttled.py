"""Workers of a loop on hosts without a device: what they compute and copy takes the time of a device's, on a clock of
each process (`throttled_link`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hybridflow as hf
from hybridflow.engines.contract import STATES, TrainState
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from hybridflow.workers.worker import Worker
from tests.throttled_link import Clock, Link

CLOCK = Clock()
SECONDS = 1.0
"""Of a call that computes, of an update twice as many; and of all copies of a model."""


class Gate(Worker):
    """Calls behind this one are on their way before it ends: what is said of them is known."""

    @register(ONE_TO_ALL)
    def wait(self, path: str) -> None:
        while not Path(path).exists():
            time.sleep(0.01)
        time.sleep(0.3)


class Timed:
    """Mixed into a model's worker."""

    @contextmanager
    def resident(self: Any, what: Collection[TrainState] = STATES) -> Iterator[None]:
        with super().resident(what):  # type: ignore[misc]
            yield
        CLOCK.now += SECONDS if len(what) == 1 else 2 * SECONDS


class Actor(Timed, hf.ActorWorker):
    pass


class Critic(Timed, hf.CriticWorker):
    pass


class Reference(Timed, hf.ReferenceWorker):
    """Its weights come over a link on which they take `SECONDS`. With `dies`, a path, the process of rank 1 is killed
    in the middle of the copies of its third return, once."""

    def __init__(self, *, dies: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        memory = self.engine.memory()
        self.link = Link(CLOCK, memory.total_bytes / SECONDS)
        memory.images.stream = self.link
        if dies is None or self.context.rank != 1 or (died := Path(dies)).exists():
            return
        copy, parts = self.link.copy, len(memory._storages)

        def dying(*tensors: Any) -> None:
            if self.link.copies == 2 * parts + parts // 2:
                died.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            copy(*tensors)

        self.link.copy = dying  # type: ignore[method-assign]

    @register(ONE_TO_ALL, blocking=True)
    def link_seconds(self) -> tuple[float, float]:
        """Of copies, and of the device's waits for them."""
        return self.link.seconds, self.link.stalled
