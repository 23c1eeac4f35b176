"""Tracker: the files of a run, one step behind, and a display on and off a terminal."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybridflow.errors import ConfigError
from hybridflow.tracking.displays import RunDisplay, sparkline
from hybridflow.tracking.tracker import Tracker


class Later:
    """Figures that count how often they were waited for."""

    def __init__(self, **figures) -> None:
        self.figures, self.waits = figures, 0

    def get(self):
        self.waits += 1
        return {name.replace("__", "/"): value for name, value in self.figures.items()}


class Failing:
    def get(self):
        raise RuntimeError("rank 1 failed")


def lines(directory, name="metrics.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_one_object_per_iteration_and_a_curve(tmp_path):
    with Tracker(tmp_path / "runs" / "a", console=False) as tracker:
        for i in range(4):
            tracker.log(
                {"reward/mean": i / 4, "response/tokens": 10, "prompt/tokens": 30}, {"actor/loss": torch.tensor(0.5)}
            )
    found = lines(tmp_path / "runs" / "a")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert [line["reward/mean"] for line in found] == [0.0, 0.25, 0.5, 0.75]
    assert all(line["actor/loss"] == 0.5 for line in found)
    assert all(line["time/iteration"] >= 0 and line["perf/response_tokens_per_second"] > 0 for line in found)
    ratios = [line["perf/tokens_per_second"] / line["perf/response_tokens_per_second"] for line in found]
    assert ratios == pytest.approx([4.0] * 4)  # prompts and responses
    assert (tmp_path / "runs" / "a" / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_log_waits_for_the_iteration_before(tmp_path):
    tracker = Tracker(tmp_path, console=False)
    first, second = Later(reward__mean=0.1), Later(reward__mean=0.2)
    tracker.log(first)
    assert first.waits == 0
    tracker.log(second)
    assert (first.waits, second.waits) == (1, 0)
    assert [line["reward/mean"] for line in lines(tmp_path)] == [0.1]  # complete lines while the run goes on
    tracker.finish()
    tracker.finish()
    assert (first.waits, second.waits) == (1, 1)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    with pytest.raises(ConfigError, match="finished"):
        tracker.log({})


def test_responses_that_do_not_end_are_said_once(tmp_path, caplog):
    tracker = Tracker(tmp_path, console=False)
    for ended in (0.9, 0.01, 0.0):
        tracker.log({"response/finished": ended, "response/length_mean": 5.0})
    tracker.finish()
    assert caplog.text.count("of the responses came to their end") == 1
    assert "Iteration 2: 1 % of the responses came to their end, the others were cut after 5 tokens" in caplog.text


def test_figures_that_are_not_finite_become_null(tmp_path):
    with Tracker(tmp_path, console=False) as tracker:
        tracker.log({"reward/mean": math.nan, "kl/ref": math.inf})
    assert lines(tmp_path)[0]["reward/mean"] is None
    assert lines(tmp_path)[0]["kl/ref"] is None
    assert not (tmp_path / "reward.png").exists()


@pytest.mark.parametrize(("bad", "message"), [({"x": "high"}, "metric 'x'"), ([1.0], "takes dicts")])
def test_what_is_no_figure_is_refused(tmp_path, bad, message):
    tracker = Tracker(tmp_path, console=False)
    tracker.log(bad)
    with pytest.raises(ConfigError, match=message):
        tracker.finish()


def test_a_failed_run_keeps_what_it_has_and_raises_its_own_error(tmp_path):
    def run():
        with Tracker(tmp_path, console=False) as tracker:
            tracker.log({"reward/mean": 0.5})
            tracker.log(Failing())
            tracker.log({"reward/mean": 0.7})

    with pytest.raises(RuntimeError, match="rank 1 failed"):
        run()
    assert [line["reward/mean"] for line in lines(tmp_path)] == [0.5]


UNFINISHED = """
import sys
from hybridflow.tracking.tracker import Tracker

