"""Conversation: the model as an agent sees it, inside the process that runs the agent. What it says is sampled and
recorded by the model's host; here messages become token ids, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.tokenizer import is_image
from hybridflow.environments.endpoint import Endpoint
from hybridflow.environments.rendering import ChatRenderer, Message
from hybridflow.environments.tool_calls import ToolCall, parsed
from hybridflow.errors import PromptError


@dataclass(frozen=True)
class Turn:
    """What the model said in one turn: token ids (the stop token included), their log-probabilities under the sampling
    policy, and whether it ended by itself ("stop") or by its length ("length")."""

    token_ids: list[int]
    log_probs: list[float]
    end: str


@dataclass(frozen=True)
class Answer:
    """A turn as a message of the assistant, with `tool_calls`, and its calls of tools, damaged ones too."""

    message: dict[str, Any]
    calls: list[ToolCall]
    turn: Turn
    prompt_tokens: int


@dataclass
class _Past:
    messages: list[Message]
    ids: list[int]  # up to the model's last word, with one for each image
    turn: list[int]
    images: list[str]


Sampler = Callable[[Sequence[int], Mapping[str, Any], Sequence[str]], Awaitable[Turn]]
"""The model's next turn after these ids, with `max_tokens` or `stop` in place of the call's, and the names of their
images."""


@dataclass
class Pictures:
    """The images of conversations: `of_row` of the row, whose names are their numbers, and others of at most
    `most_pixels` (0: the model reads text only), which `show` tells the host once."""

    of_row: int = 0
    most_pixels: int = 0
    show: Callable[[bytes], object] = bytes
    _shown: set[str] = field(default_factory=set)

    def encoded(self, where: str, image: Any) -> EncodedImage:
        """Errors: PromptError for one that cannot be read, and where the model reads text only."""
        if not self.most_pixels:
            raise PromptError(f"{where} is an image, and the model reads text only: give text.")
        return image if isinstance(image, EncodedImage) else EncodedImage.of(where, image, self.most_pixels)

    def taken(self, messages: Sequence[Message]) -> tuple[list[Message], list[EncodedImage | str]]:
        """The messages with parts that only stand for images, and these in order, of the row by name. Errors:
        PromptError, also for a part that stands for none."""
        out, images, places = list[Message](), list[EncodedImage | str](), 0
        for message in messages:
            parts = []
            for part in content if isinstance(content := message.get("content"), list) else ():
                if isinstance(part, Mapping) and part.get("image") is not None:
                    images.append(self.encoded(f"image {len(images)} of the conversation", part["image"]))
                    part = {"type": "image"}
                elif is_image(part):
                    images.append(str(places))
                    places += 1
                elif isinstance(part, Mapping) and "image" in str(part.get("type")):
                    raise PromptError(
                        f"the conversation has a part {part!r:.200}: give {{'type': 'image', 'image': ...}}."
                    )
                parts.append(part)
            out.append({**message, "content": parts} if parts else message)
        if places not in (0, self.of_row):  # which of them is not said
            raise PromptError(
                f"the conversation has {places} parts {{'type': 'image'}} without an image, and its row {self.of_row} "
                f"images: give all of the row's, or one each, {{'type': 'image', 'image': row['images'][0]}}."
            )
        return out, images

    def named(self, images: Sequence[EncodedImage | str]) -> list[str]:
        """Their names; new ones are shown to the host."""
        for image in images:
            if not isinstance(image, str) and image.name not in self._shown:
                self.show(image)
                self._shown.add(image.name)
        return [image if isinstance(image, str) else image.name for image in images]


@dataclass
class Conversation:
    """One conversation under way, or several that an agent holds with the model for one row."""

    _sample: Sampler
    _renderer: Callable[[Sequence[Mapping[str, Any]]], ChatRenderer]
    metrics: dict[str, float] = field(default_factory=dict)
    images: Pictures = field(default_factory=Pictures)
    _past: list[_Past] = field(default_factory=list)
    _endpoint: Endpoint | None = None
    _clock: asyncio.Timeout | None = None
    _seconds: float = 0.0
    _open: int = 0  # turns that the model is asked for

    @cached_property
    def _served(self) -> tuple[str, str]:
        assert self._endpoint is not None  # of a process that runs agents
        return self._endpoint.open(self)

    @property
    def base_url(self) -> str:
        """An OpenAI-compatible endpoint on loopback, whose chat completions are this conversation's turns."""
        return self._served[0]

    @property
    def api_key(self) -> str:
        """The key of this conversation at `base_url`, which ends with it."""
        return self._served[1]

    def close(self) -> None:
        """End what `base_url` serves."""
        if "_served" in self.__dict__ and self._endpoint is not None:
            self._endpoint.close(self.api_key)

    def limited(self, clock: asyncio.Timeout, seconds: float) -> None:
        """The agent has `seconds` from one turn of the model to the next, by `clock`."""
        self._clock, self._seconds = clock, seconds

    async def _turn(self, ids: Sequence[int], sampling: Mapping[str, Any], images: Sequence[str] = ()) -> Turn:
        self._open += 1
        if self._clock is not None:
            self._clock.reschedule(None)
        try:
            return await self._sample(ids, sampling, images)
        finally:
            self._open -= 1
            if self._clock is not None and not self._open and not self._clock.expired():
                self._clock.reschedule(asyncio.get_running_loop().time() + self._seconds)

    async def generate(self, ids: Sequence[int], **sampling: Any) -> Turn:
        """The model's next turn after token ids. `sampling`: `max_tokens`, `stop` and others of `hf.Sampling`.

        Errors: PromptError for ids that are none of the model's, ContextFullError.
        """
        return await self._turn(list(ids), sampling)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> dict[str, Any]:
        """The assistant's next message, with `tool_calls` where it calls tools. `tools` are JSON schemas.

        Messages that the model wrote before are recognised, and their token ids used as they were sampled.
        Errors: as `generate`; PromptError for messages that the chat template refuses.
        """
        return (await self.answer(messages, tools, **sampling)).message

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), **sampling: Any
    ) -> Answer:
        """As `chat`, with the turn's tokens and the calls that are damaged."""
        if self.images.most_pixels:  # beside this loop, which other trajectories share
            messages, shown = await asyncio.to_thread(self.images.taken, messages)
        else:
            messages, shown = self.images.taken(messages)
        renderer, images = self._renderer(tools), self.images.named(shown)
        ids = self._continued(renderer, messages, images) or renderer.prompt(messages)
        turn = await self._turn(ids, sampling, images)
        message, calls = renderer.answer(turn.token_ids)
        self._past.append(_Past([*messages, message], [*ids, *turn.token_ids], turn.token_ids, images))
        return Answer(message, calls, turn, len(ids))

    def _continued(
        self, renderer: ChatRenderer, messages: Sequence[Message], images: Sequence[str]
    ) -> list[int] | None:
        """The ids of the longest past that `messages` and their `images` continue, and theirs; None without one."""
        newest, said = enumerate(self._past), [*map(_said, messages)]
        for _, past in sorted(newest, key=lambda one: (len(one[1].messages), one[0]), reverse=True):
            size = len(past.messages)
            seen = images[: len(past.images)] == past.images
            if seen and size < len(messages) and all(_said(one) == now for one, now in zip(past.messages, said)):
                more = renderer.extension(past.messages, messages[size:], past.turn)
                if more is not None:
                    return past.ids + more
        return None


def _said(message: Message) -> Any:
    """What a message says: clients leave out, rename and reformat what does not matter."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            "\0" if is_image(part) else part.get("text", "") for part in content if isinstance(part, Mapping)
        )
    calls = [
        (call.get("function", {}).get("name"), parsed(call.get("function", {}).get("arguments")))
        for call in message.get("tool_calls") or []
    ]
    return message.get("role"), content or "", calls
