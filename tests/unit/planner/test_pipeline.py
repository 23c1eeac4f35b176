"""Pipeline schedules: what the papers draw, what no schedule can beat, and what every schedule must keep."""

from __future__ import annotations

import graphlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.planner.pipeline.schedule import (
    COMPUTES,
    WINDOW,
    Instruction,
    PipelineTimeline,
    Schedule,
    Work,
    check,
    check_order,
    one_f_one_b,
    peak_activations,
    scheduled,
    simulate,
)
from hybridflow.planner.pipeline.shared_schedule import InOrder, memory_limits, serial_makespan, shortest, together


def alike(micro_batches: int, forward: float = 1.0, backward: float = 2.0, models: int = 2) -> tuple[Work, ...]:
    return (Work(micro_batches=(micro_batches,), forward=forward, backward=backward),) * models


def drawn(found: PipelineTimeline) -> list[str]:
    """One line for each stage, a cell for each unit of time: a1 is the first forward of model a, A1 its backward."""
    lines = []
    for number, spans in enumerate(found.stages):
        cells = [".  "] * round(found.makespan)
        for each, start, end in spans:
            name = "ab"[each.model].upper() if each.kind == "backward" else "ab"[each.model]
            cells[round(start) : round(end)] = [f"{name}{each.micro + 1} "] * round(end - start)
        lines.append(f"stage {number}  {''.join(cells)}".rstrip())
    return lines


def test_figure_5():
    """PUZZLE, figure 5: four stages, four micro-batches of two models, forwards as long as backwards."""
    works = alike(4, backward=1.0)
    found = simulate(together(4, works))
    assert serial_makespan(4, works) == 2 * simulate(one_f_one_b(4, works[0])).makespan == 28
    assert found.makespan == 22
    first = next(span for span in found.stages[0] if span.instruction.model == 1)
    assert first.start + 1 == 9  # slots count from 1
    assert drawn(found)[:2] == [
        "stage 0  a1 a2 a3 a4 .  .  .  A1 b1 A2 b2 A3 b3 A4 b4 B1 .  B2 .  B3 .  B4",
        "stage 1  .  a1 a2 a3 .  .  A1 a4 A2 b1 A3 b2 A4 b3 B1 b4 B2 .  B3 .  B4 .",
    ]


@pytest.mark.parametrize("models", [2, 3, 4])
@pytest.mark.parametrize("stages", range(1, 9))
def test_equation_1(stages: int, models: int):
    """(M N + P - 1)(F + B) for M updates alike, exactly, within the activations of serial schedules where N >= P; no
    schedule can be shorter."""
    counts = range(1, 17) if models == 2 else (1, 3, 8, 16)
    for count, (forward, backward) in itertools.product(counts, [(1.0, 1.0), (1.0, 2.0), (3.0, 2.0)]):
        works = alike(count, forward, backward, models)
        schedule = together(stages, works)
        found = check(schedule, memory_limits(stages, works)).makespan
        assert found == pytest.approx((models * count + stages - 1) * (forward + backward))
        assert found == pytest.approx(shortest(stages, works))
        if count >= stages:
            alone = peak_activations(one_f_one_b(stages, works[0]))
            assert all(both <= one for both, one in zip(peak_activations(schedule), alone, strict=True))


@pytest.mark.parametrize("stages", range(1, 9))
def test_one_model(stages: int):
    """1F1B takes what its paper says, and is the time-shared schedule of one model."""
    for count in range(1, 17):
        work = Work(micro_batches=(count, count), forward=1.0, backward=2.0)
        schedule = one_f_one_b(stages, work)
        found = check(schedule, memory_limits(stages, (work,)))
        assert found.makespan == pytest.approx(serial_makespan(stages, (work,)))
        assert simulate(together(stages, (work,))).makespan == pytest.approx(found.makespan)


def orders(micro_batches: Sequence[tuple[int, int]]) -> Iterator[tuple[Instruction, ...]]:
    """Every order of a stage's computations in which forwards come before their backwards."""
    for names in set(itertools.permutations([*micro_batches, *micro_batches])):
        seen: set[tuple[int, int]] = set()
        yield tuple(
            Instruction("backward" if name in seen or seen.add(name) else "forward", name[0], 0, name[1])
            for name in names
        )


