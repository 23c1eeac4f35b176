"""Parameter groups: which settings of an optimizer hold for which parameters. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from hybridflow.config import Optimizer
from hybridflow.engine3d.layout import Layout
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.patterns import matches


class GroupSettings(NamedTuple):
    """The highest learning rate of the schedule, and the weight decay."""

    lr: float
    weight_decay: float


def settings_of(optimizer: Optimizer, tensor: str, decays: bool) -> GroupSettings:
    """Those of the canonical `tensor`; `decays`: without a group for it, it has the optimizer's weight decay."""
    groups: Any = optimizer.groups
    own = next((dict(own) for pattern, own in groups if matches(pattern, tensor)), {})
    decay = optimizer.weight_decay if decays else 0.0
    return GroupSettings(own.get("lr", optimizer.lr), own.get("weight_decay", decay))


def check_groups(optimizer: Optimizer, trained: Collection[str], layout: Layout) -> None:
    """Errors: ConfigError for a pattern without a trained tensor, two patterns for one tensor, and a parameter of a
    backend's own that consists of tensors of different groups."""
    name = type(optimizer).__name__
    patterns = [pattern for pattern, _ in optimizer.groups]
    for pattern in patterns:
        if not any(matches(pattern, tensor) for tensor in trained):
            known = {part for tensor in trained for part in tensor.split(".")}
            raise ConfigError(
                f"{name}(groups={{{pattern!r}: ...}}): no trained tensor has {pattern!r} in its name."
                f"{nearest(pattern, known)} Their names are those of model.safetensors, such as {next(iter(trained))}."
            )
    of = {tensor: [pattern for pattern in patterns if matches(pattern, tensor)] for tensor in trained}
    for tensor, found in of.items():
        if len(found) > 1:
            raise ConfigError(
                f"{name}(groups=...): {tensor} is in the groups {found[0]!r} and {found[1]!r}. Write patterns of which "
                f"one at most fits; * stands for any text."
            )
    parts: dict[Any, int] = {layout.part(rank) if layout.part else rank: rank for rank in range(layout.ranks)}
    for rank in parts.values():
        for regions in layout.storages(rank).values():
            joined = {region.box.tensor: of.get(region.box.tensor) for region in regions}
            one, *others = joined
            if other := next((tensor for tensor in others if joined[tensor] != joined[one]), None):
                raise ConfigError(
                    f"{name}(groups=...): {one} and {other} are one tensor of this backend, and their groups differ. "
                    f"Give both to one group, or train with hf.FSDP() or hf.ZeRO(stage=...)."
                )
