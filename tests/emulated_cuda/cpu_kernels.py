"""Operators of CUDA that have no CPU kernel of that name, or none that does the same, on CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.emulated_cuda.attention import ATTENTION

aten = torch.ops.aten


def softmax(x, dim, half_to_float):
    return aten._softmax(x.float() if half_to_float else x, dim, False)


def log_softmax(x, dim, half_to_float):
    return aten._log_softmax(x.float() if half_to_float else x, dim, False)


def softmax_out(x, dim, half_to_float, *, out):
    return aten._softmax.out(x.float() if half_to_float else x, dim, False, out=out)


def log_softmax_out(x, dim, half_to_float, *, out):
    return aten._log_softmax.out(x.float() if half_to_float else x, dim, False, out=out)


def given(target: Tensor | None, made: Tensor) -> Tensor:
    return made if target is None else target.resize_(made.shape).copy_(made)


def softmax_backward(grad, out, dim, input_dtype, *, grad_input=None):
    return given(grad_input, aten._softmax_backward_data(grad, out, dim, grad.dtype).to(input_dtype))


def log_softmax_backward(grad, output, dim, input_dtype, *, out=None):
    return given(out, aten._log_softmax_backward_data(grad, output, dim, grad.dtype).to(input_dtype))


def rms_norm(x, shape, weight, eps):
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    rstd = (x.float().pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
    out = x.float() * rstd
    return (out if weight is None else out * weight).to(x.dtype), rstd


def rms_norm_backward(grad, x, shape, rstd, weight, mask):
    dims = tuple(range(-len(shape), 0))
    grad = grad.float()
    normed = x.float() * rstd
    grad_weight = None
    if weight is not None and mask[1]:
        grad_weight = (grad * normed).sum(tuple(range(x.dim() - len(shape)))).to(x.dtype)
    if weight is not None:
        grad = grad * weight.float()
    grad_x = (rstd * (grad - normed * (grad * normed).mean(dims, keepdim=True))).to(x.dtype)
    return grad_x if mask[0] else None, grad_weight


def dropout(x, p, train, *, generator):
    """The CPU's kernel draws from the generator of the host."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.rand(x.shape, generator=generator) >= p
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


KERNELS: dict[str, Any] = {
    "native_dropout": dropout,
    "_softmax": softmax,
    "_softmax.out": softmax_out,
    "_softmax_backward_data": softmax_backward,
    "_softmax_backward_data.out": softmax_backward,
    "_log_softmax": log_softmax,
    "_log_softmax.out": log_softmax_out,
    "_log_softmax_backward_data": log_softmax_backward,
    "_log_softmax_backward_data.out": log_softmax_backward,
    "_fused_rms_norm": rms_norm,
    "_fused_rms_norm_backward": rms_norm_backward,
    **ATTENTION,
}
