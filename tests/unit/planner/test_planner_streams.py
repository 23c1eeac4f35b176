"""Streams as shapes of plans: prices against the simulated stream, and splits against all splits."""

from __future__ import annotations

import itertools
import math
import random

import pytest

import hybridflow as hf
from hybridflow.admission import StreamOptions
from hybridflow.planner import ResponseLengths, StreamRun, Workload, simulate_stream
from hybridflow.planner.cost.call_cost import decoding_step, prefill_seconds
from hybridflow.planner.cost.simulator import Simulator
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Lengths
from hybridflow.planner.search.call_search import exact
from hybridflow.planner.search.evaluation import options_of
from hybridflow.planner.search.problem import Problem
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


def problem_of(max_staleness: int, rows: int, response, cluster: str = "a100:1x8") -> Problem:
    work = Workload(rows=rows, prompt=128, response=response, responses_per_prompt=4)
    return Problem(Simulator(ClusterSpec.of(cluster), graph_of(max_staleness), work))


@pytest.mark.parametrize(
    ("rows", "ratio", "train", "max_staleness"),
    list(itertools.product((64, 512), (2.0, 12.0), (2, 4), (1, 2, 4))),
)
def test_the_price_is_that_of_the_simulated_stream(rows: int, ratio: float, train: int, max_staleness: int):
    """`train` of 8 devices train; within 20 %."""
    draw, lengths = random.Random(0), ResponseLengths(median=500, ratio=ratio)
    sample = [lengths.draw(draw) for _ in range(rows)]  # each batch has the longest
    problem = problem_of(max_staleness, rows, Lengths.of(sample))
    plan = {
        GENERATE: CallPlan(Mesh.of(train, 8 - train), Parallel(d=8 - train)),
        UPDATE: CallPlan(Mesh.of(0, train), Parallel(t=train)),
    }
    costs = problem.costs
    context = costs.context("rollout", plan[GENERATE], "generation")
    assert context is not None
    speed = DecodingSpeed.fitted(
        *((n, decoding_step(context, n)) for n in (1, 256)), prefill=prefill_seconds(context, 64) / (64 * 128)
    )
    run = StreamRun(
        options=StreamOptions(rows=rows, n=4, max_staleness=max_staleness),
        replicas=8 - train,
        speed=speed,
        lengths=sample,
        prompt_tokens=128,
        train_seconds=costs.cost(UPDATE, plan[UPDATE]).seconds,
        sync_seconds=problem.reallocation("rollout", plan[UPDATE], plan[GENERATE]),
        batches=16,
    )
    simulated = rows / simulate_stream(run).rows_per_second
    assert problem.timeline(plan, order="program").per_iteration == pytest.approx(simulated, rel=TOLERANCE)


@pytest.mark.parametrize(("rows", "max_staleness"), [(64, 0), (64, 1), (256, 1), (256, 3)])
def test_the_split_that_is_found_is_the_best_of_all(rows: int, max_staleness: int):
    problem = problem_of(max_staleness, rows, (300, 2048), "a100:1x4")
    found = exact(problem, order="program")
    assert found is not None
    assert found.complete
    options, capacity = options_of(problem, prune=False), problem.capacity
    least = math.inf
    for chosen in itertools.product(*options):
        plan = {call.name: option.plan for call, option in zip(problem.calls, chosen, strict=True)}
        used = problem.static(plan)
        active = [0.0] * len(used)
        for option in chosen:
            for device in option.plan.mesh.devices:
                active[device] = max(active[device], option.active)
        if all(a + b <= c for a, b, c in zip(used, active, capacity, strict=True)):
            least = min(least, problem.timeline(plan, order="program").per_iteration)
    assert found.seconds == pytest.approx(least)