def least(stages: int, works: tuple[Work, ...], limits: Sequence[float]) -> float:
    """The shortest makespan of all schedules, found by trying them."""
    micro_batches = [(m, i) for m, work in enumerate(works) for i in range(work.total)]
    fitting: list[list[tuple[Instruction, ...]]] = [[] for _ in range(stages)]
    for order in orders(micro_batches):
        live = list(
            itertools.accumulate(
                (1 if each.kind == "forward" else -1) * works[each.model].activations for each in order
            )
        )
        for stage in range(stages):
            if max(live) <= limits[stage]:
                fitting[stage].append(order)
    best = float("inf")
    for computed in itertools.product(*fitting):
        try:
            best = min(best, simulate(scheduled(works, computed), window=100).makespan)
        except ConfigError:  # these stages wait for each other
            continue
    return best


@pytest.mark.parametrize(
    ("stages", "works"),
    [
        (2, alike(1)),
        (3, alike(1)),
        (2, (*alike(2, models=1), *alike(1, models=1))),
        (2, (*alike(2, 1.0, 1.0, models=1), *alike(1, 1.0, 1.0, models=1))),
        (2, (*alike(2, 1.0, 2.0, models=1), *alike(1, 3.0, 4.0, models=1))),
        (2, (*alike(1, 1.0, 2.0, models=1), *alike(2, 2.0, 1.0, models=1))),
        # where a forward and a backward could begin at once, the best schedule of all may begin the forward
        (3, (*alike(1, 1.0, 2.0, models=1), *alike(1, 5.0, 1.0, models=1))),
        (3, (*alike(1, 3.0, 1.0, models=1), *alike(1, 1.0, 5.0, models=1))),
    ],
)
def test_no_schedule_is_shorter(stages: int, works: tuple[Work, ...]):
    """Among all orders, of small cases also with unlike times."""
    limits = memory_limits(stages, works)
    assert simulate(together(stages, works)).makespan == pytest.approx(least(stages, works, limits))


