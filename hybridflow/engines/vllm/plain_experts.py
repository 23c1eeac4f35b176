"""Experts on vLLM's CPU build, with weights that can be written in place.

vLLM packs the weights of all experts for one grouped kernel when it loads them. Here each expert is two matrix products
over the tokens that were sent to it, in the form that the loader wrote: as `environment.py` does for linear layers.

Shapes: N tokens, K experts per token, E experts, I intermediate, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Process = Callable[[Any, torch.nn.Module], None]


def keeping_plain(packed: Process) -> Process:
    """What stands in for `packed`, vLLM's processing of loaded experts: it leaves them as they are.

    Experts that are not computed here (with biases, or gates that are no SiLU) are packed after all.
    """

    def process(experts: Any, layer: torch.nn.Module) -> None:
        if experts.moe_config.activation.value != "silu" or experts.w1_bias is not None:
            return packed(experts, layer)
        experts.apply = partial(_apply, experts)
        return None

    return process


def _apply(
    experts: object,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    apply_router_weight_on_input: bool,
    **_: object,
) -> None:
    """`output` [N, H] := of `hidden_states` [N, H] what the experts `topk_ids` [N, K] make of it, weighed by
    `topk_weights` [N, K]; `w1` [E, 2 * I, H] gates and rows up, `w2` [E, H, I] rows down."""
    del experts
    total = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
    for expert in topk_ids.unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, -1)
        made = linear(silu(gate) * up, w2[expert]).to(total.dtype)
        if not apply_router_weight_on_input:  # else the inputs have been weighed
            made = made * topk_weights[token, choice, None]
        total.index_add_(0, token, made)
    output.copy_(total)
