"""What a schedule takes: when each computation runs, the makespan, and the activations that are live. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.planner.pipeline.schedule import COMPUTES, Instruction, Link, Schedule, Work

WINDOW = 2
"""Messages of a link that may be on their way: the next send waits for the receive that is so far behind."""


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
        """The end of the last forward, backward or optimizer step."""
        ends = [span.end for stage in self.stages for span in stage]
        return max([*ends, *self.steps.values()], default=0.0)

    def draw(self, slot: float = 1.0, names: str = "abcdefgh") -> str:
        """One line for each stage, a cell for each `slot`: a1 is the first forward of model a, A1 its backward."""
        width, lines = (
            max(3, 2 + len(str(max((s.instruction.micro for x in self.stages for s in x), default=0) + 1))),
            [],
        )
        for number, spans in enumerate(self.stages):
            cells = [".".ljust(width)] * round(self.makespan / slot)
            for each, start, end in spans:
                name = names[each.model].upper() if each.kind == "backward" else names[each.model]
                for at in range(round(start / slot), round(end / slot)):
                    cells[at] = f"{name}{each.micro + 1}".ljust(width)
            lines.append(f"stage {number}  {''.join(cells)}".rstrip())
        return "\n".join(lines)


def seconds_of(work: Work, instruction: Instruction, chunks: int = 1) -> float:
    return (work.forward if instruction.kind == "forward" else work.backward) / chunks


def simulate(schedule: Schedule, window: int = WINDOW) -> PipelineTimeline:
    """Runs the instructions of every stage in their order, each as early as its messages allow. Messages take no time.

    Errors: ConfigError when the stages wait for each other (deadlock), naming where each of them stands.
    """
    run = _Run(schedule, window)
    moved = True
    while moved:
        moved = False
        for stage in range(len(schedule.stages)):
            while run.advance(stage):
                moved = True
    if waiting := {s: each[run.at[s]] for s, each in enumerate(schedule.stages) if run.at[s] < len(each)}:
        where = "; ".join(f"stage {stage} at {tuple(each)}" for stage, each in waiting.items())
        raise ConfigError(f"the schedule does not end: its stages wait for each other, {where}. Change their order.")
    return PipelineTimeline(tuple(tuple(spans) for spans in run.spans), run.steps)


class _Run:
    """The state of a simulation: `at`, `clock` and `spans` of each stage."""

    def __init__(self, schedule: Schedule, window: int) -> None:
        stages = len(schedule.stages)
        self.schedule, self.window = schedule, window
        self.at, self.clock = [0] * stages, [0.0] * stages
        self.spans: list[list[StageSpan]] = [[] for _ in range(stages)]
        self.steps: dict[tuple[int, int], float] = {}
        self._finished: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._ends: dict[tuple[int, Instruction], float] = {}
        self._sent: Counter[Link] = Counter()
        self._awaited: dict[Link, list[float]] = defaultdict(list)

    def advance(self, stage: int) -> bool:
        """Run the next instruction of a stage, unless it has to wait for another stage."""
        instructions = self.schedule.stages[stage]
        if self.at[stage] == len(instructions):
            return False
        each = instructions[self.at[stage]]
        if each.kind in COMPUTES:
            done = self._compute(stage, each)
        elif each.kind == "finish":
            done = self._finish(stage, each)
        else:
            done = self._message(stage, each)
        self.at[stage] += done
        return done

    def _compute(self, stage: int, each: Instruction) -> bool:
        inputs = self._inputs(stage, each)
        if inputs is None:
            return False
        start = max(self.clock[stage], inputs)
        end = start + seconds_of(self.schedule.works[each.model], each, self.schedule.chunks)
        self.clock[stage] = self._ends[stage, each] = end
        self.spans[stage].append(StageSpan(each, start, end))
        return True

    def _inputs(self, stage: int, each: Instruction) -> float | None:
        """When everything is there that a computation needs; None while that is not known."""
        stages, chunks = len(self.schedule.stages), self.schedule.chunks
        at, needed = each.chunk * stages + stage, []
        if each.kind == "forward":
            if each.step:
                needed.append(self.steps.get((each.model, each.step - 1)))
            if at > 0:
                needed.append(self._ends.get(self.schedule.source(stage, each.of("receive_forward"))))
        else:
            needed.append(self._ends.get((stage, each.of("forward"))))
            if at < chunks * stages - 1:
                needed.append(self._ends.get(self.schedule.source(stage, each.of("receive_backward"))))
        known = [time for time in needed if time is not None]
        return max(known, default=0.0) if len(known) == len(needed) else None

    def _finish(self, stage: int, each: Instruction) -> bool:
        ready = self._finished[each.model, each.step]
        ready.append(self.clock[stage])
        if len(ready) == len(self.schedule.stages):
            self.steps[each.model, each.step] = max(ready) + self.schedule.works[each.model].finish
        return True

    def _message(self, stage: int, each: Instruction) -> bool:
        link = self.schedule.link(stage, each)
        awaited = self._awaited[link]
        if each.kind.startswith("receive"):
            awaited.append(self.clock[stage])
            return True
        before = self._sent[link] - self.window
        if before >= len(awaited):
            return False
        if before >= 0:
            self.clock[stage] = max(self.clock[stage], awaited[before])
        self._sent[link] += 1
        return True


def peak_activations(schedule: Schedule) -> list[float]:
    """The most activations that are live at a time, on each stage."""
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
    one order on both sides, no deadlock, and live activations within the `limits` of each stage.

    Errors: ConfigError.
    """
    wanted = Counter(
        Instruction(kind, model, step, micro, chunk)
        for model, work in enumerate(schedule.works)
        for step, count in enumerate(work.micro_batches)
        for micro in range(count)
        for chunk in range(schedule.chunks)
        for kind in COMPUTES
    )
    for stage, computed in enumerate(schedule.computations):
        if (found := Counter(computed)) != wanted:
            wrong = (found - wanted) + (wanted - found)
            raise ConfigError(f"stage {stage} must run each computation once; missing or too many: {list(wrong)[:4]}.")
    _check_messages(schedule)
    for stage, peak in enumerate(peak_activations(schedule)):
        if limits is not None and peak > limits[stage] * (1 + 1e-9):
            raise ConfigError(f"stage {stage} would hold activations of {peak:g}, and has room for {limits[stage]:g}.")
    return simulate(schedule, window)


