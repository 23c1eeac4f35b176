"""Rotary embeddings and core attention for Megatron's SelfAttention: one call of scaled dot-product attention.

Shapes: S positions, B rows, N heads (of this rank), K kv-heads (of this rank), D head dimension, E = D / 2. Rows are
padded on the right and attention is causal, so padding is never looked at and needs no mask.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from hybridflow.model_spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """[E] float32: rotations per position, with Llama 3's scaling of long wavelengths where the model asks for it."""
    exponent_E = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inverse_E = 1.0 / (spec.rope_theta**exponent_E)
    if not spec.rope_scaling:
        return inverse_E
    scaling = dict(spec.rope_scaling)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength_E = 2 * math.pi / inverse_E
    smooth_E = ((context / wavelength_E - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_E) * inverse_E / factor + smooth_E * inverse_E


class Rotary:
    """cos and sin of every position's rotation, [S, E] in the asked dtype; kept for the last few lengths."""

    def __init__(self, spec: ModelSpec) -> None:
        self.inverse_E = inverse_frequencies(spec)
        self.table = lru_cache(maxsize=16)(self._table)

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle_SE = torch.outer(torch.arange(length, device=device).float(), self.inverse_E.to(device))
        return angle_SE.cos().to(dtype), angle_SE.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotates the two halves of [B, N, S, D] (any strides) against each other; the result is contiguous."""

    @staticmethod
    def forward(ctx, x_BNSD, cos_SE, sin_SE):
        ctx.save_for_backward(cos_SE, sin_SE)
        return _rotate(x_BNSD, cos_SE, sin_SE)

    @staticmethod
    def backward(ctx, d_BNSD):  # type: ignore[override]
        cos_SE, sin_SE = ctx.saved_tensors
        return _rotate(d_BNSD, cos_SE, -sin_SE), None, None


def _rotate(x_BNSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    out_BNSD = torch.empty(x_BNSD.shape, dtype=x_BNSD.dtype, device=x_BNSD.device)
    (a, b), (out_a, out_b) = x_BNSD.chunk(2, -1), out_BNSD.chunk(2, -1)
    torch.mul(a, cos_SE, out=out_a).addcmul_(b, sin_SE, value=-1)
    torch.mul(b, cos_SE, out=out_b).addcmul_(a, sin_SE)
    return out_BNSD


class CoreAttention(nn.Module):
    """Megatron's core attention with rotary embeddings, grouped kv-heads and an optional sliding window."""

    def __init__(self, rotary: Rotary, sliding_window: int | None, **_) -> None:
        super().__init__()
        self.rotary, self.sliding_window = rotary, sliding_window

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N * D]."""
        length, rows, heads, head_dim = query.shape
        cos_SE, sin_SE = self.rotary.table(length, query.device, query.dtype)
        q_BNSD = _Rotate.apply(query.permute(1, 2, 0, 3), cos_SE, sin_SE)
        k_BKSD = _Rotate.apply(key.permute(1, 2, 0, 3), cos_SE, sin_SE)
        mask_SS = self._window(length, query.device)
        out_BNSD = F.scaled_dot_product_attention(
            q_BNSD,
            k_BKSD,
            value.permute(1, 2, 0, 3),
            attn_mask=mask_SS,
            is_causal=mask_SS is None,
            enable_gqa=heads != key.shape[2],
        )
        return out_BNSD.permute(2, 0, 1, 3).reshape(length, rows, heads * head_dim)

    def _window(self, length: int, device: torch.device) -> Tensor | None:
        """[S, S] bool: each position sees itself and the `sliding_window - 1` before it; None when that is all."""
        if self.sliding_window is None or length <= self.sliding_window:
            return None
        position_S = torch.arange(length, device=device)
        distance_SS = position_S[:, None] - position_S
        return (distance_SS >= 0) & (distance_SS < self.sliding_window)


class SharedHeadAttention(SelfAttention):
    """SelfAttention with fewer kv-heads than tensor parallel ranks: several ranks attend with one kv-head.

    As in Megatron, ranks hold equal parts of the interleaved query, key and value rows, which cut through kv-heads;
    the products are gathered, and each rank takes its query heads and the kv-head that they share. The way back adds
    up what all of them give to a kv-head. Megatron's own version asks its global groups for the rank.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *_, **__) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """[S, B, H] -> query [S, B, N, D], key and value [S, B, 1, D]."""
        attention: Any = self
        groups: int = attention.config.num_query_groups
        sharing, rank = self.world_size // groups, self.tp_group.rank()
        fused, _ = attention.linear_qkv(hidden_states)
        fused = all_gather_last_dim_from_tensor_parallel_region(fused, group=self.tp_group)
        heads = fused.view(*fused.shape[:2], groups, -1, self.hidden_size_per_attention_head)[:, :, rank // sharing]
        query, key, value = heads.split([heads.shape[2] - 2, 1, 1], dim=2)
        query = query.chunk(sharing, dim=2)[rank % sharing]
        return attention.q_layernorm(query), attention.k_layernorm(key), value
