"""HybridEngine between Megatron and vLLM in the same processes: cycles, memory, steps whose weights already travel.

Each scenario runs once in a set of gloo processes and returns plain values; the tests below look at them.
Acceptance: losses do not notice that generation happened, and the processes do not grow.
"""

from __future__ import annotations

import gc
import resource
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.algorithms.registry import policy_loss
from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.engine3d.hybrid_engine import HybridEngine, TransitionReport
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.engines.process_groups import RankContext
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests import tiny_models
from tests.contracts.plain_holders import resident_bytes, tensors
from tests.contracts.rank_processes import World

WARM_UP, CYCLES = 3, 20
VOCABULARY = 64  # neither engine pads it
FLAT_ENDS = 5 * 128 * 4  # bytes: Megatron's flat buffers, here five, end at multiples of 128 elements
GREEDY = Sampling(max_tokens=4, greedy=True, ignore_eos=True)
PROMPTS = [[5, 9, 33, 40], [12, 7]]


@dataclass(frozen=True)
class Scenario:
    """Training sizes and dtype, generation sizes, and how many cycles; the rest are settings of HybridEngine."""

    sizes: tuple[int, int, int]
    generation: tuple[int, int]
    dtype: Any = "float32"
    cycles: int = 3
    overlap: bool = False
    offload: tuple[Any, ...] = ()


SCENARIOS = {
    "many": Scenario((1, 2, 1), (1, 1), cycles=WARM_UP + CYCLES),
    "t4": Scenario((1, 4, 1), (1, 2), dtype="bfloat16", offload=("optimizer", "gradients")),
    "p2t2": Scenario((2, 2, 1), (2, 1), overlap=True),
    "d2": Scenario((1, 2, 2), (1, 1), dtype="bfloat16", overlap=True),
    "equal": Scenario((1, 4, 1), (1, 4)),
}


@dataclass
class Seen:
    """What one rank saw."""

    losses: list[dict[str, float]] = field(default_factory=list)
    alone: list[dict[str, float]] = field(default_factory=list)  # of the run without generation
    different: list[str] = field(default_factory=list)  # generation tensors unequal to a step and a move
    drawn: list[list[int]] = field(default_factory=list)
    report: TransitionReport | None = None
    pages: list[int] = field(default_factory=list)  # resident memory of the process after each cycle
    held: tuple[int, int] = (0, 0)  # bytes of parameters in memory while generating, while training
    generation_bytes: int = 0
    training_bytes: int = 0
    cache: tuple[int, int] = (0, 0)  # bytes of the KV cache while generating, while training
    shared: int = 0


def train_once(engine: Any, step: Callable[[], dict[str, float]], cycle: int, rank: int) -> dict[str, float]:
    """One update. The rows of the warm-up come again: for every new shape torch keeps a kernel for good."""
    rows = tiny_models.make_rows(4, seed=cycle % WARM_UP)
    share = rows[2 * engine.grid.coords(rank).d :][:2] if engine.grid.d > 1 else rows
    loss = policy_loss("ppo")
    metrics = engine.forward_backward(share, loss, loss.outputs)
    return metrics | step()


def trainer(context: RankContext, scenario: Scenario, model: Path) -> Any:
    from hybridflow.engines.train_backends import build_engine

    p, t, _ = scenario.sizes
    spec = ModelSpec.from_checkpoint(model)
    strategy = Megatron(tp=t, pp=p, dtype=scenario.dtype)
    return build_engine(context, strategy, spec, model, Adam(lr=1e-2))


