"""The simulated stream against runs that can be computed by hand, and its orders and bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import KV
from hybridflow.errors import ConfigError
from hybridflow.planner import DecodingSpeed, ResponseLengths, StreamRun, simulate_stream
from hybridflow.planner.admission import StreamOptions
from hybridflow.planner.cost.cache_places import CachedRow, CachePlace, CachePrices, cache_places, place_seconds
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import DEVICES

SPEED = DecodingSpeed(base=0.5, per_row=0.25)


def run(eta: int = 0, rows: int = 8, n: int = 2, **given) -> StreamRun:
    settings = {"replicas": 2, "speed": SPEED, "lengths": [10], "train_seconds": 6.0, "sync_seconds": 1.0}
    return StreamRun(options=StreamOptions(rows=rows, n=n, max_staleness=eta), **{**settings, **given})


def seconds(run: StreamRun) -> float:
    """Per batch, after the warm-up."""
    return run.options.rows / simulate_stream(run).rows_per_second


def test_the_synchronous_loop_is_generation_then_training_then_the_sync():
    """2 groups of 2 rows on each of 2 replicas: 10 steps of 0.5 + 4 * 0.25 s."""
    found = simulate_stream(run())
    assert 8 / found.rows_per_second == pytest.approx(15 + 6 + 1)
    assert found.staleness_max == 0
    assert found.recomputed == 0
    assert (found.trainer_busy, found.rollout_busy) == pytest.approx((6 / 22, 16 / 22), rel=0.05)


def test_prompts_are_computed_before_the_first_token():
    prompts = DecodingSpeed(base=0.5, per_row=0.25, prefill=0.125)
    assert seconds(run(speed=prompts, prompt_tokens=3)) == pytest.approx(15 + 4 * 3 * 0.125 + 6 + 1)


def test_rows_beyond_the_slots_wait():
    few = DecodingSpeed(base=0.5, per_row=0.25, slots=2)
    assert seconds(run(speed=few)) == pytest.approx(2 * 10 * 1.0 + 6 + 1)


def test_training_takes_time_by_its_tokens():
    timed = run(train_seconds=1.0, train_seconds_per_token=0.1, prompt_tokens=5)
    assert seconds(timed) == pytest.approx(15 + 1 + 8 * 15 * 0.1 + 1)


@pytest.mark.parametrize(("train", "expected"), [(6.0, 15 + 1), (40.0, 40 + 1)])
def test_one_step_off_takes_the_longer_of_generation_and_training(train, expected):
    one_step_off = run(1, train_seconds=train, whole_batches=True)
    assert seconds(one_step_off) == pytest.approx(expected)
    assert simulate_stream(one_step_off).staleness_max == 1


def test_training_starts_when_the_end_of_responses_is_known():
    assert seconds(run(report_seconds=2.5)) == pytest.approx(15 + 2.5 + 6 + 1)


def test_processes_on_one_core_take_turns():
    """2 replicas, and 3 processes that train: 2 * 15 s, 3 * 6 s, and the sync of replicas that have rows, 2 * 1 s."""
    assert seconds(run(cores=1.0, train_processes=3)) == pytest.approx(30 + 18 + 2)
    found = simulate_stream(run(cores=1.0, train_processes=3))
    assert (found.trainer_busy, found.rollout_busy) == pytest.approx((18 / 50, 32 / 50), rel=0.05)


def test_the_longest_response_bounds_the_rows_of_a_stream():
    """One response in 8 takes 10 times as long, and runs alone for most of it: eta = 4 allows up to 5 batches in it."""
    long = [10] * 7 + [200]
    speeds = [simulate_stream(run(eta, lengths=long, sync_seconds=0.0, batches=40)).rows_per_second for eta in range(5)]
    assert speeds == sorted(speeds)
    assert 1.5 < speeds[4] / speeds[0] < 5


def test_interrupted_rows_are_computed_again():
    speed = DecodingSpeed(base=0.5, per_row=0.25, prefill=0.05)
    again, kept = (simulate_stream(run(2, lengths=[5, 5, 5, 60], speed=speed, kv=kv)) for kv in ("recompute", "keep"))
    assert again.recomputed > 0.05
    assert kept.recomputed == 0
    assert kept.rows_per_second > again.rows_per_second


def test_dropping_the_late_is_faster_and_counted():
    drop = run(1, lengths=[10] * 15 + [300])
    options = StreamOptions(rows=8, n=2, max_staleness=1, on_stale="drop")
    waiting, dropping = simulate_stream(drop), simulate_stream(replace(drop, options=options))
    assert waiting.given_up == 0 < dropping.given_up
    assert dropping.rows_per_second > 1.5 * waiting.rows_per_second


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20))
def test_random_runs_end_within_the_bound(seed: int):
    random = Random(seed)
    n, eta = random.randint(1, 3), random.randint(0, 3)
    given_run = StreamRun(
        options=StreamOptions(
            rows=n * random.randint(1, 9), n=n, max_staleness=eta, on_stale=random.choice(["wait", "drop"])
        ),
        replicas=random.randint(1, 5),
        speed=DecodingSpeed(
            base=random.random(), per_row=random.random(), prefill=random.random() / 10, slots=random.randint(1, 9)
        ),
        lengths=ResponseLengths(median=20, ratio=random.choice([1, 4, 16])),
        prompt_tokens=random.randint(0, 9),
        train_seconds=random.choice([0.0, 30 * random.random()]),
        sync_seconds=random.choice([0.0, random.random()]),
        report_seconds=random.choice([0.0, random.random()]),
        train_processes=random.randint(1, 4),
        whole_batches=eta == 1 and random.random() < 0.5,
        batches=random.randint(5, 12),
        seed=seed,
    )
    found = simulate_stream(given_run)
    assert found == simulate_stream(given_run)
    assert found.staleness_mean <= found.staleness_max <= eta
    assert 0 <= found.trainer_busy <= 1 + 1e-9
    assert 0 < found.rollout_busy <= 1 + 1e-9
    assert found.rows_per_second > 0
    processes = given_run.replicas + given_run.train_processes
    assert simulate_stream(replace(given_run, cores=processes)) == found
    shared = simulate_stream(replace(given_run, cores=processes / 3))
    assert found.rows_per_second / 3 * (1 - 1e-9) <= shared.rows_per_second <= found.rows_per_second * (1 + 1e-9)
    assert shared.staleness_mean == found.staleness_mean
    assert shared.trainer_busy <= 1 + 1e-9
    assert not found.given_up or given_run.options.on_stale == "drop"


def test_lengths_have_their_median_and_their_maximum():
    lengths = ResponseLengths(median=100, ratio=16)
    drawn = sorted(lengths.draw(random) for random in [Random(1)] for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(100, rel=0.03)
    assert drawn[-1] == 1600
    assert sum(tokens == 1600 for tokens in drawn) == pytest.approx(20, abs=15)


def test_the_speed_of_decoding_goes_through_two_measurements():
    speed = DecodingSpeed.fitted((1, 0.01), (201, 0.03), slots=300)
    assert (speed.step(1), speed.step(201), speed.slots) == (pytest.approx(0.01), pytest.approx(0.03), 300)
    for few, many in (((1, 0.02), (10, 0.01)), ((10, 0.01), (10, 0.02)), ((1, 0.01), (2, 0.03))):
        with pytest.raises(ConfigError, match=r"a step of \d+ rows took"):
            DecodingSpeed.fitted(few, many)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"lengths": []}, "give numbers of tokens"),
        ({"lengths": [3, 0]}, "give numbers of tokens"),
        ({"batches": 4}, "batches=4, warm_up=4"),
        ({"train_seconds": -1.0}, "train_seconds=-1"),
    ],
)
def test_bad_runs_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        run(**given)
    with pytest.raises(ConfigError, match="a step takes time"):
        DecodingSpeed(base=0.0, per_row=0.0)
    with pytest.raises(ConfigError, match=r"ratio=0\.5.: must be a number of at least 1"):
        ResponseLengths(median=5, ratio=0.5)


FIXED: tuple[KV, ...] = ("recompute", "keep", "offload")


def rows_of(random: Random, count: int) -> list[CachedRow]:
    """Rows of 200 to 20,000 tokens: 100 kB per token, 1 ms for 25 tokens, attention beside."""
    tokens = [round(200 * 100 ** random.random()) for _ in range(count)]
    return [CachedRow(n * 1e5, n * (4e-5 + n * 2e-9)) for n in tokens]


def kept(rows: list[CachedRow], places: list[CachePlace]) -> float:
    return sum(row.nbytes for row, place in zip(rows, places, strict=True) if place == "keep")


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_near_the_best_of_all_assignments(seed: int):
    random = Random(seed)
    rows = rows_of(random, 7)
    room = random.choice([0.0, 0.5, math.inf]) * sum(row.nbytes for row in rows)
    prices = CachePrices(offload=10 ** random.uniform(-11, -8), keep=1e-12, start=random.choice([0.0, 0.1]))
    found = cache_places("auto", rows, prices, room)
    assert kept(rows, found) <= room
    every = [list(one) for one in product(get_args(CachePlace), repeat=7) if kept(rows, list(one)) <= room]
    best = min(place_seconds(rows, one, prices) for one in every)
    assert place_seconds(rows, found, prices) <= 1.2 * best
    if room in (0.0, math.inf):  # nothing to pack: exactly
        assert place_seconds(rows, found, prices) == pytest.approx(best)
    for kv in FIXED:
        fixed = cache_places(kv, rows, prices, room)
        assert set(fixed) <= {kv, "recompute"}
        assert place_seconds(rows, found, prices) <= place_seconds(rows, fixed, prices) * (1 + 1e-9)


def test_long_rows_are_copied_and_short_ones_computed_again():
    """Attention makes a long row's tokens dearer to compute; a copy costs the same for each."""
    rows = [CachedRow(n * 1e5, n * (4e-5 + n * 2e-9)) for n in (500, 5_000, 50_000)]
    assert cache_places("auto", rows, CachePrices(offload=6e-10), room=0) == ["recompute", "recompute", "offload"]
    assert cache_places("auto", rows, CachePrices(offload=6e-10), room=5.2e8) == ["recompute", "keep", "offload"]
    assert cache_places("keep", rows, CachePrices(offload=6e-10), room=5.2e8) == ["keep", "recompute", "recompute"]
    # weights that are read for one short row cost more than its copy
    assert cache_places("auto", rows, CachePrices(offload=6e-10, start=1.0), room=0) == ["offload"] * 3


