"""The life of a device's memory through one iteration, drawn from the events of a run: a column for each call, what
models hold when it ends, by owner, and above it what the call had at its peak.

    python -m benchmarks.memory_picture runs/first docs/pictures/memory.svg --step 2 --device main/0
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.timelines import COLOURS
from hybridflow.tracking.report.record import read_events

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 420, 70, 30, 70  # pixels
ACTIVATIONS, PER_LEGEND = "activations", 5


def calls_of(events: Sequence[Mapping[str, Any]], step: int, device: str) -> list[Mapping[str, Any]]:
    """The calls of an iteration on a device (`pool/rank`) that have an account, in the order in which they ended."""
    here = [e for e in events if e.get("kind") == "call" and f"{e['pool']}/{e['rank']}" == device]
    return [event for event in here if event["step"] == step and event.get("held")]


def picture(calls: Sequence[Mapping[str, Any]]) -> str:
    """An SVG; images in host memory are left out."""
    held = [{k: v for k, v in call["held"].items() if not k.endswith(" image")} for call in calls]
    owners = sorted({owner for one in held for owner in one} - {ACTIVATIONS})
    colours = {owner: COLOURS[i % len(COLOURS)] for i, owner in enumerate(owners)} | {ACTIVATIONS: "#c44e52"}
    shades = {owner: 1.0 - 0.3 * (i // len(COLOURS)) for i, owner in enumerate(owners)}
    most = max((sum(one.values()) for one in held), default=1) or 1
    unit, name = next((u, n) for u, n in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, "bytes")) if most >= u)
    legend = 18 * -(-(len(owners) + 1) // PER_LEGEND)
    whole, each = HEIGHT + TOP + BOTTOM + legend, (WIDTH - LEFT - 10) / max(1, len(calls))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" width="{WIDTH}" height="{whole}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>Memory of a device through one iteration</title>'
        f'<rect width="{WIDTH}" height="{whole}" fill="white"/>'
    ]
    for number, owner in enumerate([*owners, ACTIVATIONS]):
        x, y = LEFT + 175 * (number % PER_LEGEND), 8 + 18 * (number // PER_LEGEND)
        out.append(f'<rect x="{x}" y="{y}" width="14" height="12" {_fill(owner, colours, shades)}/>')
        out.append(f'<text x="{x + 20}" y="{y + 10}">{escape(owner)}</text>')
    base = TOP + legend + HEIGHT
    for part in range(5):
        y = base - HEIGHT * part / 4
        out.append(f'<path d="M{LEFT} {y:.1f}L{WIDTH - 10} {y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{most * part / 4 / unit:.3g} {name}</text>')
    for number, (call, one) in enumerate(zip(calls, held, strict=True)):
        x, y = LEFT + number * each + 4, float(base)
        for owner in [*owners, ACTIVATIONS]:
            if size := one.get(owner, 0):
                y -= (tall := HEIGHT * size / most)
                box = f'x="{x:.1f}" y="{y:.1f}" width="{each - 8:.1f}" height="{tall:.1f}"'
                out.append(
                    f"<rect {box} {_fill(owner, colours, shades)}><title>{escape(owner)} {size:,}</title></rect>"
                )
        middle, words = x + each / 2 - 4, [call["role"], *call["method"].split("_")]
        for line, word in enumerate(words[:4]):
            out.append(f'<text x="{middle:.1f}" y="{base + 16 + 14 * line}" text-anchor="middle">{escape(word)}</text>')
    return "\n".join([*out, "</svg>\n"])


def _fill(owner: str, colours: Mapping[str, str], shades: Mapping[str, float]) -> str:
    return f'fill="{colours[owner]}" fill-opacity="{shades.get(owner, 1.0):.1f}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("picture", help="the SVG to write")
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--device", default="main/0", help="pool/rank")
    given = parser.parse_args()
    calls = calls_of(read_events(given.run), given.step, given.device)
    Path(given.picture).write_text(picture(calls))
    print(json.dumps({"calls": len(calls), "written": given.picture}))


if __name__ == "__main__":
    main()
