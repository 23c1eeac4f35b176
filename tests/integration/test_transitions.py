"""Transitions between real layouts on eight gloo processes: table 2 measured, nothing lost, nothing twice in memory.

The holders are plain tensors in the layouts of Megatron and vLLM; `test_hybrid_engine.py` has the engines themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from benchmarks.designs import WEAKER
from hybridflow.engine3d.hybrid_engine import HybridEngine, TransitionReport
from hybridflow.errors import ConfigError, LayoutError
from hybridflow.topology import RankGrid
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer, resident_bytes
from tests.contracts.rank_processes import RankProcesses, World
from tests.integration.transition_cases import BF16, FP16, FP32, SPEC, TIED, Case, build

SIZES = [(p, t, 8 // (p * t)) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 8]


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@dataclass
class Seen:
    """What one rank found in one case."""

    report: TransitionReport
    wrong: list[str]  # generation boxes with other values than the training weights
    wrong_back: list[str]  # training boxes with other values after the way back
    held: int  # bytes in memory while generating, as the storages say
    held_training: int  # the same while training
    generation_bytes: int
    training_bytes: int
    layer_bytes: int  # the largest layer of the generation shard
    restored: int


def transitions(world: World, cases: list[Case], name: str) -> list[Seen]:
    """Twice there and back in every case, with new weights in between; what the second time showed."""
    out, groups = [], world.context(name, cases[0].grid).groups
    for case in cases:
        engine, train, generate = build(world, case, groups)
        for _ in range(2):
            train.train()
            engine.trained()
            engine.to_generation()
            wrong = train.canon.wrong(generate.layout(), world.rank, generate.storage())
            held = resident_bytes(train.storage(), generate.storage())
            engine.to_training()
        sizes: dict[str, int] = {}
        for region in generate.layout().regions(world.rank):
            unit = ".".join(region.storage.split(".")[:3])
            sizes[unit] = sizes.get(unit, 0) + region.box.numel * case.dtypes[1].itemsize
        out.append(
            Seen(
                engine.report,
                wrong,
                train.canon.wrong(train.layout(), world.rank, train.storage()),
                held,
                resident_bytes(train.storage(), generate.storage()),
                sum(tensor.nbytes for tensor in generate.storage().values()),
                sum(tensor.nbytes for tensor in train.storage().values()),
                max(sizes.values()),
                train.restored,
            )
        )
    groups.close()
    return out


@pytest.fixture(scope="module")
def ranks(rank_processes) -> RankProcesses:
    return rank_processes(8)


@pytest.fixture(scope="module")
def observe(ranks) -> Callable[[list[Case]], list[list[Seen]]]:
    """For each case, what each rank saw."""

    def observe(cases: list[Case]) -> list[list[Seen]]:
        answers = ranks.run(cases[0].ranks, transitions, cases, ranks.name())
        return [list(seen) for seen in zip(*answers, strict=True)]

    return observe


def correct(seen: list[Seen]) -> None:
    """Every element arrived and came back, and what was measured is what the storages say."""
    for rank in seen:
        assert rank.wrong == []
        assert rank.wrong_back == []
        assert rank.report.resident_bytes == rank.held
        assert rank.report.received_bytes == sum(rank.report.received.values())
        assert rank.report.peak_bytes >= rank.held


def matrices(rank: Seen) -> int:
    """Bytes received of the decoder's matrices, which are cut evenly; norms are replicated and counted apart."""
    return sum(size for name, size in rank.report.received.items() if ".layers." in name and "norm" not in name)


LAYERS = sum(math.prod(s) for n, s in SPEC.tensors().items() if len(s) == 2 and ".layers." in n) * BF16.itemsize
VOCABULARY = 2 * SPEC.vocab * SPEC.hidden * BF16.itemsize


