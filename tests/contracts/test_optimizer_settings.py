"""Settings of an optimizer that change in the middle of a run, on every backend, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks
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


@pytest.mark.parametrize("name", CASES)
def test_changed_settings_are_those_of_the_next_step(processes, models, changed, name):
    strategy, sizes = CASES[name]
    args = (processes.name(), strategy, count(sizes), models["llama", "lm"], "lm", ADAM, None, 2, {1: CHANGES})
    found = processes.run(count(sizes), tasks.updates, *args)
    assert {tuple(norm["lr"] for norm in part["norms"]) for part in found} == {(0.02, 0.003)}
    parameters = whole([part["parameters"] for part in found], spec_of(models["llama", "lm"]).tensors())
    assert max(float((parameters[name] - want).abs().max()) for name, want in changed.items()) < 1e-5


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        (FSDP(**SMALL), ADAM),
        (FSDP(lora=LoRA(rank=2, targets=("q_proj",)), **SMALL), ADAM),
        (ZeRO(stage=1, dtype="bfloat16", **SMALL), ADAM),
        (Megatron(dtype="bfloat16", **SMALL), ADAM),
        (ZeRO(stage=2, **SMALL), SGD(lr=0.05, momentum=0.5)),
    ],
    ids=str,
)
def test_a_state_has_the_changed_settings(processes, models, strategy, optimizer):
    changes = CHANGES if isinstance(optimizer, Adam) else {"lr": 0.003}
    args = (processes.name(), strategy, 2, models["llama", "lm"], optimizer, 0.0, changes)
    assert all(processes.run(2, tasks.resumed, *args))
