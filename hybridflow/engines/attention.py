"""Attention of a packed row: every position sees the positions of its own sequence up to itself, and nothing else.

`register_packed_attention` makes it an `attn_implementation` of every decoder of transformers. A packed row goes to
such a model as `model(input_ids=ids_1S, position_ids=sequences.positions[None], sequences=sequences)`; transformers
hands unknown keyword arguments down to its attention function.

Shapes: S positions of the packed row, N heads, K kv-heads (N a multiple of K), D head dimension, b rows, L positions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from hybridflow.engines.micro_batches import Sequences
from hybridflow.errors import ModelError

PACKED_ATTENTION = "hybridflow_packed"
_UNKNOWN = ("s_aux", "position_bias")
"""Arguments of some models' attention that ours does not support: sinks, biases."""


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
    logits x are softcap * tanh(x / softcap), as Gemma 2 has them. Values may be narrower than D, and so is then the
    result. On CUDA in 16 bits one call of the flash kernel for sequences of varying length, narrower values filled up
    with zeros; else one call of scaled dot-product attention for each run of neighbours of equal length (flash has no
    float32 and no soft cap, and torch's kernels for it no CPU path).
    """
    if (share := sequences.share) is not None:  # context parallelism: all tokens of a part of the heads
        q_SND, k_SKD, v_SKD = (share.heads(x) for x in (q_SND, k_SKD, v_SKD))
        return share.tokens(packed_attention(q_SND, k_SKD, v_SKD, sequences.whole, window, scale, softcap))
    if window is not None and window >= sequences.longest:
        window = None
    if softcap is None and _has_flash(q_SND.device, q_SND.dtype, q_SND.shape[-1], v_SKD.shape[-1]):
        longest, offsets, width = sequences.longest, sequences.offsets, v_SKD.shape[-1]
        if width < q_SND.shape[-1]:
            v_SKD = F.pad(v_SKD, (0, q_SND.shape[-1] - width))
        out_SND: Any = varlen_attn(  # log-sum-exp too, when it is asked for
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
        return out_SND[..., :width]
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
    """The same for rows that are padded on the right, [b, N, L, D]: causal attention never sees padding."""
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


def _has_flash(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether the flash kernel takes these; values must not be wider than keys."""
    if not has_flash_kernels(device) or dtype not in (torch.float16, torch.bfloat16) or head_dim < value_dim:
        return False
    return head_dim % 8 == 0 and head_dim <= 256


@lru_cache(maxsize=16)
def has_flash_kernels(device: torch.device) -> bool:
    """They are for Ampere and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def register_packed_attention() -> str:
    """The name of our attention function, known to transformers from now on. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, attention_forward)
    return PACKED_ATTENTION


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sequences: Sequences | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """query [b, N, S, D], key and value [b, K, S, D], rotated -> [b, S, N, D]; causal, also for padded rows.

    Errors: ModelError for a mask or a kind of attention that this function does not compute.
    """
    unknown = [name for name in _UNKNOWN if more.get(name) is not None]
    unknown += [name for name, given in (("attention_mask", attention_mask is not None), ("dropout", dropout)) if given]
    if unknown or not getattr(module, "is_causal", True):
        raise ModelError(
            f"{type(module).__name__} attends with {' and '.join(unknown) or 'no causal mask'}, which packed attention "
            f"does not compute. Use a model of plain causal attention."
        )
    if sequences is None:
        return causal_attention(query, key, value, sliding_window, scaling, softcap).transpose(1, 2), None
    q_SND, k_SKD, v_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed_attention(q_SND, k_SKD, v_SKD, sequences, sliding_window, scaling, softcap)[None], None
