"""The small task with images: count the circles or squares of a picture, with a tiny Qwen2.5-VL that sees them.

The model is trained on worksheets in which most answers are one too large, as that of recipes/arithmetic.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes.small_model import EOS, PAD, UNKNOWN, SmallModel

_VERSION = 1  # part of the cache key: increase it when the written files change
SPECIAL = tuple(f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad"))
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
CELLS, SIDE, MOST = 3, 28, 4  # cells in a row, pixels of a cell's side (one token), shapes of a kind
KINDS = ("circles", "squares")


def picture(rng: random.Random) -> tuple[Image.Image, dict[str, int]]:
    """Circles and squares of some colour in cells of their own, and how many there are of each."""
    image = Image.new("RGB", (CELLS * SIDE, CELLS * SIDE), "white")
    counts, draw = {kind: rng.randint(1, MOST) for kind in KINDS}, ImageDraw.Draw(image)
    cells = rng.sample(range(CELLS**2), sum(counts.values()))
    for cell, kind in zip(cells, [kind for kind in KINDS for _ in range(counts[kind])], strict=True):
        x, y = (at * SIDE + rng.randint(2, 6) for at in divmod(cell, CELLS))
        box, colour = (x, y, x + 19, y + 19), tuple(rng.randint(0, 160) for _ in range(3))
        (draw.ellipse if kind == "circles" else draw.rectangle)(box, fill=colour)
    return image, counts


@dataclass(frozen=True, kw_only=True)
class SmallVision(SmallModel):
    """A tiny Qwen2.5-VL. Its exercises are a picture, a text and the answer."""

    characters: str = "0123456789=" + "".join(sorted({*"".join(KINDS)}))
    chat_template: str | None = _TEMPLATE
    right: float = 0.2
    steps: int = 600
    batch: int = 64

    @property
    def vocabulary(self) -> dict[str, int]:
        return {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *SPECIAL, *self.characters])}

    def tokenizer(self) -> Any:
        found = super().tokenizer()
        found.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
        return found

    def processor(self) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        return Qwen2VLImageProcessorPil(size={"shortest_edge": SIDE**2, "longest_edge": (8 * SIDE) ** 2})

    def worksheet(self, rng: random.Random) -> tuple[Any, str]:
        image, counts = picture(rng)
        kind = rng.choice(KINDS)
        return (image, f"{kind}="), str(counts[kind] + (rng.random() >= self.right))

    def _model(self) -> Any:
        from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

        code = self.vocabulary
        text = {
            "vocab_size": len(code), "hidden_size": self.hidden, "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "max_position_embeddings": 64, "initializer_range": 0.05,
            "bos_token_id": None, "eos_token_id": code[EOS], "pad_token_id": code[PAD],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        }  # fmt: skip
        seen = {
            "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": self.hidden,
            "fullatt_block_indexes": [1], "window_size": 2 * SIDE, "initializer_range": 0.05,
        }  # fmt: skip
        ids = {f"{token[2:-2].replace('_pad', '')}_token_id": code[token] for token in SPECIAL}
        return AutoModelForImageTextToText.from_config(Qwen2_5_VLConfig(text_config=text, vision_config=seen, **ids))

    def _examples(self, pairs: Sequence[tuple[Any, Sequence[str]]]) -> dict[str, Any]:
        start, stop, pad, _ = SPECIAL
        texts = [([start, *[pad] * CELLS**2, stop, *asked], told) for (_, asked), told in pairs]
        found = super()._examples(texts) | dict(
            self.processor()([image for (image, _), _ in pairs], return_tensors="pt")
        )
        return found | {"mm_token_type_ids": (found["input_ids"] == self.vocabulary[pad]).int()}
