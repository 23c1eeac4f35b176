"""Images of rows as vLLM takes them, and what its classes need that read images: names of torchvision, a budget."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.engines.row_images import RowImages
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.models.hf_spec import Decoder, hf_config
from hybridflow.models.images import GRIDS, PIXELS, ImageTokens
from hybridflow.models.spec import ModelSpec

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def settings(spec: Decoder, tp: int, cpu: bool) -> dict[str, Any]:
    """Of `EngineArgs`, for a model that reads images; none for others."""
    if isinstance(spec, ModelSpec) or not spec.images:
        return {}
    vision = hf_config(spec.config).vision_config
    return {
        "limit_mm_per_prompt": {"image": 1, "video": 0},  # checked by vLLM's front end, which we do without
        "mm_device_do_normalize": False,  # patches are normalised already
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": cpu,  # its cache has the size that is asked for
        # "data": whole on each rank, and ranks share images, where vLLM could not divide the weights
        "mm_encoder_tp_mode": "data" if vision.num_heads % tp or vision.intermediate_size % tp else "weights",
    }


def features(ids: list[int], images: RowImages, tokens: ImageTokens, salt: str | None) -> list[MultiModalFeatureSpec]:
    """Of a prompt `ids` whose tokens of images are as many as `images` have. Those of another `salt` share no cache."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    found, at = [], 0
    parts = zip(images.patches, images.grids, images.names, tokens.counts(images.grids).tolist(), strict=True)
    for patches, grid, name, count in parts:
        (item,) = _items(patches, grid[None], tokens)
        name, at = f"{name}{salt or ''}", ids.index(tokens.token, at)
        place = PlaceholderRange(offset=at, length=count)
        found.append(MultiModalFeatureSpec(item, "image", identifier=name, mm_position=place, mm_hash=name))
        at += count
    return found


def _items(patches: Tensor, grids: Tensor, tokens: ImageTokens) -> Any:
    """An item of vLLM's for each image."""
    from transformers import BatchFeature
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems

    given = BatchFeature({PIXELS: patches, GRIDS: grids})
    return MultiModalKwargsItems.from_hf_inputs(given, _create_qwen2vl_field_factory(tokens.merge)(given))["image"]


@contextmanager
def longest_image(model_class: Any, tokens: ImageTokens, most: int) -> Iterator[None]:
    """Inside, an image may fill the context of this model, up to `most` tokens, and vLLM makes no processor of
    its own to find that out. Its profile encodes the most of these that a step may have, whose memory the KV cache then
    leaves alone."""

    def build(self: Any, ctx: Any) -> Any:
        info, longest = self.info(ctx), min(ctx.model_config.max_model_len, most)
        info.get_mm_max_tokens_per_item = lambda seq_len, mm_counts: {"image": longest}

        def dummy(mm_counts: Any, cache: Any = None) -> dict[str, Any]:
            square = math.isqrt(longest)  # or nearly so, with as many tokens
            height = max(range(square // 2 + 1, square + 1), key=lambda one: longest // one * one)
            grids = torch.tensor([[1, height * tokens.merge, longest // height * tokens.merge]])
            return {"mm_kwargs": {"image": _items(torch.zeros(int(grids.prod()), tokens.patch), grids, tokens)}}

        return SimpleNamespace(info=info, get_dummy_mm_inputs=dummy)

    with replaced(type(model_class._processor_factory), "build_processor", build):
        yield


class _AnyNames(ModuleType):
    """A module of which any name can be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def torchvision_names() -> Iterator[None]:
    """Inside, names of torchvision can be imported where it is not installed: vLLM's modules import transformers'
    processors, which import it. Images are processed once, before they come here, so none of them is called."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        yield
        return
    names = [f"torchvision{rest}" for rest in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]
    for name in names:
        sys.modules[name] = _AnyNames(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
