"""The texts that a reward model with another tokenizer reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import processors

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError
from hybridflow.workers.reward import Retokenizer, Template
from tests.example_templates import byte_tokenizer

ASKED = [{"role": "user", "content": "hi"}]


def texts(directory: Any, template: Template, prompts: list[Any], **columns: Any) -> list[str]:
    own = Retokenizer(directory, None, template, 100)
    batch = Batch({"prompt": prompts, "response": ["yes"] * len(prompts), **columns})
    return [own.own.raw.decode(row) for row in own(batch)["prompt_ids"].tolist()]


def cut(directory: Any) -> dict[str, Any]:
    """Columns of two responses, of which the second was cut."""
    raw = Retokenizer(directory, None, "auto", 100).own.raw
    said = raw("yes", add_special_tokens=False)["input_ids"]
    return {"response_ids": Ragged.from_rows([[*said, raw.eos_token_id], said], torch.int64)}


@pytest.mark.parametrize("known", ["response_ids", "finished"])
@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "plain", "thinking_removed"])
def test_a_response_that_was_cut_stays_open(tmp_path, name, known):
    byte_tokenizer(name).save_pretrained(tmp_path)
    end = byte_tokenizer(name).eos_token
    columns = cut(tmp_path) if known == "response_ids" else {"finished": torch.tensor([True, False])}
    closed, opened = texts(tmp_path, "chat", [ASKED] * 2, **columns)
    assert closed.rstrip().endswith(f"yes{end}")
    assert opened.endswith("yes")
    assert texts(tmp_path, "auto", ["hi"] * 2, **columns) == [f"hiyes{end}", "hiyes"]


def test_a_prompt_that_begins_with_the_begin_token_has_it_once(tmp_path):
    raw = byte_tokenizer("plain")
    raw.bos_token = "<s>"
    raw.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", raw.bos_token_id)]
    )
    raw.save_pretrained(tmp_path)
    assert texts(tmp_path, "auto", ["<s>hi", "hi"]) == ["<s>hiyes"] * 2


def test_rows_with_images_are_refused(tmp_path):
    byte_tokenizer("plain").save_pretrained(tmp_path)
    none, one = (Ragged.from_lengths(torch.ones(n, 3, dtype=torch.int64), [0, n]) for n in (0, 1))
    assert len(texts(tmp_path, "auto", ["a", "b"], image_grid_thw=none)) == 2
    with pytest.raises(ConfigError, match="1 of 2 rows have images"):
        texts(tmp_path, "auto", ["a", "b"], image_grid_thw=one)
