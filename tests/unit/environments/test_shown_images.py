"""Images that tools, environments and programs show, in their real processes, with a script in the model's place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridflow.environments.acting import (
    EnvironmentCallError,
    EnvironmentLoop,
    Program,
    ToolLoop,
    _observed,
    content_of,
)
from hybridflow.environments.agent import Agent
from hybridflow.environments.conversation import Pictures
from hybridflow.environments.turn_images import TurnImages
from hybridflow.errors import ConfigError, PromptError
from hybridflow.models.images import ImageTokens
from tests.example_agents import show
from tests.example_templates import byte_tokenizer
from tests.session_runs import call, run
from tests.vision_models import CHAT, make_vision

PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)


def reader(directory: Path, parts: bool = True, context: int = 512) -> TurnImages:
    """How a model with the images of Qwen2.5-VL, and with or without `parts` in its template, reads images."""
    raw = byte_tokenizer("qwen3")
    names = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")]
    raw.add_special_tokens({"additional_special_tokens": names})
    if parts:
        raw.chat_template = str(raw.chat_template).replace("{{ m.content }}", PARTS)
    raw.save_pretrained(directory)
    ids = [raw.vocab[name] for name in names]
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 28**2, "longest_edge": 224**2})
    return TurnImages(ImageTokens(ids[0], (*ids,), 2, 1176), str(directory), context, processor, 10_000)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> TurnImages:
    return reader(tmp_path_factory.mktemp("vision"))


def shown(model: TurnImages, images: TurnImages | None, *ways: str) -> list[Any]:
    """The ends of a conversation for each way in which the tool shows an image."""
    rows = [{"prompt": "Look.", "how": how} for how in ways]
    says = lambda row, turn, heard: call("show", how=row["how"]) if turn == 0 else "ok"  # noqa: E731
    return run(ToolLoop((show,), 3), model.checkpoint, rows, says, images=images)


def test_tools_show_images_among_text(images):
    for one, count, text in zip(shown(images, images, "torch", "twice"), (1, 2), ("none", " and "), strict=True):
        assert one.failure is None
        (row,) = one.trajectory.rows
        tokens = [at for at, token in enumerate(row.token_ids) if token == images.tokens.token]
        assert len(tokens) == 4 * count
        assert not any(row.response_mask[at] for at in tokens)
        assert row.images.grids.tolist() == [[1, 4, 4]] * count
        assert len({*row.images.names}) == 1
        written = [token for token in row.token_ids if token not in images.tokens.special]
        assert f"<tool_response>\n{text}" in byte_tokenizer("qwen3").decode(written)


def test_what_cannot_be_shown_ends_its_trajectory_alone(images, tmp_path):
    wanted = {
        "large": "tool show: part 0 has 200 x 100 pixels, and max_image_pixels=10000. Scale it down, or raise",
        "mode": "tool show: part 0 has mode 'F', whose range is not known. Give 8 or 16 bits.",
        "cut": "tool show: part 0 cannot be read: image file is truncated",
        "no image": "tool show: part 0 is a int: give an image of PIL, or the bytes of an image's file.",
        "other": "tool show: part 0 is a NoneType: give an image of PIL",
        "none": "the conversation has 1 parts {'type': 'image'} without an image, and its row 0 images",
        "narrow": "the conversation: image 0 cannot be read: absolute aspect ratio must be smaller than 200",
        "twice": None,
    }
    failures = [str(one.failure) for one in shown(images, images, *wanted)]
    assert all((why or "None") in failure for failure, why in zip(failures, wanted.values(), strict=True)), failures
    long, bare = reader(tmp_path / "long", context=4), reader(tmp_path / "bare", parts=False)
    failures = [str(shown(at, at, "twice")[0].failure) for at in (long, bare)]
    assert "the conversation has an image of 4 tokens, and the model's context is 4. Scale it down" in failures[0]
    assert "the conversation has 2 images and 0 tokens of images: its chat template leaves images" in failures[1]
    (text,) = shown(images, None, "twice")
    assert text.failure == "tool show answered with an image, and the model reads text only: return text"


def test_which_image_is_meant_is_said():
    """Forms of other libraries, and one place for two images of a row, would lose or exchange them."""
    pictures, place = Pictures(2, 10_000), {"type": "image"}
    for part in ({"type": "image_url", "image_url": {"url": "a"}}, {"type": "image", "url": "a"}):
        with pytest.raises(PromptError, match="has a part "):
            pictures.taken([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    with pytest.raises(PromptError, match="its row 2 images: give all of the row's, or one each"):
        pictures.taken([{"role": "user", "content": [place]}])
    assert pictures.taken([{"role": "user", "content": [place, place]}])[1] == ["0", "1"]
    assert pictures.taken([{"role": "user", "content": "none"}])[1] == []


def test_answers_in_forms_that_would_be_read_as_text_are_refused():
    pictures, image = Pictures(0, 10_000), Image.new("RGB", (8, 8))
    for one in (b"png", np.zeros((8, 8, 3), dtype=np.uint8), [image, np.zeros((8, 8, 3))]):
        with pytest.raises(EnvironmentCallError, match=r"tool answered with (bytes|ndarray): give an image of PIL"):
            content_of("tool", one, pictures)
    assert content_of("tool", np.zeros(2), pictures) == "[0. 0.]"
    assert content_of("tool", b"png", Pictures()) == "b'png'"  # of a model that reads text only
    assert _observed("step", ["Score ", "3"], pictures) == [{"role": "user", "content": "Score 3"}]


def test_a_processor_that_cannot_be_loaded_is_named(images, tmp_path):
    """The process that showed an image goes on."""
    (one,) = shown(images, replace(images, processor=str(tmp_path)), "twice")
    assert str(tmp_path) in str(one.failure)
    assert "SIGKILL" not in str(one.failure)


class Dies:
    """Shows an image in each turn; its first process dies in the second."""

    def reset(self, mark: str) -> Any:
        self.mark, self.turns = Path(mark), 0
        return [{"role": "user", "content": ["Look: ", Image.new("RGB", (56, 56))]}]

    def step(self, text: str) -> tuple[Any, float, bool]:
        self.turns += 1
        if self.turns == 2 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return Image.new("RGB", (56, 56 + 28 * self.turns)), 1.0, self.turns == 3


def test_a_process_that_dies_is_replaced_and_nothing_is_sampled_twice(images, tmp_path):
    heard = []

    def says(row, turn, text):
        heard.append(turn)
        return f"turn {turn}"

    row = {"mark": str(tmp_path / "mark")}
    (one,) = run(EnvironmentLoop(Dies, 4), images.checkpoint, [row], says, images=images)
    assert (one.failure, one.ending.stop, heard) == (None, "done", [0, 1, 2])
    assert one.trajectory.rows[0].images.grids.tolist() == [[1, 4, 4], [1, 6, 4], [1, 8, 4]]


async def forks(row, model):
    """The same words with another image are another conversation."""
    for colour in ("red", "blue", "red"):
        shown = {"type": "image", "image": Image.new("RGB", (56, 56), colour)}
        said = await model.chat([asked := {"role": "user", "content": [shown]}])
        await model.chat([asked, said, {"role": "user", "content": "More."}])


def test_conversations_with_other_images_are_other_rows(images):
    (one,) = run(Program(forks), images.checkpoint, [{}], lambda *_: "x", images=images)
    assert one.failure is None
    first, second, third = (row.images.names for row in one.trajectory.rows)
    assert first == third != second
    assert one.trajectory.turns == 6


def test_a_processor_that_no_image_could_use_is_refused_before_the_call(images, tmp_path):
    with pytest.raises(ConfigError, match=r"processor= is for images, and .* reads text only"):
        Agent(environment=Dies, processor="x").check(images.checkpoint, ("row_id",))
    model = make_vision(tmp_path / "model", "qwen3_vl", template=CHAT)
    Agent(environment=Dies, processor=str(model)).check(str(model), ("row_id",))
    with pytest.raises(ConfigError, match="has no image processor"):
        Agent(environment=Dies, processor=str(tmp_path)).check(str(model), ("row_id",))
    with pytest.raises(PromptError, match="is of another model"):
        Agent(environment=Dies, processor=images.processor).check(str(model), ("row_id",))
