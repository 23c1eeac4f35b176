"""Logits: a model's distribution over the vocabulary at each response token, computed block by block of tokens.

Shapes: N response tokens, n tokens of a block, C columns of the vocabulary on this rank, H hidden, k token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError

BLOCK_BYTES = 16 << 20
"""Size of a float32 block [n, C]. `sum` and its backward pass hold as many as its function has intermediate results,
whatever the number of tokens: up to 20 in GKD's."""
LEAST = 1e-30  # probability of the rest of the vocabulary, where it has none
LOWEST = -1e4  # log-probability of a token that cannot be drawn: an infinity times its probability, 0, would be nan


@dataclass(frozen=True)
class Columns:
    """This rank's columns `first:last` of `size`, which are cut over the ranks of `group` (None: one rank has all)."""

    first: int
    last: int
    size: int
    group: dist.ProcessGroup | None = None

    @property
    def most(self) -> int:
        """Columns of the rank with the most: block sizes must be equal on all ranks."""
        return -(-self.size // (self.group.size() if self.group else 1))

    def all_reduce(self, tensor: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and self.group.size() > 1 and tensor.numel():
            dist.all_reduce(tensor, how, group=self.group)
        return tensor


class Logits:
    """softmax(logits / temperature) at N tokens; a loss reads it by `sum`, `log_probs` and `entropy`.

    `rows` are this rank's logits [N or more, C or more], or with `weight` [C, H] the hidden states [N, H] that the
    output layer takes: their logits then exist for one block at a time. `columns` None: C is the whole vocabulary. All
    ranks of its group make the same calls, with equal tokens. Only logits that are given as such are differentiated."""

    def __init__(
        self,
        rows: Tensor,
        columns: Columns | None = None,
        temperature: float = 1.0,
        *,
        weight: Tensor | None = None,
        tokens: int | None = None,
        block_bytes: int | None = None,
    ) -> None:
        width = rows.shape[1] if weight is None else len(weight)
        self.columns = columns or Columns(0, width, width)
        self.tokens = len(rows) if tokens is None else tokens
        self._rows, self._weight, self._temperature = rows, weight, temperature
        self.dtype = torch.promote_types(rows.dtype, torch.float32)
        self.block = max(1, (block_bytes or BLOCK_BYTES) // (self.dtype.itemsize * max(1, self.columns.most)))
        self._peak, self._log_total = self._normalizer()

    @property
    def values(self) -> Tensor:
        """[N] without gradient: the log of the sum of all exponentials; not finite where a logit is nan or infinite."""
        return self._peak + self._log_total

    def sum(self, function: Callable[..., Tensor], *others: Logits | Ragged | Tensor, mask: Any = None) -> Tensor:
        """[N, ...]: a sum over the vocabulary for each token, differentiable; exactly 0 where `mask` [N] is False.

        `function(log_p, *others)` is given a block of tokens: log-probabilities [n, C] of this rank's columns, of other
        `Logits` the same, of a tensor or ragged column with a row for each token these rows. It returns sums over the C
        columns, [n, ...]; those of all ranks are added. It is called again in the backward pass, which differentiates
        by `log_p` only, so that no more than a few blocks exist at any time."""
        flat = [other if isinstance(other, Logits) else _flat(other) for other in others]
        for other in flat:
            count = other.tokens if isinstance(other, Logits) else len(other)
            if count != self.tokens:
                raise BatchError(f"logits of {self.tokens} tokens were to be summed with {count} rows: give one each.")
        index = torch.arange(self.tokens, device=self._rows.device)
        if mask is not None:
            index = index[_flat(mask).to(index.device, torch.bool)]
        return _Sum.apply(self._rows, self, function, flat, index)  # type: ignore[return-value]

    def log_probs(self, ids: Ragged | Tensor, mask: Any = None) -> Tensor:
        """[N] or [N, k]: log-probabilities of these token ids, differentiable. Errors: BatchError for an id that is not
        in the vocabulary."""
        return self.sum(self._picked, self._checked(ids), mask=mask)

    def log_probs_and_rest(self, ids: Ragged | Tensor, mask: Any = None) -> Tensor:
        """[N, k + 1], differentiable: log-probabilities of k different ids [N, k], and of all other tokens together.
        Errors: those of `log_probs`."""

        def picked_and_rest(log_p_nC: Tensor, ids_nk: Tensor) -> Tensor:
            local, inside = self._local(ids_nk)
            rows, columns = log_p_nC.shape
            kept = torch.ones(rows, columns + 1, dtype=torch.bool, device=local.device)  # one more, for ids elsewhere
            kept.scatter_(1, torch.where(inside, local, columns), False)
            rest = torch.where(kept[:, :columns], log_p_nC, -torch.inf).exp().sum(-1, keepdim=True)
            return torch.cat([self._picked(log_p_nC, ids_nk), rest], -1)

        found = self.sum(picked_and_rest, self._checked(ids), mask=mask)
        return torch.cat([found[:, :-1], found[:, -1:].clamp(min=LEAST).log()], -1)

    def entropy(self, mask: Any = None) -> Tensor:
        """[N], in nats, differentiable."""
        return self.sum(lambda log_p: -(log_p.exp() * log_p.clamp(min=LOWEST)).sum(-1), mask=mask)

    @torch.no_grad()
    def top_k(self, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """The k most probable tokens, first the most probable: ids [N, k] int64, their log-probabilities [N, k], and
        that of all other tokens together [N]. Errors: BatchError for a k that is not in 1..size of the vocabulary."""
        if not 1 <= k <= self.columns.size:
            raise BatchError(f"the {k} most probable tokens of {self.columns.size} were asked for.")
        ids = torch.empty(self.tokens, k, dtype=torch.int64, device=self._rows.device)
        for at in self.blocks(torch.arange(self.tokens, device=ids.device)):
            own_nC = self.log_p(at)
            best = own_nC.topk(min(k, own_nC.shape[1]), dim=-1)
            missing = (0, k - best.indices.shape[1])
            values = torch.nn.functional.pad(best.values, missing, value=-torch.inf)
            names = torch.nn.functional.pad(best.indices + self.columns.first, missing)
            values, names = self._of_all_ranks(values), self._of_all_ranks(names)
            ids[at] = names.gather(-1, values.topk(k, dim=-1).indices)
        found = self.log_probs_and_rest(ids)
        return ids, found[:, :-1], found[:, -1]

    # Blocks

    def blocks(self, index: Tensor) -> Iterator[Tensor]:
        """`index` in parts of a block; one empty part of an empty one."""
        yield from index.split(self.block)

    def log_p(self, at: Tensor) -> Tensor:
        """[n, C] without gradient: the log-probabilities of the tokens `at`."""
        return self._scores(at).sub_(self._peak[at, None]).sub_(self._log_total[at, None])

    def _scores(self, at: Tensor) -> Tensor:
        rows, (first, last) = self._rows.detach()[at], (self.columns.first, self.columns.last)
        rows = rows[:, : last - first] if self._weight is None else rows.to(self._weight.dtype) @ self._weight.T
        scores = rows.to(self.dtype, copy=True)
        return scores if self._temperature == 1.0 else scores.div_(self._temperature)

    @torch.no_grad()
    def _normalizer(self) -> tuple[Tensor, Tensor]:
        """[N] each: the largest logit, and the log of the sum of exponentials after subtracting it."""
        peak = torch.full((self.tokens,), -torch.inf, dtype=self.dtype, device=self._rows.device)
        total = torch.zeros_like(peak)
        if self.columns.last > self.columns.first:
            for at in self.blocks(torch.arange(self.tokens, device=peak.device)):
                scores = self._scores(at)
                peak[at] = scores.amax(-1)
                total[at] = scores.sub_(peak[at, None]).exp_().sum(-1)
        largest = self.columns.all_reduce(peak.clone(), dist.ReduceOp.MAX)
        total *= (peak - largest).exp()
        return largest, self.columns.all_reduce(total).log()

    def backward(self, function: Callable[..., Tensor], others: list, index: Tensor, d_out: Tensor) -> Tensor:
        """The gradient of `sum` by the rows: with l = log softmax(x / T), dx = (dl - exp(l) * sum of dl) / T."""
        d_rows = torch.zeros_like(self._rows)
        width = self.columns.last - self.columns.first
        for at in self.blocks(index):
            log_p = self.log_p(at).requires_grad_()
            with torch.enable_grad():
                value = function(log_p, *_at(others, at))
            if value.requires_grad:
                (d,) = torch.autograd.grad(value, log_p, d_out[at].to(value.dtype))
            else:
                d = torch.zeros_like(log_p)
            del value
            total = self.columns.all_reduce(d.sum(-1))
            d = d - log_p.detach().exp_().mul_(total[:, None])
            d_rows[at, :width] = d.div_(self._temperature).to(d_rows.dtype)
        return d_rows

    # Token ids

    def _checked(self, ids: Ragged | Tensor) -> Tensor:
        flat = _flat(ids).to(self._rows.device, torch.int64)
        if flat.numel():
            low, high = (int(end) for end in flat.aminmax())
            if low < 0 or high >= self.columns.size:
                raise BatchError(
                    f"token id {low if low < 0 else high} is not in the vocabulary of the model that trains, "
                    f"0..{self.columns.size - 1}. Was it drawn by a model with another one?"
                )
        return flat

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the ids on this rank, and whether they are there."""
        local, width = ids - self.columns.first, self.columns.last - self.columns.first
        return local, (local >= 0) & (local < width)

    def _picked(self, log_p_nC: Tensor, ids: Tensor) -> Tensor:
        """The log-probabilities of the ids that are on this rank, 0 for others."""
        local, inside = self._local(ids)
        if not log_p_nC.shape[1]:
            return log_p_nC.new_zeros(ids.shape)
        columns = torch.where(inside, local, 0)
        found = log_p_nC.gather(-1, columns if ids.ndim == 2 else columns[:, None]).view(ids.shape)
        return torch.where(inside, found, 0.0)

    def _of_all_ranks(self, own: Tensor) -> Tensor:
        """[n, k * ranks]: joined over the ranks that share the vocabulary."""
        group = self.columns.group
        if group is None or group.size() == 1:
            return own
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, -1)


class _Sum(torch.autograd.Function):
    """`Logits.sum` over the tokens `index`. Only the logits are kept: the backward pass computes blocks again."""

    @staticmethod
    def forward(ctx, rows, logits, function, others, index):
        ctx.saved = logits, function, others, index
        out = None
        for at in logits.blocks(index):
            value = function(logits.log_p(at), *_at(others, at))
            if out is None:
                out = value.new_zeros(logits.tokens, *value.shape[1:], dtype=logits.dtype)
            out[at] = value.to(out.dtype)
        return logits.columns.all_reduce(out)

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[override]
        return ctx.saved[0].backward(*ctx.saved[1:], d_out), None, None, None, None


def _flat(column: Any) -> Tensor:
    return (column.values if isinstance(column, Ragged) else torch.as_tensor(column)).detach()


def _at(others: list, at: Tensor) -> list[Tensor]:
    return [other.log_p(at) if isinstance(other, Logits) else other[at] for other in others]
