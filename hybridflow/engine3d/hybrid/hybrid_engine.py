"""HybridEngine: one rank's weights in their training layout or in their generation layout (paper, section 5).

    training ──to_generation──▶ generation: gathered inside micro data parallel groups, layer by layer; KV cache there
    training ◀──to_training──── generation: sliced out locally, layer by layer; KV cache and generation weights gone

It is given two holders of weights and never imports an engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
import torch.distributed as dist

from hybridflow.engine3d.hybrid.transition import Transition, any_rank
from hybridflow.engine3d.interfaces import Generator, Trainer
from hybridflow.engine3d.plan.plan import WeightPlan
from hybridflow.engine3d.transfer.local_plan import Storage
from hybridflow.engine3d.transfer.transfer import CopyStream, Transfer, reached_by, received_by_tensor
from hybridflow.errors import ConfigError, LayoutError, nearest

Offloaded = Literal["optimizer", "gradients", "generation"]
Phase = Literal["training", "generation"]


@dataclass(frozen=True)
class TransitionReport:
    """What the latest transition cost this rank, measured.

    `received_bytes` and `sent_bytes` went over the wire; `received` splits `received_bytes` by canonical tensor, so
    that norms and second copies of tied embeddings can be told apart. `resident_bytes` are the parameters in memory
    while generating, those of training included, shared memory counted once; `peak_bytes` the most during the
    transition; `buffer_bytes` what messages needed beside them. `seconds` is the way to generation, `back_seconds`
    the way back. Of a step with asynchronous weight transformation, `moved_seconds` is what moving took and
    `hidden_seconds` the part of it that passed while the optimizer was at work.
    """

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


class OverlappedMove:
    """`plan` cut into parts by canonical tensors, moved one after the other by a helper thread while the optimizer
    steps the others (PUZZLE, section 5.2).

        main thread / stream     step part 0 | step part 1 | step part 2 | ...          | wait
        helper thread / stream                 move part 0 | move part 1 | move part 2 | ...

    `group` is for this alone: its messages travel while the optimizer uses the groups of training. Both storages have
    memory when it is built and while it runs. Building is collective over `group`.
    Errors: LayoutError when the parts do not cover the plan's tensors; those of `Transfer`.
    """

    def __init__(
        self,
        plan: WeightPlan,
        parts: Sequence[frozenset[str]],
        source: Storage,
        destination: Storage,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int,
    ) -> None:
        if left := {move.box.tensor for move in plan.moves} - frozenset().union(*parts):
            raise LayoutError(f"no part of an optimizer step updates {sorted(left)[:5]}: step_groups() is incomplete.")
        sides = (source, destination, group, rank, bucket_bytes)
        self._transfers = [Transfer(plan.only(names), *sides) for names in parts]
        self._device = next(iter(destination.values())).device
        self._stream = CopyStream(self._device)

    def run(self, steps: Iterable[int]) -> tuple[float, float]:
        """Move part k when `steps` has yielded k, and return when all that were yielded have arrived: seconds that all
        moves took, and how many of them passed while the optimizer was at work.

        `steps` is always exhausted; then the error of the first move that failed is raised, and later parts have not
        been moved. Errors: those of `steps` and of `Transfer.run`.
        """
        moves: list[Future[float]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as helper:
            for part in steps:
                final = reached_by(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else None
                moves.append(helper.submit(self._move, part, final, moves[-1:]))
            start = time.perf_counter()
            moved = sum(move.result() for move in moves)
            waited = time.perf_counter() - start
        self._stream.join()
        return moved, max(0.0, moved - waited)

    def _move(self, part: int, final: torch.cuda.Event | None, earlier: Sequence[Future[float]]) -> float:
        for move in earlier:
            move.result()  # has ended; raises what it raised
        with self._stream.queued():
            self._stream.reached(final)
            start = time.perf_counter()
            self._transfers[part].run()
            self._transfers[part].release()
            self._stream.reached(self._stream.mark())
            return time.perf_counter() - start

    @property
    def received(self) -> Counter[str]:
        """Bytes received in all runs so far, by canonical tensor."""
        return received_by_tensor(self._transfers)

    @property
    def sent_bytes(self) -> int:
        return sum(transfer.sent_bytes for transfer in self._transfers)


class HybridEngine:
    """One rank's training and generation weights of the same model in the same process.

    It starts in training. `to_generation` moves the current weights there, unless they are there (`stale` is False),
    and gives up the training weights that it can get back; `to_training` gets them back. Building is collective over
    `group` (the training ranks, in rank order), and so are `to_generation` and `step`; every rank makes the same calls.

    `offload`: "optimizer" and "gradients" wait in host memory while generating, "generation" (its weights) while
    training: as long as nothing was trained in between they come back from there instead of over the wire.
    `overlap` prepares `step`; `overlap_group` is a second process group over the same ranks, for it alone.
    `nodes[rank]` is the node of each rank, so that what several ranks of a node need enters it once.

    Both holders have memory for all their weights when this is built, and give the same tensors at every call of
    `storage()`: build it after anything that replaces them.

    After a failure half-way no training weights are lost: each is in its training tensor or in its generation tensor.
    Call `to_training` on all ranks. It brings them back and frees what generation had, without communication (where
    weights are restored from main parameters it needs the trainer's groups). Whether weights can move again depends
    on the process group: after an error that was not WaitTimeoutError on any rank it works as before, and
    `to_generation` may be called again, directly too. After WaitTimeoutError the group in which it happened is of no
    use: build a new HybridEngine with a new group once `to_training` is done. If that was `overlap_group`,
    `to_generation` still works and `step` does not.

    Errors: ConfigError for an unknown thing to offload; LayoutError when trainer and generator do not have
    the same tensors, wholly, or `nodes` do not fit; those of `OverlappedMove` and `Transfer`.
    """

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
    ) -> None:
        check_offload(offload)
        self._train, self._generate = train, generate
        self._waits = [what for what in get_args(Offloaded) if what in offload and what != "generation"]
        self._parks = "generation" in offload
        self._move = Transition(train, generate, group, rank, bucket_bytes, nodes)
        self._group = group
        sides = (self._move.train.tensors, self._move.generate.tensors, overlap_group, rank, self._move.bucket_bytes)
        self._overlap = OverlappedMove(self._move.plan, train.step_groups(), *sides) if overlap else None
        self.phase: Phase = "training"
        self._settled = True  # what began has also ended: nothing is left over from a failure
        self._parked = False  # generation weights are in host memory, and current
        self._arrived = False  # generation weights are in memory, and current
        self._moved_seconds = self._hidden_seconds = 0.0  # of steps since the latest transition
        self.report = TransitionReport()
        self._reported = self._counted()  # what was received and sent until the latest report
        self._device = next(iter(self._move.generate.tensors.values())).device
        self._move.generate.release()
        generate.sleep()

    @property
    def stale(self) -> bool:
        """Whether the current weights have yet to move to generation."""
        return not (self._arrived or self._parked)

    def to_generation(self) -> None:
        """Make generation see the current training weights, and wake its KV cache.

        Errors: WaitTimeoutError when a peer does not take part; LayoutError when a holder's tensors were replaced.
        The phase is training then and generation stale; see the class for what can be done.
        """
        if self.phase == "generation":
            return
        if not self._settled:  # an earlier call failed half-way
            self.to_training()
        self._move.check()
        self._settled = False
        if self._waits:
            self._train.offload(self._waits)
        start = time.perf_counter()
        self._move.account.restart()
        stale, self._arrived, self._parked = self._stale_anywhere(), False, False
        self._move.run() if stale else self._move.recall()
        self._synchronize()
        seconds = time.perf_counter() - start
        self._generate.wake()
        self._generate.weights_changed()
        self.phase, self._arrived, self._parked, self._settled = "generation", True, False, True
        self._report(seconds)

    def to_training(self) -> None:
        """Give the training weights their memory and contents back; generation weights and KV cache go.

        No communication, unless generation holds the weights in a dtype that loses something: then the main
        parameters are gathered from the data parallel ranks. After an error the phase is training; call it again.
        """
        if self.phase == "training" and self._settled:
            return
        start, parks = time.perf_counter(), self._parks and self._arrived
        self.phase, self._settled, self._arrived, self._parked = "training", False, False, False
        self._generate.sleep()
        self._move.back(keep=parks)
        if parks:
            self._move.generate.offload()
        self._synchronize()
        if self._waits:
            self._train.reload(self._waits)
        self._parked, self._settled = parks, True
        self.report = replace(self.report, back_seconds=time.perf_counter() - start)

    def trained(self) -> None:
        """Say that the training weights changed, or are about to: generation gives up what it has of them.

        Errors: ConfigError while generating, and when a call failed half-way and `to_training` is still due.
        """
        if self.phase == "generation":
            raise ConfigError("the weights are in their generation layout: call to_training() before training them.")
        if not self._settled:
            raise ConfigError("an earlier call failed half-way: call to_training() on all ranks before training.")
        self._arrived = self._parked = False
        self._move.drop()

    def step(self) -> dict[str, float]:
        """An optimizer step during which every part that is final moves to the generation layout (PUZZLE, 5.2).

        The generation weights are in memory from here on, beside those of training: that is its price. They are
        current when all parts have arrived. After an error of the optimizer its step is incomplete; after one of a
        move it is complete; generation is stale either way, and `to_training` frees what it has.
        Bitwise equal to a step followed by `to_generation`.
        Errors: ConfigError without `overlap`, and as `trained`; LayoutError when a holder's tensors were replaced;
        those of Transfer.
        """
        if self._overlap is None:
            raise ConfigError("this HybridEngine was built without overlap=True: it does not step the optimizer.")
        self.trained()
        self._move.check()
        self._settled = False
        self._move.generate.acquire()
        self._moved_seconds, self._hidden_seconds = self._overlap.run(self._train.step_parts())
        self._arrived = self._settled = True
        return self._train.step_result

    def _stale_anywhere(self) -> bool:
        """Whether weights move: on all ranks if on one, because after a failure ranks may differ."""
        return any_rank(self.stale, self._group) if self._parks or self._overlap else self.stale

    @property
    def resident_bytes(self) -> int:
        """Parameters of both layouts that are in memory now."""
        return self._move.account.resident_bytes

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _counted(self) -> tuple[Counter[str], int]:
        received, sent = Counter(self._move.transfer.received), self._move.transfer.sent_bytes
        if self._overlap is not None:
            received, sent = received + self._overlap.received, sent + self._overlap.sent_bytes
        return received, sent

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
    """Errors: ConfigError for something that cannot be offloaded, or a single text in place of several."""
    known = get_args(Offloaded)
    if isinstance(offload, str) or not isinstance(offload, Collection):
        one = offload if offload in known else known[0]
        raise ConfigError(f"offload={offload!r}: give several, such as offload=({one!r},).")
    for what in offload:
        if what not in known:
            raise ConfigError(f"offload={what!r} is unknown.{nearest(str(what), known)}")
