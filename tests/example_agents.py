"""Agents for tests on hosts. Their processes import this module, which imports nothing else."""

from __future__ import annotations

import os
import random
import sys
import time
from io import BytesIO
from typing import Any


def twice(number: int) -> int:
    """Two times a number.

    Args:
        number: The number.
    """
    return 2 * number


def unhinted(number):
    """A number."""
    return number


class Echo:
    """Says what it heard, for three turns; the reward depends on the length of what the model said last."""

    def reset(self, prompt: str, **row: Any) -> str:
        self.prompt, self.turns = prompt, 0
        return "Speak."

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"heard {len(text)}", float(len(text) % 7), self.turns == 3


class Broken(Echo):
    def step(self, text: str) -> tuple[str, float, bool]:
        raise KeyError("lost")


class Unsteady(Echo):
    """Fails or hangs for some prompts."""

    def step(self, text: str) -> tuple[str, float, bool]:
        if self.prompt == "xyz":
            raise KeyError("lost")
        if self.prompt == "zz":
            time.sleep(60)
        return super().step(text)


class Silent(Echo):
    def reset(self, prompt: str, **row: Any) -> str:
        raise ValueError("no board")


class Here:
    """Can be pickled in the process that made it only."""

    def __init__(self, process: int) -> None:
        self.process = process

    def __call__(self) -> Echo:
        return Echo()

    def __reduce__(self) -> tuple[Any, ...]:
        if os.getpid() != self.process:
            raise ValueError("it stays here")
        return Here, (self.process,)


async def speak(row, model):
    said = await model.generate(row["prompt_ids"])
    return {"reward": 1.0, "tokens": len(said.token_ids)}


async def forgets(row, model):
    """Each turn begins anew, so the trajectory is three rows."""
    said = [await model.generate([65 + turn, 66]) for turn in range(3)]
    return {"reward": float(len(said[0].token_ids) % 5)}


async def asks_anew(row, model):
    """Three turns without what was said before, so each begins a row."""
    said = [await model.chat([{"role": "user", "content": f"{row['prompt']} {turn}"}]) for turn in range(3)]
    return float(len(said[-1]["content"]))


async def where(row, model):
    return {"reward": 1.0, "process": os.getpid()}


async def elsewhere(row, model):
    return {"reward": 0.5, "process": os.getpid()}


def picture(seed: int, width: int) -> Any:
    """Random points, 64 high."""
    from PIL import Image

    return Image.frombytes("RGB", (width, 64), random.Random(seed).randbytes(3 * 64 * width))


class Gallery:
    """Shows an image in its first and in its last observation, or in the last only ("late"), or text alone."""

    def reset(self, prompt: Any, shows: Any, images: Any = None, **row: Any) -> Any:
        self.shows, self.turns = shows, 0
        self.given = [one.open().size for one in images or ()]
        return ["w3", picture(1, 64), "w4"] if shows is True else "w3"

    def step(self, text: str) -> tuple[Any, float, bool]:
        self.turns += 1
        return (
            picture(2, 96) if self.turns == 2 and self.shows else "w5 w6",
            float(len(text) % 7 + len(self.given)),
            self.turns == 3,
        )


async def looks(row, model):
    """Two conversations, of which each shows an image; the first goes on."""
    begun = [{"role": "user", "content": [{"type": "image", "image": picture(3, 64)}, {"type": "text", "text": "w7"}]}]
    said = await model.chat(begun)
    await model.chat([{"role": "user", "content": [{"type": "image", "image": picture(4, 64)}]}])
    more = row["prompt"] if row["images"] else [{"role": "user", "content": "w8"}]
    await model.chat([*begun, said, *more])
    return float(len(said["content"]) % 5)


def show(how: str) -> Any:
    """Show something.

    Args:
        how: What to show.
    """
    from PIL import Image

    if how == "torch":
        return ["torch" if "torch" in sys.modules else "none", picture(0, 56)]
    if how == "cut":
        picture(0, 56).save(made := BytesIO(), "PNG")
        return {"type": "image", "image": made.getvalue()[:5000]}
    return {
        "large": lambda: Image.new("RGB", (200, 100)),
        "mode": lambda: Image.new("F", (56, 56)),
        "narrow": lambda: Image.new("L", (9999, 1)),
        "twice": lambda: [picture(0, 56), {"type": "text", "text": " and "}, picture(0, 56)],
        "no image": lambda: {"type": "image", "image": 3},
        "other": lambda: {"type": "image_url", "image_url": "x"},
        "none": lambda: {"type": "image"},
    }[how]()
