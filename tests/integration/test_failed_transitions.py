"""Transitions that fail half-way: nothing is lost, no memory of generation is left, and they can be made again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ConfigError, HybridFlowError, LayoutError
from hybridflow.topology import RankGrid
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer, resident_bytes
from tests.contracts.rank_processes import DEVICE, RankProcesses, World
from tests.integration.transition_cases import BF16, BUCKET, FP32, TIED, Case, Scarce, build, plain

SHORT = 2.0 if DEVICE.type == "cpu" else 8.0  # seconds of a group whose peer does not come; emulated devices are slow


@pytest.fixture(scope="module")
def ranks(rank_processes) -> RankProcesses:
    return rank_processes(2)


def failing_step(world: World, name: str) -> list[Any]:
    """Rank 1's optimizer fails at part 2, so part 2 never arrives; then both go on with a transition."""
    case = Case((1, 2, 1), (1, 1), spec=TIED)
    groups = world.context(name, case.grid).groups
    short = groups.new("overlap", range(2), timeout=SHORT)
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


@pytest.mark.parametrize("fails_at", [1, 7, 20])
def test_generating_again_after_running_out_of_memory_on_the_way_back(fails_at):
    """What was left of generation is not taken for all of it."""
    engine, train, generate = plain()
    engine.to_generation()
    run_out(train, fails_at)
    with pytest.raises(MemoryError):
        engine.to_training()
    assert (engine.phase, engine.stale) == ("training", True)
    with pytest.raises(ConfigError, match=r"failed half-way: call to_training\(\)"):
        engine.trained()
    engine.to_generation()
    assert (engine.phase, engine.stale, generate.asleep) == ("generation", False, False)
    assert train.canon.wrong(generate.layout(), 0, generate.storage()) == []
    engine.to_training()
    assert train.canon.wrong(train.layout(), 0, train.storage()) == []


@pytest.mark.parametrize("fails_at", [1, 12])
def test_nothing_of_generation_is_left_where_training_weights_stay(fails_at):
    engine, train, generate = plain(dtype=FP32)
    run_out(generate, fails_at)
    with pytest.raises(MemoryError):
        engine.to_generation()
    engine.to_training()
    assert resident_bytes(generate.storage()) == 0
    assert engine.resident_bytes == resident_bytes(train.storage())
    engine.trained()
    engine.to_generation()
    assert train.canon.wrong(generate.layout(), 0, generate.storage()) == []


@pytest.mark.parametrize("on", ["step", "acquire"])
def test_nothing_of_generation_is_left_after_a_step_that_failed(on):
    engine, train, generate = plain(overlap=True)
    if on == "step":
        train.fails_in = 1
    else:
        run_out(generate, 1)
    with pytest.raises((ArithmeticError, MemoryError)):
        engine.step()
    train.fails_in = None
    with pytest.raises(ConfigError, match="failed half-way"):
        engine.step()
    engine.to_training()
    assert resident_bytes(generate.storage()) == 0
    assert engine.stale
    engine.step()
    engine.to_generation()
    assert train.canon.wrong(generate.layout(), 0, generate.storage()) == []


@pytest.mark.parametrize("overlap", [True, False])
def test_padding_is_zero_whichever_way_weights_came(overlap):
    """vLLM has 128 rows for 70 tokens; memory that comes is not what it was."""

    class Dirty(Residency):
        def acquire(self, names=None):
            fresh = super().acquire(names)
            for name in fresh:
                storage[name].fill_(float("nan"))
            return fresh

    case = Case((1, 1, 1), (1, 1), spec=TIED)
    layouts = case.layouts()
    train, generate = PlainTrainer(TIED, layouts[0], case.grid, 0, BF16), PlainGenerator(layouts[1], 0, BF16, False)
    name = next(region.storage for region in layouts[1].regions(0) if "embed" in region.storage)
    storage = generate.storage()
    storage[name] = torch.full((128, TIED.hidden), float("nan"), dtype=BF16)
    generate.memory_ = Dirty(storage, torch.device("cpu"))
    engine = HybridEngine(train, generate, None, 0, overlap=overlap, bucket_bytes=BUCKET)
    if overlap:
        engine.step()
    engine.to_generation()
    assert train.canon.wrong(layouts[1], 0, storage) == []
    assert not storage[name][TIED.vocab :].any()
    assert not storage[name].isnan().any()


