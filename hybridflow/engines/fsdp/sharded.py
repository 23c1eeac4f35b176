"""Sharded: this rank's part of a TransformersModel under tensor parallelism and FSDP2, with its gradients.

Losses are shares of a global sum, so gradients are added up over data parallel ranks and never averaged.

Shapes: T rows of this rank, k experts of each, R rows that its experts compute, L experts of this rank, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from hybridflow.batch.pinned import settle, to_device
from hybridflow.config import FSDP
from hybridflow.engine3d.layout import Box
from hybridflow.engine3d.offloadable import HostImages, Residency
from hybridflow.engines.flat_shards import canonical_name, square_sum
from hybridflow.engines.fsdp.layout import EMBEDDING, PER_HEAD, tensor_parallel_styles, weights_layout
from hybridflow.engines.lora.targets import adapter_names, is_adapter, trained_tensors
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.rank_exchanges import ExpertParallel, grouped
from hybridflow.engines.train_states import local_tensor
from hybridflow.engines.transformers_model import TransformersModel
from hybridflow.models.hf_spec import ROUTER_BIAS, Decoder, expert_modules, frozen_tensors
from hybridflow.models.spec import Part

AXES = ("replicate", "shard", "tp")
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    EMBEDDING: partial(RowwiseParallel, input_layouts=Replicate()),
}

Views = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Maps a parameter (its name, the local tensor) to canonical tensors that share its memory."""


