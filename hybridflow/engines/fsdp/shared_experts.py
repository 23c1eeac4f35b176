"""Experts of transformers' model, of which each expert parallel rank has its own, for the tokens of all of them.

Shapes: T rows of this rank, k experts of each, R rows that its experts compute, L experts of this rank, H hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.engines.expert_parallel import ExpertParallel, grouped
from hybridflow.models.hf_spec import expert_modules


def share_experts(model: nn.Module, ep: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[Any]:
    """The modules of experts in `model`, whose parameters (on the meta device) are then those of this rank of `ep`;
    `alone` is a group of this rank only."""
    found = list(expert_modules(model).values())
    for module in found:
        parallel = ExpertParallel(module.num_experts, ep, alone, ep)
        for name, whole in list(module.named_parameters()):
            own = whole.detach()[: parallel.local].clone()
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        module.forward = partial(_forward, module, parallel)
    return found


def _forward(
    module: Any, parallel: ExpertParallel, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """[T, H] of `hidden_states` [T, H], in transformers' signature."""
    return parallel(hidden_states, top_k_weights, top_k_index, partial(_compute, module)).to(hidden_states.dtype)


def _compute(module: Any, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
    """What transformers' `grouped_mm_experts_forward` computes of rows that are sorted."""
    if not len(rows_RH):
        return rows_RH
    ends_L = counts_L.cumsum(0).to(torch.int32)

    def product(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        out = grouped(rows, weight if module.is_transposed else weight.mT, ends_L)
        return out + getattr(module, f"{name}_bias").repeat_interleave(counts_L, 0) if module.has_bias else out

    if module.has_gate:
        return product(module._apply_gate(product(rows_RH, "gate_up_proj")), "down_proj")
    return product(module.act_fn(product(rows_RH, "up_proj")), "down_proj")