def one_fails(world: World, name: str) -> list[Any]:
    """Rank 1 cannot park its generation weights: the ranks disagree on whether they are stale."""
    case = Case((1, 2, 1), (1, 1))
    engine, train, generate = build(world, case, world.context(name, case.grid).groups, offload=("generation",))
    engine.to_generation()
    if world.rank == 1:
        train.memory_.acquire, kept = _raise_memory_error, train.memory_.acquire  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            engine.to_training()
        train.memory_.acquire = kept  # type: ignore[method-assign]
    engine.to_training()
    out: list[Any] = [engine.stale]
    engine.to_generation()
    return [*out, train.canon.wrong(generate.layout(), world.rank, generate.storage())]


def _raise_memory_error(names: Any = None) -> set[str]:
    raise MemoryError("out of memory")


def test_weights_move_on_all_ranks_when_one_has_lost_them(ranks):
    assert ranks.run(2, one_fails, ranks.name()) == [[False, []], [True, []]]


def absent(world: World, name: str, offload: tuple[Any, ...]) -> list[Any]:
    """Rank 1 does not come to the transition."""
    case = Case((1, 2, 1), (1, 1))
    context = world.context(name, case.grid)
    layouts = case.layouts()
    train = PlainTrainer(case.spec, layouts[0], case.grid, world.rank, BF16)
    generate = PlainGenerator(layouts[1], world.rank, BF16)
    short = context.groups.new("short", range(2), timeout=SHORT)
    engine = HybridEngine(train, generate, short, world.rank, offload=offload)
    out: list[Any] = []
    if world.rank == 0:
        try:
            engine.to_generation()
        except HybridFlowError as error:
            out.append(f"{type(error).__name__}: {error}")
    out += [engine.stale, engine.phase]
    engine.to_training()
    out.append(train.canon.wrong(train.layout(), world.rank, train.storage()))
    return out


@pytest.mark.parametrize(
    ("offload", "says"),
    [((), "ranks [1] did not take part in moving weights with rank 0"), (("generation",), "and one did not come")],
)
def test_a_rank_that_does_not_come(ranks, offload, says):
    first, second = ranks.run(2, absent, ranks.name(), offload)
    assert first[0].startswith("WaitTimeoutError: ")
    assert says in first[0]
    assert first[1:] == second == [True, "training", []]


def test_training_while_generating_is_refused():
    engine, _, _ = plain()
    engine.to_generation()
    with pytest.raises(ConfigError, match=r"call to_training\(\) before"):
        engine.trained()


def test_other_models_are_refused_before_anything_is_shared_or_moved():
    untied, fewer = replace(TIED, tied=False), replace(TIED, layers=2)
    for trained, generated, says in ((untied, TIED, "lm_head.weight"), (TIED, fewer, "model.layers.2.")):
        grid = RankGrid()
        train = PlainTrainer(trained, megatron_layout(trained, grid), grid, 0, BF16)
        generate = PlainGenerator(vllm_layout(generated, grid.generation()), 0, BF16)
        with pytest.raises(LayoutError, match=rf"not of the same model: .*{says}.* is in the source only"):
            HybridEngine(train, generate, None, 0)
        assert generate.shared == set()


def test_tensors_that_were_replaced_are_noticed():
    for which in ("training", "generation"):
        engine, *holders = plain()
        storage = holders[which == "generation"].storage()
        name = next(iter(storage))
        storage[name] = storage[name].new_zeros(storage[name].shape)
        with pytest.raises(LayoutError, match=rf"1 {which} tensors were replaced .*{name}.* Build the HybridEngine"):
            engine.to_generation()
        assert engine.phase == "training"
