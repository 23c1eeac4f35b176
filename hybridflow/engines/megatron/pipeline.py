"""PipelineLoop: Megatron's schedules run micro-batches through the pipeline (1F1B with several stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow.engines.megatron.core_attention import PackedRow
from hybridflow.engines.megatron.layers import SelectedPositions
from hybridflow.engines.micro_batches import MicroBatch


class PipelineLoop:
    """Fulfils `sharded_model.MicroBatchLoop` for stage `at` of `stages`.

    `selection` receives the positions that the output layer computes for each micro-batch.
    """

    def __init__(
        self,
        model: GPTModel,
        selection: SelectedPositions,
        groups: ProcessGroupCollection,
        at: int,
        stages: int,
        device: torch.device,
    ) -> None:
        self.model, self.selection, self.groups, self.stages, self.device = model, selection, groups, stages, device
        self.last_stage = at == stages - 1

    def infer(self, micro_batches: Sequence[MicroBatch], read: Callable[[MicroBatch, Tensor], Any]) -> list[Any]:
        """Without gradients, by the same schedule with `forward_only`."""
        return self._run(micro_batches, lambda micro, out, **_: read(micro, out[0]), forward_only=True)

    def train(self, micro_batches: Sequence[MicroBatch], loss: Callable[[MicroBatch, Tensor], Tensor]) -> None:
        # Megatron expects (loss, number of tokens to average over, metrics)
        self._run(micro_batches, lambda micro, out: (loss(micro, out[0]), 0, {}), forward_only=False)

    def _run(self, micro_batches: Sequence[MicroBatch], read: Callable, forward_only: bool) -> list[Any]:
        """`read(micro-batch, model output [1, N, C])` of each on the last stage; on others nothing of use."""

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
                seq_length=length,  # of the first: stages exchange the shapes
                micro_batch_size=rows,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.groups,
                **extra,
            )
