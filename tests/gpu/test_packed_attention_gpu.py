"""Packed attention on one CUDA device: the flash kernel for varying lengths against the definition in float32."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engines.attention import packed_attention
from hybridflow.engines.micro_batches import Sequences

pytestmark = pytest.mark.gpu


def by_definition(q, k, v, lengths, window):
    """One softmax over a mask of all pairs of positions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(q.device)
    at = torch.arange(len(of), device=q.device)
    distance = at[:, None] - at
    seen = (of[:, None] == of) & (distance >= 0) & (distance < (window or len(of)))
    scores = torch.einsum("snd,tnd->nst", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("nst,tnd->snd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((8, 2), 64), ((4, 4), 32)])
def test_packed_attention_is_its_definition(dtype, window, heads, width):
    """`width` is that of the values; latent attention has them narrower than queries and keys."""
    lengths, device = [7, 1, 130, 130, 64], torch.device("cuda", 0)
    torch.manual_seed(0)
    sizes = [(heads[0], 64), (heads[1], 64), (heads[1], width), (heads[0], width)]
    made = [torch.randn(sum(lengths), *size, device=device) for size in sizes]
    rounded = [x.to(dtype) for x in made]
    ours, theirs = ([x.to(kind).requires_grad_() for x in rounded[:3]] for kind in (dtype, torch.float32))
    found = packed_attention(*ours, Sequences.of(lengths).to(device), window)
    want = by_definition(*theirs, lengths, window)
    gradients = torch.autograd.grad(found, ours, rounded[3])
    expected = torch.autograd.grad(want, theirs, rounded[3].float())
    # what is multiplied and what comes out is rounded to 8 (bfloat16) or 11 bits: a few times 2^-9 and 2^-12
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]
    for got, right in zip((found, *gradients), (want, *expected), strict=True):
        assert got.dtype == dtype
        assert float((got.float() - right).norm() / right.norm()) < tolerance
