"""Units of a model, the flat buffers that they share, and the parts of an optimizer step. Pure.

The parameters of a *unit* (a decoder layer, say) follow each other in one flat buffer, of which each of N data parallel
ranks owns one N-th, a contiguous share that cuts parameters anywhere. So work and memory are even whatever the
parameters' sizes, one collective serves a unit, and a unit's gradients can leave for their owners while those of the
units before it are still computed (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", section 5).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.models.hf_spec import ROUTER_BIAS
from hybridflow.models.spec import Part

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, tuple[int, ...]]
Range = tuple[int, int]

ALIGNMENT = 64
"""Elements: parameters and shares begin at multiples of it, as kernels and collectives on CUDA prefer."""
LAYER = re.compile(r"(?:.*?\.)?\d+\.")  # up to the first number of a name: `model.layers.3.`


@dataclass(frozen=True)
class Unit:
    """Names and shapes of the tensors that share a buffer, in its order; stepped in part `part`.

    `parts` are the model's parameters that consist of several of them, which therefore lie without a gap. Those of
    `experts` are summed over, and cut by, the ranks that hold the same experts.
    """

    parameters: Tensors
    parts: Mapping[str, Part] = field(default_factory=dict)
    part: int = 0
    experts: bool = False

    @cached_property
    def modules(self) -> dict[str, Range]:
        """Where each flattened parameter of the model begins and ends in the buffer."""
        inside = {name for part in self.parts.values() for name in part.tensors}
        found = {name: place for name, place in self.places.items() if name not in inside}
        for name, part in self.parts.items():
            found[name] = (self.places[part.tensors[0]][0], self.places[part.tensors[-1]][1])
        return found

    @cached_property
    def places(self) -> dict[str, Range]:
        """Where each flattened tensor begins and ends in the buffer."""
        placed, end = {}, 0
        joined = {name for part in self.parts.values() for name in part.tensors[1:]}
        for name, shape in self.parameters.items():
            start = end if name in joined else _aligned(end, ALIGNMENT)
            end = start + math.prod(shape)
            placed[name] = (start, end)
        return placed

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors in `buffer`, in their shapes."""
        return {name: buffer[a:b].view(self.parameters[name]) for name, (a, b) in self.places.items()}

    def share(self, ranks: int) -> int:
        """Elements that each of `ranks` ranks owns; with padding, `ranks` of them are the buffer."""
        end = max(stop for _, stop in self.places.values())
        return _aligned(end, ranks * ALIGNMENT) // ranks

    def owned(self, ranks: int, at: int) -> dict[str, Range]:
        """The range of each flattened parameter that rank `at` of `ranks` owns; no entry where it is empty."""
        share, found = self.share(ranks), {}
        for name, (start, stop) in self.places.items():
            first, last = max(start, at * share), min(stop, (at + 1) * share)
            if first < last:
                found[name] = (first - start, last - start)
        return found


def owned_layout(parameters: Layout, units: Callable[[int], Iterable[tuple[Unit, int, int]]]) -> Layout:
    """Layout of one kind of optimizer state (main parameters, or a moment) where ranks own shares of units.

    `units(rank)` are those of the rank's `parameters`, each with the number of ranks that share it and the rank's place
    among them. State is stored flat, one tensor per parameter that a rank's share touches; padding is in no box.
    """

    def regions(rank: int) -> list[Region]:
        owned: dict[str, Range] = {}
        for unit, ranks, at in units(rank):
            owned |= unit.owned(ranks, at)
        held = (region for region in parameters.regions(rank) if region.storage in owned)
        return [part for region in held for part in _flat_regions(region, *owned[region.storage])]

    return Layout(parameters.tensors, parameters.ranks, regions)


