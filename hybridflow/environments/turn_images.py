"""TurnImages: the images of conversations, as a model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.engines.row_images import RowImages
from hybridflow.errors import PromptError
from hybridflow.models.images import ImageTokens


@dataclass(frozen=True)
class TurnImages:
    """On the model's host, which has them once for each trajectory; `tokens`: how the model reads them."""

    tokens: ImageTokens

    def expanded(self, ids: Sequence[int], images: Sequence[RowImages]) -> tuple[list[int], RowImages | None]:
        """What the model is given for a conversation with one token for each of its images. Errors: PromptError."""
        if not images:
            return list(ids), None
        if (places := ids.count(self.tokens.token)) != len(images):
            raise PromptError(
                f"the conversation has {len(images)} images and {places} tokens of images: its chat template leaves "
                f"images out, or its texts have such tokens."
            )
        joined = RowImages.joined(images)
        return self.tokens.expanded(ids, joined.grids), joined
