"""The layers that vLLM's model gets when it runs eagerly compute bitwise what vLLM's own do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.engines.vllm.eager import _rms_norm, silu_and_mul


def vllm_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`vllm.ir.ops.rms_norm`."""
    x = x.to(torch.float32)
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + epsilon)).to(weight.dtype) * weight


@given(
    tokens=st.integers(1, 70), hidden=st.integers(1, 600), scale=st.floats(1e-4, 1e4), epsilon=st.floats(1e-12, 1e-2)
)
@settings(max_examples=60, deadline=None)
def test_normalization_is_bitwise_that_of_vllm(tokens: int, hidden: int, scale: float, epsilon: float):
    generator = torch.Generator().manual_seed(tokens * 1000 + hidden)
    x, residual = torch.randn(2, tokens, hidden, generator=generator).mul(scale).unbind()
    weight = torch.randn(hidden, generator=generator)
    normalized = _rms_norm(SimpleNamespace(weight=weight, hidden_size=hidden, variance_epsilon=epsilon), NotImplemented)
    assert torch.equal(normalized(x), vllm_norm(x, weight, epsilon))
    found, total = normalized(x, residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(found, vllm_norm(x + residual, weight, epsilon))


def test_other_dtypes_are_left_to_vllm():
    module = SimpleNamespace(weight=torch.ones(4, dtype=torch.bfloat16), hidden_size=4, variance_epsilon=1e-6)
    normalized = _rms_norm(module, lambda *given: given)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    assert normalized(x) == (x, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gate_is_bitwise_that_of_vllm(dtype: torch.dtype):
    x = torch.randn(37, 2 * 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    assert torch.equal(silu_and_mul(x), torch.nn.functional.silu(x[..., :96]) * x[..., 96:])
    assert torch.equal(x, before)
