"""Engines that compute in 16 bits are as far from float32 as rounding says, and no farther: see rounding.py."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import FSDP, Megatron, ZeRO
from tests.contracts import rounding
from tests.contracts.example_models import spec_of
from tests.contracts.rounding import Errors, Exact, Tolerance
from tests.contracts.train_contract import count, joined, whole

SMALL: dict[str, Any] = {"micro_tokens": 48}  # several micro-batches
CASES: dict[str, tuple[Any, tuple[int, int, int]]] = {
    "megatron-1-2-2": (Megatron(tp=2, **SMALL), (1, 2, 2)),
    "megatron-2-2-1": (Megatron(pp=2, tp=2, **SMALL), (2, 2, 1)),
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "fsdp-2-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 4)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 4)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 4)),
}
MODEL, CRITIC = ("qwen3-tied", "lm"), ("llama", "value")
VALUES = ["megatron-2-2-1", "fsdp-2-tp-2", "zero-2"]  # one of each backend: the head is all that differs


@pytest.fixture(scope="module")
def exact(models: Any) -> dict[tuple[str, str], Exact]:
    return {key: Exact.of(models[key], key[1]) for key in (MODEL, CRITIC)}


def errors(processes: Any, case: str, dtype: str, key: tuple[str, str], path: Any, exact: Exact) -> Errors:
    """Of an engine's outputs, gradients and updates."""
    strategy, sizes = CASES[case]
    strategy, shapes = type(strategy)(**{**vars(strategy), "dtype": dtype}), spec_of(path, key[1]).tensors()
    found = processes.run(count(sizes), rounding.observed, processes.name(), strategy, count(sizes), path, key[1])
    outputs = joined([part["outputs"] for part in found], sizes)[rounding.names(key[1])[0]]
    tensors = {what: whole([part[what] for part in found], shapes) for what in ("gradients", "before", "after")}
    moved = {name: after - tensors["before"][name] for name, after in tensors["after"].items()}
    return exact.errors(outputs, tensors["gradients"], moved)


@pytest.mark.parametrize(
    ("case", "key"), [*((case, MODEL) for case in CASES), *((case, CRITIC) for case in VALUES)], ids=str
)
def test_bfloat16_is_as_near_as_8_bits_can_be(processes, models, exact, case, key):
    """And not as near as 11 bits would be: it really computes in 8."""
    found, spec = errors(processes, case, "bfloat16", key, models[key], exact[key]), spec_of(models[key], key[1])
    assert found.within(Tolerance.of("bfloat16", spec)), found
    assert found.beyond(Tolerance.of("float16", spec)), found


@pytest.mark.parametrize("case", ["megatron-1-2-2", "fsdp-4", "fsdp-2-tp-2", "zero-1", "zero-2"])
def test_float16_is_as_near_as_11_bits_can_be(processes, models, exact, case):
    found = errors(processes, case, "float16", MODEL, models[MODEL], exact[MODEL])
    assert found.within(Tolerance.of("float16", spec_of(models[MODEL]))), found