def test_prices_are_those_of_the_planner():
    device = DEVICES["a100"]
    prices = CachePrices.of(device.bandwidth * DEFAULT.memory, device.host, weights=14e9)
    assert prices.offload == pytest.approx(2 / 25e9)
    assert prices.keep == pytest.approx(4 / (2039e9 * DEFAULT.memory))
    assert prices.start == pytest.approx(14e9 / (2039e9 * DEFAULT.memory))


def mix(seed: int, kv: KV) -> StreamRun:
    """A replica that trains in turns: a model of 0.5B to 30B on devices with links of 4 to 50 GB/s."""
    random = Random(seed)
    prefill, cache = 10 ** random.uniform(-6, -4), 10 ** random.uniform(4, 6)  # seconds and bytes of a token
    prices = CachePrices(offload=2 * cache / random.uniform(4e9, 50e9), keep=4 * cache / 1.5e12, start=0.01)
    lengths = ResponseLengths(median=10 ** random.uniform(1.5, 3.5), ratio=random.choice([2, 8, 32]))
    return StreamRun(
        options=StreamOptions(rows=32, n=4, max_staleness=random.choice([1, 2, 4])),
        replicas=random.choice([1, 2]),
        speed=DecodingSpeed(
            base=0.008, per_row=1e-4, prefill=prefill, attention=prefill * 10 ** random.uniform(-6, -3), slots=256
        ),
        lengths=lengths,
        prompt_tokens=random.choice([50, 500, 5000]),
        train_seconds=random.uniform(0.5, 5.0),
        kv=kv,
        cache=prices,
        cache_room=random.choice([0.0, 1e3, 1e4, 1e5, None]),
        batches=7,
        warm_up=2,
        seed=seed,
    )


def test_the_automatic_place_is_never_much_worse_than_the_best_fixed_one():
    better = 0
    for seed in range(200):
        found = {kv: 1 / simulate_stream(mix(seed, kv)).rows_per_second for kv in get_args(KV)}
        best = min(found[kv] for kv in FIXED)
        assert found["auto"] <= 1.05 * best, (seed, found)
        better += found["auto"] < 0.999 * best
    assert better >= 10  # where lengths differ, each row has its own place
