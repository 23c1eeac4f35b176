"""Schedule: the instructions of each pipeline stage, plain and interleaved 1F1B in this language, and what a schedule
takes: when each computation runs, the makespan, and the activations that are live. Pure.

    compute lists (forward, backward)  --scheduled-->  with sends, receives and the end of each mini-batch

A receive only announces a message: the forward or backward that needs it waits. It stands one computation early, so
that a transfer overlaps with it. Messages of one model in one direction have the same order on both sides, because NCCL
has no tags."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.settings import NonNegative, Positive, require, settings

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward", "finish"]
COMPUTES = ("forward", "backward")
WINDOW = 2
"""Messages of a link that may be on their way: the next send waits for the receive that is so far behind."""


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


class StageSpan(NamedTuple):
    """A forward or backward, and when it runs."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The run of a schedule: the spans of each stage, and the ends of optimizer steps by (model, mini-batch)."""

    stages: tuple[tuple[StageSpan, ...], ...]
    steps: dict[tuple[int, int], float]

    @property
    def makespan(self) -> float:
        ends = [span.end for stage in self.stages for span in stage]
        return max([*ends, *self.steps.values()], default=0.0)


def simulate(schedule: Schedule, window: int = WINDOW) -> PipelineTimeline:
    """Runs the instructions of every stage in their order, each as early as its messages allow. Messages take no time.
    Errors: ConfigError when the stages wait for each other (deadlock), naming where each of them stands, for a
    computation without the message that it needs, and for messages that both sides have in unlike orders."""
    run = _Run(schedule, window)
    while sum(run.advance(stage) for stage in range(len(schedule.stages))):
        pass
    if waiting := {s: each[run.at[s]] for s, each in enumerate(schedule.stages) if run.at[s] < len(each)}:
        where = "; ".join(f"stage {stage} at {tuple(each)}" for stage, each in waiting.items())
        raise ConfigError(f"the schedule does not end: its stages wait for each other, {where}. Change their order.")
    for name in {*run.sent, *run.awaited}:
        if [message for message, _ in run.sent[name]] != [message for message, _ in run.awaited[name]]:
            raise _unlike(name)
    return PipelineTimeline(tuple(tuple(spans) for spans in run.spans), run.steps)


_Message = tuple[int, int, int]  # mini-batch, micro-batch, and the part of the model that sends


