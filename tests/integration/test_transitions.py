"""Transitions between real layouts on eight gloo processes: table 2 measured, nothing lost, nothing twice in memory.

The holders are plain tensors in the layouts of Megatron and vLLM; `test_hybrid_engine.py` has the engines themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from hybridflow.engine3d.designs import TransitionDesign, grouping_rule
from hybridflow.engine3d.hybrid_engine import HybridEngine, TransitionReport
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.residency import Residency
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer, resident_bytes
from tests.contracts.rank_processes import RankProcesses, World

SPEC = ModelSpec(family="llama", hidden=32, intermediate=64, layers=8, heads=8, kv_heads=8, head_dim=8, vocab=128)
TIED = ModelSpec(
    family="qwen3", hidden=32, intermediate=48, layers=4, heads=8, kv_heads=4, head_dim=8, vocab=70, tied=True,
    qk_norm=True,
)  # fmt: skip
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BUCKET = 1 << 14  # bytes
SIZES = [(p, t, 8 // (p * t)) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) if p * t <= 8]


def divisors(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@dataclass(frozen=True)
class Case:
    """A transition from training sizes (p, t, d) to generation sizes (p_g, t_g)."""

    sizes: tuple[int, int, int]
    generation: tuple[int, int]
    design: TransitionDesign = "hybridflow"
    spec: ModelSpec = SPEC
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16)
    restorable: bool = False

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def grid(self) -> RankGrid:
        return RankGrid(*self.sizes)

    def layouts(self) -> tuple[Layout, Layout]:
        p_g, t_g = self.generation
        divide = self.sizes[0] % p_g == 0 and self.sizes[1] % t_g == 0
        rule = grouping_rule(self.design) if divide else "general"
        grid = self.grid
        return megatron_layout(self.spec, grid), vllm_layout(self.spec, grid.generation(p_g, t_g, rule))


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


def build(
    world: World, case: Case, groups: ProcessGroups, **options: Any
) -> tuple[HybridEngine, PlainTrainer, PlainGenerator]:
    train_layout, generate_layout = case.layouts()
    train = PlainTrainer(case.spec, train_layout, case.grid, world.rank, case.dtypes[0], case.restorable)
    generate = PlainGenerator(generate_layout, world.rank, case.dtypes[1])
    group = groups.everyone() if case.ranks > 1 else None
    if options.get("overlap") and "overlap_group" not in options:
        options["overlap_group"] = groups.new("overlap", range(case.ranks))
    options.setdefault("bucket_bytes", BUCKET)
    engine = HybridEngine(train, generate, group, world.rank, transition=case.design, **options)
    return engine, train, generate


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
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(8)
    yield processes
    processes.close()


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


@pytest.mark.parametrize(("p", "t", "d"), SIZES)
def test_table_2_of_the_weaker_designs(observe, p, t, d):
    smaller = (divisors(p)[-2:][0], divisors(t)[-2:][0])
    cases = [Case((p, t, d), smaller, "vanilla"), Case((p, t, d), smaller, "gather_all")]
    for case, seen, shares in zip(cases, observe(cases), (p * t, p * t * d), strict=True):
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


def failing_step(world: World, name: str) -> list[Any]:
    """Rank 1's optimizer fails at part 2, so part 2 never arrives; then both go on with a transition."""
    case = Case((1, 2, 1), (1, 1), spec=TIED)
    groups = world.context(name, case.grid).groups
    short = groups.new("overlap", range(2), timeout=2.0)
    engine, train, generate = build(world, case, groups, overlap=True, overlap_group=short)
    engine.to_generation()
    engine.to_training()
    train.fails_in = 2 if world.rank == 1 else None
    out: list[Any] = []
    try:
        engine.step()
    except (HybridFlowError, ArithmeticError) as error:
        out.append(type(error).__name__)
    out += [engine.stale, engine.phase]
    train.fails_in = None
    train.train()
    engine.to_generation()
    out.append(train.canon.wrong(generate.layout(), world.rank, generate.storage()))
    return out


def test_a_step_that_fails_leaves_generation_stale(ranks):
    first, second = ranks.run(2, failing_step, ranks.name())
    assert first == ["WaitTimeoutError", True, "training", []]
    assert second == ["ArithmeticError", True, "training", []]


# Failures


