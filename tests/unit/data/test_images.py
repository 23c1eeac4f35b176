"""PromptLoader(processor=): images of rows become patches and tokens once; bad images are refused when it is built."""

from __future__ import annotations

import json
import os
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

import hybridflow as hf
from hybridflow.algorithms.masked import token_column
from hybridflow.cluster.recorded_calls import BatchRecord
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import ImageProcessor, load_image_processor
from hybridflow.data.prompts import PromptSource
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, PromptError
from hybridflow.models.images import GRIDS, PIXELS, ImageTokens
from hybridflow.models.spec import read_config
from tests.tiny_models import make_policy
from tests.vision_models import IMAGE, KINDS, make_vision, noise

PART = {"type": "image"}
SIZES = [(60, 90), (64, 64), (100, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [one if one is PART else {"type": "text", "text": one} for one in parts]}]


def encoded(image: Any, kind: str = "PNG") -> bytes:
    image.save(made := BytesIO(), kind)
    return made.getvalue()


@pytest.fixture
def rows(tmp_path) -> list[dict[str, Any]]:
    """Rows with 1, 3 and no images, in every form."""
    first, second, third = (noise(seed, *size) for seed, size in enumerate(SIZES))
    first.save(tmp_path / "first.png")
    several = [encoded(first), second, {"bytes": None, "path": str(tmp_path / "third.png")}]
    third.save(tmp_path / "third.png")
    return [
        {"prompt": said("w1 w2", PART, "w3"), "images": str(tmp_path / "first.png"), "answer": "a"},
        {"prompt": said(PART, "w4", PART, PART), "images": several, "answer": "b"},
        {"prompt": [{"role": "user", "content": "w5"}], "images": None, "answer": "c"},
    ]


def test_columns_are_those_of_the_processor_and_prompts_have_a_token_for_each_patch(model, rows):
    loader = hf.PromptLoader(rows, batch_size=3, steps=1, shuffle=False, processor=model)
    (batch,) = loader.drawn()
    processor = AutoImageProcessor.from_pretrained(model, backend="pil")
    pictures = [*map(noise, range(3), *zip(*SIZES))]
    for row, images in enumerate([pictures[:1], pictures, []]):
        pixels, grids = (token_column(batch, name).row(row) for name in (PIXELS, GRIDS))
        want = processor(images=images, return_tensors="pt") if images else {PIXELS: pixels[:0], GRIDS: grids[:0]}
        assert pixels.equal(want[PIXELS])
        assert grids.equal(want[GRIDS])
        ids = token_column(batch, "prompt_ids").row(row)
        assert int((ids == IMAGE).sum()) == int(grids.prod(-1).sum()) // 4
        assert [type(one) for one in batch["images"][row]] == [EncodedImage] * len(images)
        assert [one.open().tobytes() for one in batch["images"][row]] == [one.tobytes() for one in images]
    assert batch["answer"] == ["a", "b", "c"]
    assert batch["prompt"][0] == rows[0]["prompt"]
    BatchRecord("actor", "generate_sequences", 1, batch, batch).write(model / "record")
    kept = BatchRecord.read(model / "record").prompts
    assert kept.equal(batch)
    assert isinstance(kept["images"][0][0], EncodedImage)
    assert token_column(batch, PIXELS).dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.decode(token_column(batch, "prompt_ids").row(0))
    assert text.replace("<|image_pad|> ", "").startswith("w1 w2 <|vision_start|> <|vision_end|> w3")


