"""Settings of an optimizer that change in the middle of a run, and those of groups of parameters, on every backend,
against plain PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks
from tests.contracts import state_tasks
from tests.contracts.example_models import Oracle, make_batch, spec_of
from tests.contracts.train_contract import count, whole

SMALL: dict[str, Any] = {"micro_tokens": 48}
CASES: dict[str, Any] = {
    "fsdp": (FSDP(**SMALL), (1, 1, 2)),
    "fsdp-tp": (FSDP(tp=2, **SMALL), (1, 2, 1)),
    "fsdp-offload": (FSDP(offload=True, **SMALL), (1, 1, 2)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 2)),
    "zero-2-offload": (ZeRO(stage=2, offload=True, **SMALL), (1, 1, 2)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 2)),
    "megatron-tp": (Megatron(tp=2, **SMALL), (1, 2, 1)),
    "megatron-pp-dp": (Megatron(pp=2, **SMALL), (2, 1, 2)),
}
ADAM = Adam(lr=0.02, eps=1e-3, clip_grad=0.7, weight_decay=0.1)
CHANGES: dict[str, Any] = {"lr": 0.003, "betas": (0.8, 0.7), "eps": 1e-2, "weight_decay": 0.3, "clip_grad": 0.4}


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Torch's groups for the weight decay of ADAM: norms and biases have none."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


@pytest.fixture(scope="module")
def changed(models) -> dict[str, torch.Tensor]:
    """One update of plain PyTorch, and one with other settings."""
    oracle = Oracle(models["llama", "lm"], "lm", lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3), clip=0.7)
    oracle.optimizer = torch.optim.AdamW(groups_of(oracle.model), lr=0.02, eps=1e-3, betas=(0.9, 0.95))
    oracle.update(make_batch(seed=0))
    for group in oracle.optimizer.param_groups:
        group |= {"lr": 0.003, "betas": (0.8, 0.7), "eps": 1e-2, "weight_decay": 3 * group["weight_decay"]}
    oracle.clip = 0.4
    oracle.update(make_batch(seed=1))
    return oracle.parameters()


def parameters_after(processes: Any, path: Path, case: str, optimizer: Any, changes: Any = None) -> list[Any]:
    """What every rank found, and the parameters after two updates."""
    strategy, sizes = CASES[case]
    args = (processes.name(), strategy, count(sizes), path, "lm", optimizer, None, 2, changes)
    found = processes.run(count(sizes), tasks.updates, *args)
    return [found, whole([part["parameters"] for part in found], spec_of(path).tensors())]


@pytest.mark.parametrize("name", CASES)
def test_changed_settings_are_those_of_the_next_step(processes, models, changed, name):
    found, parameters = parameters_after(processes, models["llama", "lm"], name, ADAM, {1: CHANGES})
    assert {tuple(norm["lr"] for norm in part["norms"]) for part in found} == {(0.02, 0.003)}
    assert max(float((parameters[name] - want).abs().max()) for name, want in changed.items()) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (FSDP(**SMALL), ADAM),
        (FSDP(lora=LoRA(rank=2, targets=("q_proj",)), **SMALL), ADAM),
        (ZeRO(stage=1, dtype="bfloat16", **SMALL), ADAM),
        (Megatron(dtype="bfloat16", **SMALL), ADAM),
        (Megatron(lora=LoRA(rank=2, targets=("q_proj",)), **SMALL), ADAM),
        (ZeRO(stage=2, **SMALL), SGD(lr=0.05, momentum=0.5)),
    ],
    ids=str,
)
def test_a_state_has_the_changed_settings(processes, models, strategy, optimizer):
    changes = CHANGES if isinstance(optimizer, Adam) else {"lr": 0.003}
    args = (processes.name(), strategy, 2, models["llama", "lm"], optimizer, 0.0, changes)
    assert all(processes.run(2, tasks.resumed, *args))


GROUPS: dict[str, Any] = {
    "embed": 0.002,
    "layers.1.": {"lr": 0.04, "weight_decay": 0.0},
    "model.norm": {"weight_decay": 0.2},
}
SCHEDULED: dict[str, Any] = {"schedule": "linear", "total_steps": 4, "min_lr": 0.001}


def in_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Torch's groups for GROUPS, one for each parameter."""
    found = []
    for name, parameter in model.named_parameters():
        lr, decay = 0.02, weight_decay if parameter.ndim > 1 else 0.0
        if "embed" in name:
            lr = 0.002
        elif "layers.1." in name:
            lr, decay = 0.04, 0.0
        elif name == "model.norm.weight":
            decay = 0.2
        found.append({"params": [parameter], "lr": lr, "weight_decay": decay, "most": lr})
    return found


