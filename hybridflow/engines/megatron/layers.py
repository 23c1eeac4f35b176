"""Parts of the GPTModel's layers other than Megatron's parallel linear layers, and CPU versions of those.

Shapes: S positions, B rows, H hidden, F MLP columns (of this rank), M selected positions, N heads (of this rank), K
kv-heads (of this rank), D head dimension, E = D / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn

from hybridflow.batch.pinned import to_device
from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.micro_batches import Sequences
from hybridflow.models.spec import ModelSpec


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in the signature that Megatron's specs call."""

    def __init__(self, config, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  (read by Megatron)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.is_grad_enabled():
            return _CpuRMSNorm.apply(x, self.weight, self.eps)  # type: ignore[return-value]
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _CpuRMSNorm(torch.autograd.Function):
    """`F.rms_norm` with a backward of few passes over memory: torch has a fused one on CUDA only."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        size = weight.numel()
        wide, d_rows = x.reshape(-1, size).float(), d.reshape(-1, size).float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size).add_(ctx.eps).rsqrt_()
        unit = wide * scale
        product = d_rows * unit
        d_weight = product.sum(0)
        mean = (product @ weight.float()[:, None]).div_(-size)
        d_x = (d_rows * weight).addcmul_(unit, mean).mul_(scale)
        return d_x.view(x.shape).to(x.dtype), d_weight.to(weight.dtype), None


class SwiGLU(nn.Module):
    """silu(gate) * up of the fused [S, B, 2F] -> [S, B, F]."""

    def __init__(self, config) -> None:
        super().__init__()

    def forward(self, fused: Tensor) -> Tensor:
        return _SwiGLU.apply(fused)  # type: ignore[return-value]


class _SwiGLU(torch.autograd.Function):
    """Keeps the fused input only."""

    @staticmethod
    def forward(ctx, fused):
        ctx.save_for_backward(fused)
        gate, up = fused.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        (fused,) = ctx.saved_tensors
        gate, up = fused.chunk(2, -1)
        d_fused = torch.empty_like(fused)
        d_gate, d_up = d_fused.chunk(2, -1)
        torch.mul(F.silu(gate), d, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d * up, gate, grad_input=d_gate)
        return d_fused


class SelectedPositions:
    """Forward pre-hook of the output layer: selects the positions that are read, [S, B, H] -> [M, 1, H].

    `index` [M] int64 counts positions in [S * B]; it is set before each forward pass. Under sequence parallelism the
    positions are gathered first; the output layer must then add up its input gradients as without it.
    """

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.index: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple) -> tuple:
        hidden = args[0]
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.index is not None:
            rows = rows.index_select(0, self.index)
        return (rows[:, None], *args[1:])


class ValueHead(nn.Module):
    """hidden -> one number in float32, in the place of the output layer; equal on all tensor parallel ranks."""

    def __init__(self, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden, dtype=dtype, device=device))

    def forward(self, rows: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        """rows [M, 1, H] -> ([N, 1, 1] float32, no bias)."""
        return F.linear(rows.float(), self.weight.float()), None


def use_onednn(model: nn.Module) -> None:
    """Let the parallel linear layers of a float32 CPU model multiply with oneDNN where torch has it.

    torch multiplies float32 matrices with MKL, which on AMD processors reaches less than half of what oneDNN, part of
    the same torch, does (measured: 95 against 235 GFLOP/s on one core). Nothing changes on CUDA or with 16-bit types.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module._forward_impl = _forward


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup,
    **_,
) -> Tensor:
    """Forward of Megatron's linear layers, with one collective each way."""
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return _Linear.apply(input, weight, bias)  # type: ignore[return-value]


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b.T + bias; a [..., K], b [M, K], any strides."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """y = x @ w.T + b for x [..., K] and w [M, K]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = d.reshape(-1, d.shape[-1])
        d_x = _product(d, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = _product(rows.t(), x.reshape(-1, x.shape[-1]).t()) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# Attention


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
        (inverse_E,) = to_device([self.inverse_E], device)
        angle_SE = torch.outer(torch.arange(length, device=device).float(), inverse_E)
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
