"""ParallelAdapters: adapters beside one of Megatron's parallel linear layers, whose own weight is frozen.

Tensor parallel ranks exchange the r columns between A and B where the layer itself exchanges its input or output:

    column parallel    x -> A x (whole) -> gathered over the sequence, or copied -> this rank's rows of B
    row parallel       x (columns) -> A x (a sum over ranks), added up, cut along the sequence -> B (whole)

Parameters that are whole on all ranks and see a part of the sequence on each are marked for Megatron's sum.

Shapes: S positions, b rows, I inputs and O outputs on this rank, r rank of the adapters, n adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from hybridflow.config import LoRA
from hybridflow.engine3d.layout import Layout, Region
from hybridflow.engines.megatron.layers import LayerOutput, Replicated
from hybridflow.engines.megatron.layout import CHILD, shape_of
from hybridflow.errors import ModelError


def add_adapters(
    model: GPTModel, weights: Layout, layout: Layout, rank: int, lora: LoRA, trains: bool, group: dist.ProcessGroup
) -> list[ParallelAdapters]:
    """Give the linear layers of this rank's stage their adapters of `layout`, undefined, and freeze all but these and a
    value head."""
    model.requires_grad_(False)
    held, sequence_parallel = layout.storages(rank), model.config.sequence_parallel
    found = []
    for storage, regions in weights.storages(rank).items():
        if storage in held:  # a value head
            head: Any = model.get_submodule(storage.removesuffix(".weight"))
            head.weight = nn.Parameter(head.weight.detach().float(), requires_grad=trains)
            continue
        prefix = f"{storage.removesuffix('.weight')}.{CHILD}."
        own = {name.removeprefix(prefix): found for name, found in held.items() if name.startswith(prefix)}
        if own:
            linear: Any = model.get_submodule(storage.removesuffix(".weight"))
            found.append(ParallelAdapters(linear, regions, own, lora, group, sequence_parallel))
            found[-1].requires_grad_(trains)
    if model.pre_process:  # activations that are computed again need a gradient, and so does what a stage sends
        model.embedding.register_forward_hook(lambda module, args, hidden: hidden.requires_grad_())
    return found


_CUT = {ColumnParallelLinear: "lora_B", RowParallelLinear: "lora_A", LayerOutput: "lora_A", Replicated: ""}
"""By the kind of a layer, which of its adapters' matrices tensor parallel ranks have parts of."""


class ParallelAdapters(nn.Module):
    """The adapters of a `linear` layer, whose output gets their own added before anything else is done to it; a child
    of it. All of a `Replicated` layer's are whole on all tensor parallel ranks, and nothing is exchanged.

    `regions` are the rows of its weight, `own` the regions of the adapters' parameters on this rank, by name.
    """

    def __init__(
        self,
        linear: nn.Module,
        regions: Sequence[Region],
        own: Mapping[str, Sequence[Region]],
        lora: LoRA,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        if type(linear) not in _CUT:
            raise ModelError(
                f"Megatron has no adapters for {regions[0].box.tensor}. Name other targets in LoRA(targets=)."
            )
        self._group, self._cut, self._shared = group, _CUT[type(linear)], sequence_parallel
        self._scale, self._on = lora.alpha / lora.rank, True
        self._dropout = nn.Dropout(lora.dropout)
        self._names = list(dict.fromkeys(name.partition(".")[0] for name in own))
        for path, parts in own.items():
            self._add(path, shape_of(parts))
        # of each slice of the layer's output: whose it is, and which rows of that adapter on this rank give it
        self._slices = list[tuple[str, int, int]]()
        for region in sorted(regions, key=lambda region: region.offset):
            name, (start, stop) = region.box.tensor.split(".")[-2], region.box.rows
            for part in own.get(f"{name}.lora_B.weight", ()):  # without an adapter these rows get zeros
                if part.box.start[0] <= start < part.box.stop[0]:
                    shift = part.offset[0] - part.box.start[0]
                    start, stop = start + shift, stop + shift
                    break
            self._slices.append((name, start, stop))
        linear.add_module(CHILD, self)
        linear.register_forward_hook(self._beside, prepend=True)

    def _add(self, path: str, shape: tuple[int, ...]) -> None:
        """The parameter of a path such as `q_proj.lora_A.weight`."""
        parameter: Any = nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        if self._cut in path.split("."):
            set_tensor_model_parallel_attributes(parameter, True, int(self._cut == "lora_A"), 1)
        else:
            parameter.sequence_parallel = self._shared
        module: nn.Module = self
        *modules, name = path.split(".")
        for child in modules:
            if child not in dict(module.named_children()):
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        module.register_parameter(name, parameter)

    def set_scale(self, adapter: str, scale: float) -> None:
        """As of peft's layers: with 0 the layer computes without its adapters."""
        self._on = bool(scale)

    def _beside(self, linear: nn.Module, args: tuple, output: Any) -> Any:
        if not self._on:
            return output
        return output + self(args[0]) if isinstance(output, Tensor) else (output[0] + self(args[0]), output[1])

    def forward(self, x: Tensor) -> Tensor:
        """[S, b, I] -> [S, b, O]"""
        own = {name: matrix.to(x.dtype) for name, matrix in self.named_parameters()}
        thin = [F.linear(self._dropout(x), own[f"{name}.lora_A.weight"]) for name in self._names]
        parts = self._exchange(torch.cat(thin, -1) * self._scale).chunk(len(thin), -1)
        # without a row of the layer this rank still takes part in the exchange, and in the one of the way back
        nothing = x.new_empty(0, parts[0].shape[-1])
        wide = {
            name: F.linear(part, own.get(f"{name}.lora_B.weight", nothing))
            for name, part in zip(self._names, parts, strict=True)
        }
        slices = [
            wide[name][..., start:stop] if name in wide else x.new_zeros(*parts[0].shape[:-1], stop - start)
            for name, start, stop in self._slices
        ]
        slices += [given for given in wide.values() if not given.shape[-1]]
        return slices[0] if len(slices) == 1 else torch.cat(slices, -1)

    def _exchange(self, thin: Tensor) -> Tensor:
        """[S, b, n r]: what all tensor parallel ranks have computed, of the positions that B takes."""
        if self._group.size() == 1 or not self._cut:
            return thin
        if self._cut == "lora_A":
            reduce = (
                reduce_scatter_to_sequence_parallel_region if self._shared else reduce_from_tensor_model_parallel_region
            )
            return reduce(thin, group=self._group)
        if self._shared:
            return gather_from_sequence_parallel_region(thin, tensor_parallel_output_grad=True, group=self._group)
        return copy_to_tensor_model_parallel_region(thin, group=self._group)
