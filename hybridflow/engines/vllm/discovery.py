"""Layout discovery: finds the weight layout of a model unknown to `layout.py` with vLLM's own loader.

While vLLM builds the model, its loader gets tensors without values that record each element's origin until they are
copied into parameters. Then it gets values that encode each element's position, and after vLLM has processed its
weights, every parameter element is compared with the records. Weights are later written in place, so a model is refused
if vLLM stores them in another form, or derives further tensors from them.

Memory: one canonical tensor and one piece of a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.engine3d.layout import Box, Region
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.errors import ModelError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]
Load = Callable[[Iterator[tuple[str, Tensor]]], None]

_LOADING = (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError)
_MOST = 4096  # regions of one parameter
_COMPARED = 1 << 24  # elements at once
_SAME = {"contiguous", "clone", "detach", "to", "type", "type_as", "float", "half", "bfloat16", "cpu", "cuda"}
_SETTERS = (Tensor.copy_, Tensor.__setitem__)


class UnreadableError(Exception):
    """Parameter `name` does not hold copies of boxes; `why` completes the sentence."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why


class RecordedTensor(Tensor):
    """Shape and dtype of a checkpoint's tensor, or of a part of it, and for each element where it comes from.

    `places` are int32 tensors of its shape: the number of the canonical tensor (from 1), and the index of each of its
    dimensions. Operations are applied to the places; a copy into another tensor is appended to `log` with them.
    """

    places: list[Tensor]
    log: list[tuple[Tensor, list[Tensor]]]

    @classmethod
    def of(cls, places: Sequence[Tensor], like: Any, log: list[tuple[Tensor, list[Tensor]]]) -> RecordedTensor:
        """With the dtype and on the device of `like`."""
        made = Tensor._make_wrapper_subclass(cls, places[0].shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made.places, made.log = list(places), log
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SETTERS and not isinstance(args[0], cls) and isinstance(source := args[-1], cls):
            into = args[0] if func is Tensor.copy_ else args[0][args[1]]
            source.log.append((into, source.places))
            return into
        if func.__name__ in _SAME:  # a dtype of floats would round the places
            return args[0]
        func = Tensor.reshape if func is Tensor.view else func
        one = next(arg for arg in _leaves((args, kwargs or {})) if isinstance(arg, cls))
        found = [func(*_places(args, i), **_places(kwargs or {}, i)) for i in range(len(one.places))]
        if isinstance(found[0], Tensor):
            return cls.of(found, one, one.log)
        if isinstance(found[0], tuple | list) and all(isinstance(part, Tensor) for part in found[0]):
            return tuple(cls.of(parts, one, one.log) for parts in zip(*found, strict=True))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))  # shapes, dtypes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"its loader reads values ({func})")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


def _places(value: Any, index: int) -> Any:
    """`value` with place `index` of each recorded tensor in it."""
    if isinstance(value, RecordedTensor):
        return value.places[index]
    if isinstance(value, dict):
        return {key: _places(part, index) for key, part in value.items()}
    return type(value)(_places(part, index) for part in value) if type(value) in (tuple, list) else value


def recorded(
    tensors: Shapes, like: Tensor, log: list[tuple[Tensor, list[Tensor]]]
) -> Iterator[tuple[str, RecordedTensor]]:
    """Each canonical tensor as a `RecordedTensor`; its places are views of vectors."""
    dims = max((len(shape) for shape in tensors.values()), default=0)
    for number, (name, shape) in enumerate(tensors.items(), 1):
        places = [torch.tensor(number, dtype=torch.int32).expand(shape)]
        for dim in range(dims):
            index = torch.arange(shape[dim] if dim < len(shape) else 1, dtype=torch.int32)
            places.append((_upright(index, dim, len(shape)) if dim < len(shape) else index[0]).expand(shape))
        yield name, RecordedTensor.of(places, like, log)


def read_regions(
    tensors: Shapes, parameters: Mapping[str, Tensor], load: Load, padded: Mapping[str, int], dtype: torch.dtype
) -> list[Region]:
    """Where `load`, which copies canonical tensors into `parameters`, puts the boxes of `tensors`.

    It is given tensors of `dtype` on the parameters' device. Rows of a parameter from `padded[name]` on need not be
    written.

    Errors: UnreadableError for a parameter that is not made of copies of boxes; whatever `load` raises.
    """
    log: list[tuple[Tensor, list[Tensor]]] = []
    device = next(iter(parameters.values())).device
    load(recorded(tensors, torch.empty(0, dtype=dtype, device=device), log))
    names = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
    cells: dict[str, dict[object, _Cell]] = {name: {} for name in parameters}
    for into, places in log:
        if into.numel() and (name := names.get(into.untyped_storage()._cdata)) is not None:
            for cell in _cells(name, parameters[name], into, places, tensors):
                cells[name][cell.first, cell.strides] = cell  # of several copies to one place the last counts
                if len(cells[name]) > _MOST:
                    raise UnreadableError(name, f"it holds more than {_MOST} boxes of other tensors")
    out: list[Region] = []
    for name, parameter in parameters.items():
        found = list(cells[name].values())
        needed = parameter.numel() // len(parameter) * padded.get(name, len(parameter)) if parameter.dim() else 1
        if (written := sum(cell.box.numel for cell in found)) < needed:
            raise UnreadableError(name, f"its loader writes {written} of its {needed} elements")
        straight = [cell.straight(name, parameter) for cell in found]
        flat = [Region(cell.box, name, (cell.first,), cell.strides) for cell in found]
        out += flat if None in straight else [region for region in straight if region is not None]
    return out