def _flat_regions(region: Region, start: int, stop: int) -> Iterator[Region]:
    """What elements `start:stop` of the flattened storage hold of `region`, stored flat from `start` on.

    Such a range of a matrix is at most a partial row, whole rows, and another partial row. The region's box spans whole
    rows of its storage.
    """
    box, shape = region.box, region.box.shape
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    first = region.offset[0] * strides[0]  # of the region in the flattened storage
    at, end = max(start, first), min(stop, first + box.numel)
    while at < end:
        place, rest = [], at - first
        for stride in strides:
            place.append(rest // stride)
            rest %= stride
        # the outermost dimension along which whole blocks follow
        axis = next(i for i, stride in enumerate(strides) if not any(place[i + 1 :]) and end - at >= stride)
        count = min(shape[axis] - place[axis], (end - at) // strides[axis])
        extent = (*(1 for _ in range(axis)), count, *shape[axis + 1 :])
        low = tuple(map(add, box.start, place))
        yield Region(Box(box.tensor, low, tuple(map(add, low, extent))), region.storage, (at - start,), strides)
        at += count * strides[axis]


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# Parts of a model


def ends_and_layers(tensors: Tensors) -> tuple[Tensors, list[Tensors], Tensors]:
    """Tensors before a model's layers, of each layer, and after the layers.

    `tensors` are in model order; the tensors of a layer share a name prefix that ends in a number.
    """
    before: dict[str, tuple[int, ...]] = {}
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    behind: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if (match := LAYER.match(name)) is not None:
            layers.setdefault(match[0], {})[name] = shape
        else:
            (behind if layers else before)[name] = shape
    return before, list(layers.values()), behind


def step_groups(tensors: Tensors, stages: Sequence[Sequence[int]] | None = None) -> list[frozenset[str]]:
    """Canonical tensors by part of an optimizer step, those that become final together: the ends of the model, then the
    k-th layer of every pipeline stage.

    `stages` are the layers of each stage (default: there is one). The ends come first: they are larger than a layer,
    and later parts hide their transfer to another layout. A final norm alone is too small for a part of its own.
    """
    before, layers, behind = ends_and_layers(tensors)
    own_part = bool(before) and any(len(shape) > 1 for shape in behind.values())
    ends = [before.keys(), behind.keys()] if own_part else [before.keys() | behind.keys()]
    split = [range(len(layers))] if stages is None else stages
    deepest = [
        {name for stage in split if k < len(stage) for name in layers[stage[k]]} for k in range(max(map(len, split)))
    ]
    return [frozenset(group) for group in (*ends, *deepest) if group]


# Whole parameters on every rank (ZeRO stages 1 and 2)


def whole_units(
    tensors: Tensors, parts: Mapping[str, Part] | None = None, frozen: Collection[str] = frozenset()
) -> list[Unit]:
    """The units of a model whose parameters are `tensors` (canonical names, in model order), in forward order: those
    before the decoder layers, of each layer, and after the layers. A router's bias, float32, is one of its own, and so
    are the `frozen` ones of each."""
    before, layers, behind = ends_and_layers(tensors)
    found = []
    for named in (before, *layers, behind):
        kinds: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in named.items():
            kind = name if name.endswith(ROUTER_BIAS) else "frozen" if name in frozen else ""
            kinds.setdefault(kind, {})[name] = shape
        found += kinds.values()
    return [
        Unit(named, {name: part for name, part in (parts or {}).items() if part.tensors[0] in named}) for named in found
    ]


def parameter_layout(tensors: Tensors, ranks: int) -> Layout:
    """Every rank holds every tensor whole, in storage of its name."""
    regions = [Region.whole(name, shape) for name, shape in tensors.items()]
    return Layout(tensors, ranks, lambda rank: regions, lambda rank: 0)


def optimizer_layout(
    tensors: Tensors,
    ranks: int,
    parts: Mapping[str, Part] | None = None,
    frozen: Collection[str] = frozenset(),
) -> Layout:
    """Layout of one kind of optimizer state; all kinds have the same."""
    cut = whole_units(tensors, parts, frozen)
    return owned_layout(parameter_layout(tensors, ranks), lambda rank: [(unit, ranks, rank) for unit in cut])
