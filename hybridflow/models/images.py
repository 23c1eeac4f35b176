"""ImageTokens: how a vision-language model reads images among the tokens of a prompt. Pure.

Prompts with images have three columns: `prompt_ids`, where each image already is as many image tokens as it has merged
patches, `pixel_values` (ragged float32 [n, P], n = 0 for a row without images) and `image_grid_thw` (ragged int64
[k, 3]). `hf.PromptLoader(processor=)` makes them.

Shapes: S tokens of a row, k images, n patches of all of them, P numbers of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PIXELS, GRIDS = "pixel_values", "image_grid_thw"
"""The columns: ragged [n, P] float32, the patches of a row's images, and ragged [k, 3] int64, how many patches each
image has in time, height and width."""
IMAGES = (f"{PIXELS}?", f"{GRIDS}?")
"""Of what an operation on a model reads."""
VISION_FAMILIES = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Families that read images, and the text families whose decoder layers they have."""
LANGUAGE_MODEL, VISION_TOWER = "model.language_model", "model.visual."
"""What transformers calls the text decoder of such a model, and how names of its image encoder begin."""


@dataclass(frozen=True)
class ImageTokens:
    """An image of (t, h, w) patches of `patch` numbers is t * h * w / `merge`**2 tokens `token` of a prompt; tokens of
    `special` stand for images and videos, and are no text."""

    token: int
    special: tuple[int, ...]
    merge: int
    patch: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ImageTokens:
        """From transformers' whole config of a family of `VISION_FAMILIES`, as a mapping."""
        seen = config["vision_config"]
        channels = seen.get("in_channels") or seen.get("in_chans") or 3
        special = tuple(config[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end"))
        patch = channels * seen["temporal_patch_size"] * seen["patch_size"] ** 2
        return cls(special[0], special, seen["spatial_merge_size"], patch)

    def fits(self, grids: Tensor) -> Tensor:
        """[k] bool: whether images `grids` [k, 3] have patches, and these make whole tokens."""
        return (grids > 0).all(-1) & (grids[:, 1:] % self.merge == 0).all(-1)

    def counts(self, grids: Tensor) -> Tensor:
        """[k] int64: the tokens of images `grids` [k, 3]."""
        return grids.prod(-1) // self.merge**2

    def expanded(self, ids: Sequence[int], grids: Tensor) -> list[int]:
        """Token ids with as many tokens for each image of `grids` [k, 3] as it has, in place of one."""
        counts = iter(self.counts(grids).tolist())
        return [one for id in ids for one in ([id] * next(counts) if id == self.token else [id])]

    def positions(self, ids: Tensor, grids: Tensor) -> Tensor:
        """[3, S] int64: the places of tokens `ids` [S] in time, height and width, by which rotary embeddings turn them.

        Text counts on in all three from the largest place before it; the tokens of an image lie on its grid
        (Wang et al., "Qwen2-VL", 2024, section 2.1).
        """
        import torch

        found, done, place = list[torch.Tensor](), 0, 0
        images = (ids == self.token).nonzero()[:, 0].tolist()
        for t, h, w in (grids // grids.new_tensor([1, self.merge, self.merge])).tolist():
            start, images = images[0], images[t * h * w :]
            found += [torch.arange(place, place := place + start - done).expand(3, -1)]
            found += [torch.cartesian_prod(*map(torch.arange, (t, h, w))).T + place]
            done, place = start + t * h * w, place + max(h, w)
        return torch.cat([*found, torch.arange(place, place + len(ids) - done).expand(3, -1)], 1)
