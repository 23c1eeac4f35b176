"""Optimizer state as boxes of canonical tensors: it moves between any (p, t, d), and training goes on.

Also steps in parts, and memory that comes and goes. Four gloo processes serve the whole file (see conftest.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import SGD, Adam, Megatron
from hybridflow.engines.megatron.layout import megatron_layout, stages, state_layout, units
from hybridflow.engines.units import step_groups
from hybridflow.models.hf_spec import read_spec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts import state_tasks as tasks
from tests.contracts.example_models import make_model, spec_of
from tests.contracts.test_train_engine import Sizes, count, megatron, whole

ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
pairs = pytest.mark.parametrize(
    ("optimizer", "dtype"), [(ADAM, "float32"), (MOMENTUM, "bfloat16")], ids=["adam-float32", "sgd-bfloat16"]
)
MODEL = "qwen3-tied"  # two copies of the embeddings with p > 1, padded vocabulary with t > 1


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(MODEL, tmp_path_factory.mktemp("model"))


@st.composite
def split_models(draw: st.DrawFn) -> tuple[ModelSpec, RankGrid]:
    t, p, d = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    spec = ModelSpec(
        family="qwen3",
        hidden=draw(st.integers(1, 70)),
        intermediate=6 * draw(st.integers(1, 3)),
        layers=p + draw(st.integers(0, 2)),
        heads=6,
        kv_heads=draw(st.sampled_from([1, 6])),
        head_dim=6,
        vocab=draw(st.integers(1, 40)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        head=draw(st.sampled_from(["lm", "value"])),
    )
    return spec, RankGrid(p, t, d)


@settings(max_examples=60, deadline=None)
@given(split_models())
def test_data_parallel_ranks_share_the_state_of_what_they_hold_together(case):
    """Every element of a rank's parameters has state on exactly one of its data parallel ranks, stored once."""
    spec, grid = case
    parameters, state = megatron_layout(spec, grid), state_layout(Megatron(), spec, grid)
    for first in grid.ranks(d=0):
        held = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in spec.tensors().items()}
        for region in parameters.regions(first):
            held[region.box.tensor][_index(region)] -= 1
        for rank in grid.group(first, "d"):
            stored: dict[str, Any] = {}
            for region in state.regions(rank):
                held[region.box.tensor][_index(region)] += 1
                flat = stored.setdefault(region.storage, torch.zeros(40 * 6 * 70 * 40, dtype=torch.int8))
                region.view(flat).add_(1)
            assert all(int(flat.max()) == 1 for flat in stored.values()), "two regions overlap in storage"
        assert all(not tensor.any() for tensor in held.values())


def _index(region: Any) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))


@settings(max_examples=60, deadline=None)
@given(split_models())
def test_parts_of_a_step_cover_the_model_once_and_fit_the_units_of_every_stage(case):
    spec, grid = case
    groups = step_groups(spec.tensors(), stages(spec.layers, grid.p))
    assert sorted(name for group in groups for name in group) == sorted(spec.tensors())
    layout = megatron_layout(spec, grid)
    for rank in range(grid.size):
        part_of = {n: unit.part for unit in units(spec, grid, rank) for n in unit.parameters}
        assert all(region.box.tensor in groups[part_of[region.storage]] for region in layout.regions(rank))


