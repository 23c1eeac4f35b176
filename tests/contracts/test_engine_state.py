"""What every backend keeps between calls: weights and optimizer state that come, go, and are written from outside.

One set of gloo processes serves the whole file (see conftest.py).
"""

from __future__ import annotations

import filecmp
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from hybridflow.models.spec import ModelSpec
from tests.contracts import engine_tasks as tasks
from tests.contracts import state_tasks
from tests.contracts.example_models import spec_of
from tests.contracts.train_contract import (
    SMALL,
    Case,
    assert_poison_changes_nothing,
    count,
    megatron,
    whole,
)

CASES: dict[str, Case] = {
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "fsdp-2-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "tp-4": (FSDP(tp=4, **SMALL), (1, 4, 1)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 4)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 4)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 4)),
    **{f"megatron-{p}-{t}-{d}": (megatron((p, t, d)), (p, t, d)) for p, t, d in ((1, 1, 2), (3, 1, 1), (1, 4, 1))},
    **{f"megatron-{p}-{t}-{d}": (megatron((p, t, d)), (p, t, d)) for p, t, d in ((2, 1, 2), (1, 2, 2), (2, 2, 1))},
}
FEW = ["fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "zero-2", "megatron-2-1-2"]
ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
PAIRS = [("float32", ADAM), ("bfloat16", MOMENTUM)]
DTYPES = [*PAIRS, ("float16", ADAM)]  # what 16 bits add is alike for both optimizers
pairs = pytest.mark.parametrize(("dtype", "optimizer"), PAIRS, ids=["float32-adam", "bfloat16-sgd"])
"""Either optimizer, with main parameters apart and without: what differs is covered once."""
EVERYTHING = ("parameters", "optimizer", "gradients")


def run(processes: Any, task: Any, strategy: Any, size: int, *args: Any) -> list[Any]:
    return processes.run(size, task, processes.name(), strategy, size, *args)


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *[(replace(one, dtype=dtype, **SMALL), opt) for one in (FSDP(), Megatron()) for dtype, opt in DTYPES],
        (FSDP(lora=LoRA(rank=2, targets=("q_proj",)), **SMALL), ADAM),
        (ZeRO(stage=1, **SMALL), ADAM),
        (ZeRO(stage=2, dtype="bfloat16", **SMALL), ADAM),
    ],
    ids=str,
)
def test_resuming_from_a_state_changes_nothing(processes, models, strategy, optimizer):
    assert all(run(processes, tasks.resumed, strategy, 2, models["llama", "lm"], optimizer))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 1, 3), (2, 2, 1)], ids=str)
def test_resuming_adapters_from_a_state_changes_nothing(processes, models, sizes, dtype):
    """Of a rank that owns the state of no adapter, too."""
    strategy = megatron(sizes, dtype=dtype, lora=LoRA(rank=2, targets=("layers.1.self_attn.q_proj",)))
    assert all(run(processes, tasks.resumed, strategy, count(sizes), models["llama", "lm"], ADAM))


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *[(FSDP(tp=2, dtype=dtype, **SMALL), Adam(lr=1e-3)) for dtype in ("float32", "bfloat16", "float16")],
        *[(megatron((2, 1, 2), dtype=dtype), Adam(lr=1e-3)) for dtype in ("float32", "float16")],
        (megatron((2, 1, 2), dtype="bfloat16"), SGD(lr=0.01)),
        *[(ZeRO(stage=stage, dtype="bfloat16", **SMALL), Adam(lr=1e-3)) for stage in (1, 2)],
    ],
    ids=str,
)
def test_updates_start_from_weights_that_were_written_from_outside(processes, models, strategy, optimizer):
    assert all(run(processes, tasks.written_from_outside, strategy, 4, models["llama-tied", "lm"], optimizer))


@pytest.mark.parametrize("name", ["fsdp-2-tp-2", "zero-2", "megatron-1-4-1"])
def test_an_engine_without_weights_is_filled_from_outside(processes, models, name):
    run(processes, state_tasks.filled_from_outside, CASES[name][0], 4, models["qwen3-tied", "lm"], ADAM)


