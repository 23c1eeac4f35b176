"""Schedule: Megatron's way of running micro-batches through the pipeline (1F1B with several stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow.engines.megatron.attention import PackedRow
from hybridflow.engines.megatron.layers import SelectedPositions
from hybridflow.engines.micro_batches import MicroBatch


class Schedule:
    """Runs one stage; `selection` is told which positions of each micro-batch the output layer computes."""

    def __init__(
        self,
        model: GPTModel,
        selection: SelectedPositions,
        groups: ProcessGroupCollection,
        stages: int,
        device: torch.device,
    ) -> None:
        self.model, self.selection, self.groups, self.stages, self.device = model, selection, groups, stages, device

    def run(self, micro_batches: list[MicroBatch], read: Callable, forward_only: bool) -> list[Any]:
        """What `read(micro-batch, model output)` returned for each, on the last stage; on others, nothing of use.

        Without `forward_only`, `read` returns a loss as Megatron's schedules expect it, and gradients are added.
        """

        def forward_step(batches: Iterator[MicroBatch], model: GPTModel):
            micro = next(batches).to(self.device)
            self.selection.index = micro.position_major
            packed = PackedRow(sequences=micro.sequences) if micro.sequences is not None else None
            out = model(input_ids=micro.ids, position_ids=None, attention_mask=None, packed_seq_params=packed)  # type: ignore[arg-type]
            return out, partial(read, micro)

        self.model.train(not forward_only)
        extra: dict[str, Any] = {}
        if self.stages > 1:
            extra["p2p_communicator"] = P2PCommunicator(self.groups.pp, self.model.config)
        rows, length = micro_batches[0].ids.shape
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func(pp_size=self.stages, vp_size=None)(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=[self.model],
                num_microbatches=len(micro_batches),
                seq_length=length,  # of the first: stages tell each other the shapes
                micro_batch_size=rows,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.groups,
                **extra,
            )
