"""Buckets: Megatron's buffers of parameters and gradients, one for each unit of a stage.

Megatron's data parallelism keeps one buffer per dtype for a whole model, which frees all or nothing and is gathered as
a whole. It wraps any module, so here it wraps the parameters of every unit by themselves: each has storage of its own,
and is gathered over data parallel ranks alone (a part of an optimizer step) or together with the others as one
coalesced collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import nn

from hybridflow.engine3d.residency import Residency
from hybridflow.engines.megatron.units import Unit

PACKED_BYTES = 64 << 20  # on gloo, buffers of up to so many bytes travel as one: a collective costs it about 0.2 ms


class Buckets:
    """Adds up gradients over ranks, and gathers parameters that an optimizer updated in part.

    `distributed`: the optimizer's state is split over data parallel ranks, so parameters live in flat buffers too.
    `gradients` is the memory of the gradient buffers. To Megatron this looks like one wrapped model (`module`,
    `config`, `ddp_config`, `finish_grad_sync`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        model: GPTModel,
        units: Sequence[Unit],
        groups: ProcessGroupCollection,
        distributed: bool,
    ) -> None:
        self.config, self.module, self.units, self._groups = config, model, units, groups
        self.ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=False
        )
        self.wrapped: list[Any] = [
            DistributedDataParallel(config, self.ddp_config, _UnitParameters(model, unit), pg_collection=groups)
            for unit in units
        ]
        buffers = [wrapped.buffers[0] for wrapped in self.wrapped]
        self.gradients = Residency({str(i): buffer.grad_data for i, buffer in enumerate(buffers)})
        self._buckets = [buffer.buckets[0] for buffer in buffers]
        self._everything = self._communicated(self._buckets)
        gradients = [bucket.grad_data for bucket in self._buckets]
        self._packs = (
            distributed
            and gradients[0].device.type == "cpu"
            and sum(gradient.nbytes for gradient in gradients) <= PACKED_BYTES
        )
        self._by_part: dict[int, _ParamAndGradBucketGroup] = {}
        for part in {unit.part for unit in units}:
            own = [bucket for unit, bucket in zip(units, self._buckets, strict=True) if unit.part == part]
            self._by_part[part] = self._communicated(own)

    def _communicated(self, buckets: list) -> _ParamAndGradBucketGroup:
        return _ParamAndGradBucketGroup(buckets, self.ddp_config, self._groups.dp_cp, self._groups.dp_cp.size())

    def zero(self) -> None:
        """Set the gradients to zero."""
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()

    def reduce(self, everywhere: bool = False) -> None:
        """Add up gradients over data parallel ranks and whoever else shares parameters.

        With a distributed optimizer each rank gets the sums of what it owns, or with `everywhere` all of them.
        """
        finalize_model_grads([self], None, pg_collection=self._groups, force_all_reduce=everywhere)  # type: ignore[list-item]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """What Megatron calls for the sum over data parallel ranks."""
        if self._groups.dp_cp.size() == 1:
            return
        if self._packs and not force_all_reduce:
            self._reduce_packed()
        else:
            self._everything.finish_grad_sync(force_all_reduce=force_all_reduce)

    @torch.no_grad()
    def _reduce_packed(self) -> None:
        """The sums of what this rank owns, with one message between any two ranks for all units."""
        group = self._groups.dp_cp
        shares = [bucket.grad_data.view(group.size(), -1) for bucket in self._buckets]  # [d, elements of a share]
        packed = torch.cat(shares, dim=1)
        sums = torch.empty_like(packed[0])
        dist.reduce_scatter_tensor(sums, packed.flatten(), group=group)
        own = [share[group.rank()] for share in shares]
        torch._foreach_copy_(own, list(sums.split([len(share) for share in own])))

    def gather(self, part: int | None = None) -> None:
        """Collect the parameters of `part` (default: all) from the data parallel ranks that own them."""
        group = self._everything if part is None else self._by_part.get(part)
        if group is None or not self.ddp_config.use_distributed_optimizer or self._groups.dp_cp.size() == 1:
            return
        if self._packs:
            self._gather_packed(group.buckets)
        else:
            group.start_param_sync()

    def close(self) -> None:
        """Free the gradients, and undo the cycles that Megatron's wrappers are part of.

        A wrapper keeps the autograd nodes whose hooks refer to it and to its flat buffers.
        """
        self.gradients.release()
        for wrapped in self.wrapped:
            wrapped.grad_accs.clear()

    @torch.no_grad()
    def _gather_packed(self, buckets: list) -> None:
        group = self._groups.dp_cp
        shares = [bucket.param_data.view(group.size(), -1) for bucket in buckets]
        own = torch.cat([share[group.rank()] for share in shares])
        packed = own.new_empty(group.size(), len(own))
        dist.all_gather_into_tensor(packed.view(-1), own, group=group)
        torch._foreach_copy_(shares, list(packed.split([share.shape[1] for share in shares], dim=1)))


class _UnitParameters(nn.Module):
    """The parameters of a unit, in its order, as a module that is never called."""

    def __init__(self, model: GPTModel, unit: Unit) -> None:
        super().__init__()
        for name in unit.parameters:
            self.register_parameter(name.replace(".", "/"), model.get_parameter(name))
