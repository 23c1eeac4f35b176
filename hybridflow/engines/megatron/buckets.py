"""Buckets: Megatron's buffers of parameters and gradients, one for each unit of a stage.

Megatron's data parallelism keeps one buffer per dtype for a whole model, which frees all or nothing and is gathered as
a whole. It wraps any module, so here it wraps every unit by itself: each has storage of its own, and is gathered over
data parallel ranks alone (a part of an optimizer step) or together with the others as one coalesced collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from hybridflow.engine3d.residency import Residency
from hybridflow.engines.megatron.units import Unit


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
            DistributedDataParallel(config, self.ddp_config, model.get_submodule(unit.module), pg_collection=groups)
            for unit in units
        ]
        buffers = [wrapped.buffers[0] for wrapped in self.wrapped]
        self.gradients = Residency({unit.module: buffer.grad_data for unit, buffer in zip(units, buffers, strict=True)})
        self._buckets = [buffer.buckets[0] for buffer in buffers]
        self._everything = self._communicated(self._buckets)
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
        if self._groups.dp_cp.size() > 1:
            self._everything.finish_grad_sync(force_all_reduce=force_all_reduce)

    def gather(self, part: int | None = None) -> None:
        """Collect the parameters of `part` (default: all) from the data parallel ranks that own them."""
        group = self._everything if part is None else self._by_part.get(part)
        if group is not None and self.ddp_config.use_distributed_optimizer and self._groups.dp_cp.size() > 1:
            group.start_param_sync()
