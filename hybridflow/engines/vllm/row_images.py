"""RowImages: the images of a prompt that generation reads, and their fit with its tokens; the same as vLLM takes them,
and what its classes need that read images: names of torchvision, a budget."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.algorithms.masked import token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.errors import PromptError, of_row
from hybridflow.models.hf_spec import Decoder, hf_config
from hybridflow.models.images import GRIDS, PIXELS, VISION_FAMILIES, ImageTokens
from hybridflow.models.spec import ModelSpec

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


@dataclass(frozen=True)
class RowImages:
    """The images of a row: `patches` of each [n, P] float32, `grids` [k, 3] int64, and a name of each, equal for equal
    images."""

    patches: Sequence[Tensor]
    grids: Tensor
    names: Sequence[str]

    @classmethod
    def of(cls, batch: Batch) -> list[RowImages | None] | None:
        """By row; None without a column of images. Errors: BatchError for a row whose grids do not fit its patches."""
        if GRIDS not in batch and PIXELS not in batch:
            return None
        columns = (token_column(batch, name).rows() for name in (PIXELS, GRIDS))
        found = list[RowImages | None]()
        for row, (patches, grids) in enumerate(zip(*columns, strict=True)):
            each = grids.prod(-1).tolist() if len(grids) else []
            if sum(each) != len(patches):
                raise of_row(row, f"has {len(patches)} patches in {PIXELS}, and {GRIDS} of {sum(each)}.")
            found.append(cls.named(patches.split(each), grids) if each else None)
        return found

    @classmethod
    def taken(cls, batch: Batch) -> tuple[list[RowImages | None] | None, Batch]:
        """Those of `of`, and the batch without their columns, which are much as plain values. Errors: as `of`."""
        return cls.of(batch), batch.without(*({PIXELS, GRIDS} & {*batch.columns}))

    @classmethod
    def named(cls, patches: Sequence[Tensor], grids: Tensor) -> RowImages:
        """Of these patches and grids, which decide the names."""
        parts = zip(patches, grids.tolist(), strict=True)
        names = [hashlib.blake2b(part.numpy().tobytes() + repr(grid).encode()).hexdigest() for part, grid in parts]
        return cls(patches, grids, names)

    @cached_property
    def each(self) -> list[RowImages]:
        """One for each image, in memory of its own: a view would be sent with all that it shows a part of."""
        parts = zip(self.patches, self.grids, self.names, strict=True)
        return [RowImages([patches.clone()], grid[None].clone(), [name]) for patches, grid, name in parts]

    @classmethod
    def joined(cls, images: Sequence[RowImages]) -> RowImages:
        """Several as one."""
        patches, names = ([part for one in images for part in getattr(one, name)] for name in ("patches", "names"))
        return cls(patches, torch.cat([one.grids for one in images]), names)

    @classmethod
    def columns(cls, rows: Sequence[RowImages | None], patch: int) -> dict[str, Ragged]:
        """Of rows with patches of `patch` numbers, as a batch has them."""
        none = cls([], torch.empty(0, 3, dtype=torch.int64), [])
        own = [one or none for one in rows]
        pixels = torch.cat([torch.empty(0, patch), *(part for one in own for part in one.patches)])
        return {
            PIXELS: Ragged.from_lengths(pixels, [sum(map(len, one.patches)) for one in own]),
            GRIDS: Ragged.from_lengths(
                torch.cat([none.grids, *(one.grids for one in own)]), [len(one.grids) for one in own]
            ),
        }


def check_columns(rows: int, spec: Decoder) -> None:
    """Of prompts with images. Errors: PromptError where the model of `spec` reads none."""
    if not spec.images:
        raise PromptError(
            f"{rows} prompts have images ({PIXELS}), and the model, a {spec.family}, reads text only. Use a model that "
            f"reads images ({', '.join(VISION_FAMILIES)}), or drop the columns {PIXELS} and {GRIDS}."
        )


def check_prompt(name: int, prompt: Sequence[int], images: RowImages | None, spec: Decoder, most: int) -> None:
    """Errors: PromptError for a prompt whose tokens of images are not those of its images, or that has an image of more
    than `most` tokens."""
    if (tokens := spec.images) is None:
        if images is not None:
            raise PromptError(f"prompt {name} has images, and {spec.family} models read text only.")
        return
    seen, given, why = prompt.count(tokens.token), 0, ""
    if images is not None:
        fitting, counts = tokens.fits(images.grids), tokens.counts(images.grids)
        if wrong := {one.shape[1:] for one in images.patches} - {(tokens.patch,)}:
            why = f"has patches of {list(wrong.pop())} numbers, the model reads {tokens.patch}"
        elif not bool(fitting.all()):
            odd = images.grids[~fitting].tolist()
            why = f"has images of {odd} patches: height and width must be multiples of {tokens.merge}"
        elif (longest := int(counts.max())) > most:
            raise PromptError(
                f"prompt {name} has an image of {longest} tokens, more than VLLM(image_tokens={most}). "
                f"Raise it, or give PromptLoader(processor=) a processor of smaller images (max_pixels=)."
            )
        given = int(counts.sum())
    if not why and seen != given:
        why = f"has {seen} tokens of images, its images have {given}"
    if why:
        raise PromptError(f"prompt {name} {why}. Give PromptLoader(processor=) the processor of this model.")


# As vLLM takes them


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