class _Run:
    """The state of a simulation: `at`, `clock` and `spans` of each stage; the messages of each link, and when each was
    sent and announced by its receiver."""

    def __init__(self, schedule: Schedule, window: int) -> None:
        stages, works, chunks = len(schedule.stages), schedule.works, schedule.chunks
        self.schedule, self.window = schedule, window
        self.at, self.clock = [0] * stages, [0.0] * stages
        self.spans: list[list[StageSpan]] = [[] for _ in range(stages)]
        self.steps: dict[tuple[int, int], float] = {}
        self.sent: dict[Link, list[tuple[_Message, float]]] = defaultdict(list)
        self.awaited: dict[Link, list[tuple[_Message, float]]] = defaultdict(list)
        self._finished: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._ends: list[dict[tuple, float]] = [{} for _ in range(stages)]
        self._announced: list[dict[tuple, tuple[Link, int]]] = [{} for _ in range(stages)]
        self._parts = stages * chunks
        self._seconds = {(kind, m): getattr(work, kind) / chunks for m, work in enumerate(works) for kind in COMPUTES}
        self._run_of: dict[str, Callable[[int, Instruction], bool]] = {
            **dict.fromkeys(COMPUTES, self._compute),
            **dict.fromkeys(("send_forward", "send_backward"), self._send),
            **dict.fromkeys(("receive_forward", "receive_backward"), self._receive),
            "finish": self._finish,
        }

    def advance(self, stage: int) -> bool:
        """Run the next instructions of a stage, until one has to wait for another stage; whether any ran."""
        instructions, first, run_of = self.schedule.stages[stage], self.at[stage], self._run_of
        for at in range(first, len(instructions)):
            each = instructions[at]
            if not run_of[each[0]](stage, each):
                self.at[stage] = at
                return at > first
        self.at[stage] = len(instructions)
        return first < len(instructions)

    def _compute(self, stage: int, each: Instruction) -> bool:
        kind, model, step, micro, chunk = each
        start, part = self.clock[stage], chunk * len(self.clock) + stage
        if kind == "backward":
            if ("forward", model, step, micro, chunk) not in self._ends[stage]:
                return False
        elif step:
            if (made := self.steps.get((model, step - 1))) is None:
                return False
            start = max(start, made)
        if part != (0 if kind == "forward" else self._parts - 1):
            if (announced := self._announced[stage].get(each)) is None:
                raise ConfigError(f"stage {stage} runs {tuple(each)} without {(f'receive_{kind}', *each[1:])}.")
            name, number = announced
            if number >= len(self.sent[name]):
                return False
            message, arrived = self.sent[name][number]
            if message != (step, micro, part - 1 if kind == "forward" else part + 1):
                raise _unlike(name)
            start = max(start, arrived)
        self.clock[stage] = self._ends[stage][each] = end = start + self._seconds[kind, model]
        self.spans[stage].append(StageSpan(each, start, end))
        return True

    def _finish(self, stage: int, each: Instruction) -> bool:
        ready = self._finished[each.model, each.step]
        ready.append(self.clock[stage])
        if len(ready) == len(self.schedule.stages):
            self.steps[each.model, each.step] = max(ready) + self.schedule.works[each.model].finish
        return True

    def _receive(self, stage: int, each: Instruction) -> bool:
        kind, model, step, micro, chunk = each
        forward, name = kind == "receive_forward", link(kind, model, stage, len(self.clock))
        computed = "forward" if forward else "backward"
        self._announced[stage][computed, model, step, micro, chunk] = name, len(self.awaited[name])
        sender = chunk * len(self.clock) + stage + (-1 if forward else 1)
        self.awaited[name].append(((step, micro, sender), self.clock[stage]))
        return True

    def _send(self, stage: int, each: Instruction) -> bool:
        kind, model, step, micro, chunk = each
        name = link(kind, model, stage, len(self.clock))
        sent, awaited = self.sent[name], self.awaited[name]
        if ("forward" if kind == "send_forward" else "backward", model, step, micro, chunk) not in self._ends[stage]:
            raise ConfigError(f"stage {stage} sends {tuple(each)} before it is computed.")
        before = len(sent) - self.window
        if before >= len(awaited):
            return False
        if before >= 0:
            self.clock[stage] = max(self.clock[stage], awaited[before][1])
        sent.append(((step, micro, chunk * len(self.clock) + stage), self.clock[stage]))
        return True


def _unlike(link: Link) -> ConfigError:
    return ConfigError(f"messages of {tuple(link)} are sent and received in different orders, or not at all.")


def peak_activations(schedule: Schedule) -> list[float]:
    peaks = []
    for computed in schedule.computations:
        live = peak = 0.0
        for each in computed:
            size = schedule.works[each.model].activations / schedule.chunks
            live += size if each.kind == "forward" else -size
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def check(schedule: Schedule, limits: Sequence[float] | None = None, window: int = WINDOW) -> PipelineTimeline:
    """The timeline of a schedule that can run: each computation once on every stage, with the messages that it needs in
    one order on both sides, no deadlock, and live activations within the `limits` of each stage. Errors:
    ConfigError."""
    wanted = {
        Instruction(kind, model, step, micro, chunk)
        for model, work in enumerate(schedule.works)
        for step, count in enumerate(work.micro_batches)
        for micro in range(count)
        for chunk in range(schedule.chunks)
        for kind in COMPUTES
    }
    for stage, computed in enumerate(schedule.computations):
        if len(computed) != len(wanted) or wanted != set(computed):
            wrong = [*wanted.symmetric_difference(computed), *(e for e, n in Counter(computed).items() if n > 1)]
            raise ConfigError(f"stage {stage} must run each computation once; missing or too many: {wrong[:4]}.")
    for stage, peak in enumerate(peak_activations(schedule)):
        if limits is not None and peak > limits[stage] * (1 + 1e-9):
            raise ConfigError(f"stage {stage} would hold activations of {peak:g}, and has room for {limits[stage]:g}.")
    return simulate(schedule, window)
