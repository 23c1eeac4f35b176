"""Packed attention for every decoder of transformers: a name for `attn_implementation`.

A packed row goes to such a model as `model(input_ids=ids_1S, position_ids=sequences.positions[None],
sequences=sequences)`; transformers hands unknown keyword arguments down to its attention function.

Shapes: b rows, N heads, K kv-heads, S positions, D head dimension.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from hybridflow.engines.attention import causal_attention, packed_attention
from hybridflow.engines.packing import Sequences
from hybridflow.errors import ModelError

PACKED_ATTENTION = "hybridflow_packed"
_UNKNOWN = ("s_aux", "position_bias")
"""What some models' attention has besides, and ours has not: sinks, biases."""


def register_packed_attention() -> str:
    """The name of our attention function, known to transformers from now on. May be called again."""
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
