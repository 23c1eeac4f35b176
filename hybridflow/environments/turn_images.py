"""TurnImages: the images of conversations, as a model reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import ImageProcessor, image_processor
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.vllm.row_images import RowImages
from hybridflow.errors import PromptError
from hybridflow.models.images import ImageTokens


@dataclass(frozen=True)
class TurnImages:
    """On the host of the model of `checkpoint`, which reads them as `tokens`, at most `context` of these. `processor`
    is that of the loader, by default the model's own."""

    tokens: ImageTokens
    checkpoint: str
    context: int
    processor: str | os.PathLike[str] | Any = None
    most_pixels: int = 0

    @cached_property
    def loaded(self) -> ImageProcessor:
        """Errors: ConfigError for a processor that cannot be loaded, PromptError for one of another model."""
        given = self.checkpoint if self.processor is None else self.processor
        made = image_processor(given, load_tokenizer(self.checkpoint), self.most_pixels, Path())
        made.check_model(self.tokens, self.checkpoint)
        return made

    def read(self, file: bytes) -> RowImages:
        """An image that an agent has shown. Errors: PromptError for one that the model cannot be given."""
        pixels, grids = self.loaded.patches(["the conversation"], [[EncodedImage(file)]])
        if (count := int(self.tokens.counts(grids.values))) >= self.context:
            raise PromptError(
                f"the conversation has an image of {count} tokens, and the model's context is {self.context}. Scale it "
                f"down, or give processor= one that does."
            )
        return RowImages.named([pixels.values], grids.values)

    def expanded(self, ids: Sequence[int], images: Sequence[RowImages]) -> tuple[list[int], RowImages | None]:
        """What the model is given for a conversation with one token for each of its images. Errors: PromptError."""
        if not images and self.tokens.token not in ids:
            return list(ids), None
        if (places := ids.count(self.tokens.token)) != len(images):
            raise PromptError(
                f"the conversation has {len(images)} images and {places} tokens of images: its chat template leaves "
                f"images out, or its texts have such tokens. Images are shown as parts of messages in chat."
            )
        joined = RowImages.joined(images)
        return self.tokens.expanded(ids, joined.grids), joined
