"""One process at a time writes to a run directory: real processes, killed ones, another machine's file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hybridflow as hf
from hybridflow.errors import ConfigError
from hybridflow.tracking import run_lock
from hybridflow.tracking.run_lock import RunLock

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import sys
from pathlib import Path
from hybridflow.tracking.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), "the run")
try:
    lock.take()
except ValueError as error:
    print("refused:", error, flush=True)
    sys.exit(3)
print("held", flush=True)
sys.stdin.readline()
"""


class Holder:
    """Another process that takes the lock, or is refused, until `end`."""

    def __init__(self, path: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], env=environment, **pipes)
        self.said = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.communicate("\n", timeout=60)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / ".lock"


def test_a_second_process_is_refused_and_names_the_first(path):
    first = Holder(path)
    try:
        assert first.said == "held"
        with pytest.raises(ConfigError, match=f"the run: process {first.process.pid} on .* was alive"):
            RunLock(path, "the run").take()
        second = Holder(path)
        second.end()
        assert second.said.startswith(f"refused: the run: process {first.process.pid} on ")
        assert list(path.parent.iterdir()) == [path]
    finally:
        first.end()
    assert list(path.parent.iterdir()) == []
    RunLock(path, "the run").take()


def test_the_lock_of_a_killed_process_is_taken_over(path):
    first = Holder(path)
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate(timeout=60)
    assert path.exists()
    lock = RunLock(path, "the run")
    lock.take()
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(path.parent.iterdir()) == []


def test_one_process_may_take_it_several_times(path):
    locks = [RunLock(path, "the run") for _ in range(2)]
    for lock in (*locks, locks[0]):
        lock.take()
    locks[0].release()
    locks[0].release()
    other = Holder(path)
    other.end()
    assert other.said.startswith("refused")
    locks[1].release()
    assert not path.exists()


@pytest.mark.parametrize("lives", [True, False])
def test_another_machines_lock_counts_while_its_file_gets_new_times(path, lives, monkeypatch):
    """Its kernel's lock may be out of sight: the file system is one of the network."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.1)
    path.parent.mkdir()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "today"}))
    ended = threading.Event()

    def beat():
        while not ended.wait(0.01):
            os.utime(path)

    beats = threading.Thread(target=beat)
    if lives:
        beats.start()
    lock = RunLock(path, "the run")
    try:
        if lives:
            with pytest.raises(ConfigError, match="process 7 on elsewhere has been writing there since today"):
                lock.take()
        else:
            lock.take()
            assert json.loads(path.read_text())["pid"] == os.getpid()
    finally:
        ended.set()
        if lives:
            beats.join()
        lock.release()


def test_a_held_lock_beats(path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.01)
    lock = RunLock(path, "the run")
    lock.take()
    os.utime(path, (0, 0))
    while not os.stat(path).st_mtime:
        pass
    lock.release()


@pytest.mark.parametrize("text", ["", "[]", "no json", '{"pid": 3}', "[" * 4000])
def test_a_damaged_file_is_taken_over(path, text):
    path.parent.mkdir()
    path.write_text(text)
    lock = RunLock(path, "the run")
    lock.take()
    lock.release()


def test_trackers_and_checkpoints_refuse_a_run_that_another_process_writes(tmp_path):
    run = tmp_path / "run"
    for path, make in (
        (run / ".lock", lambda: hf.Tracker(run, console=False)),
        (run / ".checkpoints.lock", lambda: hf.Checkpoints(run / "checkpoints")),
    ):
        other = Holder(path)
        with pytest.raises(ConfigError, match=f"process {other.process.pid} on "):
            make()
        other.end()
    tracker = hf.Tracker(run, console=False)
    again = hf.Tracker(run, console=False)
    tracker.finish()
    assert (run / ".lock").exists()
    again.finish()
    assert not (run / ".lock").exists()
