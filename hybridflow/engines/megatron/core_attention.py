"""Rotary embeddings and core attention for Megatron's SelfAttention, of packed and of padded rows.

Shapes: S positions, B rows, N heads (of this rank), K kv-heads (of this rank), D head dimension, E = D / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.micro_batches import Sequences
from hybridflow.models.spec import ModelSpec


@dataclass
class PackedRow(PackedSeqParams):
    """How Megatron hands the sequences of a packed row from the model's input to every core attention, also when a
    layer is recomputed: it drops the row dimension of query, key and value ("thd") and otherwise looks at nothing."""

    qkv_format: str = "thd"
    sequences: Sequences | None = None


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
    """cos and sin of every position's rotation, [S, E] in the asked dtype; kept for the last few lengths and rows."""

    def __init__(self, spec: ModelSpec) -> None:
        self.inverse_E = inverse_frequencies(spec)
        self.table = lru_cache(maxsize=16)(self._table)
        self.packed = lru_cache(maxsize=4)(self._packed)  # all layers ask for the same row, one after the other

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle_SE = torch.outer(torch.arange(length, device=device).float(), self.inverse_E.to(device))
        return angle_SE.cos().to(dtype), angle_SE.sin().to(dtype)

    def _packed(self, sequences: Sequences, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[S, 1, E]: the positions of every sequence begin at 0."""
        cos_LE, sin_LE = self.table(sequences.longest, sequences.positions.device, dtype)
        return cos_LE[sequences.positions][:, None], sin_LE[sequences.positions][:, None]


class _Rotate(torch.autograd.Function):
    """Rotates the two halves of [..., D] (any strides) against each other; the result is contiguous.

    cos and sin are broadcast from [..., E]."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(d, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out


class CoreAttention(nn.Module):
    """Megatron's core attention with rotary embeddings, grouped kv-heads and an optional sliding window."""

    def __init__(self, rotary: Rotary, sliding_window: int | None, **_) -> None:
        super().__init__()
        self.rotary, self.sliding_window = rotary, sliding_window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **_,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N * D]; of a packed row all without B."""
        if packed_seq_params is not None and packed_seq_params.sequences is not None:
            return self._packed(query, key, value, packed_seq_params.sequences)
        length, rows, heads, head_dim = query.shape
        cos_SE, sin_SE = self.rotary.table(length, query.device, query.dtype)
        q_BNSD = _Rotate.apply(query.permute(1, 2, 0, 3), cos_SE, sin_SE)
        k_BKSD = _Rotate.apply(key.permute(1, 2, 0, 3), cos_SE, sin_SE)
        out_BNSD = causal_attention(q_BNSD, k_BKSD, value.permute(1, 2, 0, 3), self.sliding_window)  # type: ignore[arg-type]
        return out_BNSD.permute(2, 0, 1, 3).reshape(length, rows, heads * head_dim)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        cos_S1E, sin_S1E = self.rotary.packed(sequences, query.dtype)
        q_SND, k_SKD = _Rotate.apply(query, cos_S1E, sin_S1E), _Rotate.apply(key, cos_S1E, sin_S1E)
        return packed_attention(q_SND, k_SKD, value, sequences, self.sliding_window).flatten(1)  # type: ignore[arg-type]


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
