"""The report page in a headless Chromium: skipped where none is installed (HYBRIDFLOW_BROWSER names one)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest

from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import thumbnail
from hybridflow.tracking.report import page as pages
from hybridflow.tracking.report.limits import Limit
from hybridflow.tracking.report.page import write_report
from tests.example_runs import HOSTILE, write_run
from tests.headless_browser import Page, find_browser, open_browser
from tests.vision_models import noise

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
KINDS = ("call", "transfer", "wait", "switch", "stage")
LIMITS = [Limit("generation tail", 4.0, 0.4, f"Shorten responses. {HOSTILE}")]


@pytest.fixture(scope="module")
def browser():
    with open_browser(find_browser() or "") as page:
        yield page


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    return write_run(directory / "first", restart=7), write_run(directory / "second", seed=1)


@pytest.fixture
def page(browser, runs, tmp_path, monkeypatch):
    """The page of two runs; whatever a test does, the console stays empty and no text of a run becomes markup."""
    monkeypatch.setattr(pages, "find_limits", lambda events: LIMITS)
    browser.problems.clear()
    browser.open(write_report(*runs, tmp_path / "both.html"))
    yield browser
    assert browser.problems == []
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.run("[typeof window.broken, document.images.length, document.scripts.length]") == ["undefined", 0, 2]


def choose(page: Page, selector: str, value: str, event: str = "change") -> None:
    """Set an input and send its event, as a user would."""
    script = "(() => {{ const it = document.querySelector({}); it.value = {}; it.dispatchEvent(new Event({})); }})()"
    page.run(script.format(json.dumps(selector), json.dumps(value), json.dumps(event)))
    page.settle()


def cells(page: Page, section: str, column: int) -> list[str]:
    return page.run(
        f"[...document.querySelectorAll('#{section} tbody tr')].map(row => row.cells[{column}].textContent)"
    )


def test_the_timeline_draws_every_call_of_an_iteration(page, runs):
    events = [json.loads(line) for line in (runs[0] / "events.jsonl").read_text().splitlines()]
    views = page.run("DATA.runs[0].views.map(view => view.step)")
    assert len(views) >= 6
    for at, step in enumerate(views):
        choose(page, "#timeline select.iteration", str(at))
        drawn = page.run("({...document.querySelector('#timeline canvas').dataset})")
        count = Counter(event["kind"] for event in events if event.get("step") == step)
        assert drawn["step"] == str(step)
        assert {kind: drawn[kind] for kind in KINDS} == {kind: str(count[kind]) for kind in KINDS}
        assert f"{count['call']} calls" in page.run("document.querySelector('#timeline .facts').textContent")


def test_the_timeline_zooms_and_names_calls(page):
    canvas = "document.querySelector('#timeline canvas')"
    page.run(canvas + ".scrollIntoView({block: 'center'})")
    page.settle()
    x, y, width = (page.run(f"{canvas}.getBoundingClientRect().{side}") for side in ("x", "y", "width"))
    where = {"x": x + width * 0.3, "y": y + 60}
    page.send("Input.dispatchMouseEvent", type="mouseMoved", **where)
    page.settle()
    told = page.run("document.getElementById('tip').textContent")
    assert "actor.generate_sequences on main/" in told
    assert "in 10.0 kB, out 20.0 kB" in told
    assert ", peak " in told
    before = page.run(canvas + ".toDataURL()")
    page.send("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-200, modifiers=2, **where)
    page.settle()
    zoomed = page.run(canvas + ".toDataURL()")
    assert zoomed != before
    page.run("[...document.querySelectorAll('#timeline button')].find(one => one.textContent === 'all').click()")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert page.run(canvas + ".toDataURL()") == before


def test_samples_are_sorted_and_searched(page):
    rewards = page.run("DATA.runs[0].samples.rows.map(row => row.rewards)")
    assert len(cells(page, "samples", 0)) == len(rewards) == 48
    head = "[...document.querySelectorAll('#samples th')].find(one => one.textContent.startsWith('rewards')).click()"
    page.run(head)
    assert list(map(float, cells(page, "samples", 2))) == sorted(rewards, reverse=True)
    page.run(head)
    assert list(map(float, cells(page, "samples", 2))) == sorted(rewards)
    choose(page, "#samples input[type=search]", "PROMPT 4/1", "input")
    assert set(cells(page, "samples", 0)) == {"4"}
    assert set(cells(page, "samples", 1)) == {"1"}
    assert page.run("document.querySelector('#samples .count').textContent") == "4 of 48 rows"
    choose(page, "#samples input[type=search]", "nothing has this", "input")
    assert cells(page, "samples", 0) == []
    choose(page, "#samples input[type=search]", "", "input")
    choose(page, "#samples select.step", "8")
    assert set(cells(page, "samples", 0)) == {"8"}


def test_the_responses_of_a_group_stand_side_by_side_in_colours(page):
    page.run("document.querySelectorAll('#samples tbody tr')[1].click()")
    rows = page.run("DATA.runs[0].samples.rows.slice(0, 4)")
    shown = "[...document.querySelectorAll('#samples .answer')].map(one => one.querySelector('.tokens').textContent)"
    assert page.run(shown) == ["".join(row["tokens"]) for row in rows]
    assert HOSTILE in page.run(shown)[1]
    tops = page.run("[...document.querySelectorAll('#samples .answer')].map(one => one.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    colours = (
        "[...document.querySelectorAll('#samples .answer:first-child .tokens span')].map(one => one.style.background)"
    )
    found = {}
    for field in ("log_probs", "advantages", "policy_version", ""):
        choose(page, "#samples select.colour", field)
        found[field] = page.run(colours)
    assert len(set(found["policy_version"])) == 2
    assert set(found[""]) == {""}
    assert found["log_probs"] != found["advantages"]
    assert len(found["advantages"]) == 12
    signs = [value > 0 for value in rows[0]["advantages"]]
    assert [("47, 129, 247" in one or "2f81f7" in one) for one in found["advantages"]] == signs


def test_two_runs_are_compared(page):
    assert page.run("document.querySelectorAll('#curves .chart').length") == page.run(
        "Object.keys(DATA.runs[0].metrics).length"
    )
    assert page.run("document.querySelectorAll('#timeline canvas').length") == 2
    assert cells(page, "settings", 0) == ["actor.optim.lr", "seed"]
    names, ratios = cells(page, "calls", 0), cells(page, "calls", 3)
    work = page.run("DATA.runs.map(run => Object.fromEntries(run.calls.map(call => [call.name, call.work])))")
    at = names.index("actor.update_actor")
    assert ratios[at] == f"{work[1][names[at]] / work[0][names[at]]:.2f} ×"
    choose(page, "#curves input[type=search]", "kl", "input")
    assert page.run("[...document.querySelectorAll('#curves .chart')].filter(one => !one.hidden).length") == 1


def test_screenshots_in_light_and_dark(page, tmp_path):
    """Every curve and both timelines have ink in both; the pictures differ."""
    path = Path(page.run("decodeURI(location.pathname)"))
    pictures = []
    for dark in (False, True):
        page.open(path, dark=dark)
        page.run("document.querySelector('#samples tbody tr').click()")
        pictures.append(page.screenshot(tmp_path / f"{dark}.png").read_bytes())
        page.run("document.querySelectorAll('.chart').forEach(one => one.draw())")
        pixels = "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(byte => byte)"
        assert all(page.run(f"[...document.querySelectorAll('canvas')].map(c => {pixels})"))
    sizes = [struct.unpack(">II", picture[16:24]) for picture in pictures]
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == 1300
    assert sizes[0][1] > 2000
    assert pictures[0] != pictures[1]
    # no part is wider than the window
    assert page.run("document.documentElement.scrollWidth") <= 1300


def test_a_run_with_metrics_alone_has_a_page(browser, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x": null}\n{"step": 3}\n')
    browser.problems.clear()
    browser.open(write_report(tmp_path))
    assert browser.problems == []
    assert browser.run("[...document.querySelectorAll('h2')].map(one => one.textContent)") == ["Curves"]


def test_images_stand_beside_samples_and_no_other_address_is_read(browser, tmp_path):
    noise(0, 20, 30).save(made := BytesIO(), "PNG")
    picture = thumbnail(EncodedImage(made.getvalue()))
    row = {"step": 1, "title": "samples", "group": 0, "prompt": "How many?", "response": "3", "rewards": 1.0}
    lines = [row | {"images": [picture, "https://example.org/a.png"]}, row | {"images": []}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    browser.problems.clear()
    browser.open(write_report(tmp_path))
    browser.run("document.querySelector('#samples tbody tr').click()")
    assert browser.problems == []
    assert browser.run("[...document.images].map(one => [one.src, one.naturalWidth])") == [[picture, 30]] * 2
