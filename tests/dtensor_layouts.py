"""Test oracle: the layout of a module's DTensors, what torch really did, for all ranks and without communication.

Works for `fully_shard` (FSDP2, HSDP), `parallelize_module` (tensor parallelism), both together, replicated and plain
parameters, and for optimizer state, whose DTensors lie as their parameters do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hybridflow.engine3d.layout import Layout
from hybridflow.engines.fsdp.layout import Axis, Cut, cut_layout
from hybridflow.engines.fsdp.sharded import canonical_name, local_tensor
from hybridflow.errors import LayoutError
from hybridflow.models.spec import ModelSpec

Model = nn.Module | Mapping[str, Tensor]


def dtensor_layout(model: Model, members: Sequence[int] | None = None, *, spec: ModelSpec | None = None) -> Layout:
    """Layout of a module's parameters, or of named tensors, over all ranks of their device mesh.

    Tensors have their canonical (Hugging Face) names, tied ones the first of their names. Rank i of the layout is world
    rank `members[i]` (default: the ranks of the mesh, ascending); replicas hold equal boxes. Parameters that are no
    DTensors, and axes of the mesh that a parameter's own mesh does not have, count as replicated. With `spec`, names
    and shapes are checked against the model's, and come in its order.

    Errors: LayoutError for a placement without boxes (Partial), for meshes of different ranks, or when the tensors
    are not those of `spec`.
    """
    named = named_tensors(model)
    tensors = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if spec is not None:
        _check_spec(tensors, spec)
        tensors = spec.tensors()  # in model order
    meshes = {tensor.device_mesh for tensor in named.values() if isinstance(tensor, DTensor)}
    if members is None:
        everyone = {tuple(sorted(mesh._rank_map.tolist())) for mesh in meshes}
        if len(everyone) > 1:
            raise LayoutError(
                f"parameters live on meshes of different ranks: {', '.join(map(str, sorted(everyone)[:3]))}. Derive "
                "all from one init_device_mesh(...)."
            )
        members = everyone.pop() if everyone else (0,)
    axes = {mesh: _axes(mesh, members) for mesh in meshes}
    cuts = {
        name: _cuts(name, tensor, axes[tensor.device_mesh])
        for name, tensor in named.items()
        if isinstance(tensor, DTensor)
    }
    layout = cut_layout(tensors, len(members), cuts)
    _check_own(layout, named, members)
    return layout


def dtensor_storage(model: Model) -> dict[str, Tensor]:
    """This rank's local tensors by the names of `dtensor_layout`, sharing the memory of the parameters.

    Take it again after something replaced parameters: the first forward pass, `model.to(...)`,
    `load_state_dict(assign=True)`.
    """
    return {name: local_tensor(tensor) for name, tensor in named_tensors(model).items()}


def named_tensors(model: Model) -> dict[str, Tensor]:
    """Parameters by canonical name; what FSDP keeps gathered after a forward pass is given back first."""
    if not isinstance(model, nn.Module):
        return dict(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {canonical_name(name): parameter for name, parameter in model.named_parameters()}


def _axes(mesh: DeviceMesh, members: Sequence[int]) -> list[Axis]:
    """The axes of a mesh. One that is a slice of a larger mesh exists once for each position along the other axes."""
    copies = mesh._layout.remap_to_tensor(mesh._rank_map).reshape(-1, *mesh.mesh.shape)
    at = {int(copies[tuple(place)]): place[1:] for place in (copies >= 0).nonzero().tolist()}
    if absent := [rank for rank in members if rank not in at]:
        raise LayoutError(
            f"ranks {absent[:8]} are not in the mesh of these parameters, which has {sorted(at)[:16]}. Ask for the "
            "layout of the mesh, then use Layout.placed(...)."
        )
    return [Axis(size, tuple(at[rank][i] for rank in members)) for i, size in enumerate(mesh.mesh.shape)]


def _cuts(name: str, tensor: DTensor, axes: Sequence[Axis]) -> list[Cut]:
    """The cuts in the order in which they were made.

    Placements are cut from left to right, except that a `_StridedShard` comes after those to its right that make
    `split_factor` parts of the dimension: so FSDP on the left cuts what tensor parallelism has left.
    """
    order: dict[int, list[Axis]] = {}
    for axis, placement in reversed(list(zip(axes, tensor.placements, strict=True))):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise LayoutError(f"{name} has placements {tensor.placements}: {placement} has no boxes. Reduce it first.")
        later = order.setdefault(placement.dim % tensor.ndim, [])
        first = int(getattr(placement, "split_factor", 1))
        parts = [math.prod(other.parts for other in later[:i]) for i in range(len(later) + 1)]
        if first not in parts:
            raise LayoutError(
                f"{name} has placements {tensor.placements} on a mesh of {[a.parts for a in axes]}: nothing cuts "
                f"dimension {placement.dim} into {first} parts before."
            )
        later.insert(parts.index(first), axis)
    return [(axis, dim) for dim, several in order.items() for axis in several]


def _check_own(layout: Layout, named: Mapping[str, Tensor], members: Sequence[int]) -> None:
    """The boxes of this rank must be as large as what it really holds."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank not in members:
        return
    boxes = {region.box.tensor: region.box for region in layout.regions(members.index(rank))}
    for name, tensor in named.items():
        local, box = local_tensor(tensor), boxes.get(name)
        if local.numel() != (box.numel if box else 0) or (box and tuple(local.shape) != box.shape):
            raise LayoutError(
                f"rank {rank} holds {tuple(local.shape)} of {name}, the placements say {box or 'nothing'}. "
                "Was its local tensor replaced?"
            )


def _check_spec(found: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
    asked = spec.tensors()
    if dict(found) == asked:
        return
    name = next(n for n in {**asked, **found} if asked.get(n) != found.get(n))
    hint = "Was the layout made from another model?"
    if name == "lm_head.weight" and spec.tied:
        hint = "Embeddings that are tied became two parameters: call model.tie_weights() after parallelize_module."
    raise LayoutError(
        f"this {spec.family} model should have {name} {asked.get(name, 'not at all')}, the module has "
        f"{found.get(name, 'no such parameter')}. {hint}"
    )
