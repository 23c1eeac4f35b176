"""What every train engine is held to: outputs, gradients and updates of transformers in one process.

Sizes are its (p, t, d).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.batch.ragged import Ragged
from hybridflow.config import SGD, Adam, Megatron, TrainStrategy
from hybridflow.models.hf_spec import Decoder, read_spec
from hybridflow.models.spec import Head
from tests.contracts import any_model_tasks, state_tasks
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import load_model, relative, spec_of
from tests.contracts.rank_processes import RankProcesses

Sizes = tuple[int, int, int]
Case = tuple[TrainStrategy, Sizes]
SMALL: dict[str, Any] = {"micro_tokens": 48}  # several micro-batches
Key = tuple[str, str]
"""Name and head of a model."""
UPDATES = 2
UPDATED = [("qwen3-tied", "lm"), ("llama", "value")]  # tied embeddings, q/k norms, biases: see the log-prob tests
FEW_KV = ("qwen3-one-kv", "lm")
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (
        SGD(lr=0.05, momentum=0.5, clip_grad=0.7),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.5),
    ),
    "adam": (
        Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ),
}


def count(sizes: Sizes) -> int:
    return sizes[0] * sizes[1] * sizes[2]


def megatron(sizes: Sizes, **settings: Any) -> Megatron:
    p, t, d = sizes
    return Megatron(pp=p, tp=t, dp=d, **{**SMALL, **settings})


def joined(parts: list[dict[str, Any] | None], sizes: Sizes) -> dict[str, Any]:
    """Outputs of all replicas, row after row; checks that exactly the last stages have them, equal on all t."""
    p, t, d = sizes
    last = []
    for rank, part in enumerate(parts):
        stage = rank // t % p
        assert (part is not None) == (stage == p - 1), f"rank {rank}"
        if part is not None:
            last.append(part)
    for i in range(0, len(last), t):
        for other in last[i + 1 : i + t]:
            assert all(values_of(other[n]).equal(values_of(last[i][n])) for n in other)
    kept = last[::t]
    assert len(kept) == d
    return {
        name: Ragged.concat([k[name] for k in kept])
        if isinstance(value, Ragged)
        else torch.cat([k[name] for k in kept])
        for name, value in kept[0].items()
    }


def assert_trains(
    processes: RankProcesses, strategy: Any, path: Path, want: dict[str, Any], target: Path, head: Head = "lm"
) -> tuple[list[dict[str, Any]], Decoder]:
    """Outputs, gradient norms and weights after updates are those of transformers (`want`), which reads what is
    saved. What the ranks say, and the model."""
    ranks = math.prod(getattr(strategy, name, 1) for name in ("pp", "tp", "cp", "dp"))
    grid, names = strategy.grid(ranks), [processes.name(), processes.name()]
    few = replace(strategy, micro_tokens=60 if getattr(strategy, "cp", 1) > 1 else 40)
    found = processes.run(ranks, any_model_tasks.trained, names, few, path, head, target, ranks)
    outputs, again, after = (
        joined([part[key] or None for part in found], (grid.p, grid.t, grid.d)) for key in ("outputs", "again", "after")
    )
    for output in outputs:
        assert torch.allclose(outputs[output].values, want[output].values, atol=1e-4)
        assert torch.allclose(again[output].values, after[output].values, rtol=1e-6, atol=2e-6)  # rounding
    for part in found:
        assert part["norms"][:2] == pytest.approx(want["norms"][:2], rel=1e-5)
        assert part["norms"][2:] == pytest.approx(want["norms"][2:], rel=1e-4)  # updates carry rounding on
    spec = read_spec(path, head)
    updated, saved = (
        any_model_tasks.tensors(where, spec.tensors()) for where in (path.with_name(f"{path.name}-after"), target)
    )
    assert relative(saved, updated) < 1e-6
    assert relative(whole([part["boxes"] for part in found], spec.tensors()), saved) == 0
    assert sum(p.numel() for p in load_model(target, head).parameters()) == sum(
        math.prod(shape) for name, shape in spec.tensors().items() if name not in getattr(spec, "constants", ())
    )
    return found, spec


def values_of(output: Ragged | Tensor) -> Tensor:
    return output.values if isinstance(output, Ragged) else output


def whole(parts: list[list], shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Canonical tensors from every rank's boxes; boxes held by several ranks must agree bit for bit."""
    out = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, start, stop, value in (box for part in parts for box in part):
        view = out[name][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        assert view.isnan().all() or view.equal(value), f"two ranks differ in {name}[{start}:{stop}]"
        view.copy_(value)
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def assert_outputs(
    processes: RankProcesses, strategy: TrainStrategy, sizes: Sizes, models: dict[Key, Path], expected: dict[Key, Any]
) -> None:
    """Everything that the heads of `models` give, against transformers."""
    jobs = [(processes.name(), strategy, count(sizes), path, head, 0.7) for (_, head), path in models.items()]
    found = processes.run(count(sizes), tasks.outputs, jobs)
    for i, key in enumerate(models):
        outputs = joined([part[i] for part in found], sizes)
        assert outputs.keys() == expected[key].keys()
        for name, want in expected[key].items():
            got = outputs[name]
            assert values_of(got).dtype == torch.float32
            if isinstance(want, Ragged):
                assert got.offsets.equal(want.offsets)
            difference = float((values_of(got) - values_of(want)).abs().max())
            assert difference < 1e-5, f"{key} {name}: {difference}"


def assert_updates(found: list[dict[str, Any]], oracle: dict[str, Any], path: Path, head: str) -> None:
    """Gradient norms, gradients, metrics and parameters of all ranks against plain PyTorch."""
    shapes = spec_of(path, head).tensors()
    norms = {tuple(u["grad_norm"] for u in part["norms"]) for part in found}
    assert len(norms) == 1, f"ranks disagree about the gradient norm: {norms}"
    for got, (want, _, _) in zip(norms.pop(), oracle["updates"], strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    assert relative(whole([p["gradients"] for p in found], shapes), oracle["updates"][0][1]) < 1e-5
    parameters = whole([p["parameters"] for p in found], shapes)
    for name, want in oracle["parameters"].items():
        assert float((parameters[name] - want).abs().max()) < 1e-5, name
    reported = [part["metrics"] for part in found if part["metrics"][0]]
    assert reported
    for metrics in reported:
        for got, (_, _, want) in zip(metrics, oracle["updates"], strict=True):
            assert got.keys() == want.keys()
            for metric in got.keys() - {"actor/clip_fraction", "critic/clip_fraction"}:  # rounding can flip a token
                assert got[metric] == pytest.approx(want[metric], rel=1e-4, abs=1e-6)


def assert_poison_changes_nothing(
    processes: RankProcesses, strategy: TrainStrategy, sizes: Sizes, path: Path, head: str, optimizer: Any
) -> None:
    """What is not finite on one rank skips the step on all of them, and all say the same of it."""
    args = (processes.name(), strategy, count(sizes), path, head, optimizer)
    found = processes.run(count(sizes), state_tasks.poisoned, *args)
    assert len(found[0]) == (11 if head == "lm" else 7)
    for case in zip(*found, strict=True):
        [(column, why)] = {(column, why) for column, _, why in case}
        assert all(result["skipped"] == 1.0 for _, result, _ in case), column
        assert why.startswith(f"{column}: row ") or column == "weight"
    reasons = [why for *_, why in found[0]]
    assert reasons[-3].startswith("weight: row ")
    assert reasons[-2].startswith("the loss is not finite on rank ")
    assert reasons[-1].startswith("the norm of the gradients is ")