def test_the_sources_of_images_are_equal(model, tmp_path):
    """JSONL with paths beside it, datasets' Image feature (also of lists) and its directory and Parquet file."""
    pictures = [noise(seed, 40, 60) for seed in range(3)]
    (tmp_path / "own").mkdir()
    for at, one in enumerate(pictures):
        one.save(tmp_path / "own" / f"{at}.png")
    lines = [json.dumps({"prompt": said("w1", PART), "images": f"own/{at}.png"}) for at in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    prompts = [said("w1", PART)] * 3
    single = datasets.Dataset.from_dict({"prompt": prompts, "images": pictures})
    single = single.cast_column("images", datasets.Image())
    listed = datasets.Dataset.from_dict({"prompt": prompts, "images": [[one] for one in pictures]})
    listed = listed.cast_column("images", datasets.List(datasets.Image()))
    listed.save_to_disk(tmp_path / "saved")
    single.to_parquet(tmp_path / "rows.parquet")
    found = []
    for source in (tmp_path / "rows.jsonl", single, listed, tmp_path / "saved", tmp_path / "rows.parquet"):
        (batch,) = PromptSource(source, batch_size=3, steps=1, processor=model)
        found.append((token_column(batch, PIXELS).values, token_column(batch, "prompt_ids").tolist()))
    assert all(pixels.equal(found[0][0]) and ids == found[0][1] for pixels, ids in found)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_continues_with_the_same_bits(model, rows, workers):
    def batches(loader: PromptSource) -> list[list[Any]]:
        return [[token_column(one, name).values for name in ("prompt_ids", PIXELS, GRIDS)] for one in loader.drawn()]

    def loader(count: int) -> PromptSource:
        return PromptSource(rows, batch_size=2, steps=6, seed=3, processor=model, workers=count)

    want, other = batches(loader(0)), loader(workers)
    drawn = other.drawn()
    for _ in range(2):
        next(drawn)
    state = json.loads(json.dumps(other.state()))
    later = loader(workers)
    later.load_state(state)
    for got, expected in zip(batches(later), want[2:], strict=True):
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
    edges = {"shortest_edge": 784, "longest_edge": 3136}
    smaller = AutoImageProcessor.from_pretrained(model, backend="pil", size=edges)
    tokenizer = AutoTokenizer.from_pretrained(model)
    changed = PromptSource(rows, batch_size=2, seed=3, processor=smaller, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="the saved state has processor="):
        changed.load_state(state)


@pytest.mark.parametrize(("kind", "place"), [("png", -40), ("bmp", 4000), ("jpg", 5000)])
def test_a_run_does_not_continue_with_another_image_in_a_file_of_equal_size(model, tmp_path, kind, place):
    path, moved = tmp_path / f"a.{kind}", tmp_path / "elsewhere" / f"a.{kind}"
    noise(0, 80, 120).save(path)

    def loader(path: Path, **how: Any) -> PromptSource:
        return PromptSource([{"prompt": said(PART), "images": str(path)}], batch_size=1, processor=model, **how)

    state, before, times = loader(path).state(), path.read_bytes(), path.stat()
    path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match=r"the saved state has fingerprint=.*or let the data change"):
        loader(path).load_state(state)
    loader(path, allow_changed=True).load_state(state)
    moved.parent.mkdir()
    moved.write_bytes(before)
    loader(moved).load_state(state)


def test_a_mixture_has_rows_of_sources_without_images(model, rows):
    def loader(data: list[Any], **how: Any) -> hf.PromptLoader:
        return hf.PromptLoader(data, batch_size=4, steps=2, **how)

    texts = [{"prompt": f"w{i}", "answer": ""} for i in range(4)]
    sources = {"seen": loader(rows, processor=model), "read": loader(texts, tokenizer=model)}
    for batch in hf.Mixture(sources, defaults={"images": None}).drawn():
        counts = [len(one or ()) for one in batch["images"]]
        assert token_column(batch, GRIDS).lengths.tolist() == counts
        ids = token_column(batch, "prompt_ids")
        assert (ids.with_values((ids.values == IMAGE).long()).row_sum() * 4).equal(token_column(batch, PIXELS).lengths)
        assert [source == "read" and count > 0 for source, count in zip(batch["source"], counts)] == [False] * 4


def test_prompts_with_too_many_tokens_are_left_out_and_counted(model, rows):
    """Image tokens count: rows have 1 + 4, 8 + 2 + 1 text tokens and more for images."""
    lengths = token_column(PromptSource(rows, batch_size=3, processor=model).prompts.whole(), "prompt_ids").lengths
    loader = PromptSource(rows, batch_size=3, processor=model, max_prompt_tokens=int(lengths[0]))
    assert loader.filtered == 1
    loader.prompts.check_fit(int(lengths[0]), lambda: pytest.fail("the loader has a tokenizer"), "actor")
    whole = PromptSource(rows, batch_size=3, processor=model)
    with pytest.raises(PromptError, match=rf"1 of 3 prompts are too long for actor.* has {int(lengths[1])}\."):
        whole.prompts.check_fit(int(lengths[1]) - 1, lambda: pytest.fail("the loader has a tokenizer"), "actor")


