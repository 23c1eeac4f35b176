"""A tensor's way between ranks, or to other places, whose gradient goes the opposite way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Way = Callable[..., Tensor]


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, *tensors: Tensor) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return there(x, *tensors)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # asked for once: activations that are computed again are given once
        return ctx.back(d, *tensors), None, None, *[None] * len(tensors)


def both_ways(x: Tensor, there: Way, back: Way, *tensors: Tensor) -> Tensor:
    """`there(x, *tensors)`, whose gradient is `back(d, *tensors)`; `tensors` have none, and wait with the graph."""
    return _BothWays.apply(x, there, back, *tensors)  # type: ignore[return-value]