@pytest.mark.parametrize(("p", "t", "d"), SIZES)
def test_table_2(observe, p, t, d):
    """Bytes received per device; resident and peak parameter bytes, for all generation sizes of one training size."""
    choices = [(p_g, t_g) for p_g in divisors(p) for t_g in divisors(t)]
    for (p_g, t_g), seen in zip(choices, observe([Case((p, t, d), sizes) for sizes in choices]), strict=True):
        correct(seen)
        d_g = p * t // (p_g * t_g)
        assert [matrices(rank) for rank in seen] == [(d_g - 1) * LAYERS // (p * t)] * 8
        # embeddings and output are on the first and the last stage: devices differ, together they receive as much
        vocabulary = sum(rank.report.received_bytes - matrices(rank) - norms(rank) for rank in seen)
        assert vocabulary == 8 * (d_g - 1) * VOCABULARY // (p * t)
        assert sum(rank.report.sent_bytes for rank in seen) == sum(rank.report.received_bytes for rank in seen)
        whole = sum(math.prod(shape) for shape in SPEC.tensors().values()) * BF16.itemsize
        for rank in seen:
            assert rank.held == rank.generation_bytes  # zero redundancy
            assert rank.held_training == rank.training_bytes
            assert rank.report.peak_bytes <= rank.generation_bytes + rank.layer_bytes
            assert rank.report.peak_bytes < whole or p_g * t_g == 1


def norms(rank: Seen) -> int:
    return sum(size for name, size in rank.report.received.items() if "norm" in name)


@pytest.mark.slow
@pytest.mark.parametrize(("p", "t", "d"), [(1, 8, 1), (2, 2, 2)])
def test_table_2_of_the_weaker_designs(observe, p, t, d):
    """They gather all of a model whatever the generation sizes are, so three of them tell."""
    choices = list(dict.fromkeys([(1, 1), (1, t), (p, t)]))
    cases = [Case((p, t, d), sizes, design) for design in WEAKER for sizes in choices]
    for case, seen in zip(cases, observe(cases), strict=True):
        shares = p * t if case.design == "vanilla" else p * t * d
        correct(seen)
        assert [matrices(rank) for rank in seen] == [(shares - 1) * LAYERS // shares] * 8
        vocabulary = sum(rank.report.received_bytes - matrices(rank) - norms(rank) for rank in seen)
        assert vocabulary == 8 * (shares - 1) * VOCABULARY // shares
        for rank in seen:
            assert rank.held == rank.generation_bytes + rank.training_bytes, case
            assert rank.report.peak_bytes >= LAYERS + VOCABULARY  # the whole model, as the paper says


OTHERS = {
    "tied": Case((2, 2, 2), (1, 1), spec=TIED),
    "tied-p2": Case((2, 2, 2), (2, 1), spec=TIED),
    "equal": Case((2, 2, 2), (2, 2), spec=replace(TIED, vocab=128)),
    "shifted": Case((2, 2, 2), (2, 2), spec=TIED, restorable=True),
    "wider": Case((2, 2, 2), (2, 1), dtypes=(BF16, FP32)),
    "narrower": Case((1, 4, 2), (1, 2), dtypes=(FP32, BF16)),
    "restored": Case((1, 4, 2), (1, 2), dtypes=(BF16, FP16), restorable=True),
    "general": Case((1, 2, 4), (1, 4)),
    "general-restored": Case((2, 1, 4), (1, 4), restorable=True),
}


@pytest.fixture(scope="module")
def others(observe) -> dict[str, list[Seen]]:
    return dict(zip(OTHERS, observe(list(OTHERS.values())), strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_lost(others, name):
    """Whatever the family, the dtypes and the grouping are; training copies go only where they can come back."""
    seen, case = others[name], OTHERS[name]
    correct(seen)
    kept = {"narrower": 1.0, "general": None, "shifted": None}.get(name, 0.0)
    for rank in seen:
        assert rank.restored == (2 if case.restorable and name != "shifted" else 0)
        if kept is not None:
            assert rank.held == rank.generation_bytes + kept * rank.training_bytes
        assert rank.held_training == rank.training_bytes


def test_equal_boxes_share_their_memory(others):
    """Nothing moves between equal layouts but what Megatron interleaves; the embedding copy of a tied model stays."""
    for rank in others["equal"]:
        assert rank.report.received_bytes == 0
        assert rank.report.sent_bytes == 0
        assert rank.report.peak_bytes <= rank.training_bytes + rank.layer_bytes


def test_what_generation_does_not_hold_stays_in_training(others):
    """vLLM pads 70 tokens to 128 and Megatron does not: rows 35 to 63 are trained on one rank and used on the other."""
    size = TIED.hidden * BF16.itemsize
    for i, rank in enumerate(others["shifted"]):
        assert rank.report.received_bytes == (0 if i % 2 else 29 * size)
        assert rank.held == rank.generation_bytes + (35 * size if i % 2 else 0)


def own_buckets(world: World, name: str) -> list[Any]:
    """Stages of unequal size, and buckets as the engine chooses them."""
    case = Case((3, 1, 1), (3, 1), spec=replace(SPEC, vocab=48_000))
    engine, train, generate = build(world, case, world.context(name, case.grid).groups, bucket_bytes=None)
    engine.to_generation()
    wrong = train.canon.wrong(generate.layout(), world.rank, generate.storage())
    engine.to_training()
    return [wrong, train.canon.wrong(train.layout(), world.rank, train.storage())]


def test_ranks_of_unequal_shards_agree_on_buckets(ranks):
    assert ranks.run(3, own_buckets, ranks.name()) == [[[], []]] * 3


def offloading(world: World, name: str) -> list[Any]:
    case = Case((1, 2, 1), (1, 1))
    groups = world.context(name, case.grid).groups
    engine, train, generate = build(world, case, groups, offload=("optimizer", "gradients", "generation"))
    out: list[Any] = []

    def look() -> None:
        wrong = train.canon.wrong(generate.layout(), world.rank, generate.storage())
        out.append((engine.report.received_bytes > 0, wrong, sorted(train.away), generate.asleep))

    engine.to_generation()
    generated = resident_bytes(generate.storage())
    look()
    engine.to_generation()
    engine.to_training()
    out.append((sorted(train.away), generate.asleep, resident_bytes(generate.storage()) < 0.05 * generated))
    engine.to_generation()  # nothing was trained: the weights come from the host
    look()
    engine.to_training()
    train.train()
    engine.trained()
    engine.to_generation()
    look()
    engine.to_training()
    out.append(train.canon.wrong(train.layout(), world.rank, train.storage()))
    return out


def test_offloading(ranks):
    for out in ranks.run(2, offloading, ranks.name()):
        away = ["gradients", "optimizer"]
        assert out[0] == (True, [], away, False)
        assert out[1] == ([], True, True)
        assert out[2] == (False, [], away, False)
        assert out[3] == (True, [], away, False)
        assert out[4] == []


# Asynchronous weight transformation


def overlapping(world: World, name: str) -> list[Any]:
    """Steps whose parts move while the next ones are stepped; the generation weights bit by bit afterwards."""
    case = Case((2, 2, 1), (1, 1), spec=TIED)
    engine, train, generate = build(world, case, world.context(name, case.grid).groups, overlap=True)
    out = []
    for _ in range(2):
        result = engine.step()
        engine.to_generation()
        wrong = train.canon.wrong(generate.layout(), world.rank, generate.storage())
        report = engine.report
        out.append((result, wrong, engine.stale, report.received_bytes, report.hidden_seconds <= report.moved_seconds))
        engine.to_training()
        out.append(train.canon.wrong(train.layout(), world.rank, train.storage()))
    return out


def test_a_step_in_parts_is_bitwise_a_step_and_a_move(ranks, observe):
    moved = [rank.report.received_bytes for rank in observe([Case((2, 2, 1), (1, 1), spec=TIED)])[0]]
    for rank, out in enumerate(ranks.run(4, overlapping, ranks.name())):
        for version, (step, back) in enumerate(zip(out[::2], out[1::2], strict=True), 1):
            assert step == ({"grad_norm": float(version)}, [], False, moved[rank], True)
            assert back == []


def nodes_of(world: World, name: str) -> Any:
    """Elements that this rank has from another node."""
    case = Case((1, 4, 1), (1, 1))
    engine, _, _ = build(world, case, world.context(name, case.grid).groups, nodes=(0, 0, 1, 1))
    with pytest.raises(LayoutError, match="2 ranks, the layouts of 4"):
        build(world, case, world.context(f"{name}-short", case.grid).groups, nodes=(0, 1))
    moves = engine._move.plan.receives(world.rank)
    return sum(move.box.numel for move in moves if move.source // 2 != world.rank // 2)


def test_what_two_ranks_of_a_node_need_enters_it_once(ranks):
    """Every rank lacks three quarters of what is cut, half of it on the other node, which both ranks need."""
    cut = sum(math.prod(shape) for name, shape in SPEC.tensors().items() if "norm" not in name)
    entered = ranks.run(4, nodes_of, ranks.name())
    assert entered[0] + entered[1] == entered[2] + entered[3] == cut // 2


def test_settings_are_checked():
    layouts = Case((1, 1, 1), (1, 1)).layouts()
    holders = PlainTrainer(SPEC, layouts[0], RankGrid(), 0, BF16), PlainGenerator(layouts[1], 0, BF16)
    with pytest.raises(ConfigError, match=r"offload='optimiser' is unknown.*optimizer"):
        HybridEngine(*holders, None, 0, offload=("optimiser",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give several"):
        HybridEngine(*holders, None, 0, offload="optimizer")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without overlap=True"):
        HybridEngine(*holders, None, 0).step()
