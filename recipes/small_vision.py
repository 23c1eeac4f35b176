"""A tiny Qwen2.5-VL with a character tokenizer, trained in a minute from its settings and seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.small_model import EOS, PAD, UNKNOWN, SmallModel, Worksheet

SPECIAL = tuple(f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad"))
_TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
_SIZES = """{
 "text_config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
   "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.05, "bos_token_id": null,
   "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}},
 "vision_config": {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 128,
   "window_size": 56, "fullatt_block_indexes": [1], "initializer_range": 0.05}
}"""


@dataclass(frozen=True, kw_only=True)
class SmallVision(SmallModel):
    """A tiny Qwen2.5-VL, whose exercises are a picture with a text, and the answer; pictures have `tokens` tokens."""

    tokens: int
    chat_template: str | None = _TEMPLATE
    steps: int = 200
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

        return Qwen2VLImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": 224**2})

    def write(self, directory: Path, worksheet: Worksheet) -> None:
        super().write(directory, worksheet)
        self.processor().save_pretrained(directory)

    def _model(self) -> Any:
        from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

        code, own = self.vocabulary, json.loads(_SIZES)
        own["text_config"] |= {"vocab_size": len(code), "eos_token_id": code[EOS], "pad_token_id": code[PAD]}
        own |= {f"{token[2:-2].removesuffix('_pad')}_token_id": code[token] for token in SPECIAL}
        return AutoModelForImageTextToText.from_config(Qwen2_5_VLConfig(**own))

    def _examples(self, pairs: Sequence[tuple[Any, Sequence[str]]]) -> dict[str, Any]:
        start, stop, pad, _ = SPECIAL
        found = super()._examples([([start, *[pad] * self.tokens, stop, *asked], told) for (_, asked), told in pairs])
        found |= self.processor()([image for (image, _), _ in pairs], return_tensors="pt")
        return found | {"mm_token_type_ids": (found["input_ids"] == self.vocabulary[pad]).int()}
