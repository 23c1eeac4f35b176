"""Loggers of a Tracker: TensorBoard's files as its reader sees them, W&B and MLflow where installed, failing ones."""

from __future__ import annotations

import json
import math
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
    assert mine.calls == [
        *[(*opened, 0), *first, (*opened, 2), *second, *close[0]],
        *[(*opened, 2), *third, *close[1]],
    ]


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