def cut(path: Path, kind: str) -> str:
    whole = encoded(noise(0, 80, 80), kind)
    path.write_bytes(whole[: len(whole) // 2])
    return str(path)


BAD = {
    "missing": (lambda at: {"images": str(at / "none.png")}, r"image 0 .*none.png cannot be read: No such file"),
    "jpeg": (lambda at: {"images": cut(at / "a.jpg", "JPEG")}, r"a.jpg cannot be read: image file is truncated"),
    "png": (lambda at: {"images": cut(at / "a.png", "PNG")}, r"a.png cannot be read: image file is truncated"),
    "text": (lambda at: {"images": b"no image"}, r"cannot be read: cannot identify image file"),
    "large": (lambda at: {"images": noise(0, 300, 400)}, r"has 400 x 300 pixels, and max_image_pixels=100000"),
    "narrow": (lambda at: {"images": noise(0, 1, 400)}, r"cannot be read: absolute aspect ratio must be smaller"),
    "kind": (lambda at: {"images": 7}, r"image 0 is a int: give a path, the bytes"),
    "more": (lambda at: {"images": [noise(0, 40, 40)] * 2}, r"has 2 images and its messages 1 parts"),
    "none": (lambda at: {"images": None}, r"has 0 images and its messages 1 parts"),
    "text token": (lambda at: {"prompt": said(PART, "<|image_pad|>")}, r"has 1 images and its messages 2 parts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_refused_when_the_loader_is_built_and_counted(model, tmp_path, case):
    change, message = BAD[case]
    good = {"prompt": said("w1", PART), "images": encoded(noise(1, 40, 40))}
    rows = [good, good | change(tmp_path), good, good | change(tmp_path)]
    with pytest.raises(PromptError, match=rf"2 of 4 prompts have images as follows: record 1.*{message}"):
        PromptSource(rows, batch_size=2, processor=model, max_image_pixels=100_000)


def test_parts_of_messages_that_are_not_read_are_named(model):
    image = encoded(noise(1, 40, 40))
    for part in ({"type": "image", "image": "a.png"}, {"type": "video"}):
        row = {"prompt": [{"role": "user", "content": [part]}], "images": image}
        with pytest.raises(PromptError, match=r"part of type .*'image'}, whose image is in the column 'images'"):
            PromptSource([row], batch_size=1, processor=model)
    with pytest.raises(PromptError, match=r"only text is read; images with PromptLoader\(processor=\)"):
        PromptSource([{"prompt": said(PART), "images": image}], batch_size=1)
    with pytest.raises(PromptError, match="'pixel_values' is written by hybridflow"):
        PromptSource([{"prompt": "w1", "pixel_values": [1.0]}], batch_size=1)


def test_processors_without_images_and_of_other_models_are_refused(model, rows, tmp_path):
    text = make_policy(tmp_path / "text")
    with pytest.raises(ConfigError, match="has no image processor"):
        PromptSource(rows, batch_size=1, processor=text)
    with pytest.raises(ConfigError, match="alone: give tokenizer="):
        PromptSource(rows, batch_size=1, processor=AutoImageProcessor.from_pretrained(model, backend="pil"))
    with pytest.raises(ConfigError, match="processor= is a int: give one of a model that reads images: qwen2_5_vl"):
        PromptSource(rows, batch_size=1, processor=3)
    prompts = PromptSource(rows, batch_size=1, processor=model).prompts
    with pytest.raises(PromptError, match="2 of 3 prompts have images, and the model reads text only"):
        prompts.check_images(None, "the model", True)
    plain = PromptSource([{"prompt": "w1"}], batch_size=1, processor=model).prompts
    plain.check_images(None, "a critic", False)  # no row has one
    with pytest.raises(PromptError, match="0 of 1 prompts have images, and the model reads text only"):
        plain.check_images(None, "the model", True)
    own, other = (make_vision(tmp_path / kind, kind) for kind in KINDS)
    prompts.check_images(ImageTokens.of(read_config(own)), str(own), False)
    with pytest.raises(PromptError, match=r"is of another model than .*qwen3_vl: it has patch=1176, the model's 1536"):
        prompts.check_images(ImageTokens.of(read_config(other)), str(other), False)
    settings = json.loads((own / "preprocessor_config.json").read_text())
    (own / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.5] * 3}))
    with pytest.raises(PromptError, match=r"it has image_mean=\[0.48"):
        prompts.check_images(ImageTokens.of(read_config(own)), str(own), False)


def test_grey_of_16_bits_is_scaled_and_what_is_transparent_is_white(model, tmp_path):
    def pixels(image: Image.Image) -> list[tuple[int, ...]]:
        (row,) = ImageProcessor(load_image_processor(model), load_tokenizer(model)).read("row 0", image)
        seen = row.open()
        assert seen.mode == "RGB"
        return [seen.getpixel((at, 0)) for at in (0, 1)]

    grey = Image.fromarray(np.array([[0x0180, 0xFFFF]], dtype=np.uint16))
    assert pixels(grey) == [(1, 1, 1), (255, 255, 255)]
    clear = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    clear.putpixel((1, 0), (9, 8, 7, 255))
    assert pixels(clear) == [(255, 255, 255), (9, 8, 7)]
    for image in (Image.new("F", (40, 40)), Image.new("I", (40, 40))):
        with pytest.raises(PromptError, match="whose range is not known"):
            PromptSource([{"prompt": said(PART), "images": image}], batch_size=1, processor=model)


def test_images_in_other_modes_and_turned_ones_are_read_as_pil_shows_them(model, tmp_path):
    exif, path = Image.Exif(), tmp_path / "turned.jpg"
    exif[0x0112] = 6
    noise(0, 40, 60).save(path, exif=exif)
    read = ImageProcessor(load_image_processor(model), load_tokenizer(model)).read
    assert read("row", path)[0].open().size == read("row", Image.open(path))[0].open().size
    kept = EncodedImage(path.read_bytes())
    assert kept.open().size == (40, 60)
    modes = [noise(0, 40, 60).convert(mode) for mode in ("L", "RGBA", "CMYK", "I;16", "P")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = [{"prompt": said(PART), "images": one} for one in (kept, *modes)]
        (batch,) = PromptSource(rows, batch_size=6, steps=1, processor=model)
    assert token_column(batch, GRIDS).lengths.tolist() == [1] * 6
