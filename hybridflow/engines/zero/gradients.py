"""Gradients of whole parameters, of which each data parallel rank keeps the sums of its own share.

Stage 1 (the paper's P_os) adds up a mini-batch in whole buffers and sends them once. Stage 2 (P_os+g) sends those of a
unit to their owners as soon as its backward pass is over and forgets them, in every backward pass; it needs 1/N of the
memory and, with m micro-batches, m times the traffic (section 7: one pass costs what data parallelism costs). Numbers
are float32 and travel as float32, whatever the parameters' dtype.

Losses are shares of a global sum, so gradients are added up and never averaged.

Shapes: n elements of a unit's buffer, n/N of a rank's share of it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.offload_manager import GradientBuffers
from hybridflow.engines.zero.parameters import FlatParameters, unit_views


class Gradients(GradientBuffers):
    """Takes the gradient of every parameter away from it as autograd completes it. A frozen model has none.

    `own[i]` [n/N] float32 are this rank's share of unit i, `memory` is what is kept between backward passes. Shares are
    on `device`: with stage 2 that may be the host. With `overlap` a unit may still be on its way while the one before
    it is computed, so that two whole units exist at a time instead of one.
    """

    def __init__(self, parameters: FlatParameters, stage: int, device: torch.device, overlap: bool) -> None:
        self.parameters, self.ranks = parameters, parameters.ranks
        self.units = parameters.units if parameters.trained else ()
        self._device, self._in_flight = parameters.buffers[0].device, int(overlap)
        # on one rank a share is the whole: nothing has to be sent
        self.whole = stage == 1 or (self.ranks == 1 and device == self._device)
        if self.whole:
            kept = [self._buffer(i) for i in range(len(self.units))]
            self.own, self._open = [parameters.own_share(buffer) for buffer in kept], dict(enumerate(kept))
        else:
            lengths = [unit.share(self.ranks) for unit in self.units]
            kept = [torch.zeros(length, dtype=torch.float32, device=device) for length in lengths]
            self.own, self._open = kept, {}
        self._kept = kept
        memory = Residency({str(i): buffer for i, buffer in enumerate(kept)}, device=self._device)
        super().__init__(memory)
        self.pieces = parameters.pieces(self.own)  # by name: what this rank owns of each parameter's gradient
        self._missing: list[set[str]] = [set() for _ in self.units]  # parameters without a gradient so far
        self._sent: list[tuple[int, Tensor, dist.Work, Tensor]] = []
        self._next = -1  # the unit that is sent next; all ranks send from the last to the first
        # the collector does not see through hooks: they must not refer to an owner of their parameters
        arrived = weakref.WeakMethod(self._arrived)
        self._hooks = [
            parameters.named[name].register_post_accumulate_grad_hook(partial(_call, arrived, i, name))
            for i, unit in enumerate(self.units)
            for name in unit.modules
        ]

    def _buffer(self, unit: int) -> Tensor:
        return torch.zeros(len(self.parameters.buffers[unit]), dtype=torch.float32, device=self._device)

    def before_backward(self) -> None:
        """A backward pass follows; the one before it, if any, is over."""
        self.after_backward()
        if not self.whole:
            self._missing = [set(unit.modules) for unit in self.units]
            self._next = len(self.units) - 1

    def after_backward(self) -> None:
        """The backward pass is over: send what is left of it, also of units that took no part on this rank."""
        while self._next >= 0:
            self._send()
        self._receive(0)

    @torch.no_grad()
    def _arrived(self, unit: int, name: str, parameter: Tensor) -> None:
        """Autograd has completed the gradient of one parameter."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        assert self.whole or name in self._missing[unit], f"{name} has two gradients in one backward pass"
        if unit not in self._open:
            self._open[unit] = self._buffer(unit)
        first, last = self.units[unit].modules[name]
        self._open[unit][first:last].add_(gradient.flatten())
        if self.whole:
            return
        self._missing[unit].discard(name)
        while self._next >= 0 and not self._missing[self._next]:
            self._send()

    def _send(self) -> None:
        """The next unit's gradients to the ranks that own them. The order is the same on every rank, whatever came
        when, as it must be for collectives."""
        unit, self._next = self._next, self._next - 1
        buffer = self._open.pop(unit, None)
        if buffer is None:
            buffer = self._buffer(unit)
        if self.ranks == 1:
            self.own[unit].add_(buffer.to(self.own[unit].device))
            return
        sums = buffer.new_empty(len(buffer) // self.ranks)
        work = _reduce_scatter(sums, buffer, self.parameters.group)
        self._sent.append((unit, sums, work, buffer))
        del buffer
        self._receive(self._in_flight)

    def _receive(self, left: int) -> None:
        """Add what has come to this rank's shares, until at most `left` units are on their way."""
        while len(self._sent) > left:
            unit, sums, work, _ = self._sent.pop(0)
            work.wait()
            self.own[unit].add_(sums.to(self.own[unit].device))

    @torch.no_grad()
    def reduce(self) -> None:
        """Make `own` the sums over data parallel ranks of all that was added since they were zero. Collective.

        May be called again, and backward passes may follow.
        """
        self.after_backward()
        if not self.whole or self.ranks == 1:
            return
        works = [
            _reduce_scatter(own, buffer, self.parameters.group)
            for own, buffer in zip(self.own, self._kept, strict=True)
        ]
        for own, buffer, work in zip(self.own, self._kept, works, strict=True):
            work.wait()
            first = self.parameters.rank * len(own)  # what others own is in their sums now
            buffer[:first].zero_()
            buffer[first + len(own) :].zero_()

    @property
    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Whole gradients by canonical name, float32, summed over data parallel ranks; copies. Collective."""
        self.reduce()
        found: dict[str, Tensor] = {}
        for i, (unit, own) in enumerate(zip(self.units, self.own, strict=True)):
            buffer = self._buffer(i)
            if self.ranks == 1:
                buffer.copy_(own)
            else:
                dist.all_gather_single(buffer, own.to(self._device), group=self.parameters.group)
            found |= unit_views(unit, buffer)
        return found

    def square_sum(self) -> Tensor:
        """float64: of the summed gradients of all ranks, each element of which is owned once. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self.pieces:
            norms = torch.stack(torch._foreach_norm(list(self.pieces.values())))
            total += norms.double().square().sum().to(self._device)
        if self.ranks > 1:
            dist.all_reduce(total, group=self.parameters.group)
        return total

    def drop(self) -> None:
        """Gradients are zero from here on, also after a backward pass that failed half-way."""
        self._receive(0)
        self._next = -1
        if not self.whole:
            self._open.clear()
        for parameter in self.parameters.named.values():
            parameter.grad = None
        if not self.resident:
            self.memory.release()
            return
        for buffer in self._kept:
            buffer.zero_()

    def close(self) -> None:
        """Free the memory, and leave the parameters to themselves."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], {}
        self.memory.release()


def _reduce_scatter(share: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts `share` [n/N] := this rank's part of the sum over ranks of `buffer` [n], whose part it may itself be."""
    work: Any = dist.reduce_scatter_single(share, buffer, group=group, async_op=True)
    return work


def _call(arrived: weakref.WeakMethod, unit: int, name: str, parameter: Tensor) -> None:
    if (method := arrived()) is not None:
        method(unit, name, parameter)