class Sharded:
    """Implements `Shards` for the model of `spec`, which computes in `dtype`.

    Trained parameters (`trains`) are float32. `storage` are this rank's parts by canonical name, in fixed memory with
    undefined contents. Adapters are in `adapters` instead. Parameters that need no gradient are frozen.
    """

    def __init__(self, context: RankContext, strategy: FSDP, spec: Decoder, dtype: torch.dtype, trains: bool) -> None:
        grid, copies, lora = context.grid, strategy.replicate, strategy.lora
        kept = torch.float32 if trains and lora is None else dtype
        self.model: Any = TransformersModel(spec, kept, recompute=strategy.recompute and trains, lora=lora)
        model, renamed = self.model, adapter_names(spec, lora) if lora else {}
        model.train_all(trains, frozen_tensors(strategy, spec))
        if lora is not None:
            learned = trained_tensors(spec, lora)
            for full, parameter in model.named_parameters():
                name = canonical_name(full)
                parameter.requires_grad_(trains and renamed.get(name, name) in learned)
        mixed = dtype != kept or (lora is not None and dtype != torch.float32)  # adapters are float32
        compute, views = dtype if mixed else None, _views(context, strategy, spec, renamed)
        mesh = make_mesh(context, (copies, grid.d // copies, grid.t))
        assert mesh.mesh_dim_names is not None
        tp = mesh.mesh_dim_names[-1]
        self.tp, self._often, self._per_head = mesh[tp].get_group(), strategy.reduce_often, frozenset[str]()
        if grid.t > 1:
            styles = tensor_parallel_styles(spec)
            parallelize_module(model, mesh[tp], _parallel_styles(model, styles), src_data_rank=None)  # pyright: ignore
            self._per_head = frozenset(f"{name}.weight" for name, style in styles.items() if style == PER_HEAD)
            if spec.tied and model.output is not None:
                model.tie()
        self.root, self._offloads = self._cut(context, strategy, mesh, compute), strategy.offload
        model.to_empty(device="cpu" if strategy.offload else context.device)
        model.make_buffers(context.device)
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTER_BIAS):
                parameter.data = parameter.data.to(context.device)
        self.parameters = {canonical_name(name): parameter for name, parameter in model.named_parameters()}
        pieces = {name: views(name, local_tensor(parameter)) for name, parameter in self.parameters.items()}
        held = {name: tensor for found in pieces.values() for name, tensor in found.items()}
        self.storage: Mapping[str, Tensor] = {name: tensor for name, tensor in held.items() if not is_adapter(name)}
        self.adapters: Mapping[str, Tensor] = {name: tensor for name, tensor in held.items() if is_adapter(name)}
        self.memory, self.separate = Residency(self.storage, context.device), False
        self.gradients: Any = LocalGradients(self.parameters, views, self.memory)
        trained = {
            piece for name, parameter in self.parameters.items() if parameter.requires_grad for piece in pieces[name]
        }
        self.main: Mapping[str, Tensor] = {n: t for n, t in held.items() if t.numel() and n in trained}
        self._device, self._everyone = context.device, context.groups.everyone()
        self.lockstep, at = grid.size > 1, context.coords
        first = at.d < grid.d // copies
        counted = (n for n, p in self.parameters.items() if first and (at.t == 0 or _is_cut(p, tp)))
        self._counted = {piece for name in counted for piece in pieces[name]}

    def _cut(self, context: RankContext, strategy: FSDP, mesh: DeviceMesh, compute: torch.dtype | None) -> FSDPModule:
        """Leave this rank its part of every parameter, which FSDP2 then gathers in `compute`; the whole model."""
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=compute and torch.float32)
        pin = context.device.type == "cuda"
        host: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin) if strategy.offload else OffloadPolicy()}
        grid, copies, model = context.grid, strategy.replicate, self.model
        if grid.ep > 1:
            same = make_mesh(context, (copies, grid.d // copies // grid.ep, grid.ep))
            as_given = replace(policy, cast_forward_inputs=False)  # weights of experts
            for experts in share_experts(model, same.get_group(2), self.tp):
                fully_shard(experts, mesh=_of_shards(same), mp_policy=as_given, **host)
        host["ignored_params"] = {p for name, p in model.named_parameters() if name.endswith(ROUTER_BIAS)}
        for layer in model.layers:
            fully_shard(layer, mesh=_of_shards(mesh), mp_policy=policy, **host)
        root = fully_shard(model, mesh=_of_shards(mesh), mp_policy=policy, reshard_after_forward=False, **host)
        for module in self._modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # only other ranks may have a gradient: experts without a token here, a replica without rows
            module.set_reduce_scatter_unused_params(True)
        for module in self._modules() if strategy.offload else ():
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.__class__ = _OffloadedParam
        return root

    def _modules(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def reset(self) -> None:
        state: Any = self.root._get_fsdp_state()
        if state._is_root is None:  # nothing has been computed yet
            return
        self.root.reset_iter_state()
        for module in self._modules():
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:  # torch leaves gathered parts and gradients of the failed pass
                    parameter.to_sharded()
                    parameter.unsharded_accumulated_grad = parameter.grad_offload_event = None
                    if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                        whole.grad = None

    def after_pass(self) -> None:
        """Reshard parameters that the last micro-batch left gathered."""
        self.root.reshard()

    def before_backward(self, last: bool) -> None:
        """`last`: the next micro-batch ends its mini-batch, so gradients are then reduced over ranks."""
        self.root.set_requires_gradient_sync(last or self._often)
        if last and not self._often:
            for module in self._modules():
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    _complete(group.fsdp_params)

    def waited(self, layer: nn.Module, mark: Any) -> None:
        for group in layer._get_fsdp_state()._fsdp_param_groups if isinstance(layer, FSDPModule) else ():
            group._wait_all_gather_streams_on_event(mark)

    def reduce(self) -> None:
        """Complete the gradients before a step. FSDP2 has summed them over data parallel ranks; query and key norms
        still need a sum over tensor parallel ranks, each of which has only its own heads' gradients."""
        if self._offloads:
            settle(self._device)
        if not self._per_head:
            return
        shared = [grad for name, grad in self.gradients.tensors.items() if name in self._per_head and grad.numel()]
        if shared:
            (flat,) = to_device([torch.cat([grad.flatten() for grad in shared])], self._device)
            dist.all_reduce(flat, group=self.tp)
            totals = flat.to(shared[0].device).split([grad.numel() for grad in shared])
            for grad, total in zip(shared, totals, strict=True):
                grad.copy_(total.view_as(grad))

    def main_gradients(self) -> dict[str, Tensor]:
        return {name: grad for name, grad in self.gradients.tensors.items() if name in self.main}

    def square_sum(self) -> Tensor:
        grads = [grad for name, grad in self.main_gradients().items() if name in self._counted]
        return square_sum(grads, self._everyone, self._device)

    def updated(self, names: Collection[str]) -> None:
        """Nothing to copy: `main` is the parameters."""
        self.memory.changed(name for name in names if name in self.main)

    def parameters_changed(self) -> None:
        """Nothing to copy: `main` is the parameters."""

    def close(self) -> None:
        self.gradients.drop()
        self.memory.release()
        Residency(self.adapters, self._device).release()


class _OffloadedParam(FSDPParam):
    """FSDP2 waits for the copy of each gradient to host memory, in the backward pass; `Sharded.reduce` for all."""

    grad_offload_event = property(lambda self: None, lambda self, event: None)  # type: ignore[assignment]


class LocalGradients:
    """Gradients of this rank's parts; they exist from the first backward pass to the step, in buffers of FSDP2."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], views: Views, beside: Residency) -> None:
        self._parameters, self._views, self._device = parameters, views, beside.device
        self._away: Residency | None = None
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._largest = max(trained, key=lambda one: one.numel(), default=None)
        self._bytes = 0  # of all, once there have been any
        self.images = HostImages(beside.images.stream)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By canonical name, of the parameters that have any; views."""
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        local = {name: self._views(name, local_tensor(grad)) for name, grad in found.items() if grad is not None}
        return {name: tensor for views in local.values() for name, tensor in views.items()}

    def drop(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @property
    def memory(self) -> Residency:
        return Residency(self.tensors, self._device) if self._away is None else self._away

    @property
    def resident(self) -> bool:
        return self._away is None

    @property
    def resident_bytes(self) -> int:
        if not self.resident or self._largest is None or self._largest.grad is None:
            return 0
        self._bytes = self._bytes or Residency(self.tensors, self._device).total_bytes
        return self._bytes

    def offload(self, zero: bool) -> None:
        if self._away is None:
            if zero:
                self.drop()
            self.images.changed()
            self._away = Residency(self.tensors, self._device, images=self.images)
            self._away.offload()

    def reload(self, zero: bool) -> None:
        if self._away is not None:
            self._away.acquire()
            self._away = None


def _complete(parameters: Sequence[FSDPParam]) -> None:
    """Give all parameters that FSDP2 reduces together an accumulated gradient, if one has it.

    FSDP2 accumulates in the reduce dtype and refuses to reduce it together with the compute dtype: gradients from the
    last micro-batch alone, or its own zeros for missing ones.
    """
    if all(parameter.unsharded_accumulated_grad is None for parameter in parameters):
        return
    for parameter in parameters:
        if parameter.unsharded_accumulated_grad is None and parameter.sharded_param.requires_grad:
            whole = parameter._unsharded_param  # without memory between passes
            parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=parameter.reduce_dtype)


def _is_cut(parameter: Tensor, axis: str) -> bool:
    """Whether ranks along an axis of the mesh hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in names and isinstance(parameter.placements[names.index(axis)], Shard)


def _parallel_styles(model: TransformersModel, styles: Mapping[str, str]) -> dict[str, ParallelStyle]:
    """By the full names of modules. Logits stay cut: `vocab_parallel_log_probs` takes them so."""
    found = {}
    for name, module in model.named_modules():
        style = "colwise" if module is model.output else styles.get(canonical_name(name))
        if style in _STYLES:
            found[name] = _STYLES[style]()
    return found


def _views(context: RankContext, strategy: FSDP, spec: Decoder, renamed: Mapping[str, str]) -> Views:
    """The canonical tensors of each parameter on this rank; `renamed` are parameters with another name."""
    parts, tensors = spec.parts, spec.tensors()
    regions = weights_layout(strategy, spec, context.grid).regions(context.rank) if parts else ()
    boxes = {region.box.tensor: region.box for region in regions}

    def of(name: str, local: Tensor) -> dict[str, Tensor]:
        return _pieces(local, boxes, tensors, parts[name]) if name in parts else {renamed.get(name, name): local}

    return of


def _pieces(
    local: Tensor, boxes: Mapping[str, Box], tensors: Mapping[str, tuple[int, ...]], part: Part
) -> dict[str, Tensor]:
    """This rank's part of a parameter as canonical tensors; `boxes` are this rank's boxes by name."""
    if part.shape == tensors[part.tensors[0]]:  # one tensor by another name
        return {part.tensors[0]: local}
    flat, at = local.view(-1), 0
    found = {}
    for name in part.tensors:
        rows = boxes[name].shape[0] if name in boxes else 0
        size = rows * math.prod(tensors[name][1:])
        found[name] = flat[at : at + size].view(rows, *tensors[name][1:])
        at += size
    return found


def make_mesh(context: RankContext, sizes: Sequence[int]) -> DeviceMesh:
    """A mesh (replicate, shard, tp) of these sizes: rank `(r * shard + s) * tp + t` is at (r, s, t).

    Every collective of it has the timeout of the group's `ProcessGroups`; no other process takes part. The names of
    its axes are its own (`mesh.mesh_dim_names`): DTensor keeps what it once found out about operations on a mesh, and
    would use the groups of another model for one that is equal to it.
    """
    ranks = torch.arange(math.prod(sizes), device="cpu").reshape(*sizes)
    at = (ranks == context.rank).nonzero()[0].tolist()
    groups = []
    for axis in range(len(AXES)):
        line = ranks[tuple(slice(None) if i == axis else at[i] for i in range(len(AXES)))]
        groups.append(context.groups.of(line.tolist()))
    names = tuple(f"{axis} of {context.groups.name}" for axis in AXES)
    world_ranks = torch.tensor(context.groups.ranks, device="cpu")[ranks]
    mesh = DeviceMesh.from_group(groups, context.device.type, mesh=world_ranks, mesh_dim_names=names)
    context.groups.when_closed(mesh._pg_registry.clear)  # DTensor's caches keep meshes for ever
    return mesh


def _of_shards(mesh: DeviceMesh) -> DeviceMesh:
    """The axes along which parameters are cut and copied."""
    assert mesh.mesh_dim_names is not None
    replicate, shard, _ = mesh.mesh_dim_names
    return mesh[replicate, shard] if mesh.size(0) > 1 else mesh[shard]


def share_experts(model: nn.Module, ep: dist.ProcessGroup, alone: dist.ProcessGroup) -> list[Any]:
    """The modules of experts in `model`, whose parameters (on the meta device) are then those of this rank of `ep`;
    `alone` is a group of this rank only."""
    found = list(expert_modules(model).values())
    for module in found:
        parallel = ExpertParallel(module.num_experts, ep, alone, ep)
        for name, whole in list(module.named_parameters()):
            own = whole.detach()[: parallel.local].clone()
            setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
        module.forward = partial(_forward, module, parallel)
    return found


def _forward(
    module: Any, parallel: ExpertParallel, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """[T, H] of `hidden_states` [T, H], in transformers' signature."""
    return parallel(hidden_states, top_k_weights, top_k_index, partial(_compute, module)).to(hidden_states.dtype)


def _compute(module: Any, rows_RH: Tensor, counts_L: Tensor) -> Tensor:
    """What transformers' `grouped_mm_experts_forward` computes of rows that are sorted."""
    if not len(rows_RH):
        return rows_RH
    ends_L = counts_L.cumsum(0).to(torch.int32)

    def product(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        out = grouped(rows, weight if module.is_transposed else weight.mT, ends_L)
        return out + getattr(module, f"{name}_bias").repeat_interleave(counts_L, 0) if module.has_bias else out

    if module.has_gate:
        return product(module._apply_gate(product(rows_RH, "gate_up_proj")), "down_proj")
    return product(module.act_fn(product(rows_RH, "up_proj")), "down_proj")
