"""What the documentation says is true: its runnable blocks run, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hybridflow as hf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^ +\w+ +\|?= ((?:actor|critic|reference|reward|hf)\.[a-z_]+)\(", re.MULTILINE)
MARKS = ("", "runnable", "cluster", "loop", "how")
RUNNABLE = [page for page in PAGES if "```python runnable" in page.read_text()]


def blocks(page: Path, mark: str) -> list[tuple[int, str]]:
    """(line, source) of the Python blocks that carry the mark."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(2)), m.group(2)) for m in BLOCK.finditer(text) if m.group(1) == mark]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_runnable_blocks_run(page: Path):
    names: dict[str, object] = {}
    for line, source in blocks(page, "runnable"):
        exec(compile("\n" * line + source, str(page), "exec"), names)  # a traceback then names the page and the line


def test_own_protocols_are_short():
    page = ROOT / "docs" / "writing_your_own.md"
    written = [source for _, source in blocks(page, "runnable") if "= Protocol(" in source]
    assert len(written) == 2
    for source in written:
        assert len([line for line in source.splitlines() if line.strip()]) <= 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_blocks_are_python(page: Path):
    for mark in MARKS:
        for line, source in blocks(page, mark):
            compile("\n" * line + source, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_use_names_that_exist(page: Path):
    found = [block for mark in MARKS for block in blocks(page, mark)]
    used = [(line, name) for line, source in found for name in re.findall(r"\bhf\.(\w+)", source)]
    unknown = sorted({(line, name) for line, name in used if name not in hf.__all__})
    assert not unknown, f"{page.name} uses names that hybridflow does not have (line of the block, name): {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_loop_of_a_page_is_the_recipes(page: Path):
    recipe = (ROOT / "recipes" / "ppo.py").read_text()
    for source in [source for _, source in blocks(page, "") if "for prompts in hf.PromptLoader" in source]:
        shown, run = (CALL.findall(text[text.index("for prompts") :]) for text in (source, recipe))
        assert shown
        assert shown == run
        assert "tracker.finish()" in source


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#:\s]+)\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_the_paper_map_names_existing_files():
    text = (ROOT / "docs" / "paper_map.md").read_text()
    named = set(re.findall(r"`((?:hybridflow|recipes|benchmarks|tests|docs|tools)/[\w./]*)`", text))
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert named
    assert not missing, f"docs/paper_map.md names files that do not exist: {missing}"
