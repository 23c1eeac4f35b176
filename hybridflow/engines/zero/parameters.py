"""FlatParameters: a module's parameters in one flat buffer per unit, whole on every rank.

Shapes: n elements of a unit's buffer, n/N of a rank's share of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.fsdp.sharded import canonical_name
from hybridflow.engines.zero.layout import FlatUnit
from hybridflow.errors import ModelError


class FlatParameters:
    """Puts new parameters on `device` in the place of `model`'s, with their values where they have any.

    `named` are the parameters by name, `storage` the same memory by canonical name, without gradients, `memory` what
    is behind it: that of a unit goes with the last of its names. `buffers[i]` [n] is that of `units[i]`, `own[i]`
    [n/N] this rank's share. Contents of parameters that were on the meta device are zero. `trained`: not frozen.

    Errors: ModelError when the model's parameters are not those of `units`, or some of them are frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FlatUnit],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.units, self.group = units, group
        self.ranks, self.rank = group.size(), group.rank()
        _check(model, units)
        dtype = next(model.parameters()).dtype
        shares = [unit.share(self.ranks) for unit in units]
        self.buffers = [torch.zeros(share * self.ranks, dtype=dtype, device=device) for share in shares]
        self.own = [self.own_share(buffer) for buffer in self.buffers]
        self.storage: dict[str, Tensor] = {}
        for unit, buffer in zip(units, self.buffers, strict=True):
            self.storage |= unit_views(unit, buffer)
        places = zip(units, self.buffers, strict=True)
        self.named = _install(
            model, {name: buffer[a:b] for unit, buffer in places for name, (a, b) in unit.modules.items()}
        )
        self.memory = Residency(self.storage, device=device)
        self.trained = any(parameter.requires_grad for parameter in self.named.values())

    def own_share(self, buffer: Tensor) -> Tensor:
        """This rank's part [n/N] of a unit's buffer [n], sharing its memory."""
        share = len(buffer) // self.ranks
        return buffer[self.rank * share : (self.rank + 1) * share]

    def pieces(self, shares: Sequence[Tensor]) -> dict[str, Tensor]:
        """What `shares` ([n/N] for each unit) hold of the parameters that this rank owns part of: flat views."""
        found = {}
        for unit, share in zip(self.units, shares, strict=bool(shares)):
            for name, (first, last) in unit.owned(self.ranks, self.rank).items():
                at = unit.places[name][0] + first - self.rank * len(share)
                found[name] = share[at : at + last - first]
        return found

    @torch.no_grad()
    def gather(self, names: Collection[str]) -> None:
        """Collect the units of the parameters `names` from the ranks that own them. Collective."""
        if self.ranks == 1:
            return
        works = [
            dist.all_gather_single(buffer, own, group=self.group, async_op=True)
            for unit, buffer, own in zip(self.units, self.buffers, self.own, strict=True)
            if not unit.parameters.keys().isdisjoint(names)
        ]
        for work in works:
            assert work is not None
            work.wait()


def unit_views(unit: FlatUnit, buffer: Tensor) -> dict[str, Tensor]:
    """The parameters of a unit in its buffer [n], by name, in their shapes."""
    return {name: buffer[a:b].view(unit.parameters[name]) for name, (a, b) in unit.places.items()}


def _check(model: nn.Module, units: Sequence[FlatUnit]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for unit in units:
        shapes = {name: part.shape for name, part in unit.parts.items()}
        expected |= {name: shapes.get(name) or unit.parameters[name] for name in unit.modules}
    found = {canonical_name(name): tuple(p.shape) for name, p in model.named_parameters()}
    if found != expected:
        name = next(n for n in {**expected, **found} if expected.get(n) != found.get(n))
        raise ModelError(
            f"this model should have {name} {expected.get(name, 'not at all')}, the module has "
            f"{found.get(name, 'no such parameter')}. Tie embeddings that are tied before they are partitioned."
        )
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if 0 < len(frozen) < len(found):
        raise ModelError(
            f"ZeRO stages 1 and 2 train all parameters of a model; {len(frozen)} of {len(found)} are frozen, among "
            f"them {frozen[0]}. Use FSDP, or ZeRO(stage=3), to train a part of a model."
        )


def _install(model: nn.Module, flat: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Parameters that live in `flat`, by name, tied ones still tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    named: dict[str, nn.Parameter] = {}
    for full_name, old in model.named_parameters():
        name = canonical_name(full_name)
        place = flat[name].view(old.shape)
        if not old.is_meta:
            place.copy_(old.detach())
        named[name] = made[old] = nn.Parameter(place, requires_grad=old.requires_grad)
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[old])
    return named
