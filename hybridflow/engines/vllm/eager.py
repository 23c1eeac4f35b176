"""vLLM's model run eagerly with fewer calls: the same operations in the same order, so results are bitwise the same.

Where vLLM compiles a model and captures graphs, the Python between two operations is paid once. Run eagerly, as on CPU,
it is paid in every layer of every step, and a small model's operations take less time than that.

Shapes: N tokens, H hidden, I intermediate; T tokens, N heads, D dimensions of a head of latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


def lighten(model: nn.Module) -> None:
    """Take out of `model`, once its weights have been loaded, the calls that compilation would remove."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.parameter import BasevLLMParameter

    for parameter in model.parameters():
        if isinstance(parameter, BasevLLMParameter):
            # its loaders are done, and a subclass costs a Python call per operation
            parameter.__class__ = nn.Parameter  # pyright: ignore[reportAttributeAccessIssue]
    for module in model.modules():
        if isinstance(module, Attention):
            module.use_direct_call = True  # not through an operator that hides it from a compiler
        elif type(module) is RMSNorm and _in_torch(module):
            module._forward_method = _rms_norm(module, module._forward_method)
        elif type(module) is SiluAndMul and not hasattr(module, "op"):  # where vLLM has a kernel, it is one
            module._forward_method = silu_and_mul


def silu_and_mul(x_N2I: Tensor) -> Tensor:
    """[N, I]: `silu` of the first half times the second, in one buffer."""
    gate_NI, up_NI = x_N2I.chunk(2, -1)
    return silu(gate_NI).mul_(up_NI)


def _in_torch(module: Any) -> bool:
    """Whether vLLM normalizes by torch's operations: on devices it has a kernel. And nothing special is asked."""
    plain = module.has_weight and module.pass_weight and module.pass_weight_add
    return plain and module.weight.device.type == "cpu" and module.variance_size_override is None


def _rms_norm(module: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `own`: one call of torch's composite instead of its ten operations, where dtypes need no casts."""
    shape, epsilon = (module.hidden_size,), module.variance_epsilon

    def normalized(x_NH: Tensor, residual: Tensor | None = None) -> Any:
        weight_H = module.weight
        if not x_NH.dtype == weight_H.dtype == torch.float32:
            return own(x_NH, residual)
        if residual is None:
            return torch.rms_norm(x_NH, shape, weight_H, epsilon)
        total_NH = x_NH + residual
        return torch.rms_norm(total_NH, shape, weight_H, epsilon), total_NH

    return normalized


def rotate_heads(model: nn.Module) -> None:
    """Rotate by torch's operations on CPU: vLLM's kernel takes queries [T, N * D], and latent attention gives it
    [T, N, D], which it rotates wrongly without an error."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    if any(isinstance(module, MLAAttention) for module in model.modules()):
        for module in model.modules():
            if isinstance(module, RotaryEmbeddingBase):
                module._forward_method = module.forward_native
