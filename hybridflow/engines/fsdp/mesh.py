"""The device mesh (replicate, shard, tp) of a model group, from process groups that only its members build."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from hybridflow.engines.process_groups import RankContext

AXES = ("replicate", "shard", "tp")


def make_mesh(context: RankContext, sizes: Sequence[int]) -> DeviceMesh:
    """A mesh (replicate, shard, tp) of these sizes: rank `(r * shard + s) * tp + t` is at (r, s, t).

    Every collective of it has the timeout of the group's `ProcessGroups`; no other process takes part. The names of
    its axes are its own (`mesh.mesh_dim_names`): DTensor keeps what it once found out about operations on a mesh, and
    would use the groups of another model for one that is equal to it.
    """
    ranks = torch.arange(math.prod(sizes), device="cpu").reshape(*sizes)
    at = (ranks == context.rank).nonzero()[0].tolist()
    groups = []
    for axis, name in enumerate(AXES):
        line = ranks[tuple(slice(None) if i == axis else at[i] for i in range(len(AXES)))]
        groups.append(context.groups.new(name, line.tolist()))
    names = tuple(f"{axis} of {context.groups.name}" for axis in AXES)
    world_ranks = torch.tensor(context.groups.ranks, device="cpu")[ranks]
    mesh = DeviceMesh.from_group(groups, context.device.type, mesh=world_ranks, mesh_dim_names=names)
    context.groups.when_closed(mesh._pg_registry.clear)  # DTensor's caches keep meshes for ever
    return mesh
