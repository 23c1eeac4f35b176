"""Streams as shapes of plans: prices against the simulated stream, and splits against all splits."""

from __future__ import annotations

import itertools
import math
import random
from typing import get_args

import pytest

import hybridflow as hf
from hybridflow.config import KV
from hybridflow.planner import ResponseLengths, StreamRun, Workload, simulate_stream
from hybridflow.planner.admission import Admission, StreamOptions
from hybridflow.planner.cost.call_cost import CallCost, decode, generation, prefill
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, ExecutionPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Lengths
from hybridflow.planner.search.call_search import exact, options_of
from hybridflow.planner.stream_simulation import DecodingSpeed
from hybridflow.tracing.trace import Trace, trace_driver

GENERATE, UPDATE = "rollout.generate_sequences", "actor.update_actor"
TOLERANCE = 0.2


def traced(max_staleness: int | None, whole: bool = False, batch_size: int = 4) -> Trace:
    """A loop over a stream of 16 rows; None: over its loader."""

    def driver():
        pool = hf.ResourcePool([2])
        actor = hf.ActorWorker.on(pool, model="llama3-7b", optim=hf.Adam(lr=1e-6))
        rollout = hf.RolloutWorker.on(hf.ResourcePool([2]), model="llama3-7b", generate=hf.VLLM())
        loader = hf.PromptLoader([{"prompt": "a"}] * 64, batch_size=batch_size)

        def generate(prompts):
            return rollout.generate_sequences(prompts, n=4)

        if max_staleness is None:
            batches = map(generate, loader)
        else:
            source = generate if whole else rollout
            batches = hf.stream(loader, source, rows=16, n=4, max_staleness=max_staleness)
        for batch in batches:
            actor.update_actor(batch, loss="sft")
            hf.sync_weights(actor, rollout)

    return trace_driver(driver)


def graph_of(max_staleness: int | None, whole: bool = False) -> Graph:
    return traced(max_staleness, whole).graph


def test_without_staleness_it_is_the_synchronous_loop():
    assert graph_of(0) == graph_of(None)


@pytest.mark.parametrize("whole", [False, True])
def test_weights_of_a_stream_may_be_older(whole: bool):
    graph = graph_of(2, whole)
    assert [(e.source, e.distance) for e in graph.into(GENERATE)] == [(UPDATE, 3)]
    assert (GENERATE, 0) in {(e.source, e.distance) for e in graph.into(UPDATE)}
    assert graph.call(GENERATE).continuous is not whole


def test_rows_are_those_of_the_stream():
    assert traced(1, batch_size=6).rows == 16


def problem_of(max_staleness: int, rows: int, response, cluster: str = "a100:1x8") -> Costs:
    work = Workload(rows=rows, prompt=128, response=response, responses_per_prompt=4)
    return Costs(ClusterSpec.of(cluster), graph_of(max_staleness), work)


def drawn(rows: int, ratio: float) -> list[int]:
    """Lengths of a batch: each batch has the longest."""
    draw, lengths = random.Random(0), ResponseLengths(median=500, ratio=ratio)
    return [lengths.draw(draw) for _ in range(rows)]


def run_of(problem: Costs, plan: ExecutionPlan, lengths: list[int], max_staleness: int) -> StreamRun:
    """The stream with the costs of the plan, in which each device of the rollout is a replica."""
    context, update = problem.context("rollout", plan[GENERATE], "generation"), plan[UPDATE]
    assert context is not None
    steps = [(n, step.total + host) for n in (1, 256) for step, _, host in [decode(context, n)]]
    speed = DecodingSpeed.fitted(*steps, prefill=prefill(context, 64)[0].total / (64 * 128))
    return StreamRun(
        options=StreamOptions(rows=len(lengths), n=4, max_staleness=max_staleness),
        replicas=plan[GENERATE].mesh.size,
        speed=speed,
        lengths=lengths,
        prompt_tokens=128,
        train_seconds=problem.cost(UPDATE, update).seconds,
        sync_seconds=problem.reallocation("rollout", update, plan[GENERATE]),
    )


@pytest.mark.parametrize(
    ("rows", "ratio", "train", "max_staleness"), list(itertools.product((64, 512), (2.0, 12.0), (2, 4), (1, 2, 4)))
)
def test_the_price_is_that_of_the_simulated_stream(rows: int, ratio: float, train: int, max_staleness: int):
    """`train` of 8 devices train; within 20 %."""
    lengths = drawn(rows, ratio)
    problem = problem_of(max_staleness, rows, Lengths.of(lengths))
    plan = {
        GENERATE: CallPlan(Mesh.of(train, 8 - train), Parallel(d=8 - train)),
        UPDATE: CallPlan(Mesh.of(0, train), Parallel(t=train)),
    }
    simulated = rows / simulate_stream(run_of(problem, plan, lengths, max_staleness)).rows_per_second
    assert problem.timeline(plan).per_iteration == pytest.approx(simulated, rel=TOLERANCE)


