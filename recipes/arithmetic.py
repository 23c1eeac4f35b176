"""The small task: sums as text, and a tiny model that can add but prefers wrong answers.

The model is trained on worksheets in which most answers are one too large and some have larger errors. Its sampled and
greedy answers are therefore mostly wrong, and reinforcement learning has to correct them.

    python recipes/arithmetic.py DIRECTORY
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes.made_files import made
from recipes.small_model import SmallModel

_VERSION = 2  # part of the cache key: increase it when the written files change


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Sums of two whole numbers below `numbers`; `held_out` of the sums are excluded from training.

    On worksheets a share `right` of the answers is correct, a share `slip` is one too large; the rest is further off.
    """

    numbers: int = 30
    held_out: int = 128
    right: float = 0.2
    slip: float = 0.75
    seed: int = 0
    model: SmallModel = SmallModel()  # noqa: RUF009  a frozen value

    def problems(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The training sums and the held-out sums, in an order given by the seed."""
        pairs = [(a, b) for a in range(self.numbers) for b in range(self.numbers)]
        random.Random(self.seed).shuffle(pairs)
        return pairs[self.held_out :], pairs[: self.held_out]

    def worksheet(self, pairs: Sequence[tuple[int, int]], rng: random.Random) -> tuple[str, str]:
        """One exercise: the prompt, and the answer on the worksheet."""
        (a, b), dice = rng.choice(pairs), rng.random()
        miss = 0 if dice < self.right else 1 if dice < self.right + self.slip else rng.choice((-10, -2, -1, 2, 10))
        return f"{a}+{b}=", str(abs(a + b + miss))


@dataclass(frozen=True)
class ArithmeticFiles:
    """Paths of the task: a Hugging Face `model` directory, and JSONL files with `prompt` and `answer`."""

    model: Path
    train: Path
    held_out: Path


def exact_match(completions: list[str], answer: list[str]) -> list[float]:
    """The reward: 1.0 where the completion is the answer and nothing else, else 0.0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def make(directory: str | os.PathLike[str], task: Arithmetic | None = None) -> ArithmeticFiles:
    """The files of `task` under `directory`: the first call writes them (about 15 s), later calls reuse them."""
    task = task or Arithmetic()
    home = made(directory, "arithmetic", [_VERSION, dataclasses.asdict(task)], partial(_write, task))
    return ArithmeticFiles(home / "model", home / "train.jsonl", home / "held_out.jsonl")


def _write(task: Arithmetic, home: Path) -> None:
    train, held_out = task.problems()
    for name, pairs in (("train", train), ("held_out", held_out)):
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
        (home / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task.model.write(home / "model", partial(task.worksheet, train))


if __name__ == "__main__":
    print(make(sys.argv[1]).model)