CIRCLE: list[Sizes] = [(1, 2, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (1, 2, 2)]


@pairs
def test_training_goes_on_in_another_layout(processes, path, optimizer, dtype):
    """State is bit-equal after each move; losses and gradient norms are those of the run that never moved."""
    strategies = [megatron(sizes, dtype=dtype) for sizes in CIRCLE]
    found = processes.run(4, tasks.moving, processes.name(), strategies, path, optimizer)
    check_moves(found, path, optimizer, 1e-5 if dtype == "float32" else 0.05, len(CIRCLE))
    shapes = spec_of(path).tensors()
    for i in range(len(CIRCLE) - 1):
        main = whole([part["after"][i]["main"] for part in found], shapes)
        parameters = whole([part["parameters"][i] for part in found], shapes)
        assert all(parameters[name].equal(own.to(getattr(torch, dtype)).float()) for name, own in main.items())


def check_moves(found: list[Any], path: Path, optimizer: Any, tolerance: float, compared: int) -> None:
    """Of `tasks.moving`: state is bit-equal after each move, and the first updates measured what those of the run that
    never moved did."""
    shapes = read_spec(path, "lm").tensors()
    kinds = ("main", "exp_avg", "exp_avg_sq") if optimizer == ADAM else ("main", "momentum_buffer")
    for i in range(len(found[0]["after"])):
        for kind in kinds:
            before, after = (whole([part[when][i][kind] for part in found], shapes) for when in ("before", "after"))
            assert all(after[name].equal(tensor) for name, tensor in before.items()), (kind, i)
            assert any(tensor.any() for tensor in before.values())
    for seed in range(compared):
        straight = {key: value for part in found for key, value in part["straight"][seed].items()}
        moved = {key: value for part in found for key, value in part["moved"][seed].items()}
        assert moved.keys() == straight.keys()
        for key in ("grad_norm", "lr", "actor/loss"):
            assert moved[key] == pytest.approx(straight[key], rel=tolerance, abs=tolerance * 0.1), (key, seed)


@pytest.mark.parametrize(
    ("sizes", "dtype", "optimizer"),
    [((1, 1, 2), "float32", MOMENTUM), ((2, 1, 2), "bfloat16", ADAM), ((3, 1, 1), "float32", ADAM)],
    ids=["(1, 1, 2)-float32-sgd", "(2, 1, 2)-bfloat16-adam", "(3, 1, 1)-float32-adam"],
)
def test_a_step_in_parts_is_the_step_in_one_go(processes, path, sizes, dtype, optimizer):
    args = (processes.name(), megatron(sizes, dtype=dtype), count(sizes), path, optimizer)
    parameters = processes.run(count(sizes), tasks.steps_in_parts, *args)
    assert not any(t.isnan().any() for t in whole(parameters, spec_of(path).tensors()).values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_skipped_step_yields_every_part_and_changes_nothing(processes, path, dtype):
    args = (processes.name(), megatron((2, 1, 2), dtype=dtype), 4, path, ADAM)
    assert all(processes.run(4, tasks.skipped_in_parts, *args))


@pairs
def test_memory_of_layers_is_released_and_comes_back(processes, path, dtype, optimizer):
    args = (processes.name(), megatron((1, 2, 2), dtype=dtype), 4, path, optimizer)
    processes.run(4, tasks.released_and_restored, *args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rank_that_owns_nothing_restores_with_its_peers(processes, dtype):
    """Small units end before the share of the last of four data parallel ranks starts: it has padding alone."""
    spec = ModelSpec(family="llama", hidden=1, intermediate=2, layers=2, heads=1, kv_heads=1, head_dim=2, vocab=61)
    args = (processes.name(), megatron((1, 1, 4), dtype=dtype), 4, None, ADAM, spec)
    *others, last = processes.run(4, tasks.released_and_restored, *args)
    assert all(others)
    assert last == 0


@pairs
def test_only_what_changed_is_copied_to_host_memory(processes, path, dtype, optimizer):
    args = (processes.name(), megatron((2, 2, 1), dtype=dtype), 4, path, optimizer)
    processes.run(4, tasks.copied, *args)


@pairs
def test_what_is_offloaded_comes_back_as_it_was(processes, path, dtype, optimizer):
    args = (processes.name(), megatron((1, 1, 2), dtype=dtype), 2, path, optimizer)
    processes.run(2, tasks.offloaded, *args)


def test_an_engine_without_weights_is_filled_from_outside(processes, path):
    processes.run(4, tasks.filled_from_outside, processes.name(), megatron((1, 4, 1)), 4, path, ADAM)
