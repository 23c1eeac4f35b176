"""Timelines as pictures (SVG): a panel for each run, a line for each process, a bar for each piece of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#4878cf", "#e8804c", "#59a869", "#b07cc6", "#d5bb67", "#82c6e2")
WIDTH, LEFT, LINE, GAP = 960, 90, 18, 34  # pixels


class Bar(NamedTuple):
    """Work of one kind on line 0, 1, ...; seconds (or slots) since the start of its panel."""

    line: int
    kind: str
    start: float
    end: float
    label: str = ""


def picture(panels: Mapping[str, Sequence[Bar]], lines: Sequence[str], unit: str = "s") -> str:
    """All panels have the same scale, and so can be compared. `lines` are the names of their lines."""
    kinds = list(dict.fromkeys(bar.kind for bars in panels.values() for bar in bars))
    colours = {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}
    longest = max((bar.end for bars in panels.values() for bar in bars), default=1.0)
    scale, height = (WIDTH - LEFT - 10) / longest, GAP + len(panels) * (GAP + LINE * len(lines))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]
    for number, kind in enumerate(kinds):
        x = LEFT + 150 * number
        out.append(f'<rect x="{x}" y="8" width="14" height="12" fill="{colours[kind]}"/>')
        out.append(f'<text x="{x + 20}" y="18">{escape(kind)}</text>')
    top = GAP
    for title, bars in panels.items():
        end = max((bar.end for bar in bars), default=0.0)
        out.append(f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{escape(title)}: {end:.4g} {unit}</text>')
        top += GAP - 8
        for number, name in enumerate(lines):
            y = top + LINE * number
            out.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
            out.append(f'<rect x="{LEFT}" y="{y + 1}" width="{end * scale:.1f}" height="{LINE - 2}" fill="#eee"/>')
        for bar in bars:
            x, y, width = LEFT + bar.start * scale, top + LINE * bar.line + 1, (bar.end - bar.start) * scale
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE - 2}"'
            out.append(f'<rect {box} fill="{colours[bar.kind]}"/>')
            if bar.label:
                middle = f'x="{x + width / 2:.1f}" y="{y + 12}" text-anchor="middle" font-size="10"'
                out.append(f'<text {middle} fill="white">{escape(bar.label)}</text>')
        top += LINE * len(lines) + 8
    return "\n".join([*out, "</svg>\n"])
