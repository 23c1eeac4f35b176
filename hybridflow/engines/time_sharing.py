"""Time sharing: updates of several models on the same pipeline stages, each in the bubbles of the others (PUZZLE,
section 4), or their forward passes (figure 12).

Each update runs unchanged in a thread of its own, up to its next mini-batch, and hands that to the thread that called
`SharedStages.run`. This one alone computes, in the order of one schedule, and lets an update continue when its
mini-batch is done: its gradients are reduced, and its optimizer steps, beside the other model's rest. Only an update's
last step waits for the last mini-batches of all models, so that updates of one mini-batch are made in both models or in
none.

    thread of update m   announce ─ pass ─ wait ......................... ─ step ─ pass ─ wait ...
    calling thread                        F F B (m)  F B (other)  B (m) ┘  F B (other) ...
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from hybridflow.engines.pipeline_turn import UPDATE_THREAD, Announced, PipelineTurn
from hybridflow.engines.process_groups import RankContext, gather
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import WorkerError
from hybridflow.planner.pipeline.schedule import Instruction, Schedule, Work, one_f_one_b
from hybridflow.planner.pipeline.shared_schedule import together

if TYPE_CHECKING:
    from hybridflow.engines.megatron.stage_pass import StagePass

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ALIKE = 1.05  # costs of micro-batches that are planned as equal


class SharedStages:
    """The updates of several models on this rank. `schedule` is the one that was planned, and `ran` records what this
    rank computed, sent and received, in order."""

    def __init__(self, engines: Sequence[TrainEngine | None], context: RankContext, trains: bool = True) -> None:
        """`engines`: None for an update that returns an error at once. `context` of one of the models. Without `trains`
        the calls compute."""
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
