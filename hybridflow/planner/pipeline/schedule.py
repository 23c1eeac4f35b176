"""Schedule: the instructions of each pipeline stage; plain and interleaved 1F1B in this language. Pure.

    compute lists (forward, backward)  --scheduled-->  with sends, receives and the end of each mini-batch

A receive only announces a message: the forward or backward that needs it waits. It stands one computation early, so
that a transfer overlaps with it. Messages of one model in one direction have the same order on both sides, because NCCL
has no tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from hybridflow.settings import NonNegative, Positive, require, settings

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward", "finish"]
COMPUTES = ("forward", "backward")


class Instruction(NamedTuple):
    """`kind` for micro-batch `micro` of mini-batch `step` of a model; `chunk`: which of the stage's parts of the model
    (virtual stages). "finish" is the stage's part in the model's optimizer step: it runs beside what follows."""

    kind: Kind
    model: int = 0
    step: int = 0
    micro: int = 0
    chunk: int = 0

    def of(self, kind: Kind) -> Instruction:
        return Instruction(kind, self.model, self.step, self.micro, self.chunk)


@settings
class Work:
    """The training of one model: the micro-batches of each mini-batch; for a micro-batch on a stage its `forward` and
    `backward` time and the `activations` that are live between both (any units); the time of an optimizer step."""

    micro_batches: tuple[int, ...]
    forward: Positive = 1.0
    backward: Positive = 2.0
    activations: Positive = 1.0
    finish: NonNegative = 0.0

    def __post_init__(self) -> None:
        counts = self.micro_batches
        good = bool(counts) and all(type(count) is int and count >= 1 for count in counts)
        require(good, f"Work(micro_batches={counts!r}): give the number, at least 1, of each mini-batch.")

    @property
    def total(self) -> int:
        return sum(self.micro_batches)

    @property
    def seconds(self) -> float:
        return self.total * (self.forward + self.backward)


class Link(NamedTuple):
    """Messages of one model between two stages in one direction; they keep their order."""

    model: int
    kind: Literal["forward", "backward"]
    sender: int
    receiver: int


@dataclass(frozen=True)
class Schedule:
    """The instructions of each stage. `chunks`: parts of the model on each stage, visited round by round."""

    works: tuple[Work, ...]
    stages: tuple[tuple[Instruction, ...], ...]
    chunks: int = 1

    @cached_property
    def computations(self) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(tuple(each for each in stage if each.kind in COMPUTES) for stage in self.stages)


@lru_cache(maxsize=4096)
def link(message: Kind, model: int, stage: int, stages: int) -> Link:
    """Where a send or receive of this stage goes to or comes from."""
    verb, kind = message.split("_")
    after = (verb == "send") == (kind == "forward")  # the peer is the next stage, else the previous one
    peer = (stage + (1 if after else -1)) % stages
    ends = (stage, peer) if verb == "send" else (peer, stage)
    return Link(model, "forward" if kind == "forward" else "backward", *ends)


def scheduled(works: Sequence[Work], computations: Sequence[Sequence[Instruction]], chunks: int = 1) -> Schedule:
    """The schedule of these forwards and backwards of each stage, with messages and the end of each mini-batch."""
    count = len(computations)
    each = (_with_messages(stage, computed, works, count, chunks) for stage, computed in enumerate(computations))
    return Schedule(tuple(works), tuple(map(tuple, each)), chunks)


def _with_messages(
    stage: int, computed: Sequence[Instruction], works: Sequence[Work], stages: int, chunks: int
) -> Iterator[Instruction]:
    last = chunks * stages - 1
    left = {(m, k): count * chunks for m, work in enumerate(works) for k, count in enumerate(work.micro_batches)}
    begun: set[tuple[int, int]] = set()
    early = 0  # computations before this one have their receives already
    for i, each in enumerate(computed):
        # the next computation's receive goes first, unless its mini-batch does not exist before a step has ended
        for j in range(early, min(i + 2, len(computed))):
            after = computed[j]
            if after.step and (after.model, after.step) not in begun:
                if j > i:
                    break
                begun.add((after.model, after.step))
            at, early = after.chunk * stages + stage, j + 1
            if (at > 0) if after.kind == "forward" else (at < last):
                yield after.of("receive_forward" if after.kind == "forward" else "receive_backward")
        yield each
        at = each.chunk * stages + stage
        if each.kind == "forward":
            if at < last:
                yield each.of("send_forward")
            continue
        if at > 0:
            yield each.of("send_backward")
        left[each.model, each.step] -= 1
        if not left[each.model, each.step]:
            yield Instruction("finish", each.model, each.step)


@lru_cache(maxsize=16)
def one_f_one_b(stages: int, work: Work) -> Schedule:
    """1F1B (Narayanan et al., "PipeDream-Flush", 2021): stage s holds at most P - s micro-batches, and each mini-batch
    drains the pipeline."""
    orders = [([(i, 0) for i in range(count)],) * 2 for count in work.micro_batches]
    return scheduled((work,), [_alternating(stages - stage - 1, orders) for stage in range(stages)])


def interleaved(stages: int, work: Work, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training", 2021, figure 4).

    Each stage has `chunks` parts of the model, and the work's times are those of all of them. Errors: ConfigError when
    a mini-batch does not divide by the stages."""
    for count in work.micro_batches:
        good = count % stages == 0
        require(good, f"interleaved 1F1B needs a multiple of {stages} micro-batches (its stages), got {count}.")

    def at(turn: int, backward: bool) -> tuple[int, int]:
        rounds, place = divmod(turn, stages * chunks)
        chunk = place // stages
        return rounds * stages + place % stages, chunks - 1 - chunk if backward else chunk

    turns = [range(count * chunks) for count in work.micro_batches]
    orders = [([at(i, False) for i in own], [at(i, True) for i in own]) for own in turns]
    ahead = [2 * (stages - stage - 1) + (chunks - 1) * stages for stage in range(stages)]
    return scheduled((work,), [_alternating(each, orders) for each in ahead], chunks)


def _alternating(ahead: int, orders: Sequence[tuple[Sequence[tuple[int, int]], ...]]) -> list[Instruction]:
    """Of each mini-batch, given its forwards and backwards as pairs (micro, chunk): `ahead` forwards, one forward and
    one backward in turn, and the remaining backwards."""
    found = []
    for step, (forwards, backwards) in enumerate(orders):
        early = min(ahead, len(forwards))
        for i in range(len(forwards) + early):
            found += [Instruction("forward", 0, step, *pair) for pair in forwards[i : i + 1]]
            if i >= early:
                found.append(Instruction("backward", 0, step, *backwards[i - early]))
    return found
