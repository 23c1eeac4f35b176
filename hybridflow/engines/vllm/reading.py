"""Which boxes a loader copies where: it is given digits instead of weights, and its parameters are read back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Region
from hybridflow.engines.vllm.boxes import Origin
from hybridflow.engines.vllm.digits import BASE, check_values, digits, written
from hybridflow.engines.vllm.fields import Field

Shapes = Mapping[str, tuple[int, ...]]
Load = Callable[[Iterator[tuple[str, Tensor]]], None]

_COMPARED = 1 << 24  # elements at once


class UnreadableError(Exception):
    """Parameter `name` does not hold copies of boxes; `why` completes the sentence."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


def read_regions(
    tensors: Shapes, parameters: Mapping[str, Tensor], load: Load, padded: Mapping[str, int], dtype: torch.dtype
) -> list[Region]:
    """Where `load`, which writes canonical tensors into `parameters`, puts the boxes of `tensors`.

    It is called once per digit, with tensors of `dtype` on the parameters' device. Rows of a parameter from
    `padded[name]` on need not be written. Parameters are left with what the last call wrote.

    Errors: UnreadableError for a parameter that is not made of copies of boxes; whatever `load` raises.
    """
    found: dict[str, dict[int | None, Field]] = {name: {} for name in parameters}
    device = next(iter(parameters.values())).device
    for digit in digits(tensors):
        for parameter in parameters.values():
            parameter.zero_()
        load(written(tensors, digit, dtype, device))
        for name, parameter in parameters.items():
            field = _field(name, parameter).minus(1)
            known = found[name].get(digit.dim)
            found[name][digit.dim] = field if known is None else known.plus(field, BASE**digit.power)
    out: list[Region] = []
    for name, parameter in parameters.items():
        fields = found.pop(name)
        origin = Origin(tuple(parameter.shape), fields[None], tuple(fields[d] for d in range(len(fields) - 1)))
        for start in origin.unwritten():
            if name not in padded or start[0] < padded[name]:
                raise UnreadableError(name, f"its loader writes nothing at {start}")
        try:
            out += origin.regions(name, tensors)
        except ValueError as error:
            raise UnreadableError(name, f"it holds {error}") from None
    return out


def check_regions(tensors: Shapes, storage: Mapping[str, Tensor], regions: Sequence[Region]) -> None:
    """Every element of `storage`, into which `digits.checked` was loaded, is what `regions` say.

    Errors: UnreadableError for the first that is not.
    """
    numbers = {name: i for i, name in enumerate(tensors)}
    for region in regions:
        tensor = storage.get(region.storage)
        if tensor is None:
            raise UnreadableError(region.storage, "it is gone once weights have been loaded")
        for part in region.box.split(_COMPARED):
            wanted = check_values(numbers[part.tensor], part, tensor.dtype, tensor.device)
            if not torch.equal(region.view(tensor, part), wanted):
                raise UnreadableError(region.storage, f"{part} has another form there once weights have been loaded")


def flat_storages(regions: Sequence[Region]) -> frozenset[str]:
    """Storages that `regions` address element by element: their tensors have to be flat."""
    return frozenset(region.storage for region in regions if region.strides is not None)


def _field(name: str, parameter: Tensor) -> Field:
    if not parameter.is_contiguous():
        raise UnreadableError(name, "it is not contiguous")
    try:
        return Field.of(parameter)
    except ValueError as error:
        raise UnreadableError(name, f"it holds {error}") from None
