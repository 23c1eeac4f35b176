"""Elastic iterations priced from a traced loop."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError, PlacementError
from hybridflow.planner import (
    ClusterSpec,
    Coefficients,
    ElasticPlan,
    Parallel,
    Workload,
    plan_elastic,
    simulate_elastic,
    static,
)
from hybridflow.planner.cost.reallocation_cost import TENSOR_SECONDS, reallocation
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.stream_simulation import ResponseLengths
from tests.example_plans import LLAMA_7B, LLAMA_13B, grpo_of

WORK = Workload(rows=256, responses_per_prompt=8, prompt=512, response=(700, 4000))
GRPO = grpo_of(LLAMA_7B)


def planned(cluster: str = "a100:1x8", work: Workload = WORK, **options) -> ElasticPlan:
    return plan_elastic(GRPO, ClusterSpec.of(cluster), work, **options)


def test_the_answer_is_the_fastest_static_split_and_what_moving_saves():
    found = planned()
    assert (found.generate, found.train) == (Parallel(), Parallel(t=4))  # of 7 B: 14 GB, and 112 GB of state
    run = found.run
    assert run.actor * run.mp + run.rollout * run.tp <= run.devices == 8
    assert found.static == simulate_elastic(run, static).mean
    other = replace(run, rollout=2, actor=1)
    assert found.static <= simulate_elastic(other, static).mean
    assert found.pays
    assert f"{run.rollout} rollouts of 1" in str(found)
    assert not planned(policy=static).pays


def test_sizes_and_workloads_change_speeds():
    plain, wide = planned(policy=static), planned(train=Parallel(t=8), cluster="a100:2x8", policy=static)
    assert wide.run.speeds.train_per_token < plain.run.speeds.train_per_token
    assert planned("h100:1x8", policy=static).run.speeds.decoding.base < plain.run.speeds.decoding.base
    long = planned("a100:2x8", replace(WORK, response=(8000, 30000)), policy=static, train=Parallel(t=8))
    assert long.run.speeds.decoding.slots < plain.run.speeds.decoding.slots == 256  # as many as have a KV cache
    assert min(plain.run.speeds.resize, plain.run.sync_seconds) > 0


@given(st.floats(50, 200), st.floats(1.0, 60))
@settings(max_examples=10, deadline=None)
def test_lengths_have_the_mean_and_the_maximum_of_the_workload(mean, factor):
    most = round(mean * factor) + 1  # a much smaller mean than a hundredth of it has no such distribution
    work = replace(WORK, rows=8, response=(mean, most))
    lengths = planned(work=work, minibatches=1, policy=static, train=Parallel(t=4)).run.lengths
    assert isinstance(lengths, ResponseLengths)
    drawn = random.Random(0)
    assert fmean(lengths.draw(drawn) for _ in range(20_000)) == pytest.approx(mean, rel=0.15)
    assert lengths.median * lengths.ratio == pytest.approx(most)


def test_state_that_moves_pays_for_its_bytes_and_for_each_of_its_messages():
    """12 bytes of each parameter are six times the weights; what tensors and messages take is paid for three kinds."""
    size, cluster, four = Sizes.of(LLAMA_7B), ClusterSpec.of("a100:1x8"), Parallel(t=4)
    ends = CallPlan(Mesh.of(0, 4), four), CallPlan(Mesh.of(4, 4), four)
    weights, twice = (reallocation(size, cluster, *ends, each, Coefficients(), fresh=True)[0] for each in (2, 4))
    overhead = 2 * weights - twice
    assert overhead > 32 * 7 * TENSOR_SECONDS
    assert planned(policy=static).run.speeds.resize == pytest.approx(6 * (weights - overhead) + 3 * overhead)


def test_an_actor_of_which_there_is_one_instance_at_most_is_not_resized():
    assert planned("a100:1x5", train=Parallel(t=4), policy=static).run.speeds.resize == 0


def test_what_cannot_be_elastic_is_refused():
    with pytest.raises(PlacementError, match="1 calls that generate and 0 that train"):
        plan_elastic(
            replace(GRPO, calls=tuple(call for call in GRPO.calls if call.kind != "training")),
            ClusterSpec.of("a100:1x8"),
            WORK,
        )
    with pytest.raises(PlacementError, match=r"actor, reference with up to 2 devices per instance need .* are usable"):
        plan_elastic(grpo_of(LLAMA_13B), ClusterSpec.of("a100-40gb:1x2"), WORK)
    with pytest.raises(PlacementError, match="need more than the 4 devices"):
        planned("a100:1x4")
    with pytest.raises(PlacementError, match=r"actor, reference with 1 devices per instance need 1.. GiB on each"):
        planned(train=Parallel())
    for options, text in (
        ({"minibatches": 5}, "the 32 prompts of an iteration are not divided"),
        ({"minibatches": 0}, "give a whole number above 0"),
        ({"policy": "gian"}, "known are gain"),
        ({"policy": lambda state: [1 / 0]}, "was refused. .*division"),
        ({"generate": Parallel(p=2)}, "give the sizes of one instance, d=1, p=1"),
        ({"train": Parallel(t=4, d=2)}, "give the sizes of one instance, d=1"),
        ({"lengths": []}, "numbers of tokens above 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            planned(**options)
