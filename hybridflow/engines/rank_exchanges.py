"""Exchanges between ranks inside a layer: of tokens for heads (context parallelism), and of tokens with the ranks that
hold their experts (expert parallelism).

Context parallelism: neighbouring data parallel ranks share their rows, of which each computes a slice of the tokens.

    rows of the rank --pool--> rows of all ranks of the group --> micro-batches [1, S] --> ids [1, S/c] of the rank
    queries, keys, values [S/c, N, D] --all-to-all--> [S, N/c, D] --attention--> [S, N/c, D] --all-to-all--> [S/c, N, D]

Only attention reads other tokens, and it sees all of them for a part of the heads (Jacobs et al., "DeepSpeed Ulysses",
2023): slices cost the same wherever they are cut. What is read of the head, one number per position, is given to all
ranks of the group: each computes the loss of all rows, and its gradient for its own tokens. Parameters and gradients
are those of data parallel ranks, which see other tokens each.

Expert parallelism: tokens travel to the ranks that hold their experts, and back.

    rows -> copies, by expert -> all-to-all over ep -> gathered over etp -> experts
    rows <- weighted sum of each token's copies <- all-to-all <- reduce-scattered <-

Every step is a function of its input alone, whatever a rank's tokens: with equally many micro-batches on all ranks of a
stage no rank waits for another. Where experts are shared, ranks need the sizes of what they send on the host, once per
layer; otherwise the host waits for nothing.

Shapes: S positions of a packed row, c ranks of the group, N heads, K kv-heads, D head dimension, M positions that are
read, n of them on this rank; T tokens of this rank, k experts of each, C = T * k copies, R received copies, E experts,
L experts of this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.engines.micro_batches import MicroBatch, some
from hybridflow.engines.process_groups import RankContext, gather

Way = Callable[..., Tensor]


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, *tensors: Tensor) -> Tensor:
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return there(x, *tensors)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # asked for once: activations that are computed again are given once
        return ctx.back(d, *tensors), None, None, *[None] * len(tensors)


def both_ways(x: Tensor, there: Way, back: Way, *tensors: Tensor) -> Tensor:
    """`there(x, *tensors)`, whose gradient is `back(d, *tensors)`; `tensors` have none, and wait with the graph."""
    return _BothWays.apply(x, there, back, *tensors)  # type: ignore[return-value]


class ContextParallel:
    """The `size` ranks that share rows, of which this is number `rank`."""

    def __init__(self, context: RankContext, size: int) -> None:
        at, grid = context.coords, context.grid
        first = at.d // size * size
        ranks = [grid.rank(at.p, at.t, d) for d in range(first, first + size)]
        self.size, self.rank, self.group = size, at.d - first, context.groups.of(ranks)
        self._host = context.groups.new("context", ranks, "gloo")

    def pool(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The rows of all ranks of the group, and the numbers of this one's among them. Collective."""
        parts = gather(batch, self._host)
        return Batch.concat(parts), torch.arange(batch.rows) + sum(part.rows for part in parts[: self.rank])

    def part(self, x: Tensor) -> Tensor:
        """This rank's slice of [S, ...]."""
        width = len(x) // self.size
        return x[self.rank * width : (self.rank + 1) * width]

    def local(self, micro: MicroBatch) -> MicroBatch:
        """This rank's slice of a packed micro-batch; `place` are the numbers of its positions among those read."""
        assert micro.sequences is not None, "checked by check_shared_heads"
        width = micro.ids.shape[1] // self.size
        index = micro.index - self.rank * width
        place = ((index >= 0) & (index < width)).nonzero()[:, 0]
        place = place[place < len(micro.targets)]  # a micro-batch without positions reads one all the same
        return replace(
            micro,
            ids=self.part(micro.ids[0])[None].contiguous(),
            index=some(index[place]),
            targets=micro.targets[place],
            sequences=replace(micro.sequences, share=self),
            routing=None if micro.routing is None else self.part(micro.routing[0])[None],
            place=place,
            read=len(micro.targets),
        )

    def joined(self, micro: MicroBatch, values: Tensor) -> Tensor:
        """[n, ...] at the positions of this rank -> [M, ...] at all. Differentiable, for a loss that all ranks of the
        group compute alike; collective."""
        assert micro.place is not None

        def whole(values: Tensor, place: Tensor) -> Tensor:
            found = values.new_zeros(micro.read, *values.shape[1:]).index_copy_(0, place, values)
            dist.all_reduce(found, group=self.group)
            return found

        return both_ways(values, whole, lambda d, place: d.index_select(0, place), micro.place)

    def heads(self, x: Tensor) -> Tensor:
        """[S/c, K, D] -> [S, K/c, D]; fewer heads than ranks are repeated."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], 1)
        return both_ways(x, self._to_heads, self._to_tokens)

    def tokens(self, x: Tensor) -> Tensor:
        """[S, N/c, D] -> [S/c, N, D]."""
        return both_ways(x, self._to_tokens, self._to_heads)

    def _to_heads(self, x: Tensor) -> Tensor:
        return self._exchanged(x.unflatten(1, (self.size, -1)).transpose(0, 1)).flatten(0, 1)

    def _to_tokens(self, x: Tensor) -> Tensor:
        out = self._exchanged(x).unflatten(0, (self.size, -1))
        return out.transpose(0, 1).flatten(1, 2).contiguous()  # a view where a rank has one head

    def _exchanged(self, x: Tensor) -> Tensor:
        out = torch.empty_like(sent := x.contiguous())
        dist.all_to_all_single(out, sent, group=self.group)
        return out


Compute = Callable[[Tensor, Tensor], Tensor]
"""[R, H]: what this rank's experts give for rows [R, H], sorted by expert, and the number of each one's, [L] int64."""


class ExpertParallel:
    """`count` experts in equal parts on the ranks of group `ep`, the columns of each on those of `etp`; `block` is
    both groups together, etp fastest."""

    def __init__(self, count: int, ep: dist.ProcessGroup, etp: dist.ProcessGroup, block: dist.ProcessGroup) -> None:
        self.count, self.ep, self.etp, self.block = count, ep, etp, block
        self.local = count // ep.size()

    def __call__(self, rows_TH: Tensor, weights_Tk: Tensor, chosen_Tk: Tensor, compute: Compute) -> Tensor:
        """[T, H]: the sum of what a token's experts give, times their weights."""
        flat_C = chosen_Tk.flatten()
        order_C = flat_C.argsort(stable=True)
        place_C = torch.empty_like(order_C).scatter_(0, order_C, torch.arange(len(order_C), device=order_C.device))
        counts_E = torch.zeros(self.count, dtype=torch.int64, device=flat_C.device)
        counts_E.scatter_add_(0, flat_C, torch.ones_like(flat_C))
        each = chosen_Tk.shape[1]
        sent_CH = both_ways(  # row i of the token of copy order[i]; the way back adds up the copies of one
            rows_TH,
            lambda rows, order, _: rows.index_select(0, order // each),
            lambda d, _, place: d.index_select(0, place).unflatten(0, (-1, each)).sum(1),
            *(order_C, place_C),
        )
        if self.block.size() == 1:
            out_CH = compute(sent_CH, counts_E)
        else:
            out_CH = self._elsewhere(sent_CH, counts_E, compute)
        back_CH = _reordered(out_CH, place_C, order_C)
        return (back_CH.view(*chosen_Tk.shape, -1) * weights_Tk[..., None]).sum(1)

    def _elsewhere(self, sent_CH: Tensor, counts_E: Tensor, compute: Compute) -> Tensor:
        """What the experts, wherever they are, give for copies that are sorted by expert."""
        ranks, ep, etp = self.block.size(), self.ep.size(), self.etp.size()
        table = counts_E.new_empty(ranks * self.count)
        dist.all_gather_into_tensor(table, counts_E, group=self.block)
        counts = table.cpu().view(ep, etp, ep, self.local)  # from (ep, etp), to expert (ep, local)
        at, column = self.ep.rank(), self.etp.rank()
        sizes = counts.sum(-1)[:, column]  # from ep, to ep
        sent, received = sizes[at].tolist(), sizes[:, at].tolist()
        there, back = (partial(_exchange, sizes=ends, group=self.ep) for ends in ((sent, received), (received, sent)))
        rows = sent_CH
        if ep > 1:
            rows = both_ways(rows, there, back)
        arrived = counts[:, :, at].transpose(0, 1)  # at etp, from ep, expert
        held = arrived.sum((1, 2)).tolist()
        gather, scatter = (partial(way, held=held, group=self.etp) for way in (_gather, _scatter))
        if etp > 1:
            rows = both_ways(rows, gather, scatter)
        of_row = torch.arange(self.local).repeat(etp * ep).repeat_interleave(arrived.flatten())
        order = of_row.argsort(stable=True)
        order, place = (x.to(sent_CH.device, non_blocking=True) for x in (order, order.argsort()))
        totals = arrived.sum((0, 1)).to(sent_CH.device, non_blocking=True)
        out = _reordered(compute(_reordered(rows, order, place), totals), place, order)
        if etp > 1:
            out = both_ways(out, scatter, gather)
        if ep > 1:
            out = both_ways(out, back, there)
        return out


def grouped(rows_RX: Tensor, weight_LXY: Tensor, ends_L: Tensor) -> Tensor:
    """[R, Y]: rows that are sorted by expert, times its matrix; those of expert l end before `ends[l]`, int32."""
    out = F.grouped_mm(rows_RX, weight_LXY, offs=ends_L)
    # grouped_mm takes no gradient that one value stands for
    return both_ways(out, lambda x: x.view_as(x), lambda d: d.contiguous())


def _reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order]; `inverse` is the way back."""
    return both_ways(
        x,
        lambda x, order, _: x.index_select(0, order),
        lambda d, _, inverse: d.index_select(0, inverse),
        *(order, inverse),
    )


def _exchange(x: Tensor, sizes: tuple[list[int], list[int]], group: dist.ProcessGroup) -> Tensor:
    """Sends `sizes[0][i]` rows to rank i of the group, and receives `sizes[1][i]` from it."""
    sent, received = sizes
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


def _gather(x: Tensor, held: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, of which rank i has `held[i]`; padded to the most rows: gloo gathers equal parts only."""
    longest = max(held)
    padded = F.pad(x, (0, 0, 0, longest - len(x))).contiguous()
    out = x.new_empty(len(held), longest, x.shape[1])
    dist.all_gather_into_tensor(out.view(-1, x.shape[1]), padded, group=group)
    return torch.cat([part[:count] for part, count in zip(out, held, strict=True)])


def _scatter(x: Tensor, held: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, of which this one keeps its rows."""
    longest = max(held)
    padded = torch.cat([F.pad(part, (0, 0, 0, longest - len(part))) for part in x.split(list(held))])
    out = x.new_empty(longest, x.shape[1])
    dist.reduce_scatter_tensor(out, padded, group=group)
    return out[: held[group.rank()]]
