"""FlatShards: every data parallel rank holds whole parameters, one flat buffer per unit, and 1/N of the optimizer
state.

Bytes on each of N ranks, for P parameters of b bytes each (2 or 4) whose optimizer keeps K bytes for one (Rajbhandari
et al. 2020, section 5 and table 1, with gradients in float32; Adam's K is 12, in float32 8, since its main parameters
are the parameters themselves):

    stage 1     (b + 4) P + K P / N
    stage 2     b P + (4 + K) P / N, and the gradients of one unit while a backward pass runs

Stage 1 of ZeRO (the paper's P_os) accumulates a mini-batch's gradients in whole buffers and sends them once. Stage 2
(P_os+g) sends a unit's to their owners after each of its backward passes and frees them: with m micro-batches m times
the traffic (section 7: one pass costs what data parallelism costs). They are float32 and travel as float32, whatever
the parameters' dtype. Losses are shares of a global sum, so gradients are added up and never averaged.

Stage 3 also shards parameters: that is FSDP. Megatron's distributed optimizer is stage 1 over the parameters of one
pipeline and tensor parallel rank.

Shapes: n elements of a unit's buffer, n/N of a rank's share of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.batch.pinned import settle, to_device
from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engine3d.offloadable import HostImages, Residency
from hybridflow.engines.lora.targets import is_adapter
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.units import Unit
from hybridflow.errors import ModelError

# activation checkpointing, torch.compile; a layer with adapters, peft's name of an adapter without one
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "base_layer.", "default.")


class FlatShards:
    """Fulfils `Shards` over the data parallel ranks of `group`, units of experts over those of `expert_group`.

    Puts new parameters on the context's device in the place of `model`'s (which may be on the meta device: then their
    contents are zero); `units` are their names and shapes. Of a frozen unit only parameters are kept. `offload` keeps
    main parameters, optimizer state and, with stage 2, gradients in host memory (Ren et al. 2021, "ZeRO-Offload").
    With `overlap` (default: on CUDA) a unit's gradients travel while the next one's are computed.

    Storage of `main` is flat, of what this rank owns. `memory` of a unit goes with the last of its names.
    """

    lockstep = False

    def __init__(
        self,
        context: RankContext,
        model: nn.Module,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        *,
        expert_group: dist.ProcessGroup | None = None,
        stage: int = 1,
        offload: bool = False,
        overlap: bool | None = None,
    ) -> None:
        given = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        assert given.keys() == {name for unit in units for name in unit.modules}, "units of another model"
        kinds = [{(given[name].dtype, given[name].requires_grad) for name in unit.modules} for unit in units]
        if several := [unit for unit, kind in zip(units, kinds, strict=True) if len(kind) > 1]:
            raise ModelError(
                f"{context.role}: parameters beside {next(iter(several[0].modules))} have several dtypes, of which "
                f"stages 1 and 2 of ZeRO take one. Use FSDP(), ZeRO(stage=3), or dtype='float32'."
            )
        self.model: Any = model
        groups = [expert_group if unit.experts and expert_group is not None else group for unit in units]
        device = context.device
        self._everyone, on_cuda = context.groups.everyone(), device.type == "cuda"
        self._host = torch.device("cpu") if offload else device
        ranks, dtypes = max((one.size() for one in groups), default=1), [next(iter(kind))[0] for kind in kinds]
        buffers = [
            torch.zeros(unit.share(one.size()) * one.size(), dtype=dtype, device=device)
            for unit, one, dtype in zip(units, groups, dtypes, strict=True)
        ]
        views = [unit.views(buffer).items() for unit, buffer in zip(units, buffers)]
        held = {name: tensor for found in views for name, tensor in found}
        self.storage: Mapping[str, Tensor] = {name: tensor for name, tensor in held.items() if not is_adapter(name)}
        self.adapters: Mapping[str, Tensor] = {name: tensor for name, tensor in held.items() if is_adapter(name)}
        places = {n: buffer[a:b] for unit, buffer in zip(units, buffers) for n, (a, b) in unit.modules.items()}
        named = _install(model, places)
        self.memory: Residency = Residency(self.storage, device)
        shares = [buffer.view(one.size(), -1)[one.rank()] for buffer, one in zip(buffers, groups, strict=True)]
        every = zip(units, groups, buffers, shares, strict=True)
        self._trained = [each for each, kind in zip(every, kinds, strict=True) if next(iter(kind))[1]]
        self.gradients: Any = FlatGradients(
            named,
            [unit for unit, *_ in self._trained],
            [one for _, one, *_ in self._trained],
            whole=stage == 1 or (ranks == 1 and not offload),  # on one rank a share is the whole: nothing is sent
            devices=(device, self._host if stage == 2 else device),
            overlap=on_cuda if overlap is None else overlap,
            stream=self.memory.images.stream,
        )
        self._own = self.gradients.pieces([share for *_, share in self._trained])
        self.separate = any(offload or buffer.dtype != torch.float32 for _, _, buffer, _ in self._trained)
        self.main: Mapping[str, Tensor] = self._own
        if self.separate:
            self.main = {
                name: torch.empty(piece.shape, dtype=torch.float32, device=self._host, pin_memory=offload and on_cuda)
                for name, piece in self._own.items()
            }
            self.parameters_changed()

    def reset(self) -> None:
        """Nothing of a pass is under way but gradients, which `gradients.drop` waits for."""

    def before_backward(self, last: bool = True) -> None:
        self.gradients.before_backward()

    def after_pass(self) -> None:
        self.gradients.after_backward()

    def reduce(self) -> None:
        self.gradients.reduce()

    def main_gradients(self) -> dict[str, Tensor]:
        """On the device of `main`; views where they are there already."""
        found = {name: piece.to(self._host, non_blocking=True) for name, piece in self.gradients.own.items()}
        if any(found[name] is not piece for name, piece in self.gradients.own.items()):
            settle(self.memory.device)
        return found

    def counts(self, name: str) -> bool:
        """Whether this rank counts the gradient of a parameter that several ranks hold alike."""
        return True

    def square_sum(self) -> Tensor:
        """Adds up matrices first."""
        self.gradients.finish()
        held = {**self.storage, **self.adapters}
        pieces = sorted(self.gradients.own.items(), key=lambda item: held[item[0]].ndim == 1)
        counted = [piece for name, piece in pieces if self.counts(name)]
        return square_sum(counted, self._everyone, self.memory.device)

    def waited(self, layer: nn.Module, mark: Any) -> None:
        """No other stream reads parameters."""

    @torch.no_grad()
    def updated(self, names: Collection[str]) -> None:
        for unit, *_ in self._trained:
            if not unit.parameters.keys().isdisjoint(names):
                self.memory.changed(unit.parameters)
        if self.separate and (mine := [name for name in names if name in self.main]):
            mains = [self.main[name] for name in mine]
            torch._foreach_copy_([self._own[name] for name in mine], mains, non_blocking=True)
        works, errors = list[Any](), list[RuntimeError]()
        try:
            for unit, group, buffer, share in self._trained:
                if group.size() > 1 and not unit.parameters.keys().isdisjoint(names):
                    works.append(dist.all_gather_single(buffer, share, group=group, async_op=True))
        finally:
            for work in works:  # all of them: threads of gloo write into memory that an error may free
                try:
                    work.wait()
                except RuntimeError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    @torch.no_grad()
    def parameters_changed(self) -> None:
        if self.separate and self.main:
            torch._foreach_copy_(list(self.main.values()), list(self._own.values()), non_blocking=True)
            settle(self.memory.device)

    def close(self) -> None:
        self.gradients.close()
        self.memory.release()
        Residency(self.adapters, self.memory.device).release()
        if self.separate:
            Residency(self.main, self.memory.device).release()
        self.main, self._own = {}, {}


def square_sum(gradients: list[Tensor], everyone: dist.ProcessGroup, device: torch.device) -> Tensor:
    """float64 on `device`, of all gradients of all ranks. Collective."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        total += to_device([torch.stack(torch._foreach_norm(gradients)).double().square_().sum()], device)[0]
    if everyone.size() > 1:
        dist.all_reduce(total, group=everyone)
    return total