def observe(world: World, scenario: Scenario, model: Path, name: str) -> Seen:
    from hybridflow.engines.vllm.engine import VLLMEngine

    seen, grid = Seen(), RankGrid(*scenario.sizes)
    p_g, t_g = scenario.generation
    alone = trainer(world.context(f"{name}-alone", grid), scenario, model)
    context = world.context(name, grid)
    train, group = trainer(context, scenario, model), context.groups.everyone()
    strategy = VLLM(pp=p_g, tp=t_g, dtype=scenario.dtype, kv_cache_gb=0.02, max_sequences=4)
    generate = VLLMEngine(context, strategy, grid.generation(p_g, t_g), alone.spec, model)
    aside = context.groups.new("overlap", range(grid.size)) if scenario.overlap else None
    hybrid = HybridEngine(
        train,
        generate,
        group,
        world.rank,
        offload=scenario.offload,
        overlap=scenario.overlap,
        overlap_group=aside,
        bucket_bytes=1 << 16,
    )
    step = hybrid.step if scenario.overlap else train.step
    weights = plan(alone.layout(), generate.layout())
    for cycle in range(scenario.cycles):
        seen.alone.append(train_once(alone, alone.step, cycle, world.rank))
        hybrid.trained()
        seen.losses.append(train_once(train, step, cycle, world.rank))
        hybrid.to_generation()
        seen.drawn = [row[0].token_ids for row in generate.generate(PROMPTS, GREEDY)]
        if cycle < WARM_UP:
            expected = tensors(generate.layout(), world.rank, next(iter(generate.storage().values())).dtype)
            execute(weights, alone.storage(), expected, group, world.rank)
            seen.different += differences(generate, expected, world.rank)
        seen.held = (resident_bytes(train.storage(), generate.storage()), 0)
        cache = generate.cache_bytes
        hybrid.to_training()
        seen.held = (seen.held[0], resident_bytes(train.storage(), generate.storage()))
        seen.cache = (cache, generate.cache_bytes)
        gc.collect()
        seen.pages.append(resident_pages())
    seen.report = hybrid.report
    sizes = [{n: t.numel() * t.itemsize for n, t in side.storage().items()} for side in (train, generate)]
    seen.training_bytes, seen.generation_bytes = (sum(side.values()) for side in sizes)
    storages = [{t.untyped_storage()._cdata for t in side.storage().values()} for side in (train, generate)]
    seen.shared = len(storages[0] & storages[1])
    generate.close()
    return seen


def differences(generate: Any, expected: dict[str, torch.Tensor], rank: int) -> list[str]:
    storage = generate.storage()
    return [
        str(region.box)
        for regions in generate.layout().storages(rank).values()
        for region in regions
        if not torch.equal(region.view(storage[region.storage]), region.view(expected[region.storage]))
    ]


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def closed_after_compilation(world: World, model: Path) -> list[bool]:
    """Which of an engine's model, first weight and KV cache are still there after `close`."""
    from vllm.engine.arg_utils import EngineArgs

    from hybridflow.engines.vllm import core
    from hybridflow.engines.vllm.engine import VLLMEngine

    create = EngineArgs.create_engine_config

    def compiling(arguments: Any, *more: Any) -> Any:
        arguments.enable_sleep_mode, arguments.compilation_config.backend = False, "eager"
        return create(arguments, *more)

    grid = RankGrid(p_g=1, t_g=1)
    context = world.context("compiled", grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "runs_eagerly", lambda *_: False)
        patch.setattr(core, "_prepare_allocator", lambda: None)
        patch.setattr(EngineArgs, "create_engine_config", compiling)
        strategy = VLLM(kv_cache_gb=0.05, sampling=GREEDY)
        engine = VLLMEngine(context, strategy, grid.generation(), ModelSpec.from_checkpoint(model), model)
    runner = core.model_runner(engine._core)
    assert runner.vllm_config.compilation_config.mode > 0
    engine.generate(PROMPTS, GREEDY)
    kept = runner.model, next(runner.model.parameters()), runner.kv_caches[0]
    references = [weakref.ref(one) for one in kept]
    del kept, runner
    engine.close()
    del engine
    gc.collect()
    return [reference() is not None for reference in references]


