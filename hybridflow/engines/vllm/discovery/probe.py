"""Where vLLM keeps the weights of a model that `layout.py` does not know: its own loader shows it.

While vLLM builds the model, its loader gets tensors whose values say which element they are (`encode.py`), several
times over. What the parameters hold then is read back as boxes (`regions.py`), and all of it is checked once more after
vLLM has processed its weights: weights are written in place, so a model whose weights vLLM keeps in another form than
its loader wrote, or from which it computes further tensors, is refused.

Memory: one canonical tensor and one piece of a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.engine3d.layout import Layout, Region, partition
from hybridflow.engines.vllm.discovery.encode import checked
from hybridflow.engines.vllm.discovery.regions import UnreadableError, check_regions, flat_storages, read_regions
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.errors import ModelError
from hybridflow.topology import GenerationGrid

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_LOADING = (ValueError, KeyError, IndexError, TypeError, AttributeError, AssertionError, RuntimeError)


class LayoutProbe:
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
        def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
            _load(model, tensors, self.family)

        with self._noting():
            parameters = {name: p.data for name, p in model.named_parameters() if p.numel()}
            self.regions = tuple(read_regions(self.tensors, parameters, load, _vocabulary_rows(model), dtype))
            load(checked(self.tensors, dtype, device))
            self.failure = None
        before = _other_tensors(model)
        process()
        if self.failure is None:
            with self._noting():
                check_regions(self.tensors, flattened(model, flat_storages(self.regions)), self.regions)
                _check_derived(model, before)
        _unset(model)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """What makes the model unfit becomes the `failure`."""
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


def _other_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors with two dimensions or more that modules keep beside their parameters."""
    found = dict(model.named_buffers())
    for at, module in model.named_modules():
        found |= {f"{at}.{name}": value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1}


def _check_derived(model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Errors: UnreadableError for a tensor that vLLM has computed from the weights, which would not follow them."""
    for name, tensor in _other_tensors(model).items():
        if before.get(name) is not tensor:
            raise UnreadableError(name, "vLLM computes it from other weights when it loads them")


def _unset(model: nn.Module) -> None:
    """Small random numbers again, as vLLM's own loader without weights leaves them."""
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    for parameter in model.parameters():
        initialize_single_dummy_weight(parameter.data)


Found = tuple[tuple[Region, ...], str | None]
"""A rank's regions, or why it has none."""


@dataclass(frozen=True)
class _Regions:
    """Of every rank of the group; it travels to the driver, so it is no closure."""

    grid: GenerationGrid
    parts: Mapping[tuple[int, int], tuple[Region, ...]]

    def __call__(self, rank: int) -> Sequence[Region]:
        return self.parts[self.part(rank)]

    def part(self, rank: int) -> tuple[int, int]:
        at = self.grid.coords(rank)
        return at.p, at.t


def probed_layout(
    tensors: Mapping[str, tuple[int, ...]], family: str, grid: GenerationGrid, found: Sequence[Found]
) -> Layout:
    """`found` is what the ranks of one replica found, in (p, t) order; all replicas are alike.

    Errors: ModelError when a rank found no layout, or when vLLM holds some of the tensors nowhere.
    """
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            raise ModelError(failure if len(found) == 1 else f"{failure} (rank {rank} of the replica)")
    held: dict[str, int] = dict.fromkeys(tensors, 0)
    boxes: dict[str, list[Region]] = {}
    for regions, _ in found:
        for region in regions:
            boxes.setdefault(region.box.tensor, []).append(region)
    for name, regions in boxes.items():
        held[name] = sum(box.numel for box, _ in partition((region.box, region) for region in regions))
    for name, shape in tensors.items():
        missing = prod(shape) - held[name]
        if missing:
            raise ModelError(
                f"vLLM keeps {missing} elements of {name} {tuple(shape)} of this {family} model in no parameter: it "
                "would not follow the training. Generate with another model."
            )
    parts = {(i // grid.t, i % grid.t): regions for i, (regions, _) in enumerate(found)}
    regions = _Regions(grid, parts)
    return Layout(tensors, grid.size, regions, regions.part)


def unbuilt_layout(tensors: Mapping[str, tuple[int, ...]], grid: GenerationGrid) -> Layout:
    """What is known of such a layout before its engines are built: the tensors. Nothing can be planned with it."""
    return Layout(tensors, grid.size, _unknown)


def _unknown(rank: int) -> Sequence[Region]:
    raise ModelError(f"where vLLM keeps the weights of rank {rank} is known when its engine is built. Ask the rank.")