def canonical_name(name: str) -> str:
    """The Hugging Face name of a parameter, whatever its module is wrapped in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _install(model: nn.Module, flat: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Parameters that live in `flat`, by name, with the attributes of those before them, tied ones still tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = {}
    for full_name, old in model.named_parameters():
        name = canonical_name(full_name)
        place = flat[name].view(old.shape)
        if not old.is_meta:
            place.copy_(old.detach())
        named[name] = made[old] = nn.Parameter(place, requires_grad=old.requires_grad)
        vars(made[old]).update(vars(old))
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[old])
    return named


# Gradients of whole parameters, of which each data parallel rank keeps the sums of its share


class FlatGradients:
    """Moves each parameter's gradient into its buffer when autograd completes it.

    `own` are, by name, the flat pieces of this rank's shares [n/N]; `memory` is what is kept between backward passes:
    with `whole` the buffers [n] (`buffers`), else the shares alone. `devices` are those of buffers and of shares. With
    `overlap` a unit is sent while the previous one is computed: two whole units exist at a time. CUDA adds to shares in
    host memory on a stream of its own: the host neither adds nor waits, before `reduce`.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        units: Sequence[Unit],
        groups: Sequence[dist.ProcessGroup],
        *,
        whole: bool,
        devices: tuple[torch.device, torch.device],
        overlap: bool,
        stream: CopyStream,
    ) -> None:
        self._named, self._units, self._groups, self._whole = named, units, groups, whole
        self._several, self._in_flight = any(group.size() > 1 for group in groups), int(overlap)
        self._device, kept_on = devices
        if whole:
            kept = [self._buffer(i) for i in range(len(units))]
            self._shares = [buffer.view(one.size(), -1)[one.rank()] for one, buffer in zip(groups, kept, strict=True)]
            self._open = dict(enumerate(kept))
        else:
            flat: dict[str, Any] = {"dtype": torch.float32, "device": kept_on, "pin_memory": kept_on != self._device}
            kept = [torch.zeros(unit.share(group.size()), **flat) for unit, group in zip(units, groups, strict=True)]
            self._shares, self._open = kept, dict[int, Tensor]()
        self._kept = kept
        self.images = HostImages(stream)
        self.memory = Residency({str(i): buffer for i, buffer in enumerate(kept)}, self._device, images=self.images)
        self.own = self.pieces(self._shares)
        self._missing: list[set[str]] = [set() for _ in units]  # parameters without a gradient so far
        self._sent: list[tuple[int, Tensor, Any, Tensor]] = []
        self._aside = None if kept_on == self._device else CopyStream(self._device)
        self._adding: list[tuple[Tensor, Any]] = []  # sums, until they are added to shares on the host
        self._settled = True
        self._empty = set() if self._aside is None else {*range(len(kept))}  # shares that count as zero
        self._next = -1  # the unit that is sent next; all ranks send from the last to the first
        # the collector does not see through hooks: they must not refer to an owner of their parameters
        arrived = weakref.WeakMethod(self._arrived)
        self._hooks = [
            named[name].register_post_accumulate_grad_hook(partial(_call, arrived, i, name))
            for i, unit in enumerate(units)
            for name in unit.modules
        ]

    def _buffer(self, unit: int) -> Tensor:
        ranks = self._groups[unit].size()
        return torch.zeros(self._units[unit].share(ranks) * ranks, dtype=torch.float32, device=self._device)

    def pieces(self, shares: Sequence[Tensor]) -> dict[str, Tensor]:
        """Flat views of this rank's parameter pieces in `shares` ([n/N] for each unit)."""
        found = {}
        for unit, group, share in zip(self._units, self._groups, shares):
            for name, (first, last) in unit.owned(group.size(), group.rank()).items():
                at = unit.places[name][0] + first - group.rank() * len(share)
                found[name] = share[at : at + last - first]
        return found

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Whole gradients where they are kept, by name, in the shapes of the parameters."""
        return self._views(self._kept if self._whole else ())

    def _views(self, buffers: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: view for unit, buffer in zip(self._units, buffers) for name, view in unit.views(buffer).items()}

    def before_backward(self) -> None:
        """A backward pass follows; the one before it, if any, is over."""
        self.after_backward()
        if not self._whole:
            self._missing = [set(unit.modules) for unit in self._units]
            self._next = len(self._units) - 1

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
        assert self._whole or name in self._missing[unit], f"{name} has two gradients in one backward pass"
        if unit not in self._open:
            self._open[unit] = self._buffer(unit)
        first, last = self._units[unit].modules[name]
        self._open[unit][first:last].add_(gradient.flatten())
        if self._whole:
            return
        self._missing[unit].discard(name)
        while self._next >= 0 and not self._missing[self._next]:
            self._send()

    def _send(self) -> None:
        """The next unit's gradients to the ranks that own them. The order is the same on every rank, whatever came
        when, as it must be for collectives."""
        unit = self._next
        buffer = self._open.pop(unit, None)
        if buffer is None:
            buffer = self._buffer(unit)
        if (ranks := self._groups[unit].size()) == 1:
            self._add(unit, buffer)
        else:
            sums = buffer.new_empty(len(buffer) // ranks)
            self._sent.append((unit, sums, self._reduce_scatter(unit, sums, buffer), buffer))
        self._next -= 1  # not before: out of memory, the unit is still to be sent
        del buffer
        self._receive(self._in_flight)

    def _receive(self, left: int) -> None:
        """Add what has come to this rank's shares, until at most `left` units are on their way."""
        while len(self._sent) > left:
            unit, sums, work, _ = self._sent.pop(0)
            work.wait()
            self._add(unit, sums)
        while self._aside is not None and len(self._adding) > left:  # then their memory may be used again
            self._aside.wait(self._adding.pop(0)[1])

    def _add(self, unit: int, sums: Tensor) -> None:
        """Add to this rank's share."""
        share = self._shares[unit]
        if self._aside is None:
            share.add_(sums)
            return
        self._aside.follow()
        with self._aside.queued():
            total = sums if unit in self._empty else share.to(self._device, non_blocking=True).add_(sums)
            share.copy_(total, non_blocking=True)
        self._adding.append((sums, self._aside.mark()))
        self._settled, self._empty = False, self._empty - {unit}

    def finish(self) -> None:
        """Shares may be read and written: those in host memory have arrived, or are zero."""
        self._receive(0)
        if not self._settled:
            settle(self._device)
            self._settled = True
        for unit in self._empty:
            self._shares[unit].zero_()

    def _reduce_scatter(self, unit: int, share: Tensor, buffer: Tensor) -> Any:
        """Starts `share` [n/N] := this rank's part of the sum of all ranks' `buffer` [n], which it may be a part of."""
        return dist.reduce_scatter_single(share, buffer, group=self._groups[unit], async_op=True)

    @torch.no_grad()
    def reduce(self) -> None:
        """Make shares the sums over data parallel ranks of all that was added since they were zero. Collective.

        May be called again, and backward passes may follow.
        """
        self.after_backward()
        self.finish()
        if not self._whole or not self._several:
            return
        both = list(zip(self._shares, self._kept, strict=True))
        works = [self._reduce_scatter(unit, own, buffer) for unit, (own, buffer) in enumerate(both)]
        for group, (own, buffer), work in zip(self._groups, both, works, strict=True):
            work.wait()
            first = group.rank() * len(own)  # what others own is in their sums now
            buffer[:first].zero_()
            buffer[first + len(own) :].zero_()

    @property
    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Whole gradients by canonical name, float32, summed over data parallel ranks; copies. Collective."""
        self.reduce()
        whole = [self._buffer(i) for i in range(len(self._units))]
        for group, buffer, share in zip(self._groups, whole, self._shares, strict=True):
            dist.all_gather_single(buffer, share.to(self._device, non_blocking=True), group=group)
        return self._views(whole)

    def drop(self) -> None:
        """Gradients are zero from here on, also after a backward pass that failed half-way."""
        self.finish()
        self._next = -1
        if not self._whole:
            self._open.clear()
        for parameter in self._named.values():
            parameter.grad = None
        if not self.resident:
            self.memory.release()
            return
        if self._aside is not None:
            self._empty = {*range(len(self._kept))}
            return
        for buffer in self._kept:
            buffer.zero_()

    @property
    def resident(self) -> bool:
        return self.memory.resident_bytes == self.memory.total_bytes

    @property
    def resident_bytes(self) -> int:
        return self.memory.resident_bytes

    def offload(self, zero: bool) -> None:
        self.memory.changed()
        self.memory.release() if zero else self.memory.offload()

    def reload(self, zero: bool) -> None:
        if not self.resident:
            self.memory.acquire()
            if zero:
                self.drop()

    def close(self) -> None:
        """Free the memory, and leave the parameters to themselves."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._open = [], {}
        self.memory.release()


def _call(arrived: weakref.WeakMethod, unit: int, name: str, parameter: Tensor) -> None:
    if (method := arrived()) is not None:
        method(unit, name, parameter)
