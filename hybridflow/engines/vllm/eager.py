"""vLLM's model run eagerly with fewer calls: the same operations in the same order, so results are bitwise the same.

Where vLLM compiles a model and captures graphs, the Python between two operations is paid once. Run eagerly, as on CPU,
it is paid in every layer of every step, and a small model's operations take less time than that.

Shapes: N tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def lighten(model: nn.Module) -> None:
    """Take out of `model`, once its weights have been loaded, the calls that compilation would remove."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.parameter import BasevLLMParameter

    for parameter in model.parameters():
        if isinstance(parameter, BasevLLMParameter):
            parameter.__class__ = nn.Parameter  # its loaders are done; a subclass costs a Python call per operation
    for module in model.modules():
        if isinstance(module, Attention):
            module.use_direct_call = True  # not through an operator that hides it from a compiler
        elif type(module) is RMSNorm and module.has_weight and module.variance_size_override is None:
            module._forward_method = _rms_norm(module, module._forward_method)


def _rms_norm(module: Any, own: Callable[..., object]) -> Callable[..., object]:
    """In place of `own`: one call of torch's composite instead of its ten operations, where dtypes need no casts."""
    shape, epsilon = (module.hidden_size,), module.variance_epsilon

    def normalized(x_NH: Tensor, residual_NH: Tensor | None = None) -> object:
        weight_H = module.weight
        if not x_NH.dtype == weight_H.dtype == torch.float32:
            return own(x_NH, residual_NH)
        if residual_NH is None:
            return torch.rms_norm(x_NH, shape, weight_H, epsilon)
        total_NH = x_NH + residual_NH
        return torch.rms_norm(total_NH, shape, weight_H, epsilon), total_NH

    return normalized
