"""HybridEngine: switches one rank's weights between training and generation layout (paper, section 5).

    training ──to_generation──▶ generation: gathered inside micro data parallel groups, layer by layer; KV cache there
    training ◀──to_training──── generation: sliced out locally, layer by layer; KV cache and generation weights gone

It works on two weight holders and imports no engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import torch
import torch.distributed as dist

from hybridflow.engine3d.overlapped_move import OverlappedMove
from hybridflow.engine3d.transfer.transfer import received_by_tensor
from hybridflow.engine3d.transition import Generator, Trainer, Transition, any_rank
from hybridflow.errors import ConfigError, nearest

Offloaded = Literal["optimizer", "gradients", "generation"]
Agree = Callable[[Callable[[], None]], object]
Phase = Literal["training", "generation"]


@dataclass(frozen=True)
class TransitionReport:
    """Measured cost of this rank's latest transition.

    `received_bytes` and `sent_bytes` went over the wire; `received` splits `received_bytes` by canonical tensor, to
    separate norms and second copies of tied embeddings. `resident_bytes` are all parameters in memory while generating,
    including training's, with shared memory counted once; `peak_bytes` is the maximum during the transition;
    `buffer_bytes` are message buffers beside them. `seconds` is the time to generation, `back_seconds` the time back.
    For a step with asynchronous weight transformation, `moved_seconds` is the time of the moves and `hidden_seconds`
    the part of it that overlapped with the optimizer."""

    received_bytes: int = 0
    sent_bytes: int = 0
    received: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    peak_bytes: int = 0
    buffer_bytes: int = 0
    seconds: float = 0.0
    back_seconds: float = 0.0
    moved_seconds: float = 0.0
    hidden_seconds: float = 0.0


class HybridEngine:
    """One rank's training and generation weights of the same model in the same process.

    It starts in training. `to_generation` moves the weights to generation if it is `stale`, and frees the training
    tensors that can be recovered; `to_training` recovers them. Building is collective over `group` (the training ranks,
    in rank order), and so are `to_generation` and `step`; every rank makes the same calls.

    `offload`: "optimizer" and "gradients" are in host memory while generating, "generation" (its weights) while
    training; without training in between, the generation weights return from there instead of over the wire. `overlap`
    enables `step`; `overlap_group` is a second process group over the same ranks, for `step` only. `nodes[rank]` is the
    node of each rank: a piece that several ranks of a node need enters it once. `agree(move)` runs a part of a move and
    raises on all ranks when it fails on any, such as for lack of memory; without it only that rank knows, and its peers
    wait until they have WaitTimeoutError.

    Both holders must have memory for all their weights when this is built, and return the same tensors from every
    `storage()` call: build it after anything that replaces them.

    A failure loses no training weights: each is in its training tensor or its generation tensor. Call `to_training` on
    all ranks: it recovers them and frees generation's memory, without communication (restoring from main parameters
    needs the trainer's groups). The process group still works unless a rank had WaitTimeoutError; `to_generation` may
    then be called again, even directly. After WaitTimeoutError the group is unusable: call `to_training`, then build a
    new HybridEngine with a new group. If it was `overlap_group`, `to_generation` still works and `step` does not.
    Errors: ConfigError for an unknown `offload`; LayoutError when trainer and generator differ in their tensors or
    `nodes` has another number of ranks; those of `OverlappedMove` and `Transfer`."""

    def __init__(
        self,
        train: Trainer,
        generate: Generator,
        group: dist.ProcessGroup | None,
        rank: int,
        *,
        offload: Collection[Offloaded] = (),
        overlap: bool = False,
        overlap_group: dist.ProcessGroup | None = None,
        bucket_bytes: int | None = None,
        nodes: Sequence[int] = (),
        agree: Agree = lambda move: move(),
    ) -> None:
        check_offload(offload)
        self._train, self._generate = train, generate
        self._waits = [what for what in get_args(Offloaded) if what in offload and what != "generation"]
        self._parks = "generation" in offload
        self._move = Transition(train, generate, group, rank, bucket_bytes, nodes)
        self._group, self._agree = group, agree
        sides = (self._move.train.tensors, self._move.generate.tensors, overlap_group, rank, self._move.bucket_bytes)
        self._overlap = OverlappedMove(self._move.plan, train.step_groups(), *sides) if overlap else None
        self.phase: Phase = "training"
        self._settled = True  # False after a failed call
        self._parked = False  # current generation weights are in host memory
        self._arrived = False  # current generation weights are in memory
        self._trained = True  # generation has not had the current weights yet
        self._moved_seconds = self._hidden_seconds = 0.0  # of steps since the latest transition
        self.report = TransitionReport()
        self._reported = self._counted()  # bytes until the latest report
        self._device = next(iter(self._move.generate.tensors.values())).device
        self._move.generate.release()
        generate.sleep()

    @property
    def stale(self) -> bool:
        """Whether generation lacks the current weights."""
        return not (self._arrived or self._parked)

    @property
    def in_training(self) -> bool:
        """Whether the training weights are there, so that `to_training` does nothing."""
        return self.phase == "training" and self._settled

    def to_generation(self) -> None:
        """Move the current training weights to generation and wake its KV cache. Errors: WaitTimeoutError when a peer
        does not take part; LayoutError when a holder's tensors were replaced. The phase is then training and generation
        stale; the class docstring describes recovery."""
        if self.phase == "generation":
            return
        if not self._settled:  # an earlier call failed
            self.to_training()
        self._move.check()
        self._settled = False
        together = self._parks or self._overlap  # ranks may differ after a failure
        stale = any_rank(self.stale, self._group) if together else self.stale
        self._arrived = self._parked = False
        if self._waits:
            self._agree(partial(self._train.offload, self._waits))
        start = time.perf_counter()
        self._move.account.restart()
        self._agree(self._move.prepare if stale else self._move.recall)
        self._agree(partial(self._leave, stale))
        self._agree(self._generate.wake)  # apart: ranks of a replica may exchange what fits
        seconds = time.perf_counter() - start
        if self._trained:
            self._generate.weights_changed()
            self._trained = False
        self.phase, self._arrived, self._parked, self._settled = "generation", True, False, True
        self._report(seconds)

    def to_training(self) -> None:
        """Restore the training weights; free generation weights and KV cache.

        No communication, unless generation's dtype is narrower: then the main parameters are gathered from the data
        parallel ranks. After an error the phase is training; call it again."""
        if self.in_training:
            return
        start, parks = time.perf_counter(), self._parks and self._arrived
        self.phase, self._settled, self._arrived, self._parked = "training", False, False, False
        self._agree(partial(self._return, parks))
        self._parked, self._settled = parks, True
        self.report = replace(self.report, back_seconds=time.perf_counter() - start)

    def _leave(self, stale: bool) -> None:
        if stale:
            self._move.run()
        self._synchronize()

    def _return(self, parks: bool) -> None:
        self._generate.sleep()
        self._move.back(keep=parks)
        if parks:
            self._move.generate.offload()
        self._synchronize()
        if self._waits:
            self._train.reload(self._waits)

    def trained(self) -> None:
        """Report that the training weights change: generation frees its copy. Errors: ConfigError while generating, and
        after a failed call until `to_training`."""
        if self.phase == "generation":
            raise ConfigError("the weights are in their generation layout: call to_training() before training them.")
        if not self._settled:
            raise ConfigError("an earlier call failed half-way: call to_training() on all ranks before training.")
        self._arrived, self._parked, self._trained = False, False, True
        self._move.generate.release()

    def step(self) -> dict[str, float]:
        """An optimizer step during which every final part moves to the generation layout (PUZZLE, 5.2).

        The price: generation weights stay in memory beside training's from here on. They are current when all parts
        have arrived. After an error of the optimizer the step is incomplete, after one of a move it is complete;
        generation is stale in both cases, and `to_training` frees its memory. Bitwise equal to a step followed by
        `to_generation`.
        Errors: ConfigError without `overlap`, and as `trained`; LayoutError when a holder's tensors were replaced;
        those of Transfer."""
        if self._overlap is None:
            raise ConfigError("this HybridEngine was built without overlap=True: it does not step the optimizer.")
        self.trained()
        self._move.check()
        self._settled = False
        self._move.generate.acquire()
        self._moved_seconds, self._hidden_seconds = self._overlap.run(self._train.step_parts())
        self._arrived = self._settled = True
        return self._train.step_result

    @property
    def resident_bytes(self) -> int:
        """Parameters of both layouts that are in memory now."""
        return self._move.account.resident_bytes

    @property
    def buffer_bytes(self) -> int:
        """Message buffers that stay for the next transition."""
        return self._move.transfer.kept_bytes

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _counted(self) -> tuple[Counter[str], int]:
        """Bytes received by canonical tensor, and bytes sent, so far."""
        transfers = [self._move.transfer, *(self._overlap.transfers if self._overlap else ())]
        return received_by_tensor(transfers), sum(transfer.sent_bytes for transfer in transfers)

    def _report(self, seconds: float) -> None:
        (known, known_sent), self._reported = self._reported, self._counted()
        received, sent = self._reported
        received = received - known
        self.report = TransitionReport(
            received_bytes=received.total(),
            sent_bytes=sent - known_sent,
            received=dict(received),
            resident_bytes=self.resident_bytes,
            peak_bytes=self._move.account.peak_bytes,
            buffer_bytes=self._move.transfer.peak_bytes,
            seconds=seconds,
            back_seconds=self.report.back_seconds,
            moved_seconds=self._moved_seconds,
            hidden_seconds=self._hidden_seconds,
        )
        self._moved_seconds = self._hidden_seconds = 0.0


def check_offload(offload: Collection[str]) -> None:
    """Errors: ConfigError for a name that cannot be offloaded, or a string instead of a collection."""
    known = get_args(Offloaded)
    if isinstance(offload, str) or not isinstance(offload, Collection):
        one = offload if offload in known else known[0]
        raise ConfigError(f"offload={offload!r}: give several, such as offload=({one!r},).")
    for what in offload:
        if what not in known:
            raise ConfigError(f"offload={what!r} is unknown.{nearest(str(what), known)}")
