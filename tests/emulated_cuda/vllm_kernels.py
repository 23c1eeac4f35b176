"""vLLM's own CUDA operators and its flash attention, in plain torch on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emulated_cuda.attention import attend, visible


def rms_norm(result, input, weight, epsilon):
    x = input.float()
    x = (x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(input.dtype)
    result.copy_((x if weight is None else x * weight).view(result.shape))


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    rms_norm(input, residual, weight, epsilon)


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
    def kernel(out: Tensor, x: Tensor) -> None:
        gate, up = x.chunk(2, -1)
        out.copy_(function(gate) * up)

    return kernel


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False):
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, -1)
    for x in (query, key):
        if x is None:
            continue
        rotated = x.view(positions.numel(), -1, head_size)[..., : cos.shape[-1] * 2]
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        a, b = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        parts = a * c - b * s, b * c + a * s
        rotated.copy_(torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2))


def vocab_parallel_embedding(out, input_ids, weight, org_start, org_end, padding, added_start, added_end):
    own = (input_ids >= org_start) & (input_ids < org_end)
    rows = F.embedding(torch.where(own, input_ids - org_start, 0), weight)
    out.copy_(torch.where(own[:, None], rows, 0))


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kind, k_scale, v_scale):
    size = key_cache.shape[1]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[i]
            value_cache[slot // size, slot % size] = value[i]


OPERATORS = {
    "_C": {
        "rms_norm": rms_norm,
        "fused_add_rms_norm": fused_add_rms_norm,
        "silu_and_mul": gated(F.silu),
        "gelu_and_mul": gated(F.gelu),
        "gelu_tanh_and_mul": gated(lambda x: F.gelu(x, approximate="tanh")),
        "rotary_embedding": rotary_embedding,
        "vocab_parallel_embedding": vocab_parallel_embedding,
    },
    "_C_cache_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
}


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    **_: object,
) -> Tensor:
    """Packed queries [T, N, D]; keys packed likewise, or in pages [blocks, block size, N, D] named by `block_table`."""
    left, right = window_size or (-1, -1)
    starts = cu_seqlens_q.tolist()
    lengths = (seqused_k if seqused_k is not None else cu_seqlens_k.diff()).tolist()
    made = torch.zeros_like(q)
    for i, length in enumerate(lengths):
        start, stop = starts[i], starts[i + 1]
        if start == stop:
            continue
        if block_table is not None:
            pages = block_table[i, : -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        else:
            keys, values = (x[cu_seqlens_k[i] : cu_seqlens_k[i + 1]] for x in (k, v))
        heads_first = (x.transpose(0, 1) for x in (q[start:stop], keys, values))
        row, _ = attend(*heads_first, softmax_scale, visible(stop - start, length, causal, left, right))
        made[start:stop] = row.transpose(0, 1).to(q.dtype)
    return made if out is None else out.copy_(made)
