"""A mixture of experts in the place of a layer's MLP: a router, its experts (`expert_parallel`), a shared expert.

Shapes: T tokens of this rank, k experts of each, R rows that its experts compute, E experts, L experts of this rank,
H hidden, F columns of an expert (of this rank).
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from hybridflow.engines.megatron.layers import Replicated, device_of
from hybridflow.engines.rank_exchanges import ExpertParallel, grouped
from hybridflow.engines.router_replay import RouterReplay, weights
from hybridflow.models.architecture import Experts


class MixtureOfExperts(nn.Module):
    """[S, B, H] -> ([S, B, H], no bias), in the signature of Megatron's MLP; `shared` are the parts of such an MLP."""

    def __init__(
        self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection, shared: MLPSubmodules
    ) -> None:
        super().__init__()
        self.router = Router(config, experts)
        self.experts = ExpertShare(config, experts, groups, build_module(shared.activation_func, config=config))  # type: ignore[misc]
        self.shared: Any = None
        self.shared_gate: Any = None
        if experts.shared_columns:
            own = copy(config)
            own.ffn_hidden_size = experts.shared_columns
            self.shared = MLP(own, shared, ffn_hidden_size=experts.shared_columns, tp_group=groups.tp)
        if experts.shared_gate:
            self.shared_gate = Replicated(config, config.hidden_size, 1)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        rows_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = self.experts(rows_TH, *self.router(rows_TH)).view(hidden_states.shape)
        if self.shared is not None:
            shared, _ = self.shared(hidden_states)
            out = out + (shared if self.shared_gate is None else self.shared_gate(hidden_states).sigmoid() * shared)
        return out, None


class Router(Replicated):
    """The experts of each token and their weights; `bias` [E] float32 never has a gradient.

    `replay` has the experts that tokens are sent to, whatever their scores: only their weights follow these."""

    def __init__(self, config: TransformerConfig, experts: Experts) -> None:
        super().__init__(config, config.hidden_size, experts.count)
        self.parts, self.replay = experts, RouterReplay()
        if experts.bias:
            self.bias = nn.Parameter(torch.zeros(experts.count, device=device_of(config)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[T, H] -> weights [T, k] in the dtype of x, experts [T, k] int64."""
        parts = self.parts
        if parts.score == "sigmoid":
            scores_TE = F.linear(x.float(), self.weight.float()).sigmoid()
        else:
            scores_TE = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        chosen_Tk = self.replay(self._chosen(scores_TE.detach()))
        return weights(scores_TE, chosen_Tk, parts).to(x.dtype), chosen_Tk

    def _chosen(self, scores_TE: Tensor) -> Tensor:
        parts = self.parts
        if parts.bias:
            scores_TE = scores_TE + self.bias.detach()
        if parts.groups > 1:
            grouped = scores_TE.unflatten(-1, (parts.groups, -1))
            best = grouped.topk(parts.group_best, -1).values.sum(-1).topk(parts.chosen_groups, -1).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=False)
            scores_TE = grouped.masked_fill(left_out[..., None], float("-inf")).flatten(-2)
        return scores_TE.topk(parts.chosen, -1).indices


class ExpertShare(nn.Module):
    """This rank's experts, `fc1` [L, 2F, H] (gate rows, then up) and `fc2` [L, H, F], and the way of tokens to them."""

    def __init__(
        self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection, activation: nn.Module
    ) -> None:
        super().__init__()
        self.parallel = ExpertParallel(experts.count, groups.ep, groups.expt_tp, groups.tp_ep)
        local, width = experts.count // groups.ep.size(), experts.columns // groups.expt_tp.size()
        settings = {"dtype": config.params_dtype, "device": device_of(config)}
        self.fc1 = nn.Parameter(torch.empty(local, 2 * width, config.hidden_size, **settings))
        self.fc2 = nn.Parameter(torch.empty(local, config.hidden_size, width, **settings))
        self.activation = activation

    def forward(self, rows_TH: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        """[T, H]: the sum of what a token's experts give, times their weights."""
        return self.parallel(rows_TH, weights_Tk, chosen_Tk, self._compute)

    def _compute(self, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
        if not len(rows_RH):  # gradients of zero for every expert
            return rows_RH + (self.fc1.sum() + self.fc2.sum()) * 0.0
        ends_L = counts_L.cumsum(0).to(torch.int32)
        return grouped(self.activation(grouped(rows_RH, self.fc1.mT, ends_L)), self.fc2.mT, ends_L)
