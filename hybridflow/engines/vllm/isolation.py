"""Isolation of vLLM in a training process: environment variables before its import, a fence around its start. vLLM
expects to own its process.

Starting it seeds the global random generators, replaces `torch.set_num_threads`, binds all memory of the process to one
NUMA node, collects garbage five times over, and on CPU prepacks linear weights so that they cannot be written any more.
The fence shields the training side from all of this. Patches of the CPU build change nothing on CUDA, where weights
stay plain.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from hybridflow.errors import ConfigError

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
    """Set the variables that vLLM reads while it is imported; what the user has set stays, where it can work.

    Errors: ConfigError for a variable that changes where weights lie.
    """
    if partition := os.environ.get("VLLM_PP_LAYER_PARTITION"):
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION={partition!r} is set, and weights are moved by vLLM's own division of layers "
            "into stages. Uninitialized it."
        )
    os.environ.update(_EVERYWHERE)
    for name, value in (_DEFAULTS | (_CPU_DEFAULTS if device_type == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its import speaks before it has set this
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="vllm")


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
    """Import and build vLLM inside this block and the training side does not notice."""
    random_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=FutureWarning)  # of attributes that vLLM looks at in every module
        stack.enter_context(replaced(torch, "set_num_threads", torch.set_num_threads))
        stack.enter_context(uncollected())
        try:
            if device.type == "cpu":
                _fence_cpu(stack)
            yield
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: with a training process's heap each takes half a second, and vLLM makes several."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with replaced(gc, "collect", lambda generation=2: 0):
            yield
    finally:
        if collecting:
            gc.enable()


def _fence_cpu(stack: ExitStack) -> None:
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)
    from vllm.model_executor.layers import utils as linear_layers
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    name = "process_weights_after_loading"
    stack.enter_context(replaced(CPUUnquantizedExperts, name, keeping_plain(getattr(CPUUnquantizedExperts, name))))
    stack.enter_context(replaced(linear_layers, "dispatch_cpu_unquantized_gemm", _plain_linear))
    stack.enter_context(replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None))


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Instead of oneDNN's prepacking: keep `layer.weight` [out, in], which can be written in place."""
    layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]


Process = Callable[[Any, torch.nn.Module], None]


def keeping_plain(packed: Process) -> Process:
    """What stands in for `packed`, vLLM's processing of loaded experts: it leaves them as they are.

    Experts that are not computed here (with biases, or gates that are no SiLU) are packed after all.
    """

    def process(experts: Any, layer: torch.nn.Module) -> None:
        if experts.moe_config.activation.value != "silu" or experts.w1_bias is not None:
            packed(experts, layer)
        else:
            experts.apply = _apply

    return process


def _apply(
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    apply_router_weight_on_input: bool,
    **_: object,
) -> None:
    """`output` [N, H] := of `hidden_states` [N, H] what the experts `topk_ids` [N, K] make of it, weighed by
    `topk_weights` [N, K]; `w1` [E, 2 * I, H] gates and rows up, `w2` [E, H, I] rows down."""
    total = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, -1)
        made = linear(silu(gate) * up, w2[expert]).to(total.dtype)
        if not apply_router_weight_on_input:  # else the inputs have been weighed
            made = made * topk_weights[token, choice, None]
        total.index_add_(0, token, made)
    output.copy_(total)
