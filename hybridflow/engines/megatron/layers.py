"""Parts of the GPTModel's layers other than Megatron's parallel linear layers, and CPU versions of those.

Shapes: S positions, B rows, H hidden, F MLP columns (of this rank), M selected positions, N heads (of this rank), K
kv-heads (of this rank), D head dimension, E = D / 2.
"""

from __future__ import annotations

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
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from hybridflow.batch.pinned import to_device
from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.micro_batches import Sequences
from hybridflow.engines.rank_exchanges import both_ways
from hybridflow.models.architecture import Activation, Architecture, Attention, Rotation


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in the signature that Megatron's specs call; with
    `layernorm_zero_centered_gamma` times 1 + weight."""

    def __init__(self, config, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.shifted = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device_of(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  (read by Megatron)

    def forward(self, x: Tensor) -> Tensor:
        if self.shifted:  # in float32: near one, 16 bits of the sum would be fewer than those of the weight
            return _rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).to(x.dtype)
        return _rms_norm(x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type == "cpu" and torch.is_grad_enabled():
        return _CpuRMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return F.rms_norm(x, weight.shape, weight, eps)


def device_of(config: Any) -> torch.device | str:
    """Where Megatron builds a model of this configuration."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()  # type: ignore[return-value]


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


class HeadsNorm(nn.Module):
    """RMSNorm over all `heads` of queries or keys together, of which the ranks of `group` have equal parts.

    x [..., N, D]; weight [N * D] of this rank's heads.
    """

    def __init__(self, config, hidden_size: int, eps: float, heads: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.group, self.size = eps, group, heads * hidden_size
        own = torch.ones(self.size // group.size(), dtype=config.params_dtype, device=device_of(config))
        self.weight = nn.Parameter(own)
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]  (each rank counts its own)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.flatten(-2).float()
        total = wide.square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            total = both_ways(total, self._sum, self._sum)  # each rank uses it, so the gradient is a sum, too
        unit = wide * (total / self.size + self.eps).rsqrt()
        return (unit.to(x.dtype) * self.weight).view(x.shape)

    def _sum(self, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=self.group)
        return x


class LayerOutput(RowParallelLinear):
    """What attention or MLP adds to the residual stream: normalised where the architecture has a norm behind it, and
    times `scale`, in a hook, before which adapters add their own."""

    def __init__(self, *args: Any, config: Any, normed: bool, scale: float, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.scale = scale
        self.post_layernorm = RMSNorm(config, self.output_size, config.layernorm_epsilon) if normed else None
        self.register_forward_hook(LayerOutput._finish)

    def _finish(self, args: tuple, given: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        out, bias = given
        out = out if self.post_layernorm is None else self.post_layernorm(out)
        return out if self.scale == 1.0 else out * self.scale, bias


class Replicated(nn.Module):
    """x @ weight.T, the weight equal on all tensor parallel ranks, which may have different tokens."""

    def __init__(self, config, columns: int, rows: int) -> None:
        super().__init__()
        dtype = config.params_dtype
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device_of(config)))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  (read by Megatron)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Gated(nn.Module):
    """activation(gate) * up of the fused [S, B, 2F] -> [S, B, F]; gelu in its approximation by tanh."""

    def __init__(self, config, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, fused: Tensor) -> Tensor:
        if self.activation == "silu":
            return _SwiGLU.apply(fused)  # type: ignore[return-value]
        gate, up = fused.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


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
    if not a.numel():  # oneDNN refuses to multiply nothing
        return F.linear(a, b, bias)
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


class Rotary:
    """cos and sin of every position's rotation, [S, E] in the asked dtype; kept for the last few lengths and rows."""

    def __init__(self, rotation: Rotation) -> None:
        self.inverse_E, self.scale = torch.tensor(rotation.inverse), rotation.scale
        self.interleaved = rotation.interleaved
        self.table = lru_cache(maxsize=16)(self._table)
        self.packed = lru_cache(maxsize=4)(self._packed)  # all layers ask for the same row, one after the other

    def of(self, sequences: Sequences | None, x: Tensor) -> tuple[Tensor, Tensor]:
        """[S, 1, 1, E] for x [S, B, N, D], of a packed row or of padded ones."""
        if sequences is not None:
            cos, sin = self.packed(sequences, x.dtype)
            return cos[:, None], sin[:, None]
        cos, sin = self.table(x.shape[0], x.device, x.dtype)
        return cos[:, None, None], sin[:, None, None]

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        (inverse_E,) = to_device([self.inverse_E], device)
        angle_SE = torch.outer(torch.arange(length, device=device).float(), inverse_E)
        cos_SE, sin_SE = angle_SE.cos(), angle_SE.sin()
        if self.scale != 1.0:
            cos_SE, sin_SE = cos_SE * self.scale, sin_SE * self.scale
        return cos_SE.to(dtype), sin_SE.to(dtype)

    def _packed(self, sequences: Sequences, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[S, 1, E], S of this rank: the positions of every sequence begin at 0."""
        cos_LE, sin_LE = self.table(sequences.longest, sequences.positions.device, dtype)
        positions = sequences.positions if sequences.share is None else sequences.share.part(sequences.positions)
        return cos_LE[positions][:, None], sin_LE[positions][:, None]


class _Rotate(torch.autograd.Function):
    """Rotates the pairs of the first 2E of [..., D] (any strides); the result is contiguous.

    cos and sin are broadcast from [..., E]."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(d, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    out, turned = torch.empty(x.shape, dtype=x.dtype, device=x.device), 2 * cos.shape[-1]
    (a, b), (out_a, out_b) = (_pairs(whole[..., :turned], interleaved) for whole in (x, out))
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)  # type: ignore[return-value]


class CoreAttention(nn.Module):
    """Megatron's core attention of a layer: rotary embeddings, grouped kv-heads, an optional sliding window.

    `rotary` is that of the layer's rotation, None without one."""

    def __init__(self, arch: Architecture, layer: Attention, rotary: Rotary | None, **_) -> None:
        super().__init__()
        self.rotary, self.sliding_window = rotary, layer.window
        self.scale, self.softcap = arch.scale, arch.softcap

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedRow | None = None,
        **_,
    ) -> Tensor:
        """query [S, B, N, D], key and value [S, B, K, D] -> [S, B, N * D]; of a packed row all without B. Values may
        have another size D, which is then the result's."""
        if packed_seq_params is not None and packed_seq_params.sequences is not None:
            return self._packed(query, key, value, packed_seq_params.sequences)
        length, rows = query.shape[:2]
        q_BNSD, k_BKSD = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3)
        if self.rotary is not None:
            cos_SE, sin_SE = self.rotary.table(length, query.device, query.dtype)
            q_BNSD, k_BKSD = (_Rotate.apply(x, cos_SE, sin_SE, self.rotary.interleaved) for x in (q_BNSD, k_BKSD))
        v_BKSD = value.permute(1, 2, 0, 3)
        out_BNSD = causal_attention(q_BNSD, k_BKSD, v_BKSD, self.sliding_window, self.scale, self.softcap)  # type: ignore[arg-type]
        return out_BNSD.permute(2, 0, 1, 3).reshape(length, rows, -1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        if self.rotary is not None:
            cos_S1E, sin_S1E = self.rotary.packed(sequences, query.dtype)
            query, key = (_Rotate.apply(x, cos_S1E, sin_S1E, self.rotary.interleaved) for x in (query, key))  # type: ignore[assignment]
        window, scale, softcap = self.sliding_window, self.scale, self.softcap
        return packed_attention(query, key, value, sequences, window, scale, softcap).flatten(1)


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


class LatentAttention(nn.Module):
    """Attention of `arch.latent` in the place of Megatron's SelfAttention: what is small is whole on every tensor
    parallel rank, what has heads is cut by heads. `core` makes the core attention, `output` what ends it."""

    def __init__(self, config, arch: Architecture, rotary: Rotary, core: Any, output: Any, pg_collection, **_) -> None:
        super().__init__()
        assert arch.latent is not None
        self.parts, self.group, self.rotary = arch.latent, pg_collection.tp, rotary
        self.heads, self.sequence_parallel = arch.heads // self.group.size(), config.sequence_parallel
        parts, heads = self.parts, arch.heads
        settings: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": True,
            "tp_group": self.group,
        }

        def up(columns: int, size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(columns, heads * size, gather_output=False, **settings)

        if parts.query_rank:
            self.linear_q_down = Replicated(config, arch.hidden, parts.query_rank)
            self.q_layernorm = RMSNorm(config, parts.query_rank, parts.norm_eps)
        self.linear_q_up = up(parts.query_rank or arch.hidden, parts.plain + parts.turned)
        self.linear_kv_down = Replicated(config, arch.hidden, parts.rank + parts.turned)
        self.kv_layernorm = RMSNorm(config, parts.rank, parts.norm_eps)
        self.linear_kv_up = up(parts.rank, parts.plain + parts.values)
        self.core_attention = core()
        self.linear_proj = build_module(
            output, heads * parts.values, arch.hidden, input_is_parallel=True, is_expert=False, **settings
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] -> [S, B, H], no bias."""
        parts, sequences = self.parts, None if packed_seq_params is None else packed_seq_params.sequences
        queries = hidden_states
        if parts.query_rank:
            queries = self.q_layernorm(self.linear_q_down(queries))
        query, _ = self.linear_q_up(queries)
        latent, key_turned = self.linear_kv_down(hidden_states).split([parts.rank, parts.turned], -1)
        key_value, _ = self.linear_kv_up(self.kv_layernorm(latent))
        if self.sequence_parallel:
            key_turned = gather_from_sequence_parallel_region(key_turned, group=self.group)
        else:
            key_turned = copy_to_tensor_model_parallel_region(key_turned, group=self.group)
        query, key_value = (x.unflatten(-1, (self.heads, -1)) for x in (query, key_value))
        query, query_turned = query.split([parts.plain, parts.turned], -1)
        key, value = key_value.split([parts.plain, parts.values], -1)
        cos, sin = self.rotary.of(sequences, query)
        query_turned, key_turned = (
            _Rotate.apply(x, cos, sin, self.rotary.interleaved) for x in (query_turned, key_turned[:, :, None])
        )
        query = torch.cat((query, query_turned), -1)
        key = torch.cat((key, key_turned.expand(-1, -1, self.heads, -1)), -1)
        if sequences is None:
            return self.linear_proj(self.core_attention(query, key, value, attention_mask))
        packed = (x.squeeze(1) for x in (query, key, value))
        return self.linear_proj(self.core_attention(*packed, attention_mask, packed_seq_params)[:, None])
