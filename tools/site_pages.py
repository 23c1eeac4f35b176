"""What the site needs beyond the pages that GitHub shows: mkdocs calls these functions (`hooks` in mkdocs.yml).

Sources that a page links to become pages, formulas become MathML, which browsers draw without a script, and Markdown
that only GitHub reads (a mark behind a block's language, a list right after a paragraph) gets its general form.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file outside docs/ that a page links to."""
    linked = {path for file in files.documentation_pages() for _, path in _outside(file.src_uri, file.content_string)}
    for path in sorted(linked):
        text = (ROOT / path).read_text()
        source = text if path.endswith(".md") else f"````{Path(path).suffix[1:]}\n{text.rstrip()}\n````\n"
        page = File.generated(config, _page(path), content=f"# {path}\n\n{source}")
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("source/"):
        return markdown
    for target, path in _outside(page.file.src_uri, markdown):
        markdown = markdown.replace(f"]({target})", f"]({relpath(_page(path), Path(page.file.src_uri).parent)})")
    parts = _around(FENCE, markdown)
    return "".join(_fence(text) if fenced else _lists(text) for fenced, text in parts)


def on_page_content(html: str, **_: Any) -> str:
    return FORMULA.sub(lambda m: convert(_plain(m[3]), display="inline" if m[2] == "(" else "block"), html)


def _outside(page: str, text: str) -> list[tuple[str, str]]:
    """(link, path in the repository) of a page's links to files that are not in docs/."""
    found = []
    for target in dict.fromkeys(LINK.findall(text)):
        path = (ROOT / "docs" / page).parent.joinpath(target).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs"):
            found.append((target, path.relative_to(ROOT).as_posix()))
    return found


def _page(path: str) -> str:
    return f"source/{path}.md"


def _around(pattern: re.Pattern[str], text: str) -> list[tuple[bool, str]]:
    """The text in order, as (whether the pattern matches, part)."""
    parts, end = list[tuple[bool, str]](), 0
    for match in pattern.finditer(text):
        parts += [(False, text[end : match.start()]), (True, match[0])]
        end = match.end()
    return [*parts, (False, text[end:])]


def _fence(block: str) -> str:
    return re.sub(r"\A```(\w+) \w+$", r"```\1", block, count=1, flags=re.MULTILINE)


def _lists(text: str) -> str:
    """An empty line before each list that follows a paragraph."""
    return re.sub(r"^((?![-|#>\s]|\d+\. ).+)\n(?=- |1\. )", r"\1\n\n", text, flags=re.MULTILINE)


def _plain(formula: str) -> str:
    return formula.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
