"""Deadlocks by NCCL's rule: one communicator for each model and direction, in which a stage's sends and receives run in
the order of its instructions, each only with its peer's."""

from __future__ import annotations

import graphlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.planner.pipeline.schedule import (
    COMPUTES,
    WINDOW,
    Instruction,
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


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), some_works)
def test_what_is_searched_for_is_no_longer_than_serial(stages: int, works: tuple[Work, ...]):
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


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("models", [3, 4])
def test_equation_1_of_several_models(stages: int, models: int):
    """(M N + P - 1)(F + B) for M updates alike, within the activations of one."""
    for count in (1, 3, 8, 16):
        work = Work(micro_batches=(count,), forward=1.0, backward=2.0)
        schedule = together(stages, (work,) * models)
        found = check(schedule, memory_limits(stages, (work,) * models)).makespan
        assert found == pytest.approx((models * count + stages - 1) * 3.0)
        if count >= stages:
            alone = peak_activations(one_f_one_b(stages, work))
            assert all(both <= one for both, one in zip(peak_activations(schedule), alone, strict=True))


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
