"""Linear layers on the CPU: oneDNN instead of the BLAS that torch was built with.

torch multiplies float32 matrices with MKL, which on AMD processors reaches less than half of what oneDNN, part of the
same torch, does (measured: 95 against 235 GFLOP/s on one core). Nothing changes on CUDA or with 16-bit types.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


def use_onednn(model: nn.Module) -> None:
    """Let the parallel linear layers of a float32 CPU model multiply with oneDNN where torch has it."""
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
