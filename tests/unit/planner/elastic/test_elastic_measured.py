"""Speeds fitted to what a run measured, and what earlier iterations mean to `gain`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.planner.elastic.policies import gain, pays
from hybridflow.planner.elastic.simulation import ElasticRun, Measured, best_static, fitted, measured_split, start_of
from hybridflow.planner.elastic.state import Speeds
from hybridflow.planner.stream_simulation import DecodingSpeed

POSITIVE = st.floats(1e-4, 10.0)


@given(st.lists(POSITIVE, min_size=3, max_size=3), st.integers(0, 7), st.integers(0, 2**32 - 1))
def test_coefficients_of_exact_data_are_found(coefficients, kept, seed):
    wanted = np.array([value if kept >> i & 1 else 0.0 for i, value in enumerate(coefficients)])
    features = np.random.default_rng(seed).uniform(0.1, 5.0, (8, 3))
    values = features @ wanted
    if not wanted.any():
        return
    found = np.array(fitted(np.column_stack([features, values]).tolist(), 3))
    assert (found >= 0).all()
    assert features @ found == pytest.approx(values, rel=1e-6)


@given(st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE), min_size=1, max_size=8))
def test_no_coefficient_is_negative(rows):
    found = np.array(fitted(rows, 2))
    assert (found >= 0).all()
    assert np.isfinite(found).all()


def test_measured_speeds_are_those_of_the_machine():
    truth, measured = DecodingSpeed(base=0.01, per_row=0.001, prefill=1e-4), Measured(slots=64)
    for rows, steps, prefilled in ((4, 30, 0), (16, 25, 320), (8, 40, 0), (32, 20, 100)):
        seconds = steps * truth.step(rows) + prefilled * truth.prefill
        measured.decoded(seconds, rows, rows * steps, prefilled)
    for tokens, instances in ((1000, 1), (1500, 2), (800, 4)):
        measured.trained(0.3 + tokens * 1e-3 / instances, tokens, instances)
    measured.took("resize", 1.0)
    measured.took("resize", 2.0)
    speeds = measured.speeds()
    assert speeds.decoding.slots == 64
    assert [speeds.decoding.base, speeds.decoding.per_row, speeds.decoding.prefill] == pytest.approx(
        [0.01, 0.001, 1e-4], rel=1e-6
    )
    assert [speeds.train, speeds.train_per_token, speeds.resize] == pytest.approx([0.3, 1e-3, 1.5], rel=1e-6)


def test_nothing_measured_is_nothing_known():
    measured = Measured()
    measured.decoded(0.0, 4, 10, 0)
    measured.trained(0.0, 10, 1)
    assert measured.speeds().train == 0.0
    assert measured.speeds().decoding.base > 0


def test_the_latest_lengths_count():
    measured = Measured()
    for tokens in range(10_000):
        measured.response(tokens)
    assert len(measured.lengths) == 8192
    assert measured.lengths == sorted(measured.lengths)
    assert measured.lengths[0] == 10_000 - 8192


def test_gain_keeps_still_what_moves_made_slower():
    speeds = Speeds(DecodingSpeed(base=0.01, per_row=0.001), train_per_token=1e-4)
    settings: dict[str, Any] = {"devices": 8, "rollout": 4, "actor": 4, "prompts": 32, "n": 4, "minibatches": 4}
    start = start_of(ElasticRun(**settings, speeds=speeds, lengths=[1]), seen=[10, 20, 40, 400] * 8)
    still, better, worse = (False, 2.0), (True, 1.0), (True, 3.0)
    assert gain()(start)  # the forecast is for lending the actor's devices
    for history, moves in (
        ((still,), False),  # what it is compared with comes first
        ((still,) * 3, True),
        ((still, still, still, better, better), True),
        ((still, still, still, worse, worse), False),
        ((still, still, worse, worse, *(still,) * 11), False),
        ((still, still, worse, worse, *(still,) * 12), True),  # lengths change: it is tried again
    ):
        state = replace(start, iterations=history)
        assert pays(state) == moves, history
        assert bool(gain()(state)) == moves
        assert gain(history=False)(state)


def test_the_fastest_static_split_by_what_was_measured():
    """As many devices train as the measured speeds need, and no size that the actor does not have."""
    decoding = DecodingSpeed(base=0.01, per_row=0.001)
    common: dict[str, Any] = {"devices": 8, "rollout": 4, "actor": 4, "prompts": 8, "n": 2, "minibatches": 2}
    lengths = [100 + 10 * i for i in range(16)]
    found = {}
    for per_token in (1e-5, 1e-2):
        speeds = Speeds(decoding, 0.1, per_token)
        run = ElasticRun(**common, speeds=speeds, lengths=lengths, actor_sizes=(1, 2, 4))
        split, seconds = measured_split(start_of(run), lengths)
        found[per_token] = split.rollout, split.actor
        others = [(7, 1), (6, 2), (4, 4)]
        assert (split, seconds) == best_static(replace(split, rollout=1, actor=1), others)
        assert (split.rollout, split.actor) in others
    assert found[1e-5][1] < found[1e-2][1] == 4
    with pytest.raises(ConfigError, match="no response has been measured"):
        measured_split(start_of(run), [])