@pytest.mark.parametrize(
    ("stages", "works"),
    [
        (
            3,
            (
                Work(micro_batches=(19,), finish=0.5),
                Work(micro_batches=(3, 3, 3), forward=15, backward=30, activations=15, finish=5),
            ),
        ),
        (
            4,
            (
                Work(micro_batches=(6, 8, 2, 3), forward=0.5, backward=0.5),
                Work(micro_batches=(8,), forward=5, backward=7, activations=5.5, finish=1),
            ),
        ),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_unlike_activations(stages: int, works: tuple[Work, ...], at_once: bool):
    """Many small micro-batches fit beside a large one: their messages must not wait for receives that come later."""
    found = check(together(stages, works, at_once=at_once), memory_limits(stages, works))
    assert found.makespan <= serial_makespan(stages, works)


def test_limits_count_what_few_micro_batches_hold():
    assert memory_limits(4, (Work(micro_batches=(1,), activations=10.0), Work(micro_batches=(20,)))) == (14, 13, 12, 10)


def replaced(schedule: Schedule, stage: int, instructions: Sequence[Instruction]) -> Schedule:
    stages = [tuple(instructions) if at == stage else each for at, each in enumerate(schedule.stages)]
    return Schedule(schedule.works, tuple(stages))


def test_what_cannot_run_is_refused():
    schedule = one_f_one_b(2, Work(micro_batches=(3,)))
    first = list(schedule.stages[0])
    with pytest.raises(ConfigError, match="each computation once"):
        check(replaced(schedule, 0, [each for each in first if each != Instruction("backward", micro=1)]))
    a, b = (first.index(Instruction("send_forward", micro=i)) for i in (0, 1))
    swapped = [*first[:a], *first[a + 1 : b + 1], first[a], *first[b + 1 :]]
    with pytest.raises(ConfigError, match="different orders"):
        check(replaced(schedule, 0, swapped))
    with pytest.raises(ConfigError, match="without"):
        check(replaced(schedule, 0, [each for each in first if each.kind != "receive_backward"]))
    own = [Instruction("forward"), Instruction("backward"), Instruction("forward", 1), Instruction("backward", 1)]
    waiting = scheduled(alike(1), [own, [own[2], own[0], own[3], own[1]]])
    with pytest.raises(ConfigError, match="wait for each other"):
        check(waiting)
    with pytest.raises(ConfigError, match="room for 1"):
        check(schedule, [1.0, 1.0])
    with pytest.raises(ConfigError, match="room for a micro-batch"):
        together(2, alike(2), (1.0, 0.5))
    with pytest.raises(ConfigError, match="micro_batches"):
        Work(micro_batches=())


TIMES = (0.5, 1.0, 2.0)


@pytest.mark.parametrize("stages", [2, 4])
def test_an_update_is_no_slower_than_in_the_orders_of_the_paper(stages: int):
    """One model's mini-batch after the other's, either first, forwards before backwards where that is near."""
    for counts, (a, b, c, d) in itertools.product(((4, 4), (3, 6)), itertools.product(TIMES, repeat=4)):
        works = tuple(
            Work(micro_batches=(count,), forward=forward, backward=backward)
            for count, forward, backward in zip(counts, (a, c), (b, d), strict=True)
        )
        orders = [(0,) * counts[0] + (1,) * counts[1], (1,) * counts[1] + (0,) * counts[0]]
        limits = memory_limits(stages, works)
        paper = min(
            InOrder(stages, works, order, limits, patience).makespan
            for order in orders
            for patience in (0.0, min(works[0].forward, works[1].forward))
        )
        assert simulate(together(stages, works, at_once=True)).makespan <= paper + 1e-9


def ends(schedule: Schedule) -> bool:
    """Whether the operations of a schedule have an order: the graph of what each of them waits for has no cycle.

    ("run", stage, i) is instruction i of a stage, queued in its order, a computation to its end; ("message", link, k)
    the k-th message of a link on both its communicators; ("step", model, k) an optimizer step."""
    waits: dict[Hashable, set[Hashable]] = defaultdict(set)
    last = len(schedule.stages) - 1
    for stage, instructions in enumerate(schedule.stages):
        count: Counter[tuple[str, tuple[int, str, int]]] = Counter()
        before: dict[tuple[int, str], Hashable] = {}  # of a communicator
        arrives: dict[Instruction, Hashable] = {}
        for i, each in enumerate(instructions):
            node = ("run", stage, i)
            waits[node] |= {("run", stage, i - 1)} if i else set()
            waits[node] |= {("step", each.model, each.step - 1)} if each.step else set()
            verb, _, direction = each.kind.partition("_")
            if each.kind == "finish":
                waits["step", each.model, each.step].add(node)
            elif not direction:
                if stage != (0 if verb == "forward" else last):
                    waits[node].add(arrives[each])
            else:
                ahead = 1 if direction == "forward" else -1
                link = (each.model, direction, stage if verb == "send" else stage - ahead)
                number = count[verb, link]
                count[verb, link] += 1
                message = ("message", link, number)
                if verb == "send" and number >= WINDOW:
                    waits[node].add(("message", link, number - WINDOW))
                waits[message].add(node)
                if (earlier := before.get((each.model, direction))) is not None:
                    waits[message].add(earlier)
                before[each.model, direction] = message
                if verb == "receive":
                    arrives[each.of(COMPUTES[direction == "backward"])] = message
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError:
        return False
    return True


training = st.builds(
    Work,
    micro_batches=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    forward=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    backward=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    activations=st.sampled_from([0.5, 1.0, 5.0]),
    finish=st.sampled_from([0.0, 0.5, 3.0]),
)
forward_passes = st.builds(
    Work,
    micro_batches=st.integers(1, 9).map(lambda n: (n,)),
    forward=st.sampled_from([0.5, 1.0, 2.0]),
    trains=st.just(False),
)
some_works = st.lists(training | forward_passes, min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), some_works, st.floats(1.0, 3.0), st.data())
def test_no_order_of_the_models_waits_for_itself(
    stages: int, works: tuple[Work, ...], room: float, data: st.DataObject
):
    """Any order in which up to four models, training or only computing, take turns."""
    limits = tuple(room * limit for limit in memory_limits(stages, works))
    order = tuple(data.draw(st.permutations([m for m, work in enumerate(works) for _ in range(work.total)])))
    schedule = InOrder(stages, works, order, limits, data.draw(st.sampled_from([0.0, 1.0, 10.0]))).schedule
    found = check(schedule, limits)
    assert ends(schedule)
    assert found.makespan >= shortest(stages, works) * (1 - 1e-9)
    spans = {(stage, span.instruction): span for stage, every in enumerate(found.stages) for span in every}
    for (stage, each), span in spans.items():
        before = stage - 1 if each.kind == "forward" else stage + 1
        if 0 <= before < stages:
            assert spans[before, each].end <= span.start
        if each.kind == "backward":
            assert spans[stage, each.of("forward")].end <= span.start
        elif each.step:
            assert found.steps[each.model, each.step - 1] <= span.start
    steps = Counter((m, k) for m, w in enumerate(works) for k in range(len(w.micro_batches)))
    for every, instructions in zip(found.stages, schedule.stages, strict=True):
        assert all(one.end <= other.start for one, other in itertools.pairwise(every))
        assert Counter((each.model, each.step) for each in instructions if each.kind == "finish") == steps


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), some_works)
def test_what_is_searched_for_is_no_longer_than_serial(stages: int, works: tuple[Work, ...]):
    check(together(stages, works, at_once=True), memory_limits(stages, works))
    schedule = together(stages, works)
    assert ends(schedule)
    assert check(schedule, memory_limits(stages, works)).makespan <= serial_makespan(stages, works) * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 4), st.lists(training | forward_passes, min_size=1, max_size=2).map(tuple), st.data())
