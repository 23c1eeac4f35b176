"""Running Megatron-core where there is no CUDA. Everything here is inert when the device is a CUDA one.

Megatron writes `device="cuda"` and `torch.cuda.current_device()` into its code. On a CPU its modules are
given a namespace of their own in the place of `torch`, so nothing that other libraries see is patched.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MODULES = (
    "models.gpt.gpt_model",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "transformer.transformer_layer",
    "utils",
)


def prepare(device: torch.device) -> None:
    """Make Megatron use `device` in this process; may be called any number of times."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    for name in _MODULES:
        module: Any = importlib.import_module(f"megatron.core.{name}")
        if not isinstance(module.torch, _CpuTorch):
            module.torch = _CpuTorch()
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def building(device: torch.device) -> AbstractContextManager:
    """For the construction of models, which call `Tensor.cuda()`."""
    return contextlib.nullcontext() if device.type == "cuda" else _StayOnCpu()


class _CpuCuda(types.ModuleType):
    """Megatron's part of `torch.cuda`, for the CPU."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.current_device = lambda: torch.device("cpu")
        self.get_rng_state, self.set_rng_state = torch.get_rng_state, torch.set_rng_state
        self.manual_seed = torch.manual_seed
        self.synchronize = self.empty_cache = lambda *args: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch`, but tensors asked for on "cuda" are made on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable) -> Callable:
    def make(*args, device: Any = None, **kwargs):
        return factory(*args, device="cpu" if device in ("cuda", 0) else device, **kwargs)

    return make


class _StayOnCpu(TorchFunctionMode):
    """Tensors that are sent to CUDA stay where they are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is torch.Tensor.cuda else func(*args, **(kwargs or {}))
