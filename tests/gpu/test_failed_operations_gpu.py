"""Passes that fail on a CUDA device: the update after them is that of an engine on which nothing failed.

The functions are those that the CPU suite runs in its processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import FSDP, Adam, LoRA, Megatron, ZeRO
from tests.contracts import failure_tasks as tasks
from tests.contracts.example_models import make_model

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"micro_tokens": 96, "dtype": "float32"}  # several micro-batches
STRATEGIES: dict[str, Any] = {
    "fsdp": FSDP(**SMALL),
    "fsdp-bfloat16": FSDP(micro_tokens=96, dtype="bfloat16"),
    "fsdp-recompute": FSDP(recompute=True, reduce_often=True, **SMALL),
    "fsdp-offload": FSDP(offload=True, **SMALL),
    "lora": FSDP(lora=LoRA(rank=3, alpha=5, targets=["q_proj", "v_proj"], dropout=0.3), **SMALL),
    "zero-1": ZeRO(stage=1, **SMALL),
    "zero-2": ZeRO(stage=2, **SMALL),
    "zero-2-offload": ZeRO(stage=2, offload=True, **SMALL),
    "zero-3": ZeRO(stage=3, **SMALL),
    "megatron": Megatron(**SMALL),
    "megatron-lora": Megatron(recompute=True, lora=LoRA(rank=3, alpha=5, dropout=0.3), **SMALL),
}
ADAM = Adam(lr=0.02, eps=1e-3, clip_grad=0.7)
ROOMS = [1 << exponent for exponent in range(13, 22, 2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"), "lm")


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_pass_that_fails_leaves_nothing(world, path, name):
    found = tasks.survives(world, f"failing-{name}", STRATEGIES[name], 1, path, ADAM, tasks.PASSES, None)
    assert found["differs"] == []
    assert all(found["errors"].values())


@pytest.mark.parametrize("name", ["fsdp", "fsdp-offload", "lora", "zero-2", "megatron", "megatron-lora"])
def test_a_pass_that_runs_out_of_memory_leaves_nothing(world, path, name):
    """Wherever it does: with more room, it comes further."""
    found = tasks.runs_out(world, f"full-{name}", STRATEGIES[name], path, ADAM, ROOMS)
    assert sum("OutOfMemoryError" in error for error in found["errors"]) > 1
    assert all("OutOfMemoryError" in error for error in found["errors"] if error)
    assert found["differs"] == []
    settled = max(found["settled"]) - min(found["settled"])  # Megatron: 3 KiB; one activation has 11
    assert settled < 1 << 12, "activations of a failed pass stay after the next update"
    # a model keeps positions and rotary factors of its last micro-batch, whichever that was
    left = found["left"][1:]  # the first ran out before it had any
    assert max(left) - min(left) < 1 << 15, "activations of a failed pass stay"


@pytest.mark.parametrize("name", ["fsdp", "zero-2", "megatron"])
def test_outputs_that_fail_leave_the_gradients_of_a_step_alone(world, path, name):
    found = tasks.keeps_gradients(world, f"outputs-{name}", STRATEGIES[name], 1, path, ADAM, "read")
    assert found["results"][0] == found["results"][1]
    assert found["differs"] == []


@pytest.mark.parametrize("name", ["fsdp", "zero-2-offload", "megatron"])
def test_no_step_takes_memory_for_moments(world, path, name):
    found = tasks.first_step_without_memory(world, f"moments-{name}", STRATEGIES[name], 1, path, ADAM)
    assert (found["error"], found["next"]) == ("", "")
    assert found["bytes"][0] == found["bytes"][1]
