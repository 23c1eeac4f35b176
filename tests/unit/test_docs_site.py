"""The documentation as a site: it builds without a warning, its links lead somewhere, and it has all public names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from omegaconf import OmegaConf

import hybridflow as hf
from hybridflow import errors
from recipes.settings import RUN, TASK

ROOT = Path(__file__).resolve().parents[2]
_SPACES = ("algorithms", "environments", "errors", "planner", "protocols", "rewards")
NAMESPACES = {name: getattr(hf, name) for name in _SPACES}
ERRORS = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]


class Page(HTMLParser):
    """`ids` of a page, its `links` to pages and files, and what it `loads` to be shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids, self.links, self.loads = set[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.add(given.get("id", ""))
        self.links += [given["href"]] if tag == "a" and "href" in given else []
        self.loads += [given[name] for name in ("src", "href") if name in given and tag != "a"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Pages by path. The build fails on warnings: links, anchors, names and pages outside of the navigation."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", target],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {page.relative_to(target).as_posix(): Page(page.read_text()) for page in target.rglob("*.html")}


@pytest.mark.slow
def test_every_page_of_the_documentation_is_there(site: dict[str, Page]):
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    expected = {re.sub(r"(README|index)\.md$", "index.md", page).removesuffix(".md") + ".html" for page in pages}
    assert expected <= set(site)


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(site: dict[str, Page]):
    wrong = []
    for path, page in site.items():
        if path == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = os.path.normpath(Path(path).parent / unquote(parts.path)) if parts.path else path
            target = "index.html" if target == "." else target
            found = site.get(target)
            if found is None or (parts.fragment and unquote(parts.fragment) not in found.ids):
                wrong.append(f"{path}: {link}")
    assert not wrong


@pytest.mark.slow
def test_no_page_needs_the_network(site: dict[str, Page]):
    assert not [(path, name) for path, page in site.items() for name in page.loads if urlsplit(name).netloc]


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: dict[str, Page]):
    ids = set().union(*(page.ids for path, page in site.items() if path.startswith("reference/")))
    names = {name for name in hf.__all__ if name not in NAMESPACES and not hasattr(hf.algorithms, name)}
    names |= {
        f"{space}.{name}" for space in ("environments", "planner", "rewards") for name in NAMESPACES[space].__all__
    }
    names |= {f"errors.{name}" for name in ERRORS}
    names |= {f"algorithms.{name}" for name, value in vars(hf.algorithms).items() if isinstance(value, type)}
    missing = sorted({f"hybridflow.{name}" for name in names} - ids)
    assert not missing, f"add `::: NAME` to a page of docs/reference for {missing}"


def test_troubleshooting_names_every_error():
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    found = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert set(ERRORS) <= set(found)
    for name, section in zip(found, re.split(r"^### \w+$", text, flags=re.MULTILINE)[1:], strict=True):
        assert "**Cause.**" in section, name
        assert "**Cure.**" in section, name


def test_recipes_name_every_common_setting():
    text = (ROOT / "docs" / "recipes.md").read_text()
    assert not [key for key in OmegaConf.create(RUN + TASK) if f"`{key}" not in text]
