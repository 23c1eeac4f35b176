"""Loggers of a Tracker: TensorBoard's files as its reader sees them, W&B and MLflow where installed, failing ones."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridflow.errors import ConfigError
from hybridflow.tracking.metric_loggers import MetricLogger, find_loggers
from hybridflow.tracking.tracker import Tracker


def curve(directory: Path, name: str = "reward/mean") -> list[tuple[int, float]]:
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return [(point.step, round(point.value, 3)) for point in reader.Scalars(name)]


def run(tracker: Tracker, first: int, last: int, part: float = 0.0) -> None:
    for step in range(first, last + 1):
        tracker.log({"reward/mean": step + part})


def test_tensorboard_hides_a_lost_part(tmp_path):
    tracker = Tracker(tmp_path, to="tensorboard", console=False)
    run(tracker, 1, 4)
    state = json.loads(json.dumps(tracker.state()))
    run(tracker, 5, 7)
    tracker.load_state(state)  # in the same process,
    run(tracker, 5, 6, part=0.1)
    tracker.finish()
    with Tracker(tmp_path, to=["tensorboard"], console=False) as tracker:  # and in another
        tracker.load_state(state)
        run(tracker, 5, 5, part=0.2)
        tracker.log({"reward/mean": math.nan, "loss": 1e300})
    found = curve(tmp_path / "tensorboard")
    assert found[:-1] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.2)]
    assert math.isnan(found[-1][1])
    assert len(curve(tmp_path / "tensorboard", "time/total")) == 6


def test_a_new_run_gets_its_own_event_files(tmp_path):
    for part in (0.1, 0.2):
        with Tracker(tmp_path, to="tensorboard", console=False) as tracker:
            run(tracker, 1, 2, part)
    assert curve(tmp_path / "tensorboard.1") == [(1, 1.1), (2, 2.1)]
    assert curve(tmp_path / "tensorboard") == [(1, 1.2), (2, 2.2)]


def test_event_files_are_read_in_the_order_of_the_parts(tmp_path):
    """Even if the clock of the machine that continues is behind."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.9999999998.host.7.0").write_bytes(b"")
    tracker = Tracker(tmp_path, to="tensorboard", console=False)
    tracker.load_state(Tracker(tmp_path / "empty", console=False).state())
    run(tracker, 1, 1)
    tracker.finish()
    assert max(path.name for path in (tmp_path / "tensorboard").iterdir()) == "events.out.tfevents.9999999999"
    assert curve(tmp_path / "tensorboard") == [(1, 1.0)]


def test_a_full_disk_leaves_complete_records(tmp_path, caplog, monkeypatch):
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "hybridflow", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        tracker = Tracker(tmp_path / "run", to="tensorboard", console=False)
        run(tracker, 1, 2)
        tracker.flush()
        with suppress(OSError), (tmp_path / "other").open("wb", buffering=0) as stream:
            while stream.write(bytes(64)):
                pass
        run(tracker, 3, 80)
        tracker.flush()
        assert 2 <= len(curve(tmp_path / "run" / "tensorboard")) < 80
        (tmp_path / "other").unlink()
        run(tracker, 81, 82)
        monkeypatch.setattr("hybridflow.tracking.tracker.drawn_curve", lambda points: b"larger than this disk")
        tracker.finish()
        assert curve(tmp_path / "run" / "tensorboard") == [(i, i) for i in range(1, 83)]
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)
    assert "No space left on device. The run continues" in caplog.text


