"""The simulator against published figures: parameter counts, calls of ReaL's plans, training with Megatron-LM, the best
generation size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isfinite

import pytest

from benchmarks.dataflows import ppo
from hybridflow.models.spec import PUBLISHED, ModelSpec
from hybridflow.planner.cost.calibration import Observation, calibrate
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload

LLAMA_7B, LLAMA_70B = PUBLISHED["llama3-7b"], PUBLISHED["llama3-70b"]
CRITIC = replace(LLAMA_7B, head="value")


def test_parameters_without_output_embedding():
    assert replace(LLAMA_7B, tied=True).num_parameters == 7_504_924_672
    assert CRITIC.num_parameters == 7_504_924_672 + 4096


# ReaL (Mei et al., MLSys 2025): 70B actor and reference, 7B critic and reward, 16 nodes of 8 H100. Calls in the order
# of the tables: parallel sizes (p, t, d, micro-batches) and seconds.
CALLS = (
    "actor.generate_sequences",
    "reward.compute_reward",
    "reference.compute_ref_log_prob",
    "critic.compute_values",
    "critic.update_critic",
    "actor.update_actor",
)
SEARCHED = ((4, 2, 16, 4), (8, 1, 16, 4), (8, 1, 16, 16), (8, 1, 16, 16), (4, 8, 4, 2), (16, 2, 4, 2))
SEARCHED_SECONDS = (185.1, 5.6, 35.6, 5.6, 20.8, 108.0)
HEURISTIC, HEURISTIC_SECONDS = ((4, 8, 4, 8),) * 6, (241.8, 12.6, 63.5, 12.5, 35.7, 163.4)
H100S = ClusterSpec.of("h100:16x8")
GRAPH = ppo(LLAMA_70B, CRITIC, LLAMA_70B, CRITIC, log_probs=False)
WORKLOAD = Workload(rows=4096, prompt=1024, response=1024, minibatches=8, sequence_parallel=False)  # as its code


def observed(workload: Workload, sizes, seconds) -> list[Observation]:
    found = []
    for name, (*cut, micro_batches), taken in zip(CALLS, sizes, seconds, strict=True):
        call, work = GRAPH.call(name), replace(workload, micro_batches=micro_batches)
        found.append(Observation(H100S, GRAPH.models[call.group], call.kind, Parallel(*cut), work, taken))  # type: ignore[arg-type]
    return found


def predicted(coefficients: Coefficients, workload: Workload, sizes) -> list[float]:
    return [seen.predicted(coefficients) for seen in observed(workload, sizes, [1.0] * len(CALLS))]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("sizes", "published"),
    [(SEARCHED, SEARCHED_SECONDS), (HEURISTIC, HEURISTIC_SECONDS)],
    ids=["searched", "heuristic"],
)
def test_uncalibrated_predictions_of_published_calls(recompute, sizes, published):
    found = predicted(DEFAULT, replace(WORKLOAD, recompute=recompute), sizes)
    for call, seconds, taken in zip(CALLS, found, published, strict=True):
        assert seconds <= 1.5 * taken, call
        if call != "actor.generate_sequences":
            assert seconds >= taken / 4, call


@pytest.mark.parametrize("recompute", [False, True])
def test_calibrated_on_the_heuristic_plan_the_searched_one_is_predicted(recompute):
    workload = replace(WORKLOAD, recompute=recompute)
    coefficients = calibrate(observed(workload, HEURISTIC, HEURISTIC_SECONDS))
    searched, heuristic = (sum(predicted(coefficients, workload, sizes)) for sizes in (SEARCHED, HEURISTIC))
    assert searched == pytest.approx(383.1, rel=0.28)
    assert heuristic == pytest.approx(546.8, rel=0.28)
    assert searched < heuristic
    assert coefficients.device == "h100"


@pytest.mark.parametrize(
    ("known", "held_out"),
    [
        ((HEURISTIC, HEURISTIC_SECONDS), (SEARCHED, SEARCHED_SECONDS)),
        ((SEARCHED, SEARCHED_SECONDS), (HEURISTIC, HEURISTIC_SECONDS)),
    ],
    ids=["heuristic", "searched"],
)
def test_calibrated_on_the_six_calls_of_one_table_those_of_the_other_are_predicted(known, held_out):
    fitted = calibrate(observed(WORKLOAD, *known))
    sizes, published = held_out
    found = predicted(fitted, WORKLOAD, sizes)
    assert found == pytest.approx(published, rel=0.28)
    assert sum(found) == pytest.approx(sum(published), rel=0.1)


def test_calibrating_on_more_calls_does_not_make_them_worse():
    both = observed(WORKLOAD, SEARCHED, SEARCHED_SECONDS) + observed(WORKLOAD, HEURISTIC, HEURISTIC_SECONDS)
    fitted = calibrate(both)
    errors = [abs(seen.predicted(fitted) / seen.seconds - 1) for seen in both]
    assert all(isfinite(error) for error in errors)
    assert max(errors) < 0.4
    assert sorted(errors)[len(errors) // 2] < 0.2


def test_any_published_call_alone_keeps_the_plans_in_order():
    """Also when it took twice or half as long: efficiencies stay shares, and costs positive."""
    seen = observed(WORKLOAD, HEURISTIC, HEURISTIC_SECONDS) + observed(WORKLOAD, SEARCHED, SEARCHED_SECONDS)
    for one, factor in product(seen, (0.5, 1.0, 2.0)):
        fitted = calibrate([replace(one, seconds=one.seconds * factor)])
        assert all(0 < getattr(fitted, name) <= 1 for name in ("compute", "attention", "memory", "link", "network"))
        searched, heuristic = (sum(predicted(fitted, WORKLOAD, sizes)) for sizes in (SEARCHED, HEURISTIC))
        assert searched < heuristic, (one.kind, one.parallel, factor)


@pytest.mark.parametrize("kv_heads", [8, 32])
@pytest.mark.parametrize("colocated", [False, True])
def test_two_way_generation_is_best_for_7b_trained_1_8_2(kv_heads, colocated):
    """HybridFlow, figure 15: the transition and generation on 16 A100, among t_g = 1, 2, 4, 8."""
    model = replace(LLAMA_7B, kv_heads=kv_heads)
    critic = replace(model, head="value")
    graph = ppo(model, critic, model, critic)
    simulator = Costs(ClusterSpec.of("a100:2x8"), graph, Workload(rows=1024, prompt=1024, response=1024, minibatches=8))
    mesh = Mesh.of(0, 16)
    home = CallPlan(mesh, Parallel(1, 8, 2))
    beside = sum(simulator.static(group, home) for group in graph.groups) if colocated else None
    seconds = {}
    for t in (1, 2, 4, 8):
        plan = CallPlan(mesh, Parallel(1, t, 16 // t))
        kv_budget = simulator.kv_budget(CALLS[0], plan, beside)
        seconds[t] = simulator.cost(CALLS[0], plan, kv_budget).seconds + simulator.reallocation("actor", home, plan)
    assert min(seconds, key=seconds.__getitem__) == 2, seconds


# Megatron-LM (Narayanan et al., SC 2021, table 2): GPT on A100-80GB, eight 200 Gbit/s links a node, recomputation,
# micro-batches of one row. TFLOP/s of a device by devices: the more, the fewer rows each has.
GPT_175B, GPT_530B = (12288, 96, 96, 1536), (20480, 105, 128, 2240)


def gpt_tflops(sizes, parallel: Parallel) -> float:
    """As that paper counts them: forward, recomputation, backward."""
    hidden, layers, heads, rows = sizes
    wide = round(hidden * 8 / 3 / 64) * 64  # three matrices of the size of two that are 4 hidden wide
    model = ModelSpec(
        family="llama", hidden=hidden, intermediate=wide, layers=layers, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=51200,
    )  # fmt: skip
    work = Workload(rows=rows, prompt=1, response=2047, recompute=True, micro_tokens=2048, sequence_parallel=False)
    cluster = ClusterSpec.of(f"a100:{parallel.size // 8}x8@1600gbps")
    seconds = Observation(cluster, model, "training", parallel, work, 1.0).predicted(DEFAULT)
    flops = 96 * rows * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    return flops / parallel.size / seconds / 1e12


@pytest.mark.parametrize(
    ("sizes", "p", "published"),
    [(GPT_175B, 12, {4: 153, 8: 149, 16: 141}), (GPT_530B, 35, {2: 171, 4: 167, 8: 159})],
    ids=["175B", "530B"],
)
def test_training_on_more_devices_scales_as_published(sizes, p, published):
    found = {d: gpt_tflops(sizes, Parallel(p, 8, d)) for d in published}
    for d, tflops in published.items():
        assert found[d] == pytest.approx(tflops, rel=0.2), d
    few, many = min(published), max(published)
    assert found[many] / found[few] == pytest.approx(published[many] / published[few], abs=0.04)
