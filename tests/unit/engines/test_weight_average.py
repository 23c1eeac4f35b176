"""WeightAverage on tensors of any shape: exact, and without memory of its own in an update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.engines import weight_average
from hybridflow.engines.weight_average import WeightAverage

SHAPES = {"matrix": (5, 3), "wide": (2, 70), "vector": (33,), "scalar": (), "none": (0, 4)}


class NewTensors(TorchDispatchMode):
    """Operations that return memory which none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        made = [each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, torch.Tensor)]
        self.found += [str(func) for each in made if each.untyped_storage()._cdata not in known]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_takes_no_memory(dtype, monkeypatch):
    """One that ran out of it on one rank would leave the average of the others a step ahead."""
    monkeypatch.setattr(weight_average, "_ROOM", 8, raising=False)
    weights = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), storage=lambda: weights, layout=None, weights_loaded=lambda: None
    )
    average = WeightAverage(engine, 0.75)
    expected = {name: weight.float().clone() for name, weight in weights.items()}
    for _ in range(3):
        for weight in weights.values():
            weight.copy_(torch.randn(weight.shape))
        expected = {name: each.lerp(weights[name].float(), 0.25) for name, each in expected.items()}
        with NewTensors() as made:
            average.update()
        assert made.found == []
        assert all(torch.equal(average.storage()[name], each) for name, each in expected.items())
        assert all(torch.equal(weights[name], each.to(dtype)) for name, each in expected.items())
