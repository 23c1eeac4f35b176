"""Time sharing: updates of several models on the same pipeline stages, each in the bubbles of the others (PUZZLE,
section 4), or their forward passes (figure 12).

Each update runs unchanged in a thread of its own, up to its next mini-batch, and hands that to the thread that called
`SharedStages.run`. This one alone computes, in the order of one schedule, and lets an update continue when its
mini-batch is done: its gradients are reduced, and its optimizer steps, beside the other model's rest. Only an update's
last step waits for the last mini-batches of all models, so that updates of one mini-batch are made in both models or in
none.

    thread of update m   announce ─ pass ─ wait ......................... ─ step ─ pass ─ wait ...
    calling thread                        F F B (m)  F B (other)  B (m) ┘  F B (other) ...

On CUDA the thread that computes queues on the device's own stream, for all models. An update's reductions and steps are
on a stream of its model, and begin when all ranks have computed the mini-batch, which they tell each other on the host:
what they wait for across ranks is there, or queued on streams like it, whatever is computed beside them.

    computing   F F B (m)  ─event─┐  F B (other)         ┌ F B (m, next mini-batch)
    of m                          └ barrier, reduce, step ┘ event
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridflow.engine3d.copy_stream import reached_by
from hybridflow.engines.process_groups import RankContext, gather
from hybridflow.errors import ConfigError, WorkerError
from hybridflow.planner.pipeline.schedule import Instruction, Schedule, Work, one_f_one_b
from hybridflow.planner.pipeline.shared_schedule import together

if TYPE_CHECKING:
    from hybridflow.engines.megatron.engine import StagePass

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ALIKE = 1.05  # costs of micro-batches that are planned as equal


class SharedStages:
    """The updates of several models on this rank. `schedule` is the one that was planned, and `ran` records what this
    rank computed, sent and received, in order."""

    def __init__(self, engines: Sequence[Any], context: RankContext, trains: bool = True) -> None:
        """`engines`: the `TrainEngine` of each update, None for one that returns an error at once. `context` of one of
        the models. Without `trains` the calls compute."""
        self.engines, self.turns, self._context = engines, list[PipelineTurn](), context
        for engine in engines:
            own = None if engine is None else engine.context
            self.turns.append(PipelineTurn(own, self.turns[-1] if self.turns else None, trains))
        self.schedule: Schedule | None = None
        self.ran: list[Instruction] = []

    def run(self, updates: Sequence[Callable[[], T]]) -> list[T]:
        """The results of the updates, which must return their errors. Collective over the ranks, of all models alike.

        When a computation raises in one of them, no model makes a step any more on any rank, and every update's last
        step waits for all computations. An error of communication, and one of a tensor parallel rank alone, is raised
        in all updates of its rank; its peers wait for their timeout.
        """
        results: list[list[T]] = [[] for _ in updates]
        with ExitStack() as stack:
            for number, (engine, turn) in enumerate(zip(self.engines, self.turns, strict=True)):
                others = [other for other in self.engines if other is not engine and other is not None]
                if engine is not None:
                    stack.enter_context(engine.in_turns(turn, others))
                arguments = updates[number], results[number]
                threading.Thread(target=turn.run, args=arguments, name=UPDATE_THREAD, daemon=True).start()
                stack.callback(turn.join)
                turn.next_pass()  # their first collectives do not mix
            try:
                self._run(*self._planned())
            except BaseException as error:
                for turn in self.turns:
                    turn.abandon(error)
                if not isinstance(error, Exception):
                    raise
            finally:
                for turn in self.turns:
                    turn.all_done()
        return [found[0] for found in results]

    def _planned(self) -> tuple[Sequence[PipelineTurn], Sequence[Instruction]]:
        """The turns of the updates that run on all ranks, and what this rank runs of them. Collective.

        A replica with fewer micro-batches than others leaves the missing ones out, so that all make steps in one order.
        """
        # a group of its own: an update that has failed here may be in a collective of its model elsewhere
        context = self._context
        planning = context.groups.new("time-sharing", range(context.grid.size), "gloo")
        mine = [None if turn.ended else turn.announced or () for turn in self.turns]
        live, works, costs = [], [], []
        for turn, announced in zip(self.turns, zip(*gather(mine, planning), strict=True), strict=True):
            if None in announced:
                turn.abandon(WorkerError("this update has failed on other ranks, before its first mini-batch."))
                continue
            known: list[Announced] = [each for each in announced if each]
            if len(known) < len(announced):
                logger.warning("An update runs alone: its method did not announce its mini-batches (engine.announce).")
                self._run_alone(turn)
                continue
            live.append(turn)
            counts = tuple(map(max, zip(*(one.micro_batches for one in known), strict=True)))
            works.append((counts, known[0].trains))
            costs.append(max(one.cost for one in known))
        if not live:
            return [], []
        times = [cost / min(costs) for cost in costs]
        times = [1.0 if time < _ALIKE else round(time, 1) for time in times]
        planned = tuple(
            Work(micro_batches=counts, forward=time, backward=2 * time, trains=trains)
            for (counts, trains), time in zip(works, times, strict=True)
        )
        if context.schedule[0] != planned:  # the first rank searches for all, and its error is that of all
            found: list[Schedule | WorkerError | None] = [None]
            if context.rank == 0:
                try:
                    found = [together(context.grid.p, planned, at_once=True)]
                except Exception as error:
                    found = [WorkerError(f"no order of the updates was found: {type(error).__name__}: {error}")]
            dist.broadcast_object_list(found, group=planning, group_src=0)
            if isinstance(found[0], WorkerError):
                raise found[0]
            context.schedule = planned, found[0]
        self.schedule = schedule = context.schedule[1]
        return live, schedule.stages[context.coords.p]

    def _run_alone(self, turn: PipelineTurn) -> None:
        """All mini-batches of an update, before those of others."""
        turn.announced, at = None, self._context.coords.p
        while (mine := turn.next_pass()) is not None:
            mine.run_all(one_f_one_b(self._context.grid.p, Work(micro_batches=(len(mine.micro_batches),))).stages[at])
            turn.done()

    def _run(self, turns: Sequence[PipelineTurn], instructions: Sequence[Instruction]) -> None:
        passes: dict[int, StagePass] = {}
        for each in instructions:
            turn = turns[each.model]
            mine = turn.next_pass()
            if mine is None or (each.kind != "finish" and each.micro >= len(mine.micro_batches)):
                continue
            self.ran.append(each)
            if each.kind == "finish":
                passes[each.model] = mine  # waits for its peers when nothing else would wait for it
                turn.done()
            else:
                mine.run(each)
        for mine in passes.values():
            mine.end()


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