class Scarce(Residency):
    """Memory that runs out at the `fails_at`-th request."""

    fails_at = -1

    def acquire(self, names=None):
        self.fails_at -= 1
        if self.fails_at == 0:
            raise MemoryError("out of memory")
        return super().acquire(names)


def plain() -> tuple[HybridEngine, PlainTrainer, PlainGenerator]:
    """One rank whose memory of either kind can run out."""
    case = Case((1, 1, 1), (1, 1), spec=TIED)
    layouts = case.layouts()
    train = PlainTrainer(case.spec, layouts[0], case.grid, 0, BF16)
    generate = PlainGenerator(layouts[1], 0, BF16, shares=False)
    train.memory_, generate.memory_ = Scarce(train.storage()), Scarce(generate.storage())
    return HybridEngine(train, generate, None, 0, bucket_bytes=BUCKET), train, generate


def run_out(holder: PlainTrainer | PlainGenerator, fails_at: int) -> None:
    assert isinstance(holder.memory_, Scarce)
    holder.memory_.fails_at = fails_at


@pytest.mark.parametrize("fails_at", [1, 7, 20])
def test_running_out_of_memory_on_the_way_to_generation(fails_at):
    """Half of the training weights are gone by then; they come back, and the transition can be made again."""
    engine, train, generate = plain()
    run_out(generate, fails_at)
    with pytest.raises(MemoryError):
        engine.to_generation()
    assert engine.stale
    assert engine.phase == "training"
    engine.to_training()
    assert train.canon.wrong(train.layout(), 0, train.storage()) == []
    assert resident_bytes(generate.storage()) == 0
    run_out(generate, fails_at)
    with pytest.raises(MemoryError):
        engine.to_generation()
    engine.to_generation()  # brings them back by itself
    assert train.canon.wrong(generate.layout(), 0, generate.storage()) == []
    assert resident_bytes(train.storage()) == 0


@pytest.mark.parametrize("fails_at", [1, 7, 20])
def test_running_out_of_memory_on_the_way_back(fails_at):
    engine, train, generate = plain()
    engine.to_generation()
    run_out(train, fails_at)
    with pytest.raises(MemoryError):
        engine.to_training()
    engine.to_training()
    assert train.canon.wrong(train.layout(), 0, train.storage()) == []
    engine.to_generation()
    assert train.canon.wrong(generate.layout(), 0, generate.storage()) == []


def absent(world: World, name: str) -> list[Any]:
    """Rank 1 does not come to the transition."""
    case = Case((1, 2, 1), (1, 1))
    context = world.context(name, case.grid)
    layouts = case.layouts()
    train = PlainTrainer(case.spec, layouts[0], case.grid, world.rank, BF16)
    generate = PlainGenerator(layouts[1], world.rank, BF16)
    engine = HybridEngine(train, generate, context.groups.new("short", range(2), timeout=2.0), world.rank)
    out: list[Any] = []
    if world.rank == 0:
        try:
            engine.to_generation()
        except HybridFlowError as error:
            out.append(str(error))
    out += [engine.stale, engine.phase]
    engine.to_training()
    out.append(train.canon.wrong(train.layout(), world.rank, train.storage()))
    return out


def test_a_rank_that_does_not_come(ranks):
    first, second = ranks.run(2, absent, ranks.name())
    assert "exchanges weights with ranks [1] and did not get through" in first[0]
    assert first[1:] == second == [True, "training", []]


def test_training_while_generating_is_refused():
    engine, _, _ = plain()
    engine.to_generation()
    with pytest.raises(ConfigError, match=r"call to_training\(\) before"):
        engine.trained()


def test_settings_are_checked():
    layouts = Case((1, 1, 1), (1, 1)).layouts()
    holders = PlainTrainer(SPEC, layouts[0], RankGrid(), 0, BF16), PlainGenerator(layouts[1], 0, BF16)
    with pytest.raises(ConfigError, match=r"transition='hybrid' is unknown.*hybridflow"):
        HybridEngine(*holders, None, 0, transition="hybrid")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"offload='optimiser' is unknown.*optimizer"):
        HybridEngine(*holders, None, 0, offload=("optimiser",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give several"):
        HybridEngine(*holders, None, 0, offload="optimizer")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="overlap=True works with transition='hybridflow'"):
        HybridEngine(*holders, None, 0, transition="vanilla", overlap=True)
    with pytest.raises(ConfigError, match="without overlap=True"):
        HybridEngine(*holders, None, 0).step()
