"""Edits of draws cost what they read: tokens only where a penalty or a bad word depends on them, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.config import Sampling
from hybridflow.engines.vllm.eager import _rms_norm, silu_and_mul
from hybridflow.engines.vllm.engine_loop import LogitEdits

VOCABULARY = 700


class Ids:
    """vLLM's ids of a batch, which stay -1 for tokens that are drawn ahead; counts what is read."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids, self.read = np.full((2, 2048), -1, np.int32), 0
        self.ids[:, : len(prompt)] = prompt

    def __getitem__(self, key: Any) -> Any:
        found = self.ids[key]
        self.read += found.size
        return found


def draws(sampling: Sampling, steps: int, words: tuple[tuple[int, ...], ...] = ()) -> tuple[list[list[int]], int]:
    """Greedy tokens of two rows with the same logits, only the second with edits, and the number of ids read."""
    from hybridflow.engines.vllm.sampler import PolicySampler

    ids, counts = Ids([1, 2, 3]), np.array([3, 3])
    batch = SimpleNamespace(req_ids=["plain", "edited"], token_ids_cpu=ids, num_tokens_no_spec=counts)
    sampler = PolicySampler(SimpleNamespace(input_batch=batch))
    sampler.streams = dict.fromkeys(batch.req_ids, (0, 3))
    sampler.edits["edited"] = LogitEdits(sampling, words)
    found = []
    for _ in range(steps):
        logits = torch.arange(VOCABULARY, 0, -1).float().repeat(2, 1)
        metadata = SimpleNamespace(all_greedy=True)
        tokens, logp = sampler.sample(logits, metadata)  # type: ignore[arg-type]
        assert logp[0].equal(logp[1])
        found.append(tokens.tolist())
        counts += 1
    return found, ids.read


@pytest.mark.parametrize(
    ("options", "expected", "read"),
    [
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, None, 3),
        ({"min_p": 0.5}, 0, 0),
        ({"logit_bias": {5: 1000.0}}, 5, 0),
    ],
)
def test_a_token_is_read_once_and_only_where_edits_depend_on_it(options, expected, read):
    found, seen = draws(Sampling(**options), 400)
    assert seen == read
    assert {plain for plain, _ in found} == {0}
    edited = [token for _, token in found]
    if expected is not None:
        assert set(edited) == {expected}
        return
    said = np.zeros(VOCABULARY)
    for token in edited:
        assert token == int(np.argmax(np.arange(VOCABULARY, 0, -1) - 2.0 * said - 2.0 * (said > 0)))
        said[token] += 1


def test_a_bad_word_is_never_completed():
    found, _ = draws(Sampling(), 5, ((0, 0),))
    assert [token for _, token in found] == [0, 1, 0, 1, 0]


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
