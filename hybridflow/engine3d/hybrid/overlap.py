"""Overlap: parts of the weights are on their way while the optimizer still steps the others (PUZZLE, section 5.2).

main thread / stream     step part 0 | step part 1 | step part 2 | ...          | wait
helper thread / stream                 move part 0 | move part 1 | move part 2 | ...
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.plan.plan import WeightPlan
from hybridflow.engine3d.transfer.copies import Lane
from hybridflow.engine3d.transfer.transfer import Transfer, received_by_tensor
from hybridflow.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds that all moves took, and how many of them passed while the optimizer was at work."""

    moved_seconds: float
    hidden_seconds: float


class OverlappedMove:
    """`plan` cut into parts by canonical tensors, moved one after the other by a helper thread in a lane.

    `group` is for this alone: its messages travel while the optimizer uses the groups of training. Both storages have
    memory when it is built and while it runs. Building is collective over `group`.
    Errors: LayoutError when the parts do not cover the plan's tensors; those of `Transfer`.
    """

    def __init__(
        self,
        plan: WeightPlan,
        parts: Sequence[frozenset[str]],
        source: Mapping[str, Tensor],
        destination: Mapping[str, Tensor],
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int,
    ) -> None:
        if left := {move.box.tensor for move in plan.moves} - frozenset().union(*parts):
            raise LayoutError(f"no part of an optimizer step updates {sorted(left)[:5]}: step_groups() is incomplete.")
        self._transfers = [
            Transfer(plan.only(names), source, destination, group, rank, bucket_bytes) for names in parts
        ]
        self._device = next(iter(destination.values())).device
        self._lane = Lane(self._device)

    def run(self, steps: Iterable[int]) -> Overlap:
        """Move part k when `steps` has yielded k, and return when all that were yielded have arrived.

        `steps` is always exhausted; then the error of the first move that failed is raised, and later parts have not
        been moved. Errors: those of `steps` and of `Transfer.run`.
        """
        ready: SimpleQueue[tuple[int, torch.cuda.Event | None] | None] = SimpleQueue()
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as helper:
            moving: Future[float] = helper.submit(self._move, ready)
            try:
                for part in steps:
                    ready.put((part, self._event()))
            finally:
                ready.put(None)
            start = time.perf_counter()
            moved = moving.result()
            waited = time.perf_counter() - start
        self._lane.join()
        return Overlap(moved, max(0.0, moved - waited))

    def _event(self) -> torch.cuda.Event | None:
        """What the step has queued so far; the lane's own mark would say what the lane has."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _move(self, ready: SimpleQueue[tuple[int, torch.cuda.Event | None] | None]) -> float:
        moved = 0.0
        with self._lane.queued():
            while (item := ready.get()) is not None:
                part, final = item
                self._lane.reached(final)
                start = time.perf_counter()
                self._transfers[part].run()
                self._transfers[part].release()
                self._lane.reached(self._lane.mark())
                moved += time.perf_counter() - start
        return moved

    @property
    def received(self) -> Counter[str]:
        """Bytes taken from the wire by all runs so far, by canonical tensor."""
        return received_by_tensor(self._transfers)

    @property
    def sent_bytes(self) -> int:
        return sum(transfer.sent_bytes for transfer in self._transfers)
