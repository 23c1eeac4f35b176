"""MegatronShards: the parameters, gradients and optimizer shards of one rank of a Megatron model.

Megatron's data parallelism keeps one buffer per dtype for a whole model, which frees all or nothing and is gathered as
a whole. It wraps any module, so here it wraps the parameters of every unit by themselves: each has storage of its own,
and is gathered over data parallel ranks alone (a part of an optimizer step) or together with the others as one
coalesced collective. As in Megatron's distributed optimizer, each data parallel rank steps one range of each buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.megatron.units import EMBEDDING, OUTPUT, Unit, vocabulary_rows
from hybridflow.engines.offload_manager import GradientBuffers
from hybridflow.engines.process_groups import RankContext
from hybridflow.models.spec import ModelSpec

PACKED_BYTES = 64 << 20  # on gloo, buffers of up to this size travel as one: a collective costs it about 0.2 ms


class MegatronShards:
    """Fulfils `sharded_model.Shards` for `model`, which is trained where its parameters need gradients.

    Names are those of Megatron's parameters; tensors of `main` are flat ranges. Rows that pad the vocabulary must be
    finite, or they would spoil what they are multiplied with by zero: they are zero from the start, and again whenever
    memory comes back.
    """

    def __init__(
        self,
        context: RankContext,
        spec: ModelSpec,
        model: GPTModel,
        units: Sequence[Unit],
        groups: ProcessGroupCollection,
    ) -> None:
        at, grid = context.coords, context.grid
        self.model: Any = model
        self._named: dict[str, Any] = dict(model.named_parameters())
        expected = {name: shape for unit in units for name, shape in unit.parameters.items()}
        assert expected == {n: tuple(p.shape) for n, p in self._named.items()}, "units.py does not describe this model"
        trained = any(parameter.requires_grad for parameter in self._named.values())
        self._buckets = Buckets(model, units, groups) if trained else None  # moves the parameters to its buffers
        self.gradients: Any = self._buckets
        self.storage: Mapping[str, Tensor] = {name: parameter.detach() for name, parameter in self._named.items()}
        start, stop = vocabulary_rows(spec.vocab, grid.t, at.t)
        padded = (EMBEDDING,) if spec.head == "value" else (EMBEDDING, OUTPUT)
        padding = {name: self.storage[name][stop - start :] for name in padded if name in self.storage}
        for rows in padding.values():
            rows.zero_()
        self.memory: Residency = _PaddedMemory(self.storage, padding)
        owned = [unit.owned(grid.d, at.d) for unit in units] if trained else []
        places = [item for of_unit in owned for item in of_unit.items()]
        # norms are summed in the order of Megatron's optimizer: matrices, then vectors
        self._ranges = dict(sorted(places, key=lambda item: self._named[item[0]].ndim == 1))
        self._own = {name: self.storage[name].view(-1)[a:b] for name, (a, b) in self._ranges.items()}
        self.separate = trained and model.config.params_dtype != torch.float32
        self.main: Mapping[str, Tensor] = self._own
        if self.separate:
            self.main = {name: torch.empty_like(piece, dtype=torch.float32) for name, piece in self._own.items()}
        # each parameter counts once: not its tensor parallel copies, not the second of tied embeddings
        self._counted = {
            name
            for name, parameter in self._named.items()
            if (at.t == 0 or getattr(parameter, "tensor_model_parallel", False))
            and not getattr(parameter, "shared", False)
        }
        self._everyone = context.groups.everyone()

    def reduce(self) -> None:
        """Add up gradients over data parallel ranks and all others that share parameters: each rank has the sums of
        its own ranges afterwards. Collective."""
        assert self._buckets is not None
        self._buckets.reduce()

    def main_gradients(self) -> dict[str, Tensor]:
        """Reduced gradients by the names of `main`; views."""
        return {name: self._named[name].main_grad.view(-1)[a:b] for name, (a, b) in self._ranges.items()}

    def square_sum(self) -> Tensor:
        """float64: of the gradients of all ranks. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=next(iter(self.storage.values())).device)
        grads = [grad for name, grad in self.main_gradients().items() if name in self._counted]
        if grads:
            total += torch.stack(torch._foreach_norm(grads)).double().square_().sum()
        dist.all_reduce(total, group=self._everyone)
        return total

    @torch.no_grad()
    def updated(self, names: Collection[str]) -> None:
        """`main` of these was updated: copy it to the parameters, and gather these. Collective."""
        if self.separate and (mine := [name for name in names if name in self.main]):
            torch._foreach_copy_([self._own[name] for name in mine], [self.main[name] for name in mine])
        if self._buckets is not None:
            self._buckets.gather(names)

    @torch.no_grad()
    def parameters_changed(self) -> None:
        """Parameters were written from outside: copy them to `main`."""
        if self.separate and self.main:
            torch._foreach_copy_(list(self.main.values()), list(self._own.values()))

    def close(self) -> None:
        """Free all memory, also of tensors that others still refer to."""
        if self._buckets is not None:
            self._buckets.close()
        self.memory.release()
        if self.separate:
            Residency(self.main).release()
        self.main, self._own, self._named = {}, {}, {}
        self.model = self._buckets = self.gradients = None


