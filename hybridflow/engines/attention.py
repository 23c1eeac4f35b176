"""Attention of a packed row: every position sees the positions of its own sequence up to itself, and nothing else.

Shapes: S positions of the packed row, N heads, K kv-heads (N a multiple of K), D head dimension, b rows, L positions.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hybridflow.engines.packing import Sequences


def packed_attention(
    q_SND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    sequences: Sequences,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v within each sequence, causal; [S, N, D] in the dtype of the inputs, differentiable.

    `window`: each position sees itself and the `window - 1` before it. `scale` defaults to 1 / sqrt(D). With `softcap`
    logits x are softcap * tanh(x / softcap), as Gemma 2 has them. On CUDA in 16 bits one call of the flash kernel for
    sequences of varying length; else one call of scaled dot-product attention for each run of neighbours of equal
    length (flash has no float32, no soft cap and no values of another size than D, which give [S, N, their size] here,
    and torch's kernels for it no CPU path).
    """
    if window is not None and window >= sequences.longest:
        window = None
    if softcap is None and _has_flash(q_SND.device, q_SND.dtype, q_SND.shape[-1], v_SKD.shape[-1]):
        longest, offsets = sequences.longest, sequences.offsets
        return varlen_attn(  # type: ignore[return-value]  (log-sum-exp too, when it is asked for)
            q_SND,
            k_SKD,
            v_SKD,
            offsets,
            offsets,
            longest,
            longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q_SND.shape[1] != k_SKD.shape[1],
        )
    sizes = [count * length for count, length in sequences.runs]
    parts = zip(sequences.runs, q_SND.split(sizes), k_SKD.split(sizes), v_SKD.split(sizes), strict=True)
    out = []
    for (count, length), *qkv in parts:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        out.append(causal_attention(q, k, v, window, scale, softcap).transpose(1, 2).flatten(0, 1))
    return torch.cat(out)


def causal_attention(
    q_bNLD: Tensor,
    k_bKLD: Tensor,
    v_bKLD: Tensor,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The same for rows that are padded on the right, [b, N, L, D]: nobody looks at padding, so it needs no mask."""
    length, device = q_bNLD.shape[2], q_bNLD.device
    if softcap is not None:
        return _capped_attention(q_bNLD, k_bKLD, v_bKLD, window, scale, softcap)
    mask_LL = _window_mask(length, window, device)
    return F.scaled_dot_product_attention(
        q_bNLD,
        k_bKLD,
        v_bKLD,
        attn_mask=mask_LL,
        is_causal=mask_LL is None,
        scale=scale,
        enable_gqa=q_bNLD.shape[1] != k_bKLD.shape[1],
    )


def _capped_attention(
    q_bNLD: Tensor, k_bKLD: Tensor, v_bKLD: Tensor, window: int | None, scale: float | None, softcap: float
) -> Tensor:
    """Attention in plain operations, the softmax in float32: [b, N, L, L] exist at once."""
    groups, length = q_bNLD.shape[1] // k_bKLD.shape[1], q_bNLD.shape[2]
    k_bNLD, v_bNLD = (x.repeat_interleave(groups, 1) for x in (k_bKLD, v_bKLD))
    logits_bNLL = q_bNLD @ k_bNLD.mT * (q_bNLD.shape[-1] ** -0.5 if scale is None else scale)
    logits_bNLL = (logits_bNLL / softcap).tanh() * softcap
    seen_LL = _window_mask(length, length if window is None else window, q_bNLD.device, always=True)
    assert seen_LL is not None
    weights_bNLL = logits_bNLL.masked_fill(~seen_LL, float("-inf")).softmax(-1, dtype=torch.float32)
    return weights_bNLL.to(q_bNLD.dtype) @ v_bNLD


def _window_mask(length: int, window: int | None, device: torch.device, always: bool = False) -> Tensor | None:
    """[L, L] bool: each position sees itself and the `window - 1` before it; unless `always` None when that is all."""
    if window is None or (length <= window and not always):
        return None
    position_L = torch.arange(length, device=device)
    distance_LL = position_L[:, None] - position_L
    return (distance_LL >= 0) & (distance_LL < window)


@lru_cache(maxsize=16)
def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether the flash kernel takes these; it is for Ampere and later, and for values as wide as keys."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim != value_dim:
        return False
    return head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability(device) >= (8, 0)
