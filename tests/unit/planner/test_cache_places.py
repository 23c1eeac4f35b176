"""Where keys and values of unfinished rows wait: against every assignment of few rows, and in the simulator."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import get_args

import pytest

from hybridflow.config import KV
from hybridflow.planner import DecodingSpeed, ResponseLengths, StreamRun, simulate_stream
from hybridflow.planner.admission import StreamOptions
from hybridflow.planner.cost.cache_places import (
    CachedRow,
    CachePlace,
    CachePrices,
    cache_places,
    place_seconds,
)
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import DEVICES

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
