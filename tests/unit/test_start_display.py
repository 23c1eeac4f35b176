"""The start of a driver on the console: stages, durations of the last time, and what listens to nothing."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from hybridflow.cluster import startup
from hybridflow.tracking import displays
from hybridflow.tracking.displays import LastDurations, RunDisplay, StartDisplay


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


def plain(directory: Path, output: io.StringIO) -> StartDisplay:
    return StartDisplay(directory, Console(file=output, width=80))


def lines(output: io.StringIO) -> list[str]:
    """Without the seconds since the start."""
    return [line.partition(" s  ")[2] for line in output.getvalue().splitlines()]


def test_stages_are_lines_until_the_first_iteration(tmp_path, output):
    display = plain(tmp_path / "run", output)
    with startup.listening(display):
        with startup.stage("outer"), startup.stage("inner"):
            startup.progress(lambda: "half")
        startup.begin("first iteration")
        startup.begin("first iteration")  # each iteration says so
        RunDisplay(console=Console(file=io.StringIO())).iteration({"step": 1})
        with startup.stage("later"):
            pass
    assert lines(output) == ["outer", "inner", "first iteration"]
    assert display.started
    kept = json.loads((tmp_path / ".stages.json").read_text())
    assert list(kept["run"]) == ["inner", "outer", "first iteration"]


def test_without_a_display_nothing_is_asked():
    def never() -> str:
        raise AssertionError

    startup.progress(never)
    with pytest.raises(KeyError), startup.stage("alone"):
        raise KeyError
    startup.started()


def test_a_start_that_fails_keeps_what_ended(tmp_path, output):
    display = plain(tmp_path / "run", output)

    def fail() -> None:
        with startup.listening(display), startup.stage("outer"):
            with startup.stage("inner"):
                pass
            startup.begin("first iteration")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not display.started
    assert list(json.loads((tmp_path / ".stages.json").read_text())["run"]) == ["inner"]
    with startup.stage("any more"):
        assert "any more" not in output.getvalue()


def test_the_durations_of_the_last_start_are_shown(tmp_path, output):
    LastDurations(tmp_path / ".stages.json", "run").write({"slow": 12.3, "quick": 0.1})
    LastDurations(tmp_path / ".stages.json", "other").write({"slow": 99.0})
    with startup.listening(plain(tmp_path / "run", output)), startup.stage("slow"), startup.stage("quick"):
        pass
    assert lines(output) == ["slow (12 s last time)", "quick"]


@pytest.mark.parametrize("content", ["", "[]", '{"run": 3}', '{"run": {"slow": "x"}}', '{"run": {"slow": -1}}', "\xff"])
def test_a_damaged_file_of_durations_is_no_hindrance(tmp_path, content):
    path = tmp_path / ".stages.json"
    path.write_text(content, encoding="latin-1")
    assert LastDurations(path, "run").last == {}
    LastDurations(path, "run").write({"slow": 1.0})
    assert LastDurations(path, "run").last == {"slow": 1.0}
    LastDurations(tmp_path / "absent" / "file", "run").write({"slow": 1.0})


def test_the_file_of_durations_stays_small(tmp_path):
    for number in range(displays._MOST_RUNS + 3):
        LastDurations(tmp_path / "file", f"run-{number}").write({"slow": 1.0})
    kept = json.loads((tmp_path / "file").read_text())
    assert len(kept) == displays._MOST_RUNS
    assert f"run-{displays._MOST_RUNS + 2}" in kept


def test_a_long_stage_speaks_again_and_again(tmp_path, output, monkeypatch):
    monkeypatch.setattr(displays, "QUIET_SECONDS", 0.1)
    with startup.listening(plain(tmp_path / "run", output)), startup.stage("slow"):
        startup.progress(lambda: "step 3 of 9")
        end = time.monotonic() + 30
        while len(lines(output)) < 4 and time.monotonic() < end:
            time.sleep(0.05)
    assert lines(output)[0] == "slow"
    assert all(line.startswith("slow: ") and line.endswith("s, step 3 of 9") for line in lines(output)[1:4])
    wait = [thread for thread in threading.enumerate() if thread.name == "start-display"]
    for thread in wait:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_terminal_shows_a_list_that_ends_before_the_iterations(tmp_path, output):
    console = Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    display = StartDisplay(tmp_path / "run", console)
    with startup.listening(display):
        with startup.stage("first"):
            time.sleep(0.06)
        with startup.stage("second"):
            assert display._live is not None
            display._live.refresh()
            console.print(display._table())
        startup.started()
        assert not display._live.is_started
    shown = output.getvalue()
    assert "✓" in shown
    assert shown.index("first") < shown.index("second")


def test_the_start_and_the_run_share_one_console(tmp_path, output):
    display = plain(tmp_path / "run", output)
    with startup.listening(display):
        assert RunDisplay()._console is display.console
    assert RunDisplay()._console is not display.console


def test_samples_print_without_what_is_alive(capsys):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Live("loading weights", console=console, redirect_stdout=False, redirect_stderr=False, auto_refresh=False):
        RunDisplay(console=console).samples([{"response": "eighteen"}], "samples")
    printed = capsys.readouterr().out
    assert "eighteen" in printed
    assert "loading weights" not in printed
