"""The parts that the GPTModel's layers are made of besides Megatron's parallel linear layers, and these on the CPU.

Shapes: S positions, B rows, H hidden, F MLP columns (of this rank), N selected positions.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


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
        d_gate.copy_(torch.ops.aten.silu_backward(d * up, gate))
        return d_fused


class SelectedPositions:
    """Forward pre-hook of the output layer: of [S, B, H] only the positions that are asked for go on, as [N, 1, H].

    Most of a vocabulary-sized product is saved for prompts and padding. `index` [N] int64 counts positions in
    [S * B]; it is set before each forward pass. Under sequence parallelism the positions are gathered first; the
    output layer itself must then add up its input gradients like without sequence parallelism.
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
        """rows [N, 1, H] -> ([N, 1, 1] float32, no bias)."""
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
    """What Megatron's linear layers do around their matrix products, as one collective each way."""
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