@pytest.fixture(scope="module")
def grouped(models) -> dict[tuple[str, str], torch.Tensor]:
    """Two updates of plain PyTorch, by model and optimizer; the second has 3/4 of the way left to min_lr."""
    found = {}
    for model in ("llama", "qwen3-tied"):
        for kind in ("adam", "sgd"):
            decay = 0.1 if kind == "adam" else 0.0
            oracle = Oracle(models[model, "lm"], "lm", lambda p: torch.optim.AdamW(p), clip=0.7)
            groups = in_groups(oracle.model, decay)
            adam = {"eps": 1e-3, "betas": (0.9, 0.95)}
            oracle.optimizer = torch.optim.AdamW(groups, **adam) if kind == "adam" else torch.optim.SGD(groups)
            oracle.update(make_batch(seed=0))
            for group in oracle.optimizer.param_groups:
                group["lr"] = 0.001 + 0.75 * (group["most"] - 0.001)
            oracle.update(make_batch(seed=1))
            found[model, kind] = oracle.parameters()
    return found


@pytest.mark.parametrize("name", CASES)
def test_groups_are_those_of_plain_pytorch(processes, models, grouped, name):
    """With tied embeddings, of which Megatron's last stage has a copy."""
    adam = Adam(lr=0.02, eps=1e-3, clip_grad=0.7, weight_decay=0.1, groups=GROUPS, **SCHEDULED)
    sgd = SGD(lr=0.02, clip_grad=0.7, groups=GROUPS, **SCHEDULED)
    for model, kind, optimizer in (("llama", "adam", adam), ("qwen3-tied", "adam", adam), ("llama", "sgd", sgd)):
        found, parameters = parameters_after(processes, models[model, "lm"], name, optimizer)
        assert {part["norms"][1]["lr"] for part in found} == {0.001 + 0.75 * 0.019}
        worst = max(float((parameters[n] - want).abs().max()) for n, want in grouped[model, kind].items())
        assert worst < 2e-5, (model, kind)


def test_changed_settings_leave_those_of_groups(processes, models, changed):
    """Groups that say what CHANGES says are without effect on it; the lr of others stays."""
    groups = {"embed": {"lr": 0.02, "weight_decay": 0.1}}
    optimizer = Adam(lr=0.02, eps=1e-3, clip_grad=0.7, weight_decay=0.1, groups=groups)
    for case in ("fsdp", "megatron-tp"):
        _, parameters = parameters_after(processes, models["llama", "lm"], case, optimizer, {1: CHANGES})
        for tensor, want in changed.items():
            near = float((parameters[tensor] - want).abs().max()) < 1e-5
            assert near == ("embed" not in tensor), tensor


def test_a_step_in_parts_has_groups_too(processes, models):
    optimizer = Adam(lr=0.02, groups={"embed": 0.1, "layers.1.": {"weight_decay": 0.5}})
    args = (processes.name(), Megatron(pp=2, **SMALL), 4, models["llama", "lm"], optimizer)
    assert processes.run(4, state_tasks.steps_in_parts, *args)