@dataclass(frozen=True)
class _Cell:
    """`box` at element `first` of a flattened parameter, its dimensions `strides` elements apart."""

    box: Box
    first: int
    strides: tuple[int, ...]

    def straight(self, name: str, parameter: Tensor) -> Region | None:
        """The region in the parameter's own dimensions, where the box lies in them as it is."""
        shape, steps = self.box.shape, parameter.stride()
        if len(steps) != len(shape) or any(
            n > 1 and a != b for n, a, b in zip(shape, self.strides, steps, strict=True)
        ):
            return None
        rest, offset = self.first, []
        for step in steps:
            offset.append(rest // step)
            rest %= step
        return Region(self.box, name, tuple(offset))


def _cells(name: str, parameter: Tensor, into: Tensor, places: Sequence[Tensor], tensors: Shapes) -> Iterator[_Cell]:
    """The boxes of one copy into a part of `parameter`, as places along each axis tell; `check_regions` verifies."""
    if not parameter.is_contiguous():
        raise UnreadableError(name, "it is not contiguous")
    spread = [place.expand(into.shape) for place in places]
    axes = [_runs(name, spread, axis) for axis in range(into.dim())]
    for runs in product(*axes):
        start = tuple(first for first, _, _ in runs)
        number, *index = (int(place[start]) for place in spread)
        if not 1 <= number <= len(tensors):
            raise UnreadableError(name, "it holds values that were not written as they are")
        tensor, shape = list(tensors.items())[number - 1]
        length = {along: stop - first for first, stop, along in runs if along is not None}
        steps = {along: into.stride(axis) for axis, (_, _, along) in enumerate(runs) if along is not None}
        first = tuple(index[: len(shape)])
        last = tuple(a + length.get(d, 1) for d, a in enumerate(first))
        if any(a < 0 or b > n for a, b, n in zip(first, last, shape, strict=True)):
            raise UnreadableError(name, "it holds values that were not written as they are")
        begin = int(into.storage_offset() - parameter.storage_offset())
        begin += sum(i * step for i, step in zip(start, into.stride(), strict=True))
        yield _Cell(Box(tensor, first, last), begin, tuple(steps.get(d, 1) for d in range(len(shape))))


def _runs(name: str, places: Sequence[Tensor], axis: int) -> list[tuple[int, int, int | None]]:
    """The longest ranges of `axis` along which exactly one index of the tensor goes up, by ones; and which one."""
    size = places[0].shape[axis]
    if size == 1:
        return [(0, 1, None)]
    origin = tuple(slice(None) if i == axis else 0 for i in range(places[0].dim()))
    steps = torch.stack([place[origin].double() for place in places]).diff(dim=1)
    good = ((steps != 0).sum(0) == 1) & ((steps[1:] == 1).sum(0) == 1)
    along = torch.where(good, (steps[1:] == 1).long().argmax(0), -1)
    turns = (along[1:] != along[:-1]) & good[1:] & good[:-1]
    cuts = (torch.cat([~good[:1], ~good[1:] | turns]).nonzero()[:, 0] + 1).tolist()
    if len(cuts) > _MOST:
        raise UnreadableError(name, f"it holds more than {_MOST} boxes of other tensors")
    return [(a, b, int(along[a]) if b - a > 1 else None) for a, b in pairwise([0, *cuts, size])]


_PRIME = 127
_FACTORS = (37, 101, 59, 83, 11, 71)  # of dimensions, in the value that checks what was found


def checked(tensors: Shapes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with values that mix all of an element's place, one tensor at a time: see `check_values`."""
    for number, (name, shape) in enumerate(tensors.items()):
        yield name, check_values(number, Box.whole(name, shape), dtype, device)


def check_values(number: int, box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[box.shape]: what `checked` gives the elements of `box`, whose tensor has this number. Whole numbers up to 127,
    which every 16-bit dtype holds exactly."""
    total = torch.full((), number * 31 % _PRIME, dtype=torch.int16, device=device)
    for dim, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        index = torch.arange(a, b, device=device) * _FACTORS[dim] % _PRIME
        total = total + _upright(index.to(torch.int16), dim, len(box.start))
    return (total.remainder_(_PRIME) + 1).to(dtype).expand(box.shape)


def _upright(index: Tensor, dim: int, dims: int) -> Tensor:
    return index.view([-1 if d == dim else 1 for d in range(dims)])


def check_regions(tensors: Shapes, storage: Mapping[str, Tensor], regions: Sequence[Region]) -> None:
    """Every element of `storage`, into which `checked` was loaded, is what `regions` say.

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


class LayoutProbe:
    """Reads this rank's regions off the model that vLLM builds while it is `installed`.

    Nothing is raised then, because the other ranks of the replica would wait for this one: `failure` says why there are
    no `regions`.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], family: str) -> None:
        self.tensors, self.family = dict(tensors), family
        self.regions: tuple[Region, ...] = ()
        self.failure: str | None = "vLLM loaded no weights"
        self.viewed: frozenset[str] = frozenset()
        """Parameters that vLLM has views of."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """vLLM's model loader, when it loads inside this block, is asked before and after it processes weights."""
        from vllm.model_executor.model_loader import base_loader

        process = base_loader.process_weights_after_loading

        def probed(model: nn.Module, config: ModelConfig, device: torch.device) -> None:
            self._around(model, config.dtype, device, lambda: process(model, config, device))

        with replaced(base_loader, "process_weights_after_loading", probed):
            yield

    @torch.no_grad()
    def _around(self, model: nn.Module, dtype: torch.dtype, device: torch.device, process: Callable[[], None]) -> None:
        from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

        def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
            _load(model, tensors, self.family)

        with self._noting():
            parameters = {name: p.data for name, p in model.named_parameters() if p.numel()}
            self.regions = tuple(read_regions(self.tensors, parameters, load, _vocabulary_rows(model), dtype))
            load(checked(self.tensors, dtype, device))
            self.failure = None
        own = {name for name, _ in model.named_parameters()}  # those that are added meanwhile are derived
        before = _other_tensors(model, own)
        process()
        weights = {name: p.data for name, p in model.named_parameters() if name in own and p.numel()}
        self.viewed = keep_views(model, weights)
        if self.failure is None:
            with self._noting():
                check_regions(self.tensors, flattened(model, flat_storages(self.regions)), self.regions)
                _check_derived(model, weights, before)
        for parameter in model.parameters():  # small random numbers again, as vLLM's own loader without weights leaves
            initialize_single_dummy_weight(parameter.data)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Stores an error that makes the model unusable as `failure`."""
        try:
            yield
        except ModelError as error:
            self.failure = str(error)
        except UnreadableError as error:
            self.failure = (
                f"weights of this {self.family} model cannot be written into vLLM's {error.name!r}: {error.why}. "
                "Generate with another model."
            )


def flattened(model: nn.Module, flat: Collection[str]) -> dict[str, Tensor]:
    """vLLM's parameters by its names, detached; those named in `flat` have one dimension."""
    return {
        name: parameter.data.view(-1) if name in flat else parameter.data
        for name, parameter in model.named_parameters()
    }


def _load(model: Any, tensors: Iterator[tuple[str, Tensor]], family: str) -> None:
    """Errors: ModelError when vLLM's loader does not know what to do with them."""
    try:
        model.load_weights(tensors)
    except _LOADING as error:
        raise ModelError(
            f"vLLM's {type(model).__name__} does not take the tensors of a {family} checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from None


def _vocabulary_rows(model: nn.Module) -> dict[str, int]:
    """Parameters with a row per token -> rows of the vocabulary on this rank; what follows is padding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return {
        f"{at}.{name}": module.shard_indices.num_org_elements
        for at, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
        for name, _ in module.named_parameters(recurse=False)
    }


def _other_tensors(model: nn.Module, own: Collection[str]) -> dict[str, Tensor]:
    """Tensors with two dimensions or more that modules keep beside the parameters `own`."""
    found = dict(model.named_buffers())
    found |= {name: parameter for name, parameter in model.named_parameters() if name not in own}
    for at, module in model.named_modules():
        found |= {f"{at}.{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1}


def keep_views(model: nn.Module, own: Mapping[str, Tensor]) -> frozenset[str]:
    """Make parameters that are views of the parameters `own` plain tensors, which follow what is written in place.

    Such are W_UV and W_UK_T, parts of kv_b_proj as the kernels take them. Returns the names in `own` that have views:
    their memory cannot be replaced by another.
    """
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in own.items()}
    viewed = set[str]()
    for at, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = f"{at}.{name}" if at else name
            if parameter is None or full in own:
                continue
            if (owner := owners.get(parameter.untyped_storage()._cdata)) is not None:
                delattr(module, name)
                plain: Any = parameter.data
                setattr(module, name, plain)
                viewed.add(owner)
    return frozenset(viewed)


def _check_derived(model: nn.Module, own: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Errors: UnreadableError for a tensor that vLLM has computed from the weights, which would not follow them as
    their views do."""
    storages = {tensor.untyped_storage()._cdata for tensor in own.values()}
    for name, tensor in _other_tensors(model, own).items():
        if before.get(name) is not tensor and tensor.untyped_storage()._cdata not in storages:
            raise UnreadableError(name, "vLLM computes it from other weights when it loads them")