class Buckets(GradientBuffers):
    """Megatron's buffers of parameters and gradients, one for each unit of a stage.

    Adds up gradients over ranks, and gathers parameters of which each rank has updated a part. To Megatron this looks
    like one wrapped model (`module`, `config`, `ddp_config`, `finish_grad_sync`).
    """

    def __init__(self, model: GPTModel, units: Sequence[Unit], groups: ProcessGroupCollection) -> None:
        self.config, self.module, self._units, self._groups = model.config, model, units, groups
        self.ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        self._wrapped: list[Any] = [
            DistributedDataParallel(self.config, self.ddp_config, _UnitParameters(model, unit), pg_collection=groups)
            for unit in units
        ]
        self.buffers = [wrapped.buffers[0] for wrapped in self._wrapped]
        super().__init__(Residency({str(i): buffer.grad_data for i, buffer in enumerate(self.buffers)}))
        buckets = [buffer.buckets[0] for buffer in self.buffers]
        size = sum(bucket.grad_data.nbytes for bucket in buckets)
        self._packs = buckets[0].grad_data.device.type == "cpu" and size <= PACKED_BYTES
        self._everything = self._communicated(range(len(units)))
        self._some = {tuple(range(len(units))): self._everything}

    def _communicated(self, units: Iterable[int]) -> _ParamAndGradBucketGroup:
        buckets = [self.buffers[i].buckets[0] for i in units]
        return _ParamAndGradBucketGroup(buckets, self.ddp_config, self._groups.dp_cp, self._groups.dp_cp.size())

    @property
    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Whole gradients by parameter name, once they are reduced; views. Collective."""
        group = self._groups.dp_cp
        if group.size() > 1:
            for buffer in self.buffers:
                own = buffer.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(buffer.grad_data, own, group=group)
        return {name: parameter.main_grad for name, parameter in self.module.named_parameters()}  # type: ignore[misc]

    def drop(self) -> None:
        """Set them to zero; offloaded ones are discarded."""
        if not self.resident:
            self.memory.release()
            return
        for wrapped in self._wrapped:
            wrapped.zero_grad_buffer()

    def reduce(self) -> None:
        """The sums of the ranges that this rank owns, over data parallel ranks and all others that share parameters."""
        finalize_model_grads([self], None, pg_collection=self._groups)  # type: ignore[list-item]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Called by Megatron for the sum over data parallel ranks."""
        if self._groups.dp_cp.size() == 1:
            return
        if self._packs:
            self._reduce_packed()
        else:
            self._everything.finish_grad_sync(force_all_reduce=force_all_reduce)

    @torch.no_grad()
    def _reduce_packed(self) -> None:
        """One message between any two ranks for all units."""
        group = self._groups.dp_cp
        shares = [buffer.grad_data.view(group.size(), -1) for buffer in self.buffers]  # [d, elements of a share]
        packed = torch.cat(shares, dim=1)
        sums = torch.empty_like(packed[0])
        dist.reduce_scatter_tensor(sums, packed.flatten(), group=group)
        own = [share[group.rank()] for share in shares]
        torch._foreach_copy_(own, list(sums.split([len(share) for share in own])))

    def gather(self, names: Collection[str]) -> None:
        """Collect the units of the parameters `names` from the data parallel ranks that own them."""
        named = frozenset(names)
        units = tuple(i for i, unit in enumerate(self._units) if not named.isdisjoint(unit.parameters))
        if not units or self._groups.dp_cp.size() == 1:
            return
        if self._packs:
            self._gather_packed(units)
            return
        if units not in self._some:
            self._some[units] = self._communicated(units)
        self._some[units].start_param_sync()

    @torch.no_grad()
    def _gather_packed(self, units: Sequence[int]) -> None:
        group = self._groups.dp_cp
        shares = [self.buffers[i].param_data.view(group.size(), -1) for i in units]
        own = torch.cat([share[group.rank()] for share in shares])
        packed = own.new_empty(group.size(), len(own))
        dist.all_gather_into_tensor(packed.view(-1), own, group=group)
        torch._foreach_copy_(shares, list(packed.split([share.shape[1] for share in shares], dim=1)))

    def close(self) -> None:
        """Free the gradients, and undo the cycles that Megatron's wrappers are part of.

        A wrapper keeps the autograd nodes whose hooks refer to it and to its flat buffers.
        """
        self.memory.release()
        for wrapped in self._wrapped:
            wrapped.grad_accs.clear()


class _UnitParameters(nn.Module):
    """The parameters of a unit, in its order, as a module that is never called."""

    def __init__(self, model: GPTModel, unit: Unit) -> None:
        super().__init__()
        for name in unit.parameters:
            self.register_parameter(name.replace(".", "/"), model.get_parameter(name))


class _PaddedMemory(Residency):
    """Zeroes the padding whose memory it gives back."""

    def __init__(self, tensors: Mapping[str, Tensor], padding: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._padding = padding

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        fresh = super().acquire(names)
        for name in fresh & self._padding.keys():
            self._padding[name].zero_()
        return fresh
