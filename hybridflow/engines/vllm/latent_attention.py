"""Latent attention (MLA) of vLLM: what it computes otherwise on CPU, and its matrices beside the weights.

Shapes: T tokens, N heads, D dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

CPU_RANK, CPU_SIZE = 512, 576
"""`kv_lora_rank`, and with it `qk_rope_head_dim`, that vLLM's kernel for CPU is made for."""


def rotate_heads(model: nn.Module) -> None:
    """Rotate by torch's operations on CPU: vLLM's kernel takes queries [T, N * D], and latent attention gives it
    [T, N, D], which it rotates wrongly without an error."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    if any(isinstance(module, MLAAttention) for module in model.modules()):
        for module in model.modules():
            if isinstance(module, RotaryEmbeddingBase):
                module._forward_method = module.forward_native


def keep_views(model: nn.Module, own: Mapping[str, Tensor]) -> frozenset[str]:
    """Make parameters that are views of the parameters `own` plain tensors, which follow what is written in place.

    Such are W_UV and W_UK_T, parts of kv_b_proj as the kernels take them. Returns the names in `own` that have views:
    their memory cannot be replaced by another.
    """
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in own.items()}
    viewed = set[str]()
    for at, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = f"{at}.{name}" if at else name
            if parameter is None or full in own:
                continue
            if (owner := owners.get(parameter.untyped_storage()._cdata)) is not None:
                delattr(module, name)
                plain: Any = parameter.data
                setattr(module, name, plain)
                viewed.add(owner)
    return frozenset(viewed)
