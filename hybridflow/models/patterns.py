"""Patterns of tensors' names: the parameters of an optimizer's groups, and frozen ones. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase

from hybridflow.config import FSDP, ZeRO
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.hf_spec import Decoder


def matches(pattern: str, tensor: str) -> bool:
    return fnmatchcase(tensor, f"*{pattern}*")


def frozen_tensors(strategy: FSDP | ZeRO, spec: Decoder) -> frozenset[str]:
    """Canonical tensors that `freeze` names. Errors: ConfigError for a pattern that fits none, for all tensors, and for
    a part of a parameter."""
    tensors, name = spec.tensors(), type(strategy).__name__
    fitting = {pattern: {one for one in tensors if matches(pattern, one)} for pattern in strategy.freeze}
    found = frozenset[str]().union(*fitting.values())
    for pattern, several in fitting.items():
        if not several or len(found) == len(tensors):
            known = {part for tensor in tensors for part in tensor.split(".")}
            raise ConfigError(
                f"{name}(freeze={strategy.freeze}): {'all tensors have' if several else 'no tensor has'} {pattern!r} "
                f"in the name.{'' if several else nearest(pattern, known)} Their names are those of model.safetensors, "
                f"such as {next(iter(tensors))}."
            )
    for part in spec.parts.values():
        if found.intersection(part.tensors) and not found.issuperset(part.tensors):
            raise ConfigError(
                f"{name}(freeze={strategy.freeze}): {' and '.join(part.tensors[:3])} are one parameter. Freeze all of "
                f"them or none."
            )
    return found
