"""The report page: its arithmetic, its data, its structure, and, where a browser is installed, what it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cli import commands as cli
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import thumbnail
from hybridflow.errors import ConfigError
from hybridflow.tracking.report import page as pages
from hybridflow.tracking.report.event_summary import Activity, EventSummary, covered, merged, overlapping, shares
from hybridflow.tracking.report.limits import Limit
from hybridflow.tracking.report.page import as_script, curves, downsample, report_html, shown_samples, write_report
from hybridflow.tracking.report.run_files import RunFiles
from tests.example_runs import HOSTILE, write_run
from tests.headless_browser import Page, find_browser, open_browser
from tests.vision_models import noise

KINDS = ("call", "transfer", "wait", "switch", "stage")
SIZES = ("bytes_in", "bytes_out", "rows", "tokens", "memory_before", "memory_after", "peak")
spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda ends: (min(ends), max(ends))), max_size=8)


class Parts(HTMLParser):
    """Start tags, and the text of each script element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_data(self, data):
        if self.inside:
            self.scripts[-1] += data

    def handle_endtag(self, tag):
        self.inside = False


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs; the first has a restart."""
    directory = tmp_path_factory.mktemp("runs")
    return write_run(directory / "first", restart=7), write_run(directory / "second", seed=1)


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def data_of(text: str) -> dict:
    return json.loads(Parts(text).scripts[0])


# Arithmetic
@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(1, 40))
def test_downsampling_keeps_every_extreme(values, buckets):
    points = list(enumerate(values))
    kept = downsample(points, buckets)
    assert kept == sorted(set(kept) & set(points))
    assert len(kept) <= 2 * buckets + 2
    assert not points or {points[0], points[-1]} <= set(kept)
    for bucket in range(buckets):
        part = points[len(points) * bucket // buckets : len(points) * (bucket + 1) // buckets]
        near = [value for step, value in kept if part and part[0][0] <= step <= part[-1][0]]
        assert not part or (min(near), max(near)) == (min(v for _, v in part), max(v for _, v in part))


def test_curves_have_gaps_where_figures_are_not_finite():
    given = [{"step": 1, "x": 1.5}, {"step": 2, "x": None}, {"step": 3, "x": 10**400}, {"step": 4, "x": 2, "y": True}]
    assert curves(given) == {"x": [[1, 2, 4], [1.5, None, 2]]}
    assert curves([{"x": 1}, {"step": "1", "x": 1}]) == {}


@given(spans, spans, spans)
def test_unions_and_overlaps_equal_a_count_of_ticks(one, two, three):
    def ticks(intervals):
        return {at for start, end in intervals for at in range(start, end)}

    assert covered(one, (10, 30)) == len(ticks(one) & {*range(10, 30)})
    assert all(a[1] < b[0] for a, b in zip(merged(one), merged(one)[1:]))
    count = Counter(at for intervals in (one, two, three) for at in ticks(intervals))
    assert overlapping([one, two, three]) == sum(times >= 2 for times in count.values())


@given(st.lists(st.tuples(*[st.integers(0, 40)] * 3).map(sorted), max_size=8), st.integers(0, 20), st.integers(20, 40))
def test_devices_work_wait_or_are_idle(times, first, last):
    calls = [event(start=start, ready=ready, end=end) for start, ready, end in times]
    found = shares([Activity.of(call) for call in calls], (first, last))
    window = set(range(first, last))
    busy = window & {at for _, ready, end in times for at in range(ready, end)}
    taken = window & {at for start, _, end in times for at in range(start, end)}
    assert found == ({"main/0": (len(busy), len(taken - busy))} if times else {})


def event(**more):
    return {"kind": "call", "step": 1, "seq": 1, "role": "r", "method": "m", "pool": "main", "rank": 0, **more}


UNUSABLE: list[dict] = [{}, {"start": 1}, {"start": 1, "end": 2}, {"start": 2, "ready": 2, "end": 1}]
UNUSABLE.append({"start": math.nan, "ready": 1, "end": 1})


@pytest.mark.parametrize("times", UNUSABLE)
def test_events_without_usable_times_are_left_out_and_inputs_arrive_within_the_call(times):
    assert Activity.of(event(**times)) is None
    assert [Activity.of(event(start=1, end=3, ready=ready)).ready for ready in (0, 9)] == [1, 3]


# Data
def test_an_iteration_has_all_its_events(runs):
    events = lines(runs[0], "events.jsonl")
    views = {view["step"]: view for view in data_of(report_html([runs[0]]))["runs"][0]["views"]}
    for step, view in views.items():
        own = Counter(event["kind"] for event in events if event.get("step") == step)
        assert view["counts"] == {kind: own[kind] for kind in KINDS}
        assert Counter(row[0] for row in view["events"] if row[5] == step) == Counter({0: 20, 1: 1, 2: 1, 3: 4, 4: 4})
        assert {row[5] for row in view["events"]} <= {step - 1, step, step + 1}
        call = next(event for event in events if event.get("step") == step and event.get("method") == "update_actor")
        row = next(row for row in view["events"] if row[3] == view["names"].index("update_actor") and row[5] == step)
        assert row[9:16] == [call[name] for name in SIZES]
        assert len(row) == 17
        assert all(sum(parts) <= view["seconds"] + 1e-6 for parts in view["shares"].values())
    why = {step: view["why"] for step, view in views.items()}
    assert (why[1], why[3], why[12]) == ("first", "slowest", "last")
    around = [why[step].split(", ")[-1] for step in (6, 7, 8)]
    assert around == ["before a restart", "restart", "after a restart"]
    assert sum("median" in reason for reason in why.values()) == 1


def test_calls_and_memory_equal_those_of_the_events(runs):
    events = [event for event in lines(runs[0], "events.jsonl") if event.get("method") == "update_actor"]
    run = data_of(report_html([runs[0]]))["runs"][0]
    found = next(call for call in run["calls"] if call["name"] == "actor.update_actor")
    work = [max(e["end"] - e["ready"] for e in events if e["step"] == step) for step in range(1, 13)]
    assert (found["calls"], found["ranks"]) == (12, 4)
    assert found["work"] == pytest.approx(median(work), rel=1e-5)
    assert run["memory"]["main/2"]["actor.update_actor"] == max(e["peak"] for e in events if e["rank"] == 2)
    assert [(one["key"], one["plan"]) for one in run["devices"]] == [(f"main/{rank}", 6e10) for rank in range(4)]


def test_more_events_than_a_page_can_hold_are_named(runs, monkeypatch):
    monkeypatch.setattr("hybridflow.tracking.report.event_summary._MOST_EVENTS", 70)
    views = EventSummary(RunFiles.of(runs[0])).views()
    assert sum(len(view["events"]) for view in views) <= 70
    assert all(view["left_out"] > 0 and view["counts"]["call"] == 20 for view in views)


def test_data_loaded_ahead_does_not_begin_an_iteration(tmp_path):
    def wait(step, start, end):
        return {"kind": "wait", "step": step, "what": "loader", "start": start, "end": end}

    calls = [event(step=step, start=start, ready=start, end=start + 4) for step, start in ((1, 2), (2, 8), (3, 13))]
    written = [wait(1, 1, 2), wait(2, 5, 8), wait(3, 3, 4), *calls]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    views = EventSummary(RunFiles.of(tmp_path)).views()
    found = {view["step"]: (view["start"], view["seconds"], view["counts"]["wait"]) for view in views}
    assert found == {1: (1, 5, 1), 2: (6, 6, 1), 3: (12, 5, 1)}


def test_devices_are_in_the_order_of_their_ranks(tmp_path):
    run = write_run(tmp_path / "run", steps=2, devices=12)
    found = EventSummary(RunFiles.of(run)).devices()
    assert [one["key"] for one in found] == [f"main/{rank}" for rank in range(12)]


def test_limits_are_asked_of_events_of_many_iterations(runs, monkeypatch):
    asked = []
    limit = Limit("generation", 4.0, 0.4, HOSTILE)
    monkeypatch.setattr(pages, "find_limits", lambda events: asked.extend(events) or [limit])
    assert data_of(report_html([runs[0]]))["runs"][0]["limits"] == [asdict(limit)]
    assert asked[0]["kind"] == "run"
    assert {event["step"] for event in asked if "step" in event} == set(range(1, 13))


def test_samples_of_evenly_spread_iterations_fill_the_budget(tmp_path):
    run = RunFiles.of(write_run(tmp_path / "run", steps=32, samples_every=1))
    every = (run.directory / "samples.jsonl").stat().st_size
    assert len(shown_samples(run, every)["rows"]) == 8 * 32
    half = shown_samples(run, every - 1)
    assert sorted({row["step"] for row in half["rows"]}) == list(range(2, 33, 2))
    assert (half["of"], half["steps"], half["steps_of"]) == (8 * 32, 16, 32)
    assert len(shown_samples(run, 1)["rows"]) == 1


def test_two_runs_have_their_settings_side_by_side(runs):
    found = data_of(report_html(runs))
    assert [run["name"] for run in found["runs"]] == ["first", "second"]
    assert [row[0] for row in found["config"]] == ["actor.optim.lr", "seed", "actor.train.tp", "name"]
    assert found["config"][1] == ["seed", "0", "1"]


def test_a_thousand_iterations_fit_into_a_page(tmp_path):
    run = write_run(tmp_path / "run", steps=1000, devices=2, more_metrics=10, response_tokens=60, restart=500)
    path = write_report(run)
    assert path.stat().st_size < 10e6
    found = data_of(path.read_text())["runs"][0]
    assert len(found["views"]) <= 12
    assert found["iterations"] == 1000
    values = [line["figure/007"] for line in lines(run, "metrics.jsonl")]
    steps, shown = found["metrics"]["figure/007"]
    assert len(steps) < 1000
    assert (min(shown), max(shown)) == (pytest.approx(min(values), rel=1e-5), pytest.approx(max(values), rel=1e-5))


# What a run may lack
def test_a_run_with_metrics_alone_and_damaged_lines(tmp_path):
    metrics = b'{"step": 1, "x": NaN}\n[1]\n\xff\n{"step": 2, "x": 1e999, "y": 1}\n{"step": 3, "x"'
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    (tmp_path / "samples.jsonl").write_bytes(b'{"step": 1, "rewards": 1e999, "log_probs": [NaN]}\n{"step": 2, "a')
    damaged = b'{"kind": "run", "devices": [3, {"memory": 1e999}], "plan": 5}\n{"kind": "x"}\n'
    (tmp_path / "events.jsonl").write_bytes(damaged)
    (tmp_path / "config.yaml").write_text("a: [1")
    found = data_of(report_html([tmp_path]))["runs"][0]
    assert found["damaged"] == {"metrics.jsonl": 3, "samples.jsonl": 1, "config.yaml": 1}
    assert found["metrics"] == {"x": [[1], [None]], "y": [[2], [1]]} or found["metrics"] == {"y": [[2], [1]]}
    assert found["unusable"] == 1
    assert found["samples"]["rows"] == [{"step": 1, "rewards": "inf", "log_probs": [None]}]


@pytest.mark.parametrize(("make", "says"), [(False, "not a directory"), (True, "has none of")])
def test_a_directory_without_a_run_is_refused(tmp_path, make, says):
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=says):
        write_report(tmp_path / "run")


def test_a_page_that_cannot_be_written_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(runs[0], output=tmp_path / "nowhere" / "page.html")
    assert list(tmp_path.iterdir()) == []


# The page
def test_the_command_writes_a_page(runs, tmp_path, capsys):
    output = tmp_path / "both.html"
    assert cli.main(["report", *map(str, runs), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"written to {output}\n"
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert cli.main(["report", "a", "b", "c"]) == 2


def test_texts_of_a_run_cannot_leave_their_place(runs):
    text = report_html(runs)
    found = Parts(text)
    assert [tag for tag, _ in found.tags if tag in ("script", "img", "iframe", "link")] == ["link", "script", "script"]
    assert [attributes.get("type") for tag, attributes in found.tags if tag == "script"] == ["application/json", None]
    assert "<" not in found.scripts[0]
    samples = json.loads(found.scripts[0])["runs"][0]["samples"]["rows"]
    assert any(row["response"] == HOSTILE for row in samples)
    assert json.loads(as_script(HOSTILE)) == HOSTILE


def test_the_page_needs_no_network_and_runs_no_other_script(runs):
    text = report_html(runs)
    found = Parts(text)
    policy = next(about["content"] for tag, about in found.tags if about.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    assert not any(word in found.scripts[1] for word in ("</script", "innerHTML", "http:", "https:", "fetch(", "eval("))
    assert [about["href"] for tag, about in found.tags if tag == "link"] == ["data:,"]


def test_all_parts_belong_to_the_package():
    settings = (Path(pages.__file__).parents[3] / "pyproject.toml").read_text()
    assert '"hybridflow.tracking.report" = ["*.html", "*.css", "*.js"]' in settings


# In a headless Chromium, where one is installed (HYBRIDFLOW_BROWSER names one)

LIMITS = [Limit("generation tail", 4.0, 0.4, f"Shorten responses. {HOSTILE}")]


@pytest.fixture(scope="module")
def browser():
    if (found := find_browser()) is None:
        pytest.skip("no Chromium is installed")
    with open_browser(found) as page:
        yield page


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
    rows = f"[...document.querySelectorAll('#{section} tbody tr')]"
    return page.run(f"{rows}.map(row => row.cells[{column}].textContent)")


def test_the_timeline_draws_every_call_of_an_iteration(page, runs):
    events = lines(runs[0], "events.jsonl")
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
    tokens = "[...document.querySelectorAll('#samples .answer:first-child .tokens span')]"
    colours = tokens + ".map(one => one.style.background)"
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
    charts = page.run("document.querySelectorAll('#curves .chart').length")
    assert charts == page.run("Object.keys(DATA.runs[0].metrics).length")
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