def test_both_ways_to_look_find_the_same_deadlocks(stages: int, works: tuple[Work, ...], data: st.DataObject):
    """Also of orders that no search gives: computations of each stage at random, receives as early as they may be."""
    computed = []
    for _ in range(stages):
        left = [[(m, k, i) for k, n in enumerate(w.micro_batches) for i in range(n)] for m, w in enumerate(works)]
        stage, behind = list[Instruction](), list[tuple[int, int, int]]()
        while any(left) or behind:
            choice = data.draw(st.integers(0, len(works)))
            if (
                choice < len(works)
                and left[choice]
                and not any(m == choice and k < left[choice][0][1] for m, k, _ in behind)
            ):
                name = left[choice].pop(0)
                stage.append(Instruction("forward", *name))
                behind += [name] if works[choice].trains else []
            elif behind:
                stage.append(Instruction("backward", *behind.pop(0)))
        computed.append(stage)
    schedule = scheduled(works, computed)
    try:
        check_order(schedule)
        found = True
    except ConfigError as error:
        if "different orders" in str(error):
            return
        found = False
    assert found == ends(schedule)


def test_a_receive_before_the_send_that_it_depends_on():
    """Stage 1 may not announce a second micro-batch before it sends the first one on: the communicator would wait."""
    work = Work(micro_batches=(2,), forward=1.0, backward=2.0)
    schedule = one_f_one_b(3, work)
    check(schedule)
    first, middle, last = schedule.stages
    a, b = middle.index(Instruction("receive_forward", micro=1)), middle.index(Instruction("send_forward", micro=0))
    assert a > b
    early = list(middle)
    early.insert(b, early.pop(a))
    waits = list(first)  # its second forward comes behind what the first one's gradient takes
    assert waits.index(Instruction("forward", micro=1)) < waits.index(Instruction("backward", micro=0))
    moved = [each for each in waits if each.micro == 1 and "forward" in each.kind]
    waits = [each for each in waits if each not in moved]
    at = waits.index(Instruction("backward", micro=0)) + 1
    waits[at:at] = moved
    wrong = Schedule((work,), (tuple(waits), tuple(early), last))
    assert not ends(wrong)
    with pytest.raises(ConfigError, match="wait for each other"):
        check_order(wrong)


def forwards(counts: Sequence[int]) -> tuple[Work, ...]:
    return tuple(Work(micro_batches=(count,), forward=1.0, trains=False) for count in counts)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_forward_passes_fill_the_pipeline_once(stages: int):
    """PUZZLE, figure 12: forward passes of a reference, a reward model and a critic, each behind the other."""
    works = forwards((4, 6, 5))
    found = check(together(stages, works)).makespan
    assert found == 15 + stages - 1
    assert serial_makespan(stages, works) == 15 + 3 * (stages - 1)
    assert simulate(one_f_one_b(stages, works[0])).makespan == 4 + stages - 1
    assert peak_activations(together(stages, works)) == [0.0] * stages


def test_forward_passes_beside_a_training():
    works = (Work(micro_batches=(4,), forward=1.0, backward=2.0), *forwards((6,)))
    found = check(together(4, works)).makespan
    assert shortest(4, works) <= found < serial_makespan(4, works)
    with pytest.raises(ConfigError, match="one mini-batch"):
        Work(micro_batches=(2, 2), trains=False)