@pytest.fixture(scope="module")
def seen(rank_processes, tmp_path_factory) -> Callable[[str], list[Seen]]:
    """What each rank of a scenario saw, by its name; run when it is first asked for."""
    model = tiny_models.make_policy(tmp_path_factory.mktemp("policy"), tokenizer=False, vocab_size=VOCABULARY)
    known: dict[str, list[Seen]] = {}
    processes = rank_processes(4)

    def seen(name: str) -> list[Seen]:
        if name not in known:
            scenario = SCENARIOS[name]
            size = RankGrid(*scenario.sizes).size
            known[name] = processes.run(size, observe, scenario, model, processes.name())
        return known[name]

    return seen


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", SCENARIOS)
def test_training_does_not_notice_generation(seen, name):
    """Losses, gradient norms and learning rates, bit by bit, against a run that never generates."""
    for rank in seen(name):
        assert len(rank.losses) == SCENARIOS[name].cycles
        assert rank.losses == rank.alone
    assert len({str(metrics) for metrics in seen(name)[-1].losses}) == SCENARIOS[name].cycles


@pytest.mark.parametrize("name", SCENARIOS)
def test_generation_has_the_weights_of_a_step_and_a_move(seen, name):
    """Bit by bit, also where parts of the weights left before the step was complete."""
    for rank in seen(name):
        assert rank.different == []
        assert [len(row) for row in rank.drawn] == [GREEDY.max_tokens] * 2


@pytest.mark.parametrize("name", SCENARIOS)
def test_weights_are_in_memory_once(seen, name):
    """Generation holds its shard and nothing of training but what is shared; training holds its own; so does the
    KV cache come and go."""
    for rank in seen(name):
        report = rank.report
        assert report.resident_bytes == rank.held[0] <= rank.generation_bytes + FLAT_ENDS
        assert rank.cache[0] > 0
        assert rank.cache[1] == 0
        assert rank.held[1] <= rank.training_bytes + FLAT_ENDS
        if not SCENARIOS[name].overlap and name != "equal":
            assert report.peak_bytes < rank.generation_bytes + rank.training_bytes


def test_bytes_on_the_wire(seen):
    """Table 2 at (1,4,1) -> (1,2): each device receives a quarter of the sharded parameters; norms are everywhere."""
    sizes = tiny_models.SIZES
    q, kv = (sizes[f"num_{name}_heads"] * sizes["head_dim"] for name in ("attention", "key_value"))
    layer = (2 * q + 2 * kv + 3 * sizes["intermediate_size"]) * sizes["hidden_size"]
    elements = sizes["num_hidden_layers"] * layer + 2 * VOCABULARY * sizes["hidden_size"]
    for rank in seen("t4"):
        assert rank.report.received_bytes == rank.report.sent_bytes == elements * torch.bfloat16.itemsize // 4
        assert not any("norm" in name for name in rank.report.received)


def test_equal_layouts_share_memory(seen):
    """With one kv-head per rank Megatron's layers are vLLM's: all memory is shared, and nothing moves at all."""
    for rank in seen("equal"):
        assert rank.shared == 7  # embedding, two layers and the fused query, key and value of each, norm, output
        assert rank.report.received_bytes == rank.report.sent_bytes == 0
        assert rank.report.peak_bytes == rank.held[0] == rank.held[1]


@pytest.mark.parametrize("name", ["p2t2", "d2"])
def test_moves_are_hidden_behind_the_optimizer(seen, name):
    for rank in seen(name):
        assert 0 <= rank.report.hidden_seconds <= rank.report.moved_seconds
        assert rank.report.moved_seconds > 0
        assert rank.report.received_bytes > 0


def test_processes_do_not_grow(seen):
    """After three cycles, twenty more: train, generate, train."""
    for rank in seen("many"):
        assert len(rank.pages) == WARM_UP + CYCLES
        assert rank.pages[-1] <= 1.02 * rank.pages[WARM_UP - 1], rank.pages


@pytest.mark.slow
def test_a_closed_engine_leaves_nothing_where_vllm_compiled(rank_processes, tmp_path):
    """vLLM compiles where it captures graphs, and torch's compiler knows what it compiled."""
    model, processes = tiny_models.make_policy(tmp_path, tokenizer=False, vocab_size=VOCABULARY), rank_processes(1)
    assert processes.run(1, closed_after_compilation, model) == [[False, False, False]]
