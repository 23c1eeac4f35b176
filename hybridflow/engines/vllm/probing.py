"""Where vLLM keeps the weights of a model that `layout.py` does not know: its own loader shows it.

While vLLM builds the model, its loader gets tensors whose values say which element they are (`digits.py`), several
times over. What the parameters hold then is read back as boxes (`fields.py`, `boxes.py`), and all of it is checked once
more after vLLM has processed its weights: a layout is what weights can be written through in place, so a model that
vLLM computes with in another form than its loader's is refused.

Memory: one canonical tensor and one piece of a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.engine3d.layout import Region
from hybridflow.engines.vllm.boxes import Origin
from hybridflow.engines.vllm.digits import BASE, check_values, checked, digits, written
from hybridflow.engines.vllm.environment import replaced
from hybridflow.engines.vllm.fields import Field
from hybridflow.errors import ModelError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_CHECKED = 1 << 24  # elements compared at once
_LOADING = (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError)


class Probe:
    """Reads this rank's regions off the model that vLLM builds while it is `installed`.

    Nothing is raised then, because the other ranks of the replica would wait for this one: `failure` says why there are
    no `regions`.
    """

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], family: str) -> None:
        self.tensors, self.family = dict(tensors), family
        self.regions: tuple[Region, ...] = ()
        self.failure: str | None = "vLLM loaded no weights"

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
        try:
            self.failure = None
            self.regions = tuple(self._read(model, dtype, device))
            self._load(model, checked(self.tensors, dtype, device))
        except ModelError as error:
            self.failure = str(error)
        before = _other_tensors(model)
        process()
        try:
            if self.failure is None:
                self._check(model)
                _check_derived(model, before, self.family)
        except ModelError as error:
            self.failure, self.regions = str(error), ()
        _unset(model)

    def _read(self, model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[Region]:
        """Errors: ModelError naming the parameter that is no copy of boxes."""
        found: dict[str, dict[int | None, Field]] = {}
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
        for digit in digits(self.tensors):
            for parameter in parameters.values():
                parameter.zero_()
            self._load(model, written(self.tensors, digit, dtype, device))
            for name, parameter in parameters.items():
                fields = found.setdefault(name, {})
                field = _field(name, parameter, self.family)
                known = fields.get(digit.dim)
                fields[digit.dim] = field if known is None else known.plus(field, BASE**digit.power)
        vocabulary = _vocabulary_rows(model)
        names, dims = list(self.tensors), [len(shape) for shape in self.tensors.values()]
        for name, parameter in parameters.items():
            fields = {dim: field.minus(_ones(dim, self.tensors)) for dim, field in found.pop(name).items()}
            tensor = fields.pop(None)
            origin = Origin(tuple(parameter.shape), tensor, tuple(fields[dim] for dim in sorted(fields, key=str)))
            for start in origin.unwritten():
                if name not in vocabulary or start[0] < vocabulary[name]:
                    raise _refused(self.family, name, f"its loader writes nothing at {start}")
            try:
                yield from origin.regions(name, names, dims)
            except ValueError as error:
                raise _refused(self.family, name, f"it holds {error}") from None

    def _load(self, model: Any, tensors: Iterator[tuple[str, Tensor]]) -> None:
        try:
            model.load_weights(tensors)
        except _LOADING as error:
            raise ModelError(
                f"vLLM's {type(model).__name__} does not take the tensors of a {self.family} checkpoint: "
                f"{type(error).__name__}: {error}"
            ) from None

    def _check(self, model: nn.Module) -> None:
        """Every element is what its region says. Errors: ModelError naming the first parameter that is not."""
        numbers, storage = (
            {name: i for i, name in enumerate(self.tensors)},
            flattened(model, flat_storages(self.regions)),
        )
        for region in self.regions:
            tensor = storage.get(region.storage)
            if tensor is None:
                raise _refused(self.family, region.storage, "it is gone when vLLM has processed its weights")
            for part in region.box.split(_CHECKED):
                wanted = check_values(numbers[part.tensor], part, tensor.dtype, tensor.device)
                if not torch.equal(region.view(tensor, part), wanted):
                    raise _refused(self.family, region.storage, f"vLLM changes the form of {part} for its kernels")


def flat_storages(regions: Sequence[Region]) -> frozenset[str]:
    """Parameters that `regions` address element by element."""
    return frozenset(region.storage for region in regions if region.strides is not None)


def flattened(model: nn.Module, flat: Collection[str]) -> dict[str, Tensor]:
    """vLLM's parameters by its names, detached; those named in `flat` have one dimension."""
    return {
        name: parameter.data.view(-1) if name in flat else parameter.data
        for name, parameter in model.named_parameters()
    }


def _field(name: str, parameter: Tensor, family: str) -> Field:
    if not parameter.is_contiguous():
        raise _refused(family, name, "it is not contiguous")
    try:
        return Field.of(parameter.data)
    except ValueError as error:
        raise _refused(family, name, f"it holds {error}") from None


def _ones(dim: int | None, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """What was added to the digits of an index, as a number."""
    return sum(BASE**digit.power for digit in digits(tensors) if digit.dim == dim)


def _vocabulary_rows(model: nn.Module) -> dict[str, int]:
    """Parameters with a row per token -> rows of the vocabulary on this rank; what follows is padding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return {
        f"{at}.{name}": module.shard_indices.num_org_elements
        for at, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
        for name, _ in module.named_parameters(recurse=False)
    }


def _other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors with two dimensions or more that modules keep beside their parameters."""
    found = dict(model.named_buffers())
    for at, module in model.named_modules():
        found |= {f"{at}.{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1}


def _check_derived(model: nn.Module, before: Mapping[str, Tensor], family: str) -> None:
    """Errors: ModelError for a tensor that vLLM has computed from the weights, which would not follow them."""
    for name, tensor in _other_tensors(model).items():
        if before.get(name) is not tensor:
            raise _refused(family, name, "vLLM computes it from other weights when it loads them")


def _unset(model: nn.Module) -> None:
    """Small random numbers again, as vLLM's own loader without weights leaves them."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    for parameter in model.parameters():
        initialize_single_dummy_weight(parameter.data)


def _refused(family: str, name: str, why: str) -> ModelError:
    return ModelError(
        f"weights of this {family} model cannot be written into vLLM's {name!r}: {why}. Generate with another model."
    )
