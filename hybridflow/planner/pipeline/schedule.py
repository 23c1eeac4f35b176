"""Schedule: the instructions of each pipeline stage, 1F1B in this language, and what a schedule takes: when each
computation runs, the makespan, and the activations that are live. Pure.

    compute lists (forward, backward)  --scheduled-->  with sends, receives and the end of each mini-batch

A receive only announces a message: the forward or backward that needs it waits. It stands one computation early, so
that a transfer overlaps with it. Messages of one model in one direction have the same order on both sides, because NCCL
has no tags, and one communicator: `check_order` refuses schedules in which they wait for each other."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from hybridflow.errors import ConfigError
from hybridflow.settings import NonNegative, Positive, require, settings

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward", "finish"]
Computed = Literal["forward", "backward"]
COMPUTES: tuple[Computed, ...] = ("forward", "backward")
RECEIVES: Mapping[str, Kind] = MappingProxyType({"forward": "receive_forward", "backward": "receive_backward"})
SENDS: Mapping[str, Kind] = MappingProxyType({"forward": "send_forward", "backward": "send_backward"})
WINDOW = 2
"""Messages of a link that may be on their way: the next send waits for the receive that is so far behind."""


class Instruction(NamedTuple):
    """`kind` for micro-batch `micro` of mini-batch `step` of a model. "finish" ends a mini-batch on the stage: of a
    training, its part in the optimizer step runs beside what follows."""

    kind: Kind
    model: int = 0
    step: int = 0
    micro: int = 0

    def of(self, kind: Kind) -> Instruction:
        return Instruction(kind, self.model, self.step, self.micro)


@settings
class Work:
    """The training of one model: the micro-batches of each mini-batch; for a micro-batch on a stage its `forward` and
    `backward` time and the `activations` that are live between both (any units); the time of an optimizer step. Or,
    without `trains`, its forward passes."""

    micro_batches: tuple[int, ...]
    forward: Positive = 1.0
    backward: Positive = 2.0
    activations: Positive = 1.0
    finish: NonNegative = 0.0
    trains: bool = True

    def __post_init__(self) -> None:
        counts = self.micro_batches
        good = bool(counts) and all(type(count) is int and count >= 1 for count in counts)
        require(good, f"Work(micro_batches={counts!r}): give the number, at least 1, of each mini-batch.")
        require(self.trains or len(counts) == 1, f"Work({counts=}, trains=False): forward passes are one mini-batch.")

    @property
    def total(self) -> int:
        return sum(self.micro_batches)

    @property
    def kinds(self) -> tuple[Computed, ...]:
        return COMPUTES if self.trains else COMPUTES[:1]

    @property
    def each(self) -> float:
        """The time of a micro-batch on a stage."""
        return self.forward + self.backward * self.trains

    @property
    def seconds(self) -> float:
        return self.total * self.each

    @property
    def held(self) -> float:
        """Activations of a micro-batch that stay."""
        return self.activations * self.trains


@dataclass(frozen=True)
class Schedule:
    """The instructions of each stage."""

    works: tuple[Work, ...]
    stages: tuple[tuple[Instruction, ...], ...]

    @cached_property
    def computations(self) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(tuple(each for each in stage if each.kind in COMPUTES) for stage in self.stages)


def scheduled(works: Sequence[Work], computations: Sequence[Sequence[Instruction]]) -> Schedule:
    """The schedule of these forwards and backwards of each stage, with messages and the end of each mini-batch."""
    last = len(computations) - 1
    each = (_with_messages(own, works, first=not i, last=i == last) for i, own in enumerate(computations))
    return Schedule(tuple(works), tuple(map(tuple, each)))


def _with_messages(
    computed: Sequence[Instruction], works: Sequence[Work], *, first: bool, last: bool
) -> Iterator[Instruction]:
    before, behind = {"forward": not first, "backward": not last}, {"forward": not last, "backward": not first}
    left = {(m, k): count for m, work in enumerate(works) for k, count in enumerate(work.micro_batches)}
    begun: set[tuple[int, int]] = set()
    announced: set[Instruction] = set()
    for i, each in enumerate(computed):
        # the next computation's receive goes first, unless its mini-batch does not exist before a step has ended, or it
        # would keep this one's send waiting
        after = computed[i + 1] if i + 1 < len(computed) else None
        alike = after is not None and (after.model, after.kind) == (each.model, each.kind)
        ahead = [] if after is None or (after.step and (after.model, after.step) not in begun) else [after]
        begun.add((each.model, each.step))
        for one in (each, *(ahead if not alike or not behind[each.kind] else ())):
            if before[one.kind] and one not in announced:
                announced.add(one)
                yield one.of(RECEIVES[one.kind])
        yield each
        if behind[each.kind]:
            yield each.of(SENDS[each.kind])
            for one in ahead if alike else ():
                announced.add(one)
                if before[one.kind]:
                    yield one.of(RECEIVES[one.kind])
        if each.kind == works[each.model].kinds[-1]:
            left[each.model, each.step] -= 1
            if not left[each.model, each.step]:
                yield Instruction("finish", each.model, each.step)


@lru_cache(maxsize=16)
def one_f_one_b(stages: int, work: Work) -> Schedule:
    """1F1B (Narayanan et al., "PipeDream-Flush", 2021): stage s holds at most P - s micro-batches, and each mini-batch
    drains the pipeline."""
    computed: list[list[Instruction]] = [[] for _ in range(stages)]
    for stage, found in enumerate(computed):
        for step, count in enumerate(work.micro_batches):
            ahead = min(stages - stage - 1, count) if work.trains else count  # forwards before the first backward
            for i in range(count + ahead):
                found += [Instruction("forward", 0, step, i)] if i < count else []
                found += [Instruction("backward", 0, step, i - ahead)] if i >= ahead and work.trains else []
    return scheduled((work,), computed)


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


_Link = tuple[int, str, int]  # messages of a model in one direction, from a stage: they keep their order
_Message = tuple[int, int]  # mini-batch and micro-batch
_Operation = tuple[_Link, _Message]
_Spans = dict[Instruction, StageSpan]
_AHEAD = {"forward": 1, "backward": -1}
"""From a stage to the one that its messages go to."""


def simulate(schedule: Schedule, window: int = WINDOW) -> PipelineTimeline:
    """Runs the instructions of every stage in their order, each as early as its messages allow. Messages take no time.
    Errors: ConfigError when the stages wait for each other (deadlock), naming where each of them stands, for a
    computation without the message that it needs, and for messages that both sides have in unlike orders."""
    stages, works, last = schedule.stages, schedule.works, len(schedule.stages) - 1
    clock, steps, computed = [0.0] * len(stages), dict[tuple[int, int], float](), [_Spans() for _ in stages]
    finished = defaultdict[tuple[int, int], list[float]](list)
    sent, awaited = (defaultdict[_Link, list[tuple[_Message, float]]](list) for _ in range(2))
    announced = dict[tuple[int, Instruction], tuple[_Link, int]]()

    def computes(stage: int, each: Instruction) -> bool:
        kind, model, step, micro = each
        if step and (model, step - 1) not in steps:
            return False
        if kind == "backward" and each.of("forward") not in computed[stage]:
            return False
        start = max(clock[stage], steps.get((model, step - 1), 0.0))
        if stage != (0 if kind == "forward" else last):
            if (stage, each) not in announced:
                raise ConfigError(f"stage {stage} runs {tuple(each)} without {(f'receive_{kind}', *each[1:])}.")
            link, number = announced[stage, each]
            if number >= len(sent[link]):
                return False
            if sent[link][number][0] != (step, micro):
                raise _unlike(link)
            start = max(start, sent[link][number][1])
        clock[stage] = end = start + getattr(works[model], kind)
        computed[stage][each] = StageSpan(each, start, end)
        return True

    def runs(stage: int, each: Instruction) -> bool:
        kind, model, step, micro = each
        if kind in COMPUTES:
            return computes(stage, each)
        if kind == "finish":
            finished[model, step].append(clock[stage])
            if len(ends := finished[model, step]) == len(stages):
                steps[model, step] = max(ends) + works[model].finish
            return True
        of = each.of("forward" if kind in ("send_forward", "receive_forward") else "backward")
        if kind == RECEIVES[of.kind]:
            link = model, of.kind, stage - _AHEAD[of.kind]
            announced[stage, of] = link, len(awaited[link])
            awaited[link].append(((step, micro), clock[stage]))
            return True
        link = model, of.kind, stage
        if of not in computed[stage]:
            raise ConfigError(f"stage {stage} sends {tuple(each)} before it is computed.")
        if (before := len(sent[link]) - window) >= len(awaited[link]):
            return False
        if before >= 0:
            clock[stage] = max(clock[stage], awaited[link][before][1])
        sent[link].append(((step, micro), clock[stage]))
        return True

    _run_all(stages, runs)
    for link in {*sent, *awaited}:
        if [message for message, _ in sent[link]] != [message for message, _ in awaited[link]]:
            raise _unlike(link)
    return PipelineTimeline(tuple(tuple(own.values()) for own in computed), steps)


def _run_all(
    stages: Sequence[Sequence[Instruction]],
    runs: Callable[[int, Instruction], bool],
    exchange: Callable[[], bool] = lambda: False,
) -> None:
    """Run the instructions of all stages, each in its order: `runs` says whether one could, `exchange` whether messages
    moved meanwhile. Errors: ConfigError when none can and some are left."""
    at, progress = [0] * len(stages), True
    while progress:
        progress = False
        for stage, own in enumerate(stages):
            while at[stage] < len(own) and runs(stage, own[at[stage]]):
                at[stage] += 1
                progress = True
        progress |= exchange()
    if waiting := [f"stage {i} at {tuple(own[at[i]])}" for i, own in enumerate(stages) if at[i] < len(own)]:
        where = "; ".join(waiting)
        raise ConfigError(f"the schedule does not end: its stages wait for each other, {where}. Change their order.")


def _unlike(link: _Link) -> ConfigError:
    return ConfigError(f"messages of {link} are sent and received in different orders, or not at all.")


def check_order(schedule: Schedule, window: int = WINDOW) -> None:
    """Run a schedule by NCCL's rule: all messages of a model in one direction have one communicator, in which a stage's
    sends and receives run in the order of its instructions, each only with the peer's. A stage computes in its order,
    and waits for what it computes with and for the send that is `window` behind; an optimizer step waits for all
    stages, and only the next mini-batch of its model for it.

    If this ends, so does every run in which stages wait for less: each of its operations waits for earlier ones only.
    Errors: ConfigError, as `simulate`."""
    stages, last = schedule.stages, len(schedule.stages) - 1
    queues: dict[_Link, deque[_Operation]] = defaultdict(deque)  # by communicator and stage
    counts, done = Counter[tuple[int, _Link]](), Counter[tuple[int, _Link]]()  # of operations, by stage and link
    received, ended = set[tuple[int, Instruction]](), Counter[tuple[int, int]]()

    def queue(stage: int, each: Instruction) -> tuple[int, _Link]:
        verb, _, direction = each.kind.partition("_")
        sender = stage if verb == "send" else stage - _AHEAD[direction]
        link = each.model, direction, sender
        queues[each.model, direction, stage].append((link, (each.step, each.micro)))
        return stage, link

    def runs(stage: int, each: Instruction) -> bool:
        """Whether a stage is past this instruction."""
        verb, _, direction = each.kind.partition("_")
        if each.step and ended[each.model, each.step - 1] <= last:
            return False
        if each.kind == "finish":
            ended[each.model, each.step] += 1
        elif not direction:
            return stage == (0 if verb == "forward" else last) or (stage, each) in received
        else:
            own = stage, (each.model, direction, stage)
            if verb == "send" and counts[own] - done[own] >= window:
                return False
            counts[queue(stage, each)] += 1
        return True

    def exchange() -> bool:
        """Run the first operations of each communicator; whether any ran."""
        ran = False
        for (model, direction, stage), own in queues.items():
            peer = queues.get((model, direction, to := stage + _AHEAD[direction]))
            while own and peer and own[0][0] == peer[0][0] == (model, direction, stage):
                (link, message), (_, awaited) = own.popleft(), peer.popleft()
                if message != awaited:
                    raise _unlike(link)
                done.update(((stage, link), (to, link)))
                received.add((to, Instruction(direction, model, *message)))  # type: ignore[arg-type]  a kind
                ran = True
        return ran

    _run_all(stages, runs, exchange)


def peak_activations(schedule: Schedule) -> list[float]:
    peaks = []
    for computed in schedule.computations:
        live = peak = 0.0
        for each in computed:
            size = schedule.works[each.model].held
            live += size if each.kind == "forward" else -size
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def check(schedule: Schedule, limits: Sequence[float] | None = None, window: int = WINDOW) -> PipelineTimeline:
    """The timeline of a schedule that can run: each computation once on every stage, with the messages that it needs in
    one order on both sides, no deadlock, nor with one communicator for each model and direction, and live activations
    within the `limits` of each stage. Errors: ConfigError."""
    wanted = {
        Instruction(kind, model, step, micro)
        for model, work in enumerate(schedule.works)
        for step, count in enumerate(work.micro_batches)
        for micro in range(count)
        for kind in work.kinds
    }
    for stage, computed in enumerate(schedule.computations):
        if len(computed) != len(wanted) or wanted != set(computed):
            wrong = [*wanted.symmetric_difference(computed), *(e for e, n in Counter(computed).items() if n > 1)]
            raise ConfigError(f"stage {stage} must run each computation once; missing or too many: {wrong[:4]}.")
    for stage, peak in enumerate(peak_activations(schedule)):
        if limits is not None and peak > limits[stage] * (1 + 1e-9):
            raise ConfigError(f"stage {stage} would hold activations of {peak:g}, and has room for {limits[stage]:g}.")
    found = simulate(schedule, window)
    check_order(schedule, window)
    return found
