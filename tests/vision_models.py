"""Tiny vision-language models of both families with a tokenizer of 96 words, images for them, and rows with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow import Batch, Ragged
from hybridflow.algorithms.masked import token_column

KINDS = ("qwen2_5_vl", "qwen3_vl")
PATCH = {"qwen2_5_vl": 14, "qwen3_vl": 16}
SPECIAL = ["<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
END, START, STOP, IMAGE, WORDS = 1, 2, 3, 4, 90
VOCABULARY = len(SPECIAL) + WORDS
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<|vision_start|> <|image_pad|> <|vision_end|> {% else %}{{ p['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
CHAT = TEMPLATE.removesuffix("{% endfor %}") + "<|im_end|> {% endfor %}"
"""The same with an end of each turn, for conversations."""


def sizes(kind: str, width: int = 64, **more: Any) -> Any:
    """A transformers configuration, of Qwen3-VL with tied embeddings; `width` is that of layers that encode images,
    `more` are sizes of the text decoder."""
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    own = kind == "qwen2_5_vl"
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128 if own else 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.12,
        "tie_word_embeddings": not own,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            **({"mrope_section": [4, 6, 6]} if own else {"mrope_section": [6, 5, 5], "mrope_interleaved": True}),
        },
        **({} if own else {"head_dim": 32}),
        **more,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": width,
        "patch_size": PATCH[kind],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "initializer_range": 0.1,
        **({"fullatt_block_indexes": [1], "window_size": 56} if own else {}),
        **({} if own else {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}),
    }
    names = ("vision_start", "vision_end", "image", "video")
    ids: dict[str, Any] = {f"{name}_token_id": START + at for at, name in enumerate(names)}
    made: Any = Qwen2_5_VLConfig if own else Qwen3VLConfig
    return made(text_config=text, vision_config=vision, tie_word_embeddings=not own, **ids)


def make_vision(directory: Path, kind: str, *, seed: int = 0, template: str = TEMPLATE, **more: Any) -> Path:
    """A random model as a Hugging Face directory, with tokenizer and image processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(sizes(kind, **more), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    words = {word: at for at, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    raw = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token=SPECIAL[1], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    side = PATCH[kind]
    limits = {"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2}
    given = {"patch_size": side, "merge_size": 2, "temporal_patch_size": 2, "size": limits}
    Qwen2VLImageProcessorPil(**given).save_pretrained(directory)
    return directory


def noise(seed: int, height: int, width: int) -> Any:
    """A picture of random points."""
    from PIL import Image

    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def make_rows(kind: str, *, seed: int = 0, response: bool = True, counts: tuple[int, ...] = (0, 1, 3, 1, 0)) -> Batch:
    """Rows with `counts` images, text before, between and after them, and all columns of an update."""
    generator = torch.Generator().manual_seed(seed)
    grids = [torch.tensor([[1, 4, 6], [1, 2, 4], [1, 6, 4]])[torch.arange(n)] for n in counts]

    def words(n: int) -> list[int]:
        return torch.randint(len(SPECIAL), VOCABULARY, (n,), generator=generator).tolist()

    prompts = []
    for grid in grids:
        parts = [words(3)]
        for _, h, w in grid.tolist():
            parts.append([START, *[IMAGE] * (h * w // 4), STOP, *words(2)])
        prompts.append([token for part in parts for token in part])
    lengths = torch.tensor([4 + i % 3 for i in range(len(counts))])
    tokens = int(lengths.sum())
    patches = sum(int(grid.prod(-1).sum()) for grid in grids)
    columns: dict[str, Any] = {
        "row_id": torch.arange(len(counts)),
        "prompt_ids": Ragged.from_rows(prompts, torch.int64),
        "pixel_values": Ragged.from_lengths(
            torch.randn(patches, 6 * PATCH[kind] ** 2, generator=generator), [int(g.prod(-1).sum()) for g in grids]
        ),
        "image_grid_thw": Ragged.from_lengths(torch.cat(grids), [len(grid) for grid in grids]),
    }
    if response:
        columns["response_ids"] = Ragged.from_lengths(torch.tensor(words(tokens)), lengths)
        columns["response_mask"] = columns["response_ids"].with_values(torch.ones(tokens, dtype=torch.bool))
        for name in ("old_log_probs", "advantages"):
            columns[name] = Ragged.from_lengths(torch.randn(tokens, generator=generator), lengths)
        columns["old_log_probs"] = columns["old_log_probs"].map(lambda values: values * 0.2 - 4.5)
    return Batch(columns)


def outputs(model: Any, batch: Batch, read: str = "lm") -> dict[str, Ragged]:
    """What transformers gives row by row for each response token, differentiable: `log_probs` and `entropy`, or with
    `read` the `hidden` states or `logits` that predict it."""
    found: dict[str, list[Tensor]] = {}
    names = ("prompt_ids", "response_ids", "pixel_values", "image_grid_thw")
    columns = (token_column(batch, name).rows() for name in names)
    for prompt, response, pixels, grids in zip(*columns, strict=True):
        ids, at = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        given = {"pixel_values": pixels, "image_grid_thw": grids} if len(grids) else {}
        given["mm_token_type_ids"] = (ids == IMAGE).int()
        if read == "hidden":
            found.setdefault("hidden", []).append(model.model(ids, **given)[0][0, at])
            continue
        logits = model(ids, **given).logits[0, at]
        if read == "logits":
            found.setdefault("logits", []).append(logits)
            continue
        logs = logits.log_softmax(-1)
        found.setdefault("log_probs", []).append(logs.gather(-1, response[:, None])[:, 0])
        found.setdefault("entropy", []).append(-(logs.exp() * logs).sum(-1))
    return {name: Ragged.from_rows(rows) for name, rows in found.items()}
