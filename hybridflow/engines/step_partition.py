"""The parts of an optimizer step: which canonical tensors become final together. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Tensors = Mapping[str, tuple[int, ...]]

_LAYER = re.compile(r"(?:.*?\.)?\d+\.")  # up to the first number of a name: `model.layers.3.`


def ends_and_layers(tensors: Tensors) -> tuple[Tensors, list[Tensors], Tensors]:
    """What stands before the layers of a model, each layer, and what stands behind them.

    `tensors` are named in model order; a layer is what has a number in its name up to which its tensors agree.
    """
    before: dict[str, tuple[int, ...]] = {}
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    behind: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if (match := _LAYER.match(name)) is not None:
            layers.setdefault(match[0], {})[name] = shape
        else:
            (behind if layers else before)[name] = shape
    return before, list(layers.values()), behind


def step_groups(tensors: Tensors, stages: Sequence[Sequence[int]] | None = None) -> list[frozenset[str]]:
    """Canonical tensors by part of a step: the ends of the model, then the k-th layer of every pipeline stage.

    `stages` are the layers of each stage (default: there is one). The ends come first: they are larger than a layer,
    and what follows hides their way to another layout. A final norm alone is too small for a part of its own.
    """
    before, layers, behind = ends_and_layers(tensors)
    own_part = bool(before) and any(len(shape) > 1 for shape in behind.values())
    ends = [before.keys(), behind.keys()] if own_part else [before.keys() | behind.keys()]
    split = [range(len(layers))] if stages is None else stages
    deepest = [
        {name for stage in split if k < len(stage) for name in layers[stage[k]]} for k in range(max(map(len, split)))
    ]
    return [frozenset(group) for group in (*ends, *deepest) if group]
