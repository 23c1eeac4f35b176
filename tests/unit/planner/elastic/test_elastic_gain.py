"""Single iterations under `gain` against the static placement: few rows per device, so that the longest decide."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import fmean

import numpy as np
import pytest

from hybridflow.planner import ClusterSpec, DecodingSpeed, ResponseLengths, Workload, plan_elastic, static
from hybridflow.planner.elastic.policies import SeenLengths, gain
from hybridflow.planner.elastic.simulation import ElasticRun, simulate_elastic
from hybridflow.planner.elastic.state import Speeds
from tests.example_plans import LLAMA_7B, grpo_of


def eight(ratio: float) -> ElasticRun:
    """256 responses on eight devices."""
    speeds = Speeds(
        DecodingSpeed.fitted((1, 0.008), (256, 0.028), prefill=3e-5),
        train=0.5, train_per_token=1.4e-4, resize=2.0, hand_over=0.2, join=1.0, look=0.02,
    )  # fmt: skip
    lengths = ResponseLengths(median=1024, ratio=ratio)
    return ElasticRun(
        devices=8, rollout=5, actor=3, prompts=32, n=8, minibatches=4, speeds=speeds, lengths=lengths, prompt_tokens=256
    )  # fmt: skip


def sixteen() -> ElasticRun:
    """256 responses on sixteen devices, four for an instance of the actor."""
    work = Workload(rows=256, responses_per_prompt=8, prompt=512, response=(700, 4000))
    run = plan_elastic(grpo_of(LLAMA_7B), ClusterSpec.of("h100:2x8"), work, policy=static, iterations=1).run
    return replace(run, sync_seconds=0.0)


@pytest.mark.parametrize(("run", "seeds"), [(eight(4), (0, 6)), (eight(16), (4,)), (sixteen(), (7, 9))])
def test_no_iteration_is_more_than_two_hundredths_behind_static(run: ElasticRun, seeds: tuple[int, ...]):
    """Where only the longest response of the iteration before is expected, devices return up to 14 % too late; with
    seed 6, lending does not pay."""
    runs = [replace(run, seed=seed) for seed in seeds]
    ratios = [simulate_elastic(each, gain()).mean / simulate_elastic(each, static).mean for each in runs]
    assert max(ratios) <= 1.02
    assert fmean(ratios) <= 1.0


def test_forecasts_differ_in_the_longest_response():
    seen = SeenLengths(sorted(range(100, 1100, 4)))
    draws = [seen.remaining(np.zeros(250), number) for number in range(8)]
    assert len({draw.max() for draw in draws}) > 1
    assert np.mean(draws) == pytest.approx(600, rel=0.05)
    assert seen.remaining(np.array([2000.0]), 0) == 400  # longer than all seen
    near = {float(seen.remaining(np.array([996.0]), number)[0]) for number in range(8)}
    assert len(near) > 1
    assert max(near) <= 100


def smallest() -> list[ElasticRun]:
    """Every placement of rollout and actor on 2 to 8 devices in instances of 1 to 4, with all and with few sizes."""
    out = []
    for devices, tp, mp in product(range(2, 9), (1, 2, 4), (1, 2, 4)):
        for actor in range(1, devices // mp + 1):
            for rollout in range(1, devices // tp - -(-actor * mp // tp) + 1):
                out += [
                    replace(eight(4), devices=devices, tp=tp, mp=mp, actor=actor, rollout=rollout, actor_sizes=sizes,
                            prompts=4, n=2, minibatches=2)
                    for sizes in (None, (actor,))
                ]  # fmt: skip
    return out


@pytest.mark.slow
def test_the_default_policy_decides_on_every_small_placement():
    """Where the devices allow no other split, it stays."""
    for run in smallest():
        found = simulate_elastic(run, gain())
        assert found.refused is None, (run, found.refused)


def test_no_response_is_expected_to_be_longer_than_it_may_be():
    seen = SeenLengths([100, 200, 900, 1000])
    tokens = np.array([50.0, 950.0, 1000.0, 1023.0])
    for number in range(4):
        left = seen.remaining(tokens, number, 1024)
        assert (tokens + left <= 1024).all()
        assert (left >= 1).all()
    assert seen.remaining(tokens, 0).max() > 1024 - 1000