class Recorder:
    """A user's logger: records its calls; fails those that `failing` names."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, Exception] = {}

    def open(self, directory: Path, run: str, step: int) -> None:
        self.record("open", run, step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert "step" not in metrics
        self.record("log", step, metrics["reward/mean"])

    def close(self, failed: bool) -> None:
        self.record("close", failed)

    def record(self, name: str, *call: Any) -> None:
        if name in self.failing:
            raise self.failing[name]
        self.calls.append((name, *call))


def test_an_object_of_the_user_gets_each_iteration(tmp_path):
    mine = Recorder()
    assert isinstance(mine, MetricLogger)
    tracker = Tracker(tmp_path, to=mine, console=False)
    run(tracker, 1, 2)
    state = tracker.state()
    run(tracker, 3, 4)
    tracker.flush()
    tracker.load_state(state)
    run(tracker, 3, 3, part=0.5)
    tracker.finish()
    tracker.load_state(state)
    with suppress(KeyError), tracker:
        run(tracker, 3, 4, part=0.7)
        raise KeyError
    opened = ("open", state["run"])
    parts = [[(1, 1), (2, 2), (3, 3), (4, 4)], [(3, 3.5)], [(3, 3.7)]]
    first, second, third = [[("log", *point) for point in part] for part in parts]
    close = [("close", False)], [("close", True)]
    assert mine.calls == [*[(*opened, 0), *first, (*opened, 2), *second, *close[0]], *[(*opened, 2), *third, *close[1]]]


@pytest.mark.parametrize("method", ["open", "log"])
def test_a_failing_logger_stops_no_run_and_gets_everything_later(tmp_path, caplog, method):
    mine = Recorder()
    mine.failing = {method: ConnectionError("no route\nto host")}
    tracker = Tracker(tmp_path, to=[mine, "tensorboard"], console=False)
    run(tracker, 1, 5)
    tracker.flush()
    assert [record.message for record in caplog.records] == [
        "Recorder failed: ConnectionError: no route. The run continues; metrics are sent again later."
    ]
    mine.failing = {}
    run(tracker, 6, 6)
    tracker.finish()
    assert [call[1] for call in mine.calls if call[0] == "log"] == [1, 2, 3, 4, 5, 6]
    assert len(caplog.records) == 1
    assert len(curve(tmp_path / "tensorboard")) == 6


def test_the_end_says_what_a_logger_lacks(tmp_path, caplog):
    mine = Recorder()
    mine.failing = {"log": ConnectionError("no route")}
    with Tracker(tmp_path, to=mine, console=False) as tracker:
        run(tracker, 1, 3)
    assert caplog.records[-1].message == "Recorder lacks the metrics of 3 iterations (ConnectionError: no route)."
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_one_iteration_that_is_refused_does_not_hold_up_the_others(tmp_path, caplog):
    class Picky(Recorder):
        def log(self, step, metrics):
            if step == 2:
                raise ValueError("not a good step")
            super().log(step, metrics)

    mine = Picky()
    with Tracker(tmp_path, to=mine, console=False) as tracker:
        run(tracker, 1, 4)
    assert [call[1] for call in mine.calls if call[0] == "log"] == [1, 3, 4]
    assert "Picky lacks the metrics of 1 iterations (ValueError: not a good step)" in caplog.text


def test_a_logger_that_hangs_is_not_waited_for(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hybridflow.tracking.tracker._FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("hybridflow.tracking.tracker._CLOSE_SECONDS", 0.05)
    release, ended = threading.Event(), threading.Event()

    class Hanging(Recorder):
        def log(self, step, metrics):
            release.wait(60)
            super().log(step, metrics)

        def close(self, failed):
            ended.set()

    mine = Hanging()
    tracker = Tracker(tmp_path, to=mine, console=False)
    run(tracker, 1, 3)
    for _ in range(100):
        tracker.flush()
    assert mine.calls[1:] == []
    tracker.finish()
    assert "Hanging has not answered for 0 s: it may lack metrics." in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    release.set()
    assert ended.wait(60)  # what it had not taken, it gets
    assert len(mine.calls) == 4


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        (("tensorboard", "Wandb"), "'Wandb'.*Did you mean 'wandb'"),
        (("tensorboard", "tensorboard"), "twice"),
        ([Recorder], "objects with the methods"),
        (3, "objects with the methods"),
        (None, "objects with the methods"),
    ],
)
def test_a_destination_that_is_unknown_is_refused_first(tmp_path, to, message):
    with pytest.raises(ConfigError, match=message):
        Tracker(tmp_path / "run", to=to)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "install"),
    [("wandb", r"hybridflow\[wandb\]"), ("mlflow", r"hybridflow\[mlflow\]"), ("tensorboard", "tensorboard")],
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, install):
    for module in [name, *(loaded for loaded in sys.modules if loaded.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"to='{name}'.*pip install \"?{install}"):
        Tracker(tmp_path / "run", to=name)
    assert not (tmp_path / "run").exists()


def test_wandb_offline_keeps_the_id_of_a_resumed_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = Tracker(tmp_path, to="wandb", console=False)
    run(tracker, 1, 3)
    state = tracker.state()
    tracker.finish()
    with Tracker(tmp_path, to="wandb", console=False) as tracker:
        tracker.load_state(state)
        run(tracker, 4, 5)
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{state['run']}/*.wandb"))) == 2


def test_mlflow_continues_the_run_with_its_tag(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    tracker = Tracker(tmp_path / "run", to="mlflow", console=False)
    run(tracker, 1, 3)
    state = tracker.state()
    run(tracker, 4, 4)
    tracker.load_state(state)
    run(tracker, 4, 5)
    tracker.finish()
    with Tracker(tmp_path / "run", to="mlflow", console=False) as tracker:
        tracker.load_state(state)
        tracker.log({"reward/mean": math.nan, "rewards/f(x)": 1.0})
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("hybridflow").experiment_id
    (only,) = client.search_runs([experiment])
    points = client.get_metric_history(only.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in points][:5] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert "rewards/f_x_" in only.data.metrics
    assert (only.info.status, only.info.run_name) == ("FINISHED", "run")


def test_no_logger_is_the_default():
    assert find_loggers(()) == {}


HOSTILE = "a | b\n<script>x</script> ![p](http://127.0.0.1/p.png) [l](http://127.0.0.1) `c` **d** \\| ~e~ \ud800"
ROWS = [
    {"prompt": [{"role": "user", "content": "1+2="}], "response": "3", "rewards": 1.0, "finished": True},
    {"prompt": "2+2=", "response": HOSTILE, "rewards": None, "log_probs": [-0.5], "mark": "x"},
]
COLUMNS = ["prompt", "response", "rewards", "finished", "mark"]
CELLS = [
    ['[{"role": "user", "content": "1+2="}]', "3", 1.0, True, None],
    ["2+2=", HOSTILE.replace("\ud800", "?"), None, None, "x"],
]


def texts(directory: Path, title: str) -> dict[int, str]:
    """What TensorBoard shows of a text, as HTML, by step."""
    from tensorboard.plugin_util import markdown_to_safe_html

    reader = EventAccumulator(str(directory))
    reader.Reload()
    assert f"{title}/text_summary" in reader.PluginTagToContent("text")
    return {
        point.step: markdown_to_safe_html(point.tensor_proto.string_val[0])
        for point in reader.Tensors(f"{title}/text_summary")
    }


def test_samples_are_tables_in_tensorboard(tmp_path):
    with Tracker(tmp_path, to="tensorboard", console=False) as tracker:
        tracker.samples(ROWS[:1], title="greedy answers: before")  # before the first log
        tracker.log({"reward/mean": 1.0})
        tracker.samples(ROWS)
        state = tracker.state()
        tracker.log({"reward/mean": 2.0})
        tracker.samples(ROWS[:1])
        tracker.load_state(state)
        tracker.log({"reward/mean": 3.0})
    assert set(texts(tmp_path / "tensorboard", "greedy answers_ before")) == {0}
    found = texts(tmp_path / "tensorboard", "samples")
    assert set(found) == {1, 2}, "TensorBoard hides points of a lost part, not its texts"
    cells = [re.sub("<br ?/?>", "\n", cell) for cell in re.findall(r"<td>(.*?)</td>", found[1], re.DOTALL)]
    assert re.findall(r"<th>(.*?)</th>", found[1]) == COLUMNS
    shown = [["" if cell is None else str(cell) for cell in row] for row in CELLS]
    assert [html.unescape(cell) for cell in cells] == [cell for row in shown for cell in row]
    assert not re.search(r"<(img|a|code|strong|script)\b", found[1])
    assert curve(tmp_path / "tensorboard") == [(1, 1.0), (2, 3.0)]


class Tables(Recorder):
    def samples(self, step: int, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        self.record("samples", step, title, columns, rows)


def test_samples_reach_objects_that_take_them(tmp_path, caplog):
    mine, other = Tables(), Recorder()
    mine.failing = {"samples": ConnectionError("no route")}
    with Tracker(tmp_path, to=[mine, other], console=False) as tracker:
        for _ in range(2):
            run(tracker, 1, 1)
            tracker.samples(ROWS)
        tracker.flush()
        mine.failing = {}
        run(tracker, 3, 3)
    assert [call for call in mine.calls if call[0] == "samples"] == [
        ("samples", step, "samples", COLUMNS, CELLS) for step in (1, 2)
    ]
    assert [call[0] for call in other.calls] == ["open", "log", "log", "log", "close"]
    assert [record.message for record in caplog.records] == [
        "Tables failed: ConnectionError: no route. The run continues; metrics are sent again later."
    ]


def test_the_end_says_which_tables_a_logger_lacks(tmp_path, caplog):
    mine = Tables()
    mine.failing = {"samples": ConnectionError("no route")}
    with Tracker(tmp_path, to=mine, console=False) as tracker:
        tracker.samples(ROWS)  # without any iteration
        tracker.samples(ROWS)
    assert caplog.records[-1].message == "Tables lacks 2 tables (ConnectionError: no route)."
    assert [call[0] for call in mine.calls] == ["open", "close"]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4


def test_samples_are_tables_in_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracker(tmp_path, to="wandb", console=False) as tracker:
        for _ in range(2):
            run(tracker, 1, 1)
            tracker.samples(ROWS)
    tables = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"))
    assert len(tables) == 2
    for table in tables:
        found = json.loads(table.read_text())
        assert (found["columns"], found["data"]) == (COLUMNS, [[*row] for row in CELLS])


def test_samples_are_a_table_in_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    with Tracker(tmp_path / "run", to="mlflow", console=False) as tracker:
        for _ in range(2):
            run(tracker, 1, 1)
            tracker.samples(ROWS)
    client = mlflow.MlflowClient()
    (only,) = client.search_runs([client.get_experiment_by_name("hybridflow").experiment_id])
    path = client.download_artifacts(only.info.run_id, "samples.json", str(tmp_path))
    found = json.loads(Path(path).read_text())
    assert found["columns"] == ["step", *COLUMNS]
    assert found["data"] == [[step, *row] for step in (1, 2) for row in CELLS]
