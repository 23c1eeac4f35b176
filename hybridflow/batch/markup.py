"""Tables of notebooks: HTML of `_repr_html_`, and short texts of values. Every text is escaped, and no value raises."""

from __future__ import annotations

import html
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LETTERS, _NUMBERS, _ROWS = 48, 6, 6
_LEFT = ' style="text-align:left"'
_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, _LETTERS, _LETTERS, _LETTERS


def first_rows(title: str, heading: Sequence[str], length: int, row: Callable[[int], Sequence[str]]) -> str:
    """A table of the first of `length` rows, whose cells are `row(number)`."""
    note = f"{length - _ROWS} more rows" if length > _ROWS else ""
    return table(title, heading, map(row, range(min(length, _ROWS))), note)


def table(title: str, heading: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A titled table; a cell may have several lines, the first line of a heading is its name."""
    head = "".join(f"<th{_LEFT}>{escaped(text)}</th>" for text in heading)
    body = "".join("<tr>" + "".join(f"<td{_LEFT}>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    above = f"<thead><tr>{head}</tr></thead>" if heading else ""
    below = f"<p>{escaped(note)}</p>" if note else ""
    return f"<p>{escaped(title)}</p><table>{above}<tbody>{body}</tbody></table>{below}"


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, whose cells show their texts as they are."""

    def line(cells: Sequence[str]) -> str:
        plain = (escaped(re.sub(r"([\\`*_{}\[\]()!|])", r"\\\1", cell)).replace("~", "&#126;") for cell in cells)
        return f"| {' | '.join(plain)} |"

    return "\n".join([line(heading), "|" + " --- |" * len(heading), *map(line, rows)])


def escaped(text: str) -> str:
    """Text as HTML; half surrogates, which no message to a browser can hold, become question marks."""
    return html.escape(text.encode(errors="replace").decode()).replace("\n", "<br>")


def shown(value: Any) -> str:
    """One value in one line, shortened. Never raises."""
    if isinstance(value, float):
        return f"{value:.4g}"
    try:
        text = value[: 8 * _LETTERS] if isinstance(value, str) else _short.repr(value)
    except Exception as error:  # the repr of a type of the user's; or an integer of more than 4,300 digits
        text = f"<{type(value).__name__}: {type(error).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def numbers(values: Any) -> str:
    """The first numbers of a tensor, in brackets."""
    first = [shown(value) for value in values.detach().flatten()[:_NUMBERS].tolist()]
    return f"[{', '.join(first)}{', ...' if values.numel() > _NUMBERS else ''}]"