@pytest.mark.thinned(8)
@pairs
@pytest.mark.parametrize("name", [*FEW, "megatron-1-1-2", "megatron-3-1-1"])
def test_a_step_in_parts_is_the_step_in_one_go(processes, models, name, dtype, optimizer):
    (strategy, sizes), path = CASES[name], models["qwen3-tied", "lm"]
    strategy = replace(strategy, dtype=dtype)
    parameters = run(processes, state_tasks.steps_in_parts, strategy, count(sizes), path, optimizer)
    assert not any(t.isnan().any() for t in whole(parameters, spec_of(path).tensors()).values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["fsdp-2-tp-2", "megatron-2-1-2"])
def test_a_skipped_step_yields_every_part_and_changes_nothing(processes, models, name, dtype):
    strategy = replace(CASES[name][0], dtype=dtype)
    assert all(run(processes, state_tasks.skipped_in_parts, strategy, 4, models["llama", "lm"], ADAM))


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("name", "more", "optimizer", "key"),
    [
        ("fsdp-4", {}, MOMENTUM, ("llama", "value")),
        ("megatron-1-2-2", {}, ADAM, ("qwen3-tied", "lm")),
        ("fsdp-2-tp-2", {}, ADAM, ("qwen3-tied", "lm")),
        ("hsdp-2x2", {"lora": LoRA(rank=2)}, ADAM, ("qwen3-tied", "lm")),
        ("megatron-2-2-1", {}, MOMENTUM, ("qwen3-tied", "lm")),
        ("tp-4", {}, MOMENTUM, ("llama", "value")),
        ("zero-1", {}, MOMENTUM, ("qwen3-tied", "lm")),
        ("megatron-2-1-2", {"dtype": "float16"}, ADAM, ("qwen3-tied", "lm")),
        ("zero-2", {"dtype": "float16"}, ADAM, ("llama", "value")),
        ("megatron-2-1-2", {}, ADAM, ("llama", "value")),
        ("zero-3", {}, ADAM, ("llama", "lm")),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_changes_nothing(processes, models, name, more, optimizer, key):
    strategy, sizes = CASES[name]
    assert_poison_changes_nothing(processes, replace(strategy, **more), sizes, models[key], key[1], optimizer)


def test_all_ranks_refuse_to_save_weights_that_are_not_finite_on_any(processes, models, tmp_path):
    found = run(processes, state_tasks.saved_with_nan, CASES["fsdp-4"][0], 4, models["llama", "lm"], tmp_path / "saved")
    assert len(set(found)) == 1
    error, left = found[0]
    assert "has weights that are not finite, in " in error
    assert "lm_head.weight (1)" in error or "model.norm.weight (1)" in error
    assert not left


@pairs
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("task", [state_tasks.released_and_restored, state_tasks.copied])
def test_memory_comes_back_and_only_what_changed_is_copied(processes, models, task, name, dtype, optimizer):
    strategy, sizes = CASES[name]
    run(processes, task, replace(strategy, dtype=dtype), count(sizes), models["qwen3-tied", "lm"], optimizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rank_that_owns_nothing_restores_with_its_peers(processes, dtype):
    """Small units end before the share of the last of four data parallel ranks starts: it has padding alone."""
    spec = ModelSpec(family="llama", hidden=1, intermediate=2, layers=2, heads=1, kv_heads=1, head_dim=2, vocab=61)
    strategy = megatron((1, 1, 4), dtype=dtype)
    *others, last = run(processes, state_tasks.released_and_restored, strategy, 4, None, ADAM, spec)
    assert all(others)
    assert last == 0


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [FSDP(**SMALL), Megatron(tp=2, **SMALL)], ids=str)
def test_only_adapters_and_heads_are_copied_after_an_update(processes, models, strategy, dtype, head):
    strategy = replace(strategy, lora=LoRA(rank=2), dtype=dtype)
    left = run(processes, state_tasks.copied_adapters, strategy, 2, models["llama", head], head)
    assert (sum(left) > 0) == (head == "value")


@pairs
@pytest.mark.parametrize("strategy", [FSDP(**SMALL), Megatron(**SMALL)], ids=str)
def test_what_is_offloaded_comes_back_as_it_was(processes, models, strategy, dtype, optimizer):
    strategy = replace(strategy, dtype=dtype)
    run(processes, state_tasks.offloaded, strategy, 2, models["qwen3-tied", "lm"], optimizer)


@pytest.mark.parametrize(
    ("optimizer", "away"),
    [(ADAM, ()), (MOMENTUM, EVERYTHING), (None, ("parameters",))],
    ids=["adam-here", "sgd-away", "none-away"],
)
@pytest.mark.parametrize(
    "strategy",
    [
        FSDP(tp=2),
        ZeRO(stage=1),
        ZeRO(stage=1, offload=True),
        ZeRO(stage=2, dtype="bfloat16"),
        Megatron(),
        Megatron(dtype="float16"),
    ],
    ids=str,
)
def test_close_gives_all_memory_back(processes, models, strategy, optimizer, away):
    size = 4 if isinstance(strategy, FSDP) else 2
    found = run(processes, tasks.closed, replace(strategy, **SMALL), size, models["llama-tied", "lm"], optimizer, away)
    assert found == [0] * size


def test_an_engine_that_cannot_be_built_leaves_nothing(processes, models, tmp_path):
    spec = spec_of(models["llama", "lm"])
    args = (processes.name(), megatron((1, 1, 1), dtype="float16"), tmp_path / "nowhere", spec, ADAM)
    assert processes.run(1, tasks.left_by_a_failed_build, *args) == [0]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_layers_in_any_order_and_layers_that_a_rank_does_not_use(processes, stage, overlap):
    for same, kept in processes.run(4, tasks.any_order, processes.name(), stage, overlap):
        assert same
        assert not kept, f"{kept} still have gradients of their own"


BACKENDS: dict[str, Any] = {"fsdp": FSDP, "zero-1": ZeRO, "zero-3": ZeRO, "megatron": Megatron}
OPTIONS: dict[str, dict[str, Any]] = {"zero-1": {"stage": 1}, "zero-3": {"stage": 3}, "megatron": {"tp": 2}}
ASKED = (None, "bfloat16", "float16", "float32")


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("files", "computes"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_all_backends_save_by_one_rule(processes, models, tmp_path, files, computes):
    path, kind = tmp_path / "model", getattr(torch, files)
    AutoModelForCausalLM.from_pretrained(models["llama", "lm"], dtype=kind).save_pretrained(path)
    source, saved = weights(path), dict[str, dict[str | None, Path]]()
    for name, backend in BACKENDS.items():
        saved[name] = {dtype: tmp_path / f"{name}-{dtype}" for dtype in ASKED}
        for target in saved[name].values():
            target.mkdir()
        strategy = backend(dtype=computes, **OPTIONS.get(name, {}))
        processes.run(2, state_tasks.saved, processes.name(), strategy, 2, path, saved[name])
    for dtype in ASKED:
        for name in BACKENDS:
            check(saved[name][dtype], saved["fsdp"][dtype], source, getattr(torch, dtype or files))
            held = weights(saved[name]["float32"] / "after")
            assert all(t.equal(held[n].to(t.dtype)) for n, t in weights(saved[name][dtype] / "after").items())
        assert any(not t.equal(t.bfloat16().float()) for t in held.values()), "more bits than bfloat16 has"


def check(target: Path, fsdp: Path, source: dict[str, Tensor], dtype: torch.dtype) -> None:
    before, after = weights(target / "before"), weights(target / "after")
    assert before.keys() == source.keys()
    assert all(tensor.equal(source[name].to(dtype)) for name, tensor in before.items())
    names = [file.name for file in (target / "before").iterdir()]
    assert filecmp.cmpfiles(target / "before", fsdp / "before", names, shallow=False) == (names, [], [])
    assert json.loads((target / "after" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    apart = moved = 0.0
    for name, tensor in weights(fsdp / "after").items():
        apart += float((after[name].float() - tensor.float()).square().sum())
        moved += float((source[name].float() - tensor.float()).square().sum())
    assert apart < 0.03 * moved  # gradients are rounded otherwise
    model = AutoModelForCausalLM.from_pretrained(target / "after")
    assert model.dtype == dtype
    assert all(tensor.equal(after[name]) for name, tensor in model.state_dict().items() if name in after)
