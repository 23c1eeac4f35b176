"""PipelineTurn: one update's side of shared pipeline stages (`time_sharing`).

On CUDA the thread that computes queues on the device's own stream, for all models. An update's reductions and steps are
on a stream of its model, and begin when all ranks have computed the mini-batch, which they tell each other on the host:
what they wait for across ranks is there, or queued on streams like it, whatever is computed beside them.

    computing   F F B (m)  ─event─┐  F B (other)         ┌ F B (m, next mini-batch)
    of m                          └ barrier, reduce, step ┘ event
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridflow.engine3d.copy_stream import reached_by
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.engines.megatron.stage_pass import StagePass

T = TypeVar("T")
UPDATE_THREAD = "shared update"
"""The name of the threads of updates."""


class Announced(NamedTuple):
    """The micro-batches of each mini-batch of an update on this rank, and the mean cost of one; or of forward passes,
    which it does not train on."""

    micro_batches: tuple[int, ...]
    cost: float
    trains: bool = True


class PipelineTurn:
    """One update's side: it announces itself, then gives each mini-batch to be run and waits for its end. `context` of
    its model (None: it returns an error at once), `before` the update whose last step comes before its own. A call that
    does not train (`trains`) gives its first forward passes."""

    def __init__(
        self, context: RankContext | None = None, before: PipelineTurn | None = None, trains: bool = True
    ) -> None:
        self.announced: Announced | None = None
        self.ended = False
        self._context, self._before, self._trains = context, before, trains
        self._stream = None if context is None else context.step_stream
        self._given: torch.cuda.Event | None = None  # after what the update queued before its mini-batch
        self._computed: torch.cuda.Event | None = None
        self._changed = threading.Condition()
        self._pass: StagePass | None = None
        self._error: BaseException | None = None
        self._taken, self._all_done = 0, threading.Event()

    # The update's thread

    def announce(self, micro_batches: Sequence[int], cost: float) -> None:
        """What the update will train, before its first mini-batch, or compute. Errors: ConfigError the second time:
        its passes would be in no schedule."""
        if self.announced is not None:
            raise ConfigError(
                "an update that shares stages announced its mini-batches twice. Call a method that updates twice "
                "outside of hf.together and time_sharing=True, or make two calls of it."
            )
        self.announced = Announced(tuple(micro_batches), cost, self._trains)

    def takes_forwards(self) -> bool:
        """Whether forward passes are taken; those behind the first ones wait until nothing runs beside them."""
        self._alone()
        return not self._trains and not self._last

    def take(self, mine: StagePass) -> None:
        """Have a mini-batch run; returns after its last instruction. Errors: those of any model's computations."""
        with self._changed:
            self._taken += 1
            self._given = self._mark()
            self._pass = mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._pass is None or self._error is not None)
            if self._error is not None:
                raise self._error
        if self._computed is not None and self._context is not None and self._stream is not None:
            self._computed.synchronize()  # not the stream alone: see the module's docstring
            dist.barrier(self._context.groups.new("agreement", range(self._context.grid.size), "gloo"))
            if self.announced is not None:  # else nothing is computed beside it
                torch.cuda.set_stream(self._stream)

    @property
    def _last(self) -> bool:
        """Whether the mini-batch that was taken is the last one that was announced."""
        return self.announced is not None and self._taken == len(self.announced.micro_batches)

    def rejoin(self) -> None:
        """From now on this thread queues on the device's own stream, behind what is on its model's."""
        if self._stream is not None:
            own = torch.cuda.default_stream(self._stream.device)
            own.wait_stream(self._stream)
            torch.cuda.set_stream(own)

    def _mark(self) -> torch.cuda.Event | None:
        """After what the current stream has so far."""
        return None if self._stream is None else reached_by(torch.cuda.current_stream(self._stream.device))

    def settle(self) -> BaseException | None:
        """After the last mini-batch, wait for those of all models, what fails there stops this step, too, and for the
        update before this one. Returns an error of this rank's computations, of any model."""
        self._alone()
        with self._changed:
            return self._error

    def _alone(self) -> None:
        """After the last mini-batch: until all models have computed theirs, and the update before this one has ended:
        two that queue on one stream would be in unlike orders on unlike ranks."""
        if self._last:
            self._all_done.wait()
            if self._before is not None:
                self._before.join()
            self.rejoin()

    def run(self, update: Callable[[], T], results: list[T]) -> None:
        """The update in this thread; `update` does not raise."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
        try:
            results.append(update())
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    # The thread that computes

    def next_pass(self) -> StagePass | None:
        """The mini-batch that the update waits for; None when the update has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._pass is not None or self.ended)
            if self._given is not None and self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_event(self._given)
                self._given = None
            return self._pass

    def done(self) -> None:
        """Let the update continue after its mini-batch."""
        with self._changed:
            self._pass, self._computed = None, self._mark()
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
