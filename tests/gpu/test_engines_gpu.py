"""Single-rank rows of the train engine contract on one CUDA device in bfloat16, for every backend.

The functions are those that the CPU suite runs in its processes, and so are the tolerances: see rounding.py.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Adam, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks
from tests.contracts import rounding, state_tasks
from tests.contracts.example_models import make_model, spec_of
from tests.contracts.rounding import Exact, Tolerance
from tests.contracts.train_contract import whole

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"micro_tokens": 48, "dtype": "bfloat16"}  # several micro-batches
STRATEGIES: dict[str, Any] = {
    "fsdp": FSDP(**SMALL),
    "fsdp-padded": FSDP(packed=False, **SMALL),
    "fsdp-recompute": FSDP(recompute=True, reduce_often=True, **SMALL),
    "fsdp-offload": FSDP(offload=True, **SMALL),
    "zero-1": ZeRO(stage=1, **SMALL),
    "zero-2": ZeRO(stage=2, recompute=True, **SMALL),
    "zero-2-offload": ZeRO(stage=2, offload=True, **SMALL),
    "zero-3": ZeRO(stage=3, **SMALL),
    "megatron": Megatron(**SMALL),
}
FEW = ["fsdp", "zero-1", "zero-2", "megatron"]
MODELS = [("qwen3-tied", "lm"), ("llama", "value"), ("qwen2", "lm"), ("mistral", "lm")]
ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
both = pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "sgd"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    directory = tmp_path_factory.mktemp("models")
    return {key: make_model(key[0], directory, key[1]) for key in MODELS}


@pytest.fixture(scope="module")
def exact(models: Any) -> dict[tuple[str, str], Exact]:
    return {key: Exact.of(path, key[1]) for key, path in models.items()}


def strategy_of(name: str) -> Any:
    if name == "megatron":
        pytest.importorskip("megatron.core")
    return STRATEGIES[name]


@pytest.mark.parametrize("key", MODELS, ids="-".join)
@pytest.mark.parametrize("name", STRATEGIES)
def test_outputs_gradients_and_updates_are_as_near_as_8_bits_can_be(world, models, exact, name, key):
    """And not as near as 11 bits would be: it really computes in 8."""
    shapes, spec = spec_of(models[key], key[1]).tensors(), spec_of(models[key], key[1])
    found = rounding.observed(world, f"{name}-{'-'.join(key)}", strategy_of(name), 1, models[key], key[1])
    tensors = {what: whole([found[what]], shapes) for what in ("gradients", "before", "after")}
    moved = {name: after - tensors["before"][name] for name, after in tensors["after"].items()}
    errors = exact[key].errors(found["outputs"][rounding.names(key[1])[0]], tensors["gradients"], moved)
    assert errors.within(Tolerance.of("bfloat16", spec)), errors
    assert errors.beyond(Tolerance.of("float16", spec)), errors


@pytest.mark.parametrize("name", FEW)
def test_several_passes_before_a_step_add_up(world, models, name):
    """To what one pass gives, up to the order of roundings."""
    path = models["qwen3-tied", "lm"]
    found = tasks.two_passes(world, f"passes-{name}", strategy_of(name), 1, path, SGD(lr=0.0, clip_grad=0))
    halves, once = (torch.cat([box[3].flatten() for box in found[key]]) for key in ("gradients", "whole"))
    assert float((halves - once).norm() / once.norm()) < Tolerance.of("bfloat16", spec_of(path)).gradients


@both
@pytest.mark.parametrize("name", FEW)
def test_resuming_from_a_state_changes_nothing(world, models, name, optimizer):
    """Up to what kernels that add up in no fixed order (flash attention's backward pass) may change."""
    rounding_error = 2 * rounding.UNIT["bfloat16"]
    path, group = models["qwen2", "lm"], f"resumed-{name}-{optimizer}"
    assert tasks.resumed(world, group, strategy_of(name), 1, path, optimizer, rounding_error)


@pytest.mark.parametrize("name", [*FEW, "fsdp-offload", "zero-2-offload"])
def test_changed_settings_and_groups_are_resumed(world, models, name):
    optimizer = Adam(lr=0.02, eps=1e-3, groups={"embed": 0.002, "layers.1.": {"weight_decay": 0.1}})
    changes, rounding_error = {"lr": 0.001, "betas": (0.5, 0.6)}, 2 * rounding.UNIT["bfloat16"]
    arguments = (f"changed-{name}", strategy_of(name), 1, models["qwen2", "lm"], optimizer, rounding_error, changes)
    assert tasks.resumed(world, *arguments)


@pytest.mark.parametrize("name", FEW)
def test_updates_start_from_weights_that_were_written_from_outside(world, models, name):
    path = models["qwen2", "lm"]
    assert tasks.written_from_outside(world, f"written-{name}", strategy_of(name), 1, path, Adam(lr=1e-3))


@both
@pytest.mark.parametrize("name", FEW)
def test_memory_of_layers_is_released_and_comes_back(world, models, name, optimizer):
    path = models["qwen3-tied", "lm"]
    state_tasks.released_and_restored(world, f"memory-{name}-{optimizer}", strategy_of(name), 1, path, optimizer)


@pytest.mark.parametrize("name", FEW)
def test_a_skipped_step_yields_every_part_and_changes_nothing(world, models, name):
    path = models["qwen2", "lm"]
    assert state_tasks.skipped_in_parts(world, f"skipped-{name}", strategy_of(name), 1, path, ADAM)


@pytest.mark.parametrize("name", FEW)
def test_a_closed_engine_leaves_no_memory(world, models, name):
    path, strategy, allocated = models["qwen3-tied", "lm"], strategy_of(name), []
    for turn in range(3):
        _ = tasks.updates(world, f"closed-{name}-{turn}", strategy, 1, path, "lm", ADAM)["norms"]
        world.close()
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] == allocated[2], "workspaces of libraries stay after the first, nothing does after the next"
