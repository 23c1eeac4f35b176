"""What a reward worker reads: images that its functions name, and texts for a model with another tokenizer."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch
from tokenizers import processors

import hybridflow as hf
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.errors import ConfigError
from hybridflow.models.images import GRIDS, PIXELS
from hybridflow.protocols.operation import operations
from hybridflow.rewards import per_row
from hybridflow.workers.reward import Retokenizer, Template
from tests.example_templates import byte_tokenizer
from tests.vision_models import noise


def rows(*images: list[EncodedImage] | None) -> Batch:
    """As a loader with a processor and generation give them."""
    each = [len(own or ()) for own in images]
    return Batch(
        {
            "prompt": ["w1"] * len(images),
            "response": ["w2"] * len(images),
            "answer": list(range(len(images))),
            "images": list(images),
            "rewards": torch.zeros(len(images)),
            PIXELS: Ragged.from_lengths(torch.zeros(sum(each) * 4, 6), [4 * n for n in each]),
            GRIDS: Ragged.from_lengths(torch.ones(sum(each), 3, dtype=torch.int64), each),
        }
    )


def picture(seed: int) -> EncodedImage:
    noise(seed, 4, 6).save(made := BytesIO(), "PNG")
    return EncodedImage(made.getvalue())


def everything(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    assert "images" not in columns
    assert not {PIXELS, GRIDS} & columns.keys()
    return [float(answer) for answer in columns["answer"]]


def sees(prompts: list[Any], completions: list[str], images: list[list[Any]], **columns: Any) -> list[float]:
    found = [float(sum(one.width for one in own)) for own in images]
    for one in (one for own in images for one in own):
        one.thumbnail((2, 2))  # changes it in place
    return found


@per_row
def one_row(prompt: str, response: str, images: list[Any], **columns: Any) -> float:
    return float(len(images))


def read(batch: Batch, function: Any) -> tuple[str, ...]:
    settings = {"function": function, "weights": None, "by": None, "workers": 0, "timeout": None, "model": None}
    settings |= {"on_failure": "raise", "level": "sample"}
    return operations(hf.RewardWorker)["compute_reward"].columns_read(settings, {"batch": batch}, batch.columns)


def test_images_are_decoded_only_for_functions_that_name_them():
    batch = rows([EncodedImage(b"not an image")], None)
    assert PIXELS not in read(batch, everything)
    assert "answer" in read(batch, everything)
    judge = hf.RewardWorker(function=everything)
    assert judge.compute_reward(batch.select(read(batch, everything)))["rewards"].tolist() == [0.0, 1.0]
    batch = rows([picture(0)] * 2, None)
    for function, found in ((sees, [12.0, 0.0]), (one_row, [2.0, 0.0]), ([sees, everything], [12.0, 1.0])):
        assert PIXELS not in read(batch, function)
        judge = hf.RewardWorker(function=function)
        assert judge.compute_reward(batch.select(read(batch, function)))["rewards"].tolist() == found


def test_a_column_images_of_a_loader_without_a_processor_is_as_any_other():
    def named(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        return [float(len(one or "")) for one in columns["images"]]

    batch = rows(None, None).select("prompt", "response").with_columns(images=["a.png", None])
    assert "images" in read(batch, named)
    assert hf.RewardWorker(function=named).compute_reward(batch)["rewards"].tolist() == [5.0, 0.0]


def test_a_column_images_of_the_users_own_stays_so_beside_patches():
    """Those of an agent's conversations, of a model that reads images."""

    def named(prompts: list[Any], completions: list[str], images: list[Any]) -> list[float]:
        return [float(len(one or "")) for one in images]

    def other(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
        assert GRIDS not in columns
        return [float(len(one or "")) for one in columns["images"]]

    for images in (["a.png", None], [["a", "b"], []]):
        batch = rows(None, None).with_columns(images=images)
        for function in (named, other):
            judge = hf.RewardWorker(function=function)
            found = judge.compute_reward(batch.select(read(batch, function)))["rewards"].tolist()
            assert found == [float(len(images[0])), 0.0]


def test_each_distinct_image_is_decoded_once_and_rows_have_their_own(monkeypatch: pytest.MonkeyPatch):
    decoded, opened = list[bytes](), EncodedImage.open
    monkeypatch.setattr(EncodedImage, "open", lambda self: (decoded.append(self), opened(self))[1])
    first, again, other = picture(0), EncodedImage(bytes(picture(0))), picture(1)
    batch = rows([first], [again, other], [other])
    assert hf.RewardWorker(function=sees).compute_reward(batch)["rewards"].tolist() == [6.0, 12.0, 6.0]
    assert decoded == [first, other]


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
