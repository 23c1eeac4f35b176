"""FlatShards: every data parallel rank holds whole parameters, one flat buffer per unit, and 1/N of the optimizer
state.

Bytes on each of N ranks, for P parameters of b bytes each (2 or 4) whose optimizer keeps K bytes for one (Rajbhandari
et al. 2020, section 5 and table 1, with gradients in float32; Adam's K is 12, in float32 8, since its main parameters
are the parameters themselves):

    stage 1     (b + 4) P + K P / N
    stage 2     b P + (4 + K) P / N, and the gradients of one unit while a backward pass runs

Stage 3 also shards parameters: that is FSDP. Megatron's distributed optimizer is stage 1 over the parameters of one
pipeline and tensor parallel rank.

Shapes: n elements of a unit's buffer, n/N of a rank's share of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.batch.pinned import settle, to_device
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.flat_gradients import FlatGradients
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
