"""The contract of a TrainEngine, held by FSDP2, HSDP, FSDP with tensor parallelism, and ZeRO: see train_contract.py.

One set of four gloo processes serves the whole file (see conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks
from tests.contracts import state_tasks
from tests.contracts.example_models import make_batch, relative, spec_of
from tests.contracts.train_contract import (
    OPTIMIZERS,
    UPDATED,
    Sizes,
    assert_outputs,
    assert_poison_changes_nothing,
    assert_updates,
    count,
    joined,
    values_of,
    whole,
)

Case = tuple[FSDP | ZeRO, Sizes]
SMALL: dict[str, Any] = {"micro_tokens": 48}  # several micro-batches
CASES: dict[str, Case] = {
    "fsdp-1": (FSDP(**SMALL), (1, 1, 1)),
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "fsdp-4-padded": (FSDP(**SMALL, packed=False), (1, 1, 4)),
    "fsdp-2-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "tp-2-twice": (FSDP(tp=2, replicate=2, **SMALL), (1, 2, 2)),
    "tp-4": (FSDP(tp=4, **SMALL), (1, 4, 1)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 4)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 4)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 4)),
}
WAYS: dict[str, Case] = {  # of one engine to save memory, on top of the cases
    "recompute": (FSDP(recompute=True, **SMALL), (1, 1, 4)),
    "recompute-tp": (FSDP(recompute=True, tp=2, **SMALL), (1, 2, 2)),
    "reduce-often": (FSDP(reduce_often=True, replicate=2, **SMALL), (1, 1, 4)),
    "offload": (FSDP(offload=True, **SMALL), (1, 1, 4)),
    "zero-1-offload": (ZeRO(stage=1, offload=True, **SMALL), (1, 1, 4)),
    "zero-2-offload": (ZeRO(stage=2, offload=True, recompute=True, **SMALL), (1, 1, 4)),
}
FEW = ["fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "zero-2"]
ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
NAMED = ["fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "zero-2", "zero-3"]
"""What is held to plain PyTorch under both optimizers; other cases under Adam, which has more state."""
PAIRS = [("float32", ADAM), ("bfloat16", MOMENTUM)]
pairs = pytest.mark.parametrize(("dtype", "optimizer"), PAIRS, ids=["float32-adam", "bfloat16-sgd"])
"""Either optimizer, with main parameters apart and without: what differs is covered once."""


def fitting(models: Any, name: str, sizes: Sizes) -> Any:
    """Models whose kv-heads divide by t, of sizes that no rank count divides where t = 1. Every family is cut once
    without tensor parallelism and once with it; what cuts them in other ways sees the same tensors."""
    kv_heads = {"qwen2-two-kv": 2, "qwen3-one-kv": 1, "thirds": 3}
    names = {key[0] for key in models} if name in ("fsdp-4", "fsdp-2-tp-2") else {"qwen3-tied", "llama", "thirds"}
    return {key: path for key, path in models.items() if key[0] in names and kv_heads.get(key[0], 4) % sizes[1] == 0}


def run_updates(processes: Any, case: Case, path: Any, head: str, optimizer: Any, *more: Any) -> list[dict[str, Any]]:
    strategy, sizes = case
    args = (processes.name(), strategy, count(sizes), path, head, optimizer, *more)
    return processes.run(count(sizes), tasks.updates, *args)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_transformers(processes, models, expected, name):
    strategy, sizes = CASES[name]
    assert_outputs(processes, strategy, sizes, fitting(models, name, sizes), expected)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in CASES for kind in OPTIMIZERS if name in NAMED or kind == "adam"]
)
def test_updates_are_those_of_plain_pytorch(processes, models, oracles, name, kind):
    for key in UPDATED:
        found = run_updates(processes, CASES[name], models[key], key[1], OPTIMIZERS[kind][0])
        assert_updates(found, oracles[*key, kind], models[key], key[1])


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_save_memory_change_nothing(processes, models, oracles, way):
    key = UPDATED[0]
    found = run_updates(processes, WAYS[way], models[key], key[1], OPTIMIZERS["adam"][0])
    assert_updates(found, oracles[*key, "adam"], models[key], key[1])


@pytest.mark.parametrize(
    ("name", "counts"),
    [("fsdp-4", (4, 0, 2, 1)), ("fsdp-2-tp-2", (0, 7)), ("zero-2", (7, 0, 0, 0)), ("zero-1", (0, 3, 4, 0))],
)
def test_uneven_and_empty_local_batches(processes, models, expected, oracles, name, counts):
    (strategy, sizes), key = CASES[name], UPDATED[name == "fsdp-4"]
    path, head = models[key], key[1]
    found = run_updates(processes, CASES[name], path, head, OPTIMIZERS["adam"][0], counts)
    assert_updates(found, oracles[*key, "adam"], path, head)
    job = (processes.name(), strategy, count(sizes), path, head, 0.7)
    outputs = joined([p[0] for p in processes.run(count(sizes), tasks.outputs, [job], counts)], sizes)
    for output, want in expected[key].items():
        assert torch.allclose(values_of(outputs[output]), values_of(want), atol=1e-5)


@pytest.mark.parametrize("name", FEW)
def test_several_passes_before_a_step_add_up(processes, models, name):
    (strategy, sizes), path = CASES[name], models["qwen3", "lm"]
    args = (processes.name(), strategy, count(sizes), path, SGD(lr=0.0, clip_grad=0))
    found = processes.run(count(sizes), tasks.two_passes, *args)
    halves, once = (whole([part[key] for part in found], spec_of(path).tensors()) for key in ("gradients", "whole"))
    assert relative(halves, once) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        *[(FSDP(dtype=dtype, **SMALL), optimizer) for dtype, optimizer in (*PAIRS, ("float16", ADAM))],
        (FSDP(lora=LoRA(rank=2, targets=("q_proj",)), **SMALL), ADAM),
        (ZeRO(stage=1, **SMALL), ADAM),
        (ZeRO(stage=2, dtype="bfloat16", **SMALL), ADAM),
    ],
    ids=str,
)
def test_resuming_from_a_state_changes_nothing(processes, models, strategy, optimizer):
    args = (processes.name(), strategy, 2, models["llama", "lm"], optimizer)
    assert all(processes.run(2, tasks.resumed, *args))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_start_from_weights_that_were_written_from_outside(processes, models, dtype):
    strategy = FSDP(tp=2, dtype=dtype, **SMALL)
    args = (processes.name(), strategy, 4, models["llama-tied", "lm"], Adam(lr=1e-3))
    assert all(processes.run(4, tasks.written_from_outside, *args))


def test_weights_without_a_checkpoint_do_not_depend_on_the_split(processes, models):
    spec, found = spec_of(models["qwen2-tied", "lm"]), {}
    for name in ("fsdp-1", "fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1"):
        strategy, sizes = CASES[name]
        args = (processes.name(), strategy, count(sizes), spec)
        found[name] = whole(processes.run(count(sizes), tasks.fresh_weights, *args), spec.tensors())
    for other in found.values():
        assert all(other[name].equal(tensor) for name, tensor in found["fsdp-1"].items())


def test_a_value_model_starts_from_a_language_model_with_a_zero_head(processes, models):
    strategy, sizes = CASES["fsdp-4"]
    job = (processes.name(), strategy, 4, models["llama", "lm"], "value", 1.0)
    outputs = joined([part[0] for part in processes.run(4, tasks.outputs, [job])], sizes)
    assert outputs["values"].values.eq(0).all()
    assert len(outputs["values"].values) == len(make_batch().peek("response_ids").values)


@pytest.mark.parametrize("name", FEW)
def test_a_loss_that_raises_on_one_replica_fails_on_every_rank_and_leaves_nothing(processes, models, name):
    strategy, sizes = CASES[name]
    args = (processes.name(), strategy, count(sizes), models["llama", "lm"], OPTIMIZERS["sgd"][0])
    found = processes.run(count(sizes), tasks.survives_a_loss_that_raises, *args)
    assert len({name for name, _, _ in found}) == 1
    assert all("the reward of this row is gone" in text for _, text, _ in found)
    assert all(same for _, _, same in found)


@pytest.mark.thinned(5)
@pairs
@pytest.mark.parametrize("name", FEW)
def test_a_step_in_parts_is_the_step_in_one_go(processes, models, name, dtype, optimizer):
    (strategy, sizes), path = CASES[name], models["qwen3-tied", "lm"]
    strategy = type(strategy)(**{**vars(strategy), "dtype": dtype})
    parameters = processes.run(4, state_tasks.steps_in_parts, processes.name(), strategy, count(sizes), path, optimizer)
    assert not any(t.isnan().any() for t in whole(parameters, spec_of(path).tensors()).values())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_skipped_step_yields_every_part_and_changes_nothing(processes, models, dtype):
    args = (processes.name(), FSDP(dtype=dtype, tp=2, **SMALL), 4, models["llama", "lm"], ADAM)
    assert all(processes.run(4, state_tasks.skipped_in_parts, *args))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "more", "optimizer", "key"),
    [
        ("fsdp-4", {}, MOMENTUM, ("llama", "value")),
        ("fsdp-2-tp-2", {}, ADAM, ("qwen3-tied", "lm")),
        ("hsdp-2x2", {"lora": LoRA(rank=2)}, ADAM, ("qwen3-tied", "lm")),
        ("tp-4", {}, MOMENTUM, ("llama", "value")),
        ("zero-1", {}, MOMENTUM, ("qwen3-tied", "lm")),
        ("zero-2", {"dtype": "float16"}, ADAM, ("llama", "value")),
        ("zero-3", {}, ADAM, ("llama", "lm")),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_changes_nothing(processes, models, name, more, optimizer, key):
    strategy, sizes = CASES[name]
    strategy = type(strategy)(**{**vars(strategy), **more})
    assert_poison_changes_nothing(processes, strategy, sizes, models[key], key[1], optimizer)


def test_all_ranks_refuse_to_save_weights_that_are_not_finite_on_any(processes, models, tmp_path):
    args = (processes.name(), CASES["fsdp-4"][0], 4, models["llama", "lm"], tmp_path / "saved")
    found = processes.run(4, state_tasks.saved_with_nan, *args)
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
    strategy = type(strategy)(**{**vars(strategy), "dtype": dtype})
    processes.run(4, task, processes.name(), strategy, count(sizes), models["qwen3-tied", "lm"], optimizer)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [FSDP(**SMALL), Megatron(tp=2, **SMALL)], ids=str)
def test_only_adapters_and_heads_are_copied_after_an_update(processes, models, strategy, dtype, head):
    strategy = replace(strategy, lora=LoRA(rank=2), dtype=dtype)
    left = processes.run(2, state_tasks.copied_adapters, processes.name(), strategy, 2, models["llama", head], head)
    assert (sum(left) > 0) == (head == "value")


@pairs
def test_what_is_offloaded_comes_back_as_it_was(processes, models, dtype, optimizer):
    args = (processes.name(), FSDP(dtype=dtype, **SMALL), 2, models["qwen3-tied", "lm"], optimizer)
    processes.run(2, state_tasks.offloaded, *args)


def test_an_engine_without_weights_is_filled_from_outside(processes, models):
    for name in ("fsdp-2-tp-2", "zero-2"):
        args = (processes.name(), CASES[name][0], 4, models["qwen3-tied", "lm"], ADAM)
        processes.run(4, state_tasks.filled_from_outside, *args)
