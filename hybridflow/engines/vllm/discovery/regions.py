"""Which boxes a loader copies where: from what it wrote, field by field, to regions of the parameters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Box, Region
from hybridflow.engines.vllm.discovery.encode import BASE, Field, check_values, digits, written

_MOST = 4096  # regions of one parameter


@dataclass(frozen=True)
class _Run:
    """Indices `start:stop` of one dimension of a parameter, along which dimension `along` of a tensor goes up by one;
    None for a single index."""

    start: int
    stop: int
    along: int | None

    def cut(self) -> list[_Run]:
        return [_Run(i, i + 1, None) for i in range(self.start, self.stop)]


@dataclass(frozen=True)
class ElementOrigin:
    """Where the elements of a parameter come from: `tensor` numbers canonical tensors, `places[d]` are indices of
    their dimension d. A negative tensor: not written."""

    shape: tuple[int, ...]
    tensor: Field
    places: tuple[Field, ...]

    def unwritten(self) -> list[tuple[int, ...]]:
        """Where each block that was not written begins."""
        return [start for start, _ in self._blocks() if self.tensor.at(start) < 0]

    def regions(self, storage: str, tensors: Mapping[str, tuple[int, ...]]) -> list[Region]:
        """Regions of the parameter `storage`, `tensors` being the canonical ones in the order of their numbers.

        In index space as a rule; where a box is turned or has other dimensions than the parameter, all of them are
        regions of the flattened parameter.

        Errors: ValueError for elements that are no copies of boxes.
        """
        names, cells = list(tensors), list[tuple[Box, tuple[int, ...], tuple[int | None, ...]]]()
        for start, stop in self._blocks():
            number = self.tensor.at(start)
            if number < 0:
                continue
            if number >= len(names):
                raise ValueError("values that were not written as they are")
            name = names[number]
            for runs in self._cells(start, stop, len(tensors[name])):
                cells.append(self._cell(runs, name, tensors[name]))
                if len(cells) > _MOST:
                    raise ValueError(f"more than {_MOST} boxes of other tensors")
        if all(_straight(box, along) for box, _, along in cells):
            return [Region(box, storage, offset) for box, offset, _ in cells]
        return [self._flat(box, offset, along, storage) for box, offset, along in cells]

    def _blocks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """First and last indices of blocks that belong to one tensor each, or to none."""
        edges = [[*kept.tolist(), size] for kept, size in zip(self.tensor.kept, self.shape, strict=True)]
        for ends in product(*map(pairwise, edges)):
            yield tuple(a for a, _ in ends), tuple(b for _, b in ends)

    def _cells(self, start: tuple[int, ...], stop: tuple[int, ...], dims: int) -> Iterator[tuple[_Run, ...]]:
        places = [place.block(start, stop) for place in self.places[:dims]]
        axes = [_runs(places, axis, a, b) for axis, (a, b) in enumerate(zip(start, stop, strict=True))]
        for runs in product(*axes):
            later = [{other.along for other in runs[axis + 1 :]} - {None} for axis in range(len(runs))]
            # two dimensions of the parameter that move the same index are cut along the first
            yield from product(
                *(run.cut() if run.along in used else (run,) for run, used in zip(runs, later, strict=True))
            )

    def _cell(
        self, runs: tuple[_Run, ...], name: str, shape: tuple[int, ...]
    ) -> tuple[Box, tuple[int, ...], tuple[int | None, ...]]:
        offset, along = tuple(run.start for run in runs), tuple(run.along for run in runs)
        first = tuple(place.at(offset) for place in self.places[: len(shape)])
        size = {run.along: run.stop - run.start for run in runs if run.along is not None}
        last = tuple(a + size.get(d, 1) for d, a in enumerate(first))
        if any(a < 0 or b > n for a, b, n in zip(first, last, shape, strict=True)):
            raise ValueError("values that were not written as they are")
        return Box(name, first, last), offset, along

    def _flat(self, box: Box, offset: tuple[int, ...], along: tuple[int | None, ...], storage: str) -> Region:
        steps = torch.empty(self.shape, device="meta").stride()
        strides = {d: step for d, step in zip(along, steps, strict=True) if d is not None}
        first = sum(i * step for i, step in zip(offset, steps, strict=True))
        return Region(box, storage, (first,), tuple(strides.get(d, 1) for d in range(len(box.start))))


def _straight(box: Box, along: tuple[int | None, ...]) -> bool:
    return len(along) == len(box.start) and all(d in (axis, None) for axis, d in enumerate(along))


def _runs(places: Sequence[Field], axis: int, start: int, stop: int) -> list[_Run]:
    """The longest runs of `start:stop` along `axis` in which exactly one of `places` goes up, by one each time."""
    length = stop - start
    if length == 1:
        return [_Run(start, stop, None)]
    if not places:
        raise ValueError("a single number several times over")
    found = [place.steps(axis, length) for place in places]
    steps = torch.stack([step for step, _ in found])
    good = torch.stack([same for _, same in found]).all(0) & ((steps == 1).sum(0) == 1) & ((steps != 0).sum(0) == 1)
    along = torch.where(good, (steps == 1).long().argmax(0), -1)
    turns = (along[1:] != along[:-1]) & good[1:] & good[:-1]
    cuts = torch.cat([~good[:1], ~good[1:] | turns]).nonzero()[:, 0] + 1
    if len(cuts) > _MOST:
        raise ValueError(f"more than {_MOST} boxes of other tensors")
    edges = [0, *cuts.tolist(), length]
    return [_Run(start + a, start + b, int(along[a]) if b - a > 1 else None) for a, b in pairwise(edges)]


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
        origin = ElementOrigin(tuple(parameter.shape), fields[None], tuple(fields[d] for d in range(len(fields) - 1)))
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