def _check_messages(schedule: Schedule) -> None:
    sent: dict[Link, list[Instruction]] = defaultdict(list)
    received: dict[Link, list[Instruction]] = defaultdict(list)
    for stage, instructions in enumerate(schedule.stages):
        done, announced = set[Instruction](), set[Instruction]()
        for each in instructions:
            verb, _, kind = each.kind.partition("_")
            if each.kind in COMPUTES:
                done.add(each)
                if (need := each.of(f"receive_{each.kind}")) not in announced and _has_input(schedule, stage, each):  # type: ignore[arg-type]
                    raise ConfigError(f"stage {stage} runs {tuple(each)} without {tuple(need)}.")
            elif verb == "send":
                if each.of(kind) not in done:  # type: ignore[arg-type]
                    raise ConfigError(f"stage {stage} sends {tuple(each)} before it is computed.")
                sent[schedule.link(stage, each)].append(each.of(kind))  # type: ignore[arg-type]
            elif verb == "receive":
                announced.add(each)
                received[schedule.link(stage, each)].append(schedule.source(stage, each)[1])
    for link in sent.keys() | received.keys():
        if sent[link] != received[link]:
            raise ConfigError(f"messages of {tuple(link)} are sent and received in different orders, or not at all.")


def _has_input(schedule: Schedule, stage: int, each: Instruction) -> bool:
    """Whether a computation needs a message."""
    at = each.chunk * len(schedule.stages) + stage
    return at > 0 if each.kind == "forward" else at < schedule.chunks * len(schedule.stages) - 1
