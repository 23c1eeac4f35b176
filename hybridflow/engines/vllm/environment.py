"""What vLLM needs around it to live inside a training process: variables before its import, a fence around its start.

vLLM expects to own its process. Starting it seeds the global random generators, replaces `torch.set_num_threads`, and
on CPU prepacks linear weights so that nobody can write them any more. The fence undoes the first two and prevents the
third. On CUDA weights stay plain by themselves and the shims change nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second model runner cannot broadcast pipeline outputs to all ranks
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # hosts of one machine would all bind to the same cores
    "VLLM_TARGET_DEVICE": "cpu",
}


def prepare(device_type: str) -> None:
    """Set the variables that vLLM reads while it is imported; what the user has set stays, where it can work."""
    os.environ.update(_EVERYWHERE)
    for name, value in (_DEFAULTS | (_CPU_DEFAULTS if device_type == "cpu" else {})).items():
        os.environ.setdefault(name, value)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fence(device: torch.device) -> Iterator[None]:
    """Build vLLM inside this block and the training side does not notice: generators, thread setting, plain weights."""
    from vllm.model_executor.layers import utils as linear_layers

    devices = [device] if device.type == "cuda" else []
    python_state, numpy_state, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    try:
        with (
            torch.random.fork_rng(devices=devices),
            replaced(linear_layers, "dispatch_cpu_unquantized_gemm", _plain_linear),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # vLLM on CPU replaces it by a warning


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Instead of oneDNN's prepacking: keep `layer.weight` [out, in], which can be written in place."""
    layer.cpu_linear = torch.nn.functional.linear