class Later:
    def __init__(self, reward, done=True):
        self.figures, self.there = {"reward/mean": reward}, done
    def done(self):
        return self.there
    def get(self):
        if self.figures["reward/mean"] < 0:
            raise RuntimeError("rank 1 failed")
        return self.figures

tracker = Tracker(sys.argv[1], console=False)
tracker.log(Later(0.1))
"""


@pytest.mark.parametrize(
    ("end", "rewards", "says"),
    [
        ("tracker.log(Later(0.2))", [0.1, 0.2], ""),
        ("tracker.log(Later(-1.0))", [0.1], "rank 1 failed"),
        ("tracker.log(Later(0.2, done=False)); raise KeyError", [0.1], "the last iteration had not ended"),
        ("tracker.log(Later(0.2)); raise KeyError", [0.1, 0.2], "KeyError"),
    ],
)
def test_who_does_not_finish_gets_it_at_the_end_of_the_program(tmp_path, end, rewards, says):
    """The last iteration and the curve, without waiting for what a failed program has left; errors are logged."""
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED + end, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == ("raise" in end)
    assert says in done.stderr
    assert (done.stderr == "") == (says == ""), done.stderr
    assert [line["reward/mean"] for line in lines(tmp_path)] == rewards
    assert (tmp_path / "reward.png").exists() == ("-1.0" not in end)


def test_an_earlier_run_is_kept_under_a_number(tmp_path):
    for run in range(3):
        with Tracker(tmp_path, console=False) as tracker:
            tracker.samples([{"prompt": "p", "response": str(run)}])
            tracker.log({"reward/mean": float(run)})
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert [lines(tmp_path, name)[0]["reward/mean"] for name in names] == [0.0, 1.0, 2.0]
    assert lines(tmp_path, "samples.2.jsonl")[0]["response"] == "1"
    assert (tmp_path / "reward.1.png").exists()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="this is a file"):
        Tracker(tmp_path / "file")


def test_samples_and_notes(tmp_path):
    with Tracker(tmp_path, console=False) as tracker:
        tracker.log({})
        tracker.samples([{"prompt": "1+1=", "response": "2", "rewards": torch.tensor(1.0)}], title="greedy")
        tracker.samples([])
        tracker.note(accuracy_before=0.25)
        tracker.note(accuracy_after=torch.tensor(0.75))
    expected = {"step": 1, "title": "greedy", "prompt": "1+1=", "response": "2", "rewards": 1.0}
    assert lines(tmp_path, "samples.jsonl") == [expected]
    assert json.loads((tmp_path / "notes.json").read_text()) == {"accuracy_before": 0.25, "accuracy_after": 0.75}


@pytest.fixture
def disk(tmp_path):
    """A file system of 256 kB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "hybridflow", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while stream.write(bytes(512)):
            pass


def test_a_full_disk_stops_no_run_and_figures_are_written_when_there_is_room(disk, caplog):
    other, metrics = disk / "other", disk / "run" / "metrics.jsonl"
    tracker = Tracker(disk / "run", console=False)
    for step in range(60):
        if step == 2:
            fill(other)
        if step == 50:
            other.unlink()
        tracker.log({"reward/mean": step / 10, **{f"figure/{i}": 1.0 for i in range(9)}})
        tracker.samples([{"prompt": "p" * 300, "response": str(step)}])
        tracker.note(accuracy=step)
        assert metrics.read_text()[-1:] in ("", "\n")
        assert len(lines(disk / "run")) == (step if not 2 < step < 50 else len(lines(disk / "run")))
        assert step < 2 or json.loads((disk / "run" / "notes.json").read_text())
    tracker.finish()
    assert [line["reward/mean"] for line in lines(disk / "run")] == [step / 10 for step in range(60)]
    assert [row["response"] for row in lines(disk / "run", "samples.jsonl")] == [str(step) for step in range(60)]
    assert json.loads((disk / "run" / "notes.json").read_text()) == {"accuracy": 59}
    assert len(caplog.records) == 1
    assert "No space left on device. The run continues" in caplog.text
    assert not list((disk / "run").glob(".*.partial"))


