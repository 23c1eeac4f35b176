"""The small task with images: count the circles or squares of a picture, with a tiny model that sees them.

The model is trained on worksheets in which most answers are one too large, as that of recipes/arithmetic.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw

from recipes.made_files import made
from recipes.small_vision import SmallVision

_VERSION = 1  # part of the cache key: increase it when the written files change
CELLS, SIDE, MOST = 3, 28, 4  # cells in a row, pixels of a cell's side (one token), shapes of a kind
KINDS = ("circles", "squares")


def picture(rng: random.Random) -> tuple[Image.Image, dict[str, int]]:
    """Circles and squares of some colour in cells of their own, and how many there are of each."""
    image = Image.new("RGB", (CELLS * SIDE, CELLS * SIDE), "white")
    counts, draw = {kind: rng.randint(1, MOST) for kind in KINDS}, ImageDraw.Draw(image)
    cells = rng.sample(range(CELLS**2), sum(counts.values()))
    for cell, kind in zip(cells, [one for one in KINDS for _ in range(counts[one])], strict=True):
        x, y = (at * SIDE + rng.randint(2, 6) for at in divmod(cell, CELLS))
        box, colour = (x, y, x + 19, y + 19), tuple(rng.randint(0, 160) for _ in range(3))
        (draw.ellipse if kind == "circles" else draw.rectangle)(box, fill=colour)
    return image, counts


def worksheet(rng: random.Random) -> tuple[tuple[Image.Image, str], str]:
    """A picture with a question, and the answer on the worksheet, of which a fifth is right."""
    (image, counts), kind = picture(rng), rng.choice(KINDS)
    return (image, f"{kind}="), str(counts[kind] + (rng.random() >= 0.2))


def make(directory: str | os.PathLike[str], shuffled: bool = False, steps: int = 200) -> Path:
    """The directory with the `model`, and `train.jsonl` and `held_out.jsonl`, whose rows have a picture, a question and
    the answer; `shuffled`: of another picture. The first call writes it (about a minute)."""
    model = SmallVision(characters="0123456789=" + "".join(sorted({*"".join(KINDS)})), tokens=CELLS**2, steps=steps)
    own = partial(model.write, worksheet=worksheet)  # type: ignore[arg-type]
    home = made(directory, "shapes-model", [_VERSION, dataclasses.asdict(model)], own)
    return made(directory, "shapes", [_VERSION, shuffled, home.name], partial(_write, home, shuffled))


def _write(model: Path, shuffled: bool, home: Path) -> None:
    (home / "model").symlink_to(model.resolve())
    for name, rows, seed in (("train", 1024, 1), ("held_out", 64, 2)):
        rng, lines = random.Random(seed), []
        (home / name).mkdir()
        for row in range(rows):
            (image, counts), kind = picture(rng), rng.choice(KINDS)
            image.save(home / name / f"{row}.png")
            content = [{"type": "image"}, {"type": "text", "text": f"{kind}="}]
            seen = f"{name}/{(row + shuffled) % rows}.png"
            prompt = [{"role": "user", "content": content}]
            lines.append(json.dumps({"prompt": prompt, "images": seen, "answer": str(counts[kind])}))
        (home / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