def test_keys_and_values_of_rows_under_way_have_the_price_of_their_place():
    """Those of a rollout on its own devices stay; where an actor trains on them they move, or are computed again."""

    def cost(kv: KV, shared: bool) -> CallCost:
        work = Workload(rows=512, prompt=128, response=2000, responses_per_prompt=4, kv=kv)
        problem = Costs(ClusterSpec.of("a100:1x8"), graph_of(2), work)
        context = problem.context("rollout", CallPlan(Mesh.of(0, 4), Parallel(d=4)), "generation")
        assert context is not None
        return generation(context, 512, 40e9, 2, shared)

    found = {(kv, shared): cost(kv, shared) for kv in get_args(KV) for shared in (False, True)}
    again, kept = found["recompute", True], found["keep", True].seconds - found["keep", False].seconds
    assert again == found["recompute", False]
    assert len({found[kv, False].seconds for kv in ("keep", "offload", "auto")}) == 1
    assert 0 < kept < found["offload", True].parts["offload"]
    assert found["keep", True].seconds < again.seconds
    assert found["auto", True].seconds == min(found["offload", True].seconds, again.seconds)


def taking_turns(run: StreamRun) -> float:
    """Seconds of an iteration on common devices: all decode until a batch is complete, and then all train it. Tokens
    of unfinished rows are kept, and their keys and values computed again."""
    assert not isinstance(run.lengths, ResponseLengths)
    policy, lengths = Admission(run.options, range(run.replicas)), itertools.cycle(run.lengths)
    queues: list[list[list]] = [[] for _ in range(run.replicas)]  # rows: group, tokens decoded, tokens in all
    speed, stalled = run.speed, [0.0] * run.replicas
    now, ends = 0.0, [0.0]
    while len(ends) <= run.batches:
        for group, replica in policy.admit(policy.capacity).items():
            queues[int(replica)] += [[group, 0.0, next(lengths)] for _ in range(run.options.n)]
            stalled[int(replica)] += run.prompt_tokens * speed.prefill
        if policy.next_batch() is not None:
            now += run.train_seconds + run.sync_seconds
            ends.append(now)
            policy.trained()
            policy.synced()
            for replica, rows in enumerate(queues):
                stalled[replica] += sum(run.prompt_tokens + done for _, done, _ in rows if done) * speed.prefill
            continue
        decoded = [rows[: speed.slots] for rows in queues]
        steps = [speed.step(len(rows)) for rows in decoded]
        passed = min(
            wait + min(tokens - done for _, done, tokens in rows) * step
            for wait, rows, step in zip(stalled, decoded, steps, strict=True)
            if rows
        )
        now += passed
        for replica, rows in enumerate(decoded):
            wait = min(stalled[replica], passed)
            stalled[replica] -= wait
            for row in rows:
                row[1] += (passed - wait) / steps[replica]
                if row[1] > row[2] - 1e-6:
                    queues[replica].remove(row)
                    policy.finished(row[0], [[policy.version]])
    return (ends[-1] - ends[run.warm_up]) / (run.batches - run.warm_up)


@pytest.mark.parametrize(("rows", "ratio", "max_staleness"), list(itertools.product((64, 256), (2.0, 12.0), (1, 2, 4))))
def test_the_price_on_common_devices_is_that_of_taking_turns(rows: int, ratio: float, max_staleness: int):
    """All 8 devices generate and train; within 15 %."""
    lengths = drawn(rows, ratio)
    problem = problem_of(max_staleness, rows, Lengths.of(lengths))
    plan = {GENERATE: CallPlan(Mesh.of(0, 8), Parallel(d=8)), UPDATE: CallPlan(Mesh.of(0, 8), Parallel(t=8))}
    expected = taking_turns(run_of(problem, plan, lengths, max_staleness))
    assert problem.timeline(plan).per_iteration == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(("rows", "max_staleness"), [(64, 0), (64, 1), (256, 1), (256, 3)])
def test_the_split_that_is_found_is_the_best_of_all(rows: int, max_staleness: int):
    problem = problem_of(max_staleness, rows, (300, 2048), "a100:1x4")
    found = exact(problem)
    assert found is not None
    assert found.complete
    options, capacity = options_of(problem, prune=False), problem.capacity
    least = math.inf
    for chosen in itertools.product(*options):
        plan = {call.name: option.plan for call, option in zip(problem.calls, chosen, strict=True)}
        used = problem.kept(plan)
        active = [0.0] * len(used)
        for option in chosen:
            for device in option.plan.mesh.devices:
                active[device] = max(active[device], option.active)
        if all(a + b <= capacity for a, b in zip(used, active, strict=True)):
            least = min(least, problem.timeline(plan).per_iteration)
    assert found.seconds == pytest.approx(least)