def test_a_full_disk_delays_what_a_restart_sets_aside(disk, caplog):
    tracker, run = Tracker(disk / "run", console=False), disk / "run"
    tracker.log({"reward/mean": 0.1})
    state = tracker.state()
    for _ in range(30):
        tracker.log({"reward/mean": 0.2, **{f"figure/{i}": 1.0 for i in range(9)}})
    fill(disk / "other")
    tracker.load_state(state)
    tracker.log({"reward/mean": 0.3})
    tracker.flush()
    assert [line["step"] for line in lines(run)] == [*range(1, 31)]  # as the lost part has left them
    assert not (run / "metrics.1.jsonl").exists()
    (disk / "other").unlink()
    tracker.flush()
    assert [line["reward/mean"] for line in lines(run)] == [0.1, 0.3]
    assert [line["step"] for line in lines(run, "metrics.1.jsonl")] == [*range(2, 31)]
    assert len(caplog.records) == 1
    assert not list(run.glob(".*.partial"))
    tracker.finish()


def test_a_directory_that_is_removed_stops_no_run_and_the_end_says_what_is_missing(tmp_path, caplog):
    tracker = Tracker(tmp_path / "run", console=False)
    tracker.log({"reward/mean": 0.1})
    tracker.log({"reward/mean": 0.2})
    shutil.rmtree(tmp_path / "run")
    for step in range(3):
        tracker.log({"reward/mean": 0.3 + step / 10})
    tracker.samples([{"prompt": "p"}])
    tracker.note(accuracy=1.0)
    assert len(caplog.records) == 1
    tracker.finish()
    missing = "4 lines of metrics.jsonl, 1 lines of samples.jsonl, notes.json (No such file or directory)"
    assert missing in caplog.records[1].message
    assert len(caplog.records) == 2


def test_a_terminal_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    full = Path("/dev/full").open("w")  # noqa: SIM115  which cannot be closed without an error
    with Tracker(tmp_path) as tracker:
        tracker._display = RunDisplay(console=Console(file=full))
        for _ in range(3):
            tracker.log({"reward/mean": 0.5})
            tracker.samples([{"prompt": "p"}])
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert len(lines(tmp_path)) == 3
    assert "the display cannot be written: No space left on device" in caplog.text


def test_a_directory_that_nobody_can_write_is_refused_at_once(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"No such file or directory: .*metrics.jsonl. Give a directory"):
        Tracker(tmp_path)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_display_shows_the_figures_that_are_there(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    display = RunDisplay(total=2, console=console)
    times = {"time/iteration": 1.5, "time/actor.generation": 0.5}
    display.iteration({"step": 1, "reward/mean": 0.25, "kl/ref": 0.0125, **times})
    display.iteration({"step": 2, "reward/mean": 0.5, **times, "time/actor.generation": 0.75})
    display.samples([{"prompt": "[bold]1+1=", "response": "2", "rewards": 1.0}], "samples")
    display.close()
    display.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.500" in text
    assert "[bold]1+1=" in text  # a sample is text, never markup
    assert "generation 0.75" in text
    if not terminal:
        assert text.splitlines()[0] == "step 1  reward 0.250  KL 0.0125  s/iteration 1.50  (generation 0.50)"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"


def test_an_interrupt_in_the_wait_loses_no_metrics(tmp_path):
    class Interrupted:
        calls = 0

        def get(self):
            self.calls += 1
            if self.calls == 1:
                raise KeyboardInterrupt
            return {"reward/mean": 0.5}

    tracker = Tracker(tmp_path, console=False)
    tracker.log(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tracker.log({"reward/mean": 0.75})
    plot = tracker.plot("reward/mean", "unknown")
    tracker.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward/mean"]) for line in lines] == [(1, 0.5), (2, 0.75)]
    assert plot.points == {"reward/mean": [(1, 0.5), (2, 0.75)], "unknown": []}
    assert plot.png().startswith(b"\x89PNG")
    assert repr(tracker.plot()) == "LivePlot(reward/mean 0.75)"
