"""RowImages: the images of a prompt that generation reads, and their fit with its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hybridflow.algorithms.masked import token_column
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import PromptError, of_row
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.images import GRIDS, PIXELS, VISION_FAMILIES


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
