"""PipelineTurn: one update's side of shared pipeline stages (`time_sharing`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hybridflow.planner.pipeline.schedule import Instruction

T = TypeVar("T")
UPDATE_THREAD = "shared update"
"""The name of the threads of updates."""


class Pass(Protocol):
    """A mini-batch of a model on this stage (`megatron.stage_pass.StagePass`)."""

    micro_batches: Sequence[Any]

    def run(self, each: Instruction) -> None: ...

    def run_all(self, instructions: Sequence[Instruction]) -> None: ...

    def end(self) -> None: ...


Announced = tuple[tuple[int, ...], float]
"""The micro-batches of each mini-batch of an update on this rank, and the mean cost of one."""


class PipelineTurn:
    """One update's side: it announces itself, then gives each mini-batch to be run and waits for its end."""

    def __init__(self) -> None:
        self.announced: Announced | None = None
        self.ended = False
        self._changed = threading.Condition()
        self._pass: Pass | None = None
        self._error: BaseException | None = None
        self._taken, self._all_done = 0, threading.Event()

    # The update's thread

    def announce(self, micro_batches: Sequence[int], cost: float) -> None:
        """What the update will train, before its first mini-batch."""
        self.announced = tuple(micro_batches), cost

    def take(self, mine: Pass) -> None:
        """Have a mini-batch run; returns after its last instruction. Errors: those of any model's computations."""
        with self._changed:
            self._taken += 1
            self._pass = mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pass is None or self._error is not None)
            if self._error is not None:
                raise self._error

    def settle(self) -> BaseException | None:
        """After the last mini-batch, wait for those of all models: what fails there stops this step, too. Returns an
        error of this rank's computations, of any model."""
        if self.announced is not None and self._taken == len(self.announced[0]):
            self._all_done.wait()
        with self._changed:
            return self._error

    def run(self, update: Callable[[], T], results: list[T]) -> None:
        """The update in this thread; `update` does not raise."""
        try:
            results.append(update())
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    # The thread that computes

    def next_pass(self) -> Pass | None:
        """The mini-batch that the update waits for; None when the update has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._pass is not None or self.ended)
            return self._pass

    def done(self) -> None:
        """Let the update continue after its mini-batch."""
        with self._changed:
            self._pass = None
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the update has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended)

    def all_done(self) -> None:
        """No model has anything left to compute."""
        self._all_done.set()

    def abandon(self, error: BaseException) -> None:
        """Make the update raise `error` where it waits, or when it next gives a mini-batch."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
