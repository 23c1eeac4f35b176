"""A mixture of experts in the place of a layer's MLP: tokens travel to the ranks that hold their experts, and back.

    rows -> router -> copies, by expert -> all-to-all over ep -> gathered over etp -> experts
    rows <- weighted sum of each token's copies <- all-to-all <- reduce-scattered <-

Every step is a function of its input alone, whatever a rank's tokens: with equally many micro-batches on all ranks of a
stage no rank waits for another. Where experts are shared, ranks need the sizes of what they send on the host, once per
layer; otherwise the host waits for nothing.

Shapes: T tokens of this rank, k experts of each, C = T * k copies, R received copies, E experts, L experts of this
rank, H hidden, F columns of an expert (of this rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor, nn

from hybridflow.engines.megatron.layers import Replicated, device_of
from hybridflow.engines.router_replay import RouterReplay, weights
from hybridflow.models.architecture import Experts


class MixtureOfExperts(nn.Module):
    """[S, B, H] -> ([S, B, H], no bias), in the signature of Megatron's MLP; `shared` are the parts of such an MLP."""

    def __init__(
        self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection, shared: MLPSubmodules
    ) -> None:
        super().__init__()
        self.router = Router(config, experts)
        self.experts = ExpertShare(config, experts, groups, shared.activation_func(config))  # type: ignore[misc]
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
        ep, etp = groups.ep, groups.expt_tp
        self.count, self.ep, self.etp, self.block = experts.count, ep, etp, groups.tp_ep
        local, width = experts.count // ep.size(), experts.columns // etp.size()
        self.local, settings = local, {"dtype": config.params_dtype, "device": device_of(config)}
        self.fc1 = nn.Parameter(torch.empty(local, 2 * width, config.hidden_size, **settings))
        self.fc2 = nn.Parameter(torch.empty(local, config.hidden_size, width, **settings))
        self.activation = activation

    def forward(self, rows_TH: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor) -> Tensor:
        """[T, H]: the sum of what a token's experts give, times their weights."""
        flat_C = chosen_Tk.flatten()
        order_C = flat_C.argsort(stable=True)
        place_C = torch.empty_like(order_C).scatter_(0, order_C, torch.arange(len(order_C), device=order_C.device))
        counts_E = torch.zeros(self.count, dtype=torch.int64, device=flat_C.device)
        counts_E.scatter_add_(0, flat_C, torch.ones_like(flat_C))
        sent_CH = _Copies.apply(rows_TH, order_C, place_C, chosen_Tk.shape[1])
        if self.block.size() == 1:
            out_CH = self._compute(sent_CH, counts_E)
        else:
            out_CH = self._elsewhere(sent_CH, counts_E)
        back_CH: Any = _Reorder.apply(out_CH, place_C, order_C)
        return (back_CH.view(*chosen_Tk.shape, -1) * weights_Tk[..., None]).sum(1)

    def _elsewhere(self, sent_CH: Tensor, counts_E: Tensor) -> Tensor:
        """What the experts, wherever they are, give for copies that are sorted by expert."""
        ranks, ep, etp = self.block.size(), self.ep.size(), self.etp.size()
        table = counts_E.new_empty(ranks * self.count)
        dist.all_gather_into_tensor(table, counts_E, group=self.block)
        counts = table.cpu().view(ep, etp, ep, self.local)  # from (ep, etp), to expert (ep, local)
        at, column = self.ep.rank(), self.etp.rank()
        sizes = counts.sum(-1)[:, column]  # from ep, to ep
        received: Any = sent_CH
        if ep > 1:
            received = _Exchange.apply(sent_CH, sizes[at].tolist(), sizes[:, at].tolist(), self.ep)
        arrived = counts[:, :, at].transpose(0, 1)  # at etp, from ep, expert
        held = arrived.sum((1, 2)).tolist()
        if etp > 1:
            received = _OfAllRanks.apply(received, held, self.etp, True)
        of_row = torch.arange(self.local).repeat(etp * ep).repeat_interleave(arrived.flatten())
        order = of_row.argsort(stable=True)
        order, place = (x.to(sent_CH.device, non_blocking=True) for x in (order, order.argsort()))
        totals = arrived.sum((0, 1)).to(sent_CH.device, non_blocking=True)
        out: Any = self._compute(_Reorder.apply(received, order, place), totals)
        out = _Reorder.apply(out, place, order)
        if etp > 1:
            out = _OfAllRanks.apply(out, held, self.etp, False)
        if ep > 1:
            out = _Exchange.apply(out, sizes[:, at].tolist(), sizes[at].tolist(), self.ep)
        return out

    def _compute(self, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
        """Rows sorted by expert; `counts_L` int64 of each."""
        if not len(rows_RH):  # gradients of zero for every expert
            return rows_RH + (self.fc1.sum() + self.fc2.sum()) * 0.0
        ends_L = counts_L.cumsum(0).to(torch.int32)
        fused = F.grouped_mm(rows_RH, self.fc1.mT, offs=ends_L)
        return _Contiguous.apply(F.grouped_mm(self.activation(fused), self.fc2.mT, offs=ends_L))  # type: ignore[return-value]


class _Contiguous(torch.autograd.Function):
    """Its input; grouped_mm takes no gradient that one value stands for."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        return d.contiguous()


class _Copies(torch.autograd.Function):
    """[T, H] -> [C, H], row i the token of copy order[i]; the way back adds up the `each` copies of one."""

    @staticmethod
    def forward(ctx, rows, order, place, each):
        ctx.save_for_backward(place)
        ctx.each = each
        return rows.index_select(0, order // each)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return d.index_select(0, place).unflatten(0, (-1, ctx.each)).sum(1), None, None, None


class _Reorder(torch.autograd.Function):
    """x[order]; `inverse` is the way back."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return d.index_select(0, inverse), None, None


class _Exchange(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i of the group, and receives `received[i]` from it."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sizes, ctx.group = (sent, received), group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        sent, received = ctx.sizes
        return _exchange(d, received, sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _OfAllRanks(torch.autograd.Function):
    """With `gathers` the rows of all ranks of the group, of which rank i has `held[i]`; else the sum over the ranks, of
    which this one keeps its rows. Each is the other's gradient."""

    @staticmethod
    def forward(ctx, x, held, group, gathers):
        ctx.given = held, group, gathers
        return (_gather if gathers else _scatter)(x, held, group)

    @staticmethod
    def backward(ctx, d):  # type: ignore[override]
        held, group, gathers = ctx.given
        return (_scatter if gathers else _gather)(d, held, group), None, None, None


def _gather(x: Tensor, held: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Padded to the most rows: gloo gathers equal parts only."""
    longest = max(held)
    padded = F.pad(x, (0, 0, 0, longest - len(x))).contiguous()
    out = x.new_empty(len(held), longest, x.shape[1])
    dist.all_gather_into_tensor(out.view(-1, x.shape[1]), padded, group=group)
    return torch.cat([part[:count] for part, count in zip(out, held, strict=True)])


def _scatter(x: Tensor, held: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    longest = max(held)
    padded = torch.cat([F.pad(part, (0, 0, 0, longest - len(part))) for part in x.split(list(held))])
    out = x.new_empty(longest, x.shape[1])
    dist.reduce_scatter_tensor(out, padded, group=group)
    return out[: held[group.rank()]]
