"""Context parallelism: neighbouring data parallel ranks share their rows, of which each computes a slice of the tokens.

    rows of the rank --pool--> rows of all ranks of the group --> micro-batches [1, S] --> ids [1, S/c] of the rank
    queries, keys, values [S/c, N, D] --all-to-all--> [S, N/c, D] --attention--> [S, N/c, D] --all-to-all--> [S/c, N, D]

Only attention reads other tokens, and it sees all of them for a part of the heads (Jacobs et al., "DeepSpeed Ulysses",
2023): slices cost the same wherever they are cut. What is read of the head, one number per position, is given to all
ranks of the group: each computes the loss of all rows, and its gradient for its own tokens. Parameters and gradients
are those of data parallel ranks, which see other tokens each.

Shapes: S positions of a packed row, c ranks of the group, N heads, K kv-heads, D head dimension, M positions that are
read, n of them on this rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.engines.both_ways import both_ways
from hybridflow.engines.micro_batches import MicroBatch, some
from hybridflow.engines.process_groups import RankContext, gather


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
