"""OverlappedMove: weights that move part by part while the optimizer steps further parts (PUZZLE, section 5.2).

main thread / stream     step part 0 | step part 1 | step part 2 | ...          | wait
helper thread / stream                 move part 0 | move part 1 | move part 2 | ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hybridflow.engine3d.copy_stream import CopyStream, reached_by
from hybridflow.engine3d.plan import BUCKET_BYTES, WeightPlan
from hybridflow.engine3d.transfer.handshake import wire_device
from hybridflow.engine3d.transfer.transfer import Storage, Transfer
from hybridflow.errors import LayoutError

T = TypeVar("T")


class Final(NamedTuple):
    """A part whose parameters are final once `reached` is (None: they are)."""

    part: int
    reached: torch.cuda.Event | None


def beside(steps: Iterable[int], move: Callable[[Iterator[Final]], T], device: torch.device) -> tuple[T, float]:
    """`move(parts)` in a helper thread, which gets each part when `steps` has yielded it: its result, and the seconds
    for which the last step was over and it was not. `steps` is always exhausted. Errors: its own, then those of
    `move`."""
    parts: SimpleQueue[Final | None] = SimpleQueue()
    device_of = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins with 0
    with ThreadPoolExecutor(1, thread_name_prefix="weights", initializer=device_of) as helper:
        moving = helper.submit(move, iter(parts.get, None))
        try:
            for part in steps:
                parts.put(final(part, device))
        finally:
            parts.put(None)
        start = time.perf_counter()
        return moving.result(), time.perf_counter() - start


def final(part: int, device: torch.device) -> Final:
    """The part, as the current stream leaves it."""
    return Final(part, reached_by(torch.cuda.current_stream(device)) if device.type == "cuda" else None)


class OverlappedMove:
    """Moves parts of `plan` (by canonical tensor), each once it is final.

    `group` serves only these moves, since the optimizer uses training's groups at the same time. Storages must have
    memory when it is built and while it runs. Building is collective over `group`.
    Errors: LayoutError when the parts do not cover the plan's tensors; those of `Transfer`."""

    def __init__(
        self,
        plan: WeightPlan,
        parts: Sequence[frozenset[str]],
        source: Storage,
        destination: Storage,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if left := {move.box.tensor for move in plan.moves} - frozenset().union(*parts):
            raise LayoutError(f"no part of an optimizer step updates {sorted(left)[:5]}: step_groups() is incomplete.")
        sides = (source, destination, group, rank, bucket_bytes)
        self.transfers = [Transfer(plan.only(names), *sides) for names in parts]
        tensors = (*source.values(), *destination.values())
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), wire_device(group))
        self._stream = CopyStream(self._device, group)

    @property
    def received_bytes(self) -> int:
        """Over the wire, in all moves so far."""
        return sum(transfer.received_bytes for transfer in self.transfers)

    def run(self, steps: Iterable[int]) -> tuple[float, float]:
        """Move part k once `steps` has yielded k; return when all yielded parts have arrived.

        Returns the seconds of all moves and the part of them that overlapped with the optimizer. `steps` is always
        exhausted; then the first failed move's error is raised, and later parts are not moved. Errors: those of `steps`
        and of `Transfer.run`."""
        moved, waited = beside(steps, self.move, self._device)
        return moved, max(0.0, moved - waited)

    def move(self, parts: Iterable[Final]) -> float:
        """Move these parts, each once it is final; the seconds of all moves. Errors: those of `Transfer.run`."""
        moved = 0.0
        try:
            for part, reached in parts:
                with self._stream.queued():
                    self._stream.reached(reached)
                    start = time.perf_counter()
                    self.transfers[part].run()
                    self.transfers[part].release()
                    moved += time.perf_counter() - start
        finally:
            self._stream.join()  # what was queued before a failure still runs
        return moved

    def all(self, parts: Iterable[Final] = ()) -> Iterator[Final]:
        """These parts, and then those that an unfinished step has left out, as they are."""
        left = list(range(len(self.transfers)))
        for each in parts:
            left.remove(each.part)
            yield each
        for part in left:
            yield final(part, self._device)
