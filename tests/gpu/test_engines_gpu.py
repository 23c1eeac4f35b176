"""Single-rank rows of the train engine contract on one CUDA device in bfloat16, for every backend.

The functions are those that the CPU suite runs in its processes, and so are the tolerances: see rounding.py."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from hybridflow.engines.attention import packed_attention
from hybridflow.engines.micro_batches import Sequences
from tests.contracts import engine_tasks as tasks
from tests.contracts import failure_tasks, rounding, state_tasks
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
    "megatron-recompute": Megatron(recompute=True, **SMALL),
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
    if name.startswith("megatron"):
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
    found = tasks.several_passes(world, f"passes-{name}", strategy_of(name), 1, path, SGD(lr=0.0, clip_grad=0))
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


SEVERAL: dict[str, Any] = {"micro_tokens": 96, "dtype": "float32"}  # several micro-batches
FAILING: dict[str, Any] = {
    **{name: replace(strategy, **SEVERAL) for name, strategy in STRATEGIES.items()},
    "fsdp-bfloat16": FSDP(micro_tokens=96, dtype="bfloat16"),
    "lora": FSDP(lora=LoRA(rank=3, alpha=5, targets=["q_proj", "v_proj"], dropout=0.3), **SEVERAL),
    "megatron-lora": Megatron(recompute=True, lora=LoRA(rank=3, alpha=5, dropout=0.3), **SEVERAL),
}
CLIPPED = Adam(lr=0.02, eps=1e-3, clip_grad=0.7)
ROOMS = [1 << exponent for exponent in range(13, 22, 2)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("models"), "lm")


@pytest.mark.parametrize("name", FAILING)
def test_a_pass_that_fails_leaves_nothing(world, path, name):
    found = failure_tasks.survives(
        world, f"failing-{name}", FAILING[name], 1, path, CLIPPED, failure_tasks.PASSES, None
    )
    assert found["differs"] == []
    assert all(found["errors"].values())


@pytest.mark.parametrize("name", ["fsdp", "fsdp-offload", "lora", "zero-2", "megatron", "megatron-lora"])
def test_a_pass_that_runs_out_of_memory_leaves_nothing(world, path, name):
    """Wherever it does: with more room, it comes further."""
    found = failure_tasks.runs_out(world, f"full-{name}", FAILING[name], path, CLIPPED, ROOMS)
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
    found = failure_tasks.keeps_gradients(world, f"outputs-{name}", FAILING[name], 1, path, CLIPPED, "read")
    assert found["results"][0] == found["results"][1]
    assert found["differs"] == []


@pytest.mark.parametrize("name", ["fsdp", "zero-2-offload", "megatron"])
def test_no_step_takes_memory_for_moments(world, path, name):
    found = failure_tasks.first_step_without_memory(world, f"moments-{name}", FAILING[name], 1, path, CLIPPED)
    assert (found["error"], found["next"]) == ("", "")
    assert found["bytes"][0] == found["bytes"][1]


def by_definition(q, k, v, lengths, window):
    """One softmax over a mask of all pairs of positions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    at = torch.arange(len(of), device=q.device)
    distance = at[:, None] - at
    seen = (of[:, None] == of) & (distance >= 0) & (distance < (window or len(of)))
    scores = torch.einsum("snd,tnd->nst", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("nst,tnd->snd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 64), ((4, 4), 32)])
def test_packed_attention_is_its_definition(dtype, window, heads, width):
    """`width` is that of the values; latent attention has them narrower than queries and keys."""
    lengths, device = [7, 1, 130, 130, 64], torch.device("cuda", 0)
    torch.manual_seed(0)
    sizes = [(heads[0], 64), (heads[1], 64), (heads[1], width), (heads[0], width)]
    made = [torch.randn(sum(lengths), *size, device=device) for size in sizes]
    rounded = [x.to(dtype) for x in made]
    ours, theirs = ([x.to(kind).requires_grad_() for x in rounded[:3]] for kind in (dtype, torch.float32))
    found = packed_attention(*ours, Sequences.of(lengths).to(device), window)
    want = by_definition(*theirs, lengths, window)
    gradients = torch.autograd.grad(found, ours, rounded[3])
    expected = torch.autograd.grad(want, theirs, rounded[3].float())
    # what is multiplied and what comes out is rounded to 8 (bfloat16) or 11 bits: a few times 2^-9 and 2^-12
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]
    for got, right in zip((found, *gradients), (want, *expected), strict=True):
        assert got.dtype == dtype
        assert float((got.float() - right).norm() / right.norm()) < tolerance
