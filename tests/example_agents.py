"""Agents for tests on hosts. Their processes import this module, which imports nothing else."""

from __future__ import annotations

import os
import time
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
