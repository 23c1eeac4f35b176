"""Log-probabilities and entropy in blocks of tokens: bit for bit what one block gives, and what float64 says."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from hybridflow.engines import token_outputs
from hybridflow.engines.token_outputs import vocab_parallel_log_probs

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def alone() -> Any:
    return c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=datetime.timedelta(seconds=20))


def computed(
    group: Any, logits: Tensor, targets: Tensor, first: int, temperature: float, entropy: bool
) -> list[Tensor]:
    """Both outputs, and the gradient of a sum of them with unequal weights."""
    leaf = logits.clone().requires_grad_()
    found = vocab_parallel_log_probs(leaf, targets, first, group, temperature, entropy)
    kept = [output for output in found if output is not None]
    weights = torch.arange(1.0, len(targets) + 1).sin()
    sum(((output * weights).sum() for output in kept), torch.zeros(())).backward()
    assert leaf.grad is not None
    return [*(output.detach() for output in kept), leaf.grad]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(-20, 20),
    st.sampled_from((1.0, 0.7, 3.0)),
    st.booleans(),
    st.sampled_from(TYPES),
    st.integers(1, 700),
    st.integers(0, 99),
)
def test_blocks_change_no_bit(alone, tokens, columns, first, temperature, entropy, dtype, block_bytes, seed):
    """Also for targets that are columns of another rank: they count as 0 here."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, columns, generator=generator) * 4).to(dtype)
    targets = torch.randint(0, columns, (tokens,), generator=generator)
    arguments = (alone, logits, targets, first, temperature, entropy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_outputs, "_BLOCK_BYTES", 1 << 30)
        once = computed(*arguments)
        patch.setattr(token_outputs, "_BLOCK_BYTES", block_bytes)
        blocks = computed(*arguments)
    assert all(map(torch.equal, once, blocks))
    if not first:
        exact = logits.double().requires_grad_()
        log_p = (exact / temperature).log_softmax(-1)
        outputs = [log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)][: 1 + entropy]
        weights = torch.arange(1.0, tokens + 1).sin()
        sum(((output * weights).sum() for output in outputs), torch.zeros(())).backward()
        for got, want in zip(once, [*outputs, exact.grad], strict=True):
            near = 1e-5 if got.dtype == torch.float32 else 1e-2
            assert torch.allclose(got.double(), want, rtol=near, atol=near)  # type: ignore[arg-type]


def test_no_more_than_blocks_exist_at_once(alone):
    """Of float32 [tokens, vocabulary], in the forward and in the backward pass."""
    tokens, columns = 64, 1000
    logits = torch.randn(tokens, columns).to(torch.bfloat16)
    targets, whole = torch.arange(tokens), 4 * tokens * columns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_outputs, "_BLOCK_BYTES", whole // 16)
        with torch.profiler.profile(profile_memory=True) as profile:
            computed(alone, logits, targets, 0, 0.7, True)
    largest = max(event.cpu_memory_usage for event in profile.events() if event.name.startswith("aten::"))
    assert largest <= whole // 2  # the gradient, in 16 bits
