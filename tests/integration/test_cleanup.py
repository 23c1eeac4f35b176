"""Nothing of ours is left when a driver ends, however it ends; sessions follow each other and join existing clusters.

Each driver is a program of its own; its processes are followed from when it is busy until none of them is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN = 30.0
"""Seconds for processes to vanish on a loaded machine; they need one or two."""

WORKER = """
import os, signal, sys, time
from pathlib import Path
import torch
import hybridflow as hf
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.errors import ConfigError, PlacementError, WorkerError

class Busy:
    @hf.register(hf.ONE_TO_ALL)
    def segment(self):
        # shared memory that carries the session's name, as a killed engine may leave it
        path = Path("/dev/shm") / f"engine-{os.environ['HYBRIDFLOW_SESSION']}"
        path.write_bytes(b"0" * 4096)

    @hf.register(hf.ONE_TO_ALL)
    def sleep(self, seconds):
        time.sleep(seconds)

    @hf.register(hf.ONE_TO_ONE)
    def figures(self):
        return {"reward/mean": 0.5}

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("y",))
    def double(self, batch):
        return hf.Batch({"y": batch["x"] * 2})

def batch():
    return hf.Batch({"x": torch.arange(4.0)})
"""

BUSY = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests themselves run in the background
hf.init(devices=2)
group = hf.place(Busy, hf.ResourcePool([1]))
kept = group.double(hf.Batch({"x": torch.ones(200_000)}))  # in shared memory
kept.get()
if END != "kill":
    group.segment().get()
Path(READY).write_text(Session.current().name)
if END == "error":
    group.sleep(1.0)
    raise RuntimeError("the driver's own mistake")
if END in ("interrupt", "kill"):
    group.sleep(600.0).get()
if END == "terminate":
    tracker = hf.Tracker(Path(READY).parent / "run", console=False)
    tracker.log(group.figures().get())
    tracker.log(group.sleep(600.0))
    Path(READY).with_name("logging").touch()
    tracker.log({})
if END == "terminate while building":
    class Endless:
        def __init__(self):
            Path(READY).with_name("building").touch()
            time.sleep(600.0)

        @hf.register(hf.ONE_TO_ALL)
        def nothing(self): ...

    hf.place(Endless, hf.ResourcePool([1]))
"""


class Driver:
    """A driver program in a process group of its own, as a terminal starts it."""

    def __init__(self, folder: Path, program: str, **environment: str) -> None:
        self.ready = folder / "ready"
        script = folder / "driver.py"
        script.write_text(f"READY = {str(self.ready)!r}\n{WORKER}\n{program}")
        self.output = (folder / "output").open("w+")
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            [sys.executable, script],
            env=environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def text(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def session(self) -> str:
        """The session's name, once the driver is busy."""
        until(lambda: self.process.poll() is not None or (self.ready.exists() and self.ready.read_text()), 180)
        assert self.ready.exists(), self.text()
        return self.ready.read_text()

    def wait(self) -> int:
        return self.process.wait(timeout=180)


def until(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


def stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, start time) of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1]), int(fields[19])


def processes() -> dict[int, tuple[str, int, int]]:
    found = {int(path.name): stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    return {pid: at for pid, at in found.items() if at is not None}


def family(pid: int) -> dict[int, int]:
    """This process and all below it: pid -> start time."""
    table = processes()
    members = {pid}
    while more := {child for child, (_, parent, _) in table.items() if parent in members} - members:
        members |= more
    return {member: table[member][2] for member in members if member in table}


def alive(members: dict[int, int]) -> list[str]:
    """Which of these processes still run (a zombie does not)."""
    now = {pid: stat(pid) for pid in members}
    running = [pid for pid, at in now.items() if at is not None and at[2] == members[pid] and at[0] not in "ZX"]
    return [f"{pid} {command(pid)}" for pid in running]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def of_session(name: str) -> list[int]:
    """Processes that were started for a session."""
    wanted, found = f"HYBRIDFLOW_SESSION={name}".encode(), []
    for pid in processes():
        try:
            if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def shared_memory(members: dict[int, int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped."""
    out: set[str] = set()
    for pid in members:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        out |= {line.split()[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return out


def check_nothing_is_left(name: str, members: dict[int, int], segments: set[str]) -> None:
    assert until(lambda: not alive(members), GONE_WITHIN), alive(members)
    assert of_session(name) == []
    assert [path.name for path in Path("/dev/shm").iterdir() if name in path.name] == []
    assert [path for path in segments if os.path.exists(path)] == []


@pytest.fixture(scope="module")
def drivers(tmp_path_factory, request) -> Iterator[dict[str, Driver]]:
    """One driver for each way to end that a test asks for, three started at a time: more of them start too slowly for
    Ray on two cores."""
    asked = [item.callspec.params.get("end") for item in request.session.items if hasattr(item, "callspec")]
    started: dict[str, Driver] = {}
    for end in ("return", "error", "interrupt", "kill", "terminate", "terminate while building"):
        if end not in asked:
            continue
        if len(started) == 3:
            for driver in started.values():
                driver.session()
        started[end] = Driver(tmp_path_factory.mktemp(end), f"END = {end!r}\n{BUSY}")
    yield started
    for driver in started.values():
        if driver.process.poll() is None:
            driver.process.kill()
        driver.output.close()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("end", ["kill", "error", "return", "interrupt"])
def test_nothing_is_left_of_a_driver(drivers, end):
    """It returns, raises, is interrupted by Ctrl-C while its hosts are busy, or is killed."""
    driver = drivers[end]
    name = driver.session()
    members = family(driver.process.pid)
    segments = shared_memory(members)
    if end == "interrupt":
        assert len(of_session(name)) >= 2  # the host and the helper: what is counted below is really there
        os.killpg(driver.process.pid, signal.SIGINT)
    elif end == "kill":
        assert len(of_session(name)) >= 2
        driver.process.kill()
    code = driver.wait()
    check_nothing_is_left(name, members, segments)
    text = driver.text()
    if end == "return":
        assert code == 0, text
        assert "Traceback" not in text
    elif end == "error":
        assert code == 1
        assert "RuntimeError: the driver's own mistake" in text
    elif end == "interrupt":
        assert code in (1, 130, -signal.SIGINT)
        assert "KeyboardInterrupt" in text


NOTEBOOK = """
import psutil, ray, threading
runs = Path(READY).parent
tracker = hf.Tracker(runs / "first", console=False)
def mine(number, frame): ...
signal.signal(signal.SIGTERM, mine)
hf.init(devices=2)
assert signal.getsignal(signal.SIGTERM) is mine
first = Session.current()
assert not first.parts and first.run_directory is None
pool = hf.ResourcePool([1])
group = hf.place(Busy, pool)
old, future = group.double(batch()), group.sleep(0.0)
assert old.get()["y"].tolist() == [0, 2, 4, 6]
tracker.log(group.figures())
assert list(first.parts.values()) == [tracker] and first.run_directory == runs / "first"
other = hf.Tracker(runs / "other", console=False)
assert list(first.parts.values()) == [tracker, other] and first.run_directory == runs / "first"
other.finish()
assert list(first.parts.values()) == [tracker, other]
hf.shutdown()
hf.shutdown()
assert not ray.is_initialized()
assert "host monitor" not in [thread.name for thread in threading.enumerate()]
assert not psutil.Process().net_connections("tcp"), psutil.Process().net_connections("tcp")

def refused(call, kind, text):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{text}: was not refused")
    assert not ray.is_initialized() or Session._current is not None, "Ray was started behind the driver's back"

refused(old.get, WorkerError, "session that is closed")
refused(future.get, WorkerError, "session that is closed")
refused(lambda: group.double(batch()), PlacementError, "closed with its pool")
refused(lambda: hf.place(Busy, pool), PlacementError, "this pool is closed")
group.close()
pool.close()
tracker = hf.Tracker(runs / "second", console=False)

signal.signal(signal.SIGTERM, signal.SIG_DFL)
hf.init(devices=2)
assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
assert Session.current() is not first
again = hf.place(Busy, hf.ResourcePool([1]))
assert again.name == "busy"
assert again.double(batch()).get()["y"].tolist() == [0, 2, 4, 6]
refused(old.get, WorkerError, "session that is closed")
refused(future.get, WorkerError, "session that is closed")
tracker.log(again.figures())
Path(READY).write_text(Session.current().name)
"""


@pytest.mark.parametrize(("end", "busy"), [("terminate", "logging"), ("terminate while building", "building")])
def test_sigterm_ends_a_driver_cleanly(drivers, end, busy):
    """As `timeout` and batch systems send it, to the whole process group and more than once; figures are kept."""
    driver = drivers[end]
    name = driver.session()
    assert until(driver.ready.with_name(busy).exists, 60)
    members = family(driver.process.pid)
    segments = shared_memory(members)
    for _ in range(3):
        os.killpg(driver.process.pid, signal.SIGTERM)
        time.sleep(0.3)
    assert driver.wait() == 128 + signal.SIGTERM, driver.text()
    check_nothing_is_left(name, members, segments)
    assert "Traceback" not in driver.text()
    if end == "terminate":
        figures = (driver.ready.parent / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(figures) == 1  # what is under way is not waited for
        assert '"reward/mean": 0.5' in figures[0]


def test_sessions_follow_each_other(tmp_path, warm):
    """A notebook shuts down twice, keeps old references, and opens the next session; it never finishes a tracker, whose
    last figures are fetched while the session can still be asked."""
    driver = Driver(tmp_path, NOTEBOOK, **warm.environment)
    name = driver.session()
    members = family(driver.process.pid)
    assert driver.wait() == 0, driver.text()
    check_nothing_is_left(name, members, shared_memory(members))
    for run in ("first", "second"):
        assert '"reward/mean": 0.5' in (tmp_path / run / "metrics.jsonl").read_text()
        assert (tmp_path / run / "reward.png").exists()


GUEST = """
import psutil, ray, threading
try:
    hf.init("127.0.0.1:9")
except ConfigError as error:
    assert "no Ray cluster answers at 127.0.0.1:9" in str(error), error
pool = hf.ResourcePool([1])
session = Session.current()
assert not session.backend.started_ray
assert ray.cluster_resources()["CPU"] == 4
try:
    hf.ResourcePool([5])
except PlacementError as error:
    assert "the cluster has 4. Make the pool smaller or add nodes to the cluster." in str(error), error
try:
    hf.ResourcePool([1, 1])
except PlacementError as error:
    assert "on 2 nodes, the cluster's nodes have [4]" in str(error), error
group = hf.place(Busy, pool)
assert group.double(batch()).get()["y"].tolist() == [0, 2, 4, 6]
group.segment().get()
Path(READY).write_text(session.name)
hf.shutdown()
assert not ray.is_initialized()
assert "host monitor" not in [thread.name for thread in threading.enumerate()]
head = int(os.environ["RAY_ADDRESS"].rpartition(":")[2])  # Ray keeps its own connection there
assert not [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port != head]
"""


@pytest.fixture
def existing_cluster() -> Iterator[tuple[str, subprocess.Popen]]:
    """`ray start --head` in the foreground: it ends, with all that it started, when it is told to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="hf", dir="/tmp")  # a long path would not fit into the names of sockets
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4"]
    options = ["--include-dashboard=false", f"--temp-dir={folder}", "--disable-usage-stats"]
    output = (Path(folder) / "output").open("w+")
    head = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    assert until(lambda: b"runtime started" in Path(output.name).read_bytes(), 120), Path(output.name).read_text()
    members = family(head.pid)
    yield f"127.0.0.1:{port}", head
    members |= family(head.pid)
    head.terminate()
    head.wait(timeout=60)
    assert until(lambda: not alive(members), GONE_WITHIN), alive(members)
    output.close()
    shutil.rmtree(folder)


def test_a_driver_is_a_guest_on_an_existing_cluster(existing_cluster, tmp_path):
    """It finds the cluster by RAY_ADDRESS, leaves nothing of its own there, and leaves the cluster running."""
    address, head = existing_cluster
    driver = Driver(tmp_path, GUEST, RAY_ADDRESS=address)
    name = driver.session()
    assert driver.wait() == 0, driver.text()
    assert until(lambda: not of_session(name), GONE_WITHIN), [command(pid) for pid in of_session(name)]
    assert [path.name for path in Path("/dev/shm").iterdir() if name in path.name] == []
    assert head.poll() is None


@pytest.mark.slow
def test_a_cluster_is_examined_and_left_as_it_was(existing_cluster, tmp_path):
    address, head = existing_cluster
    command = [sys.executable, "-m", "hybridflow", "doctor", "--cluster", "--shared", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": address}, capture_output=True, text=True, timeout=120
    )
    said = [" ".join(line.split()) for line in done.stdout.splitlines()]  # FAIL where others hold the memory
    assert any("4 of 4 CPUs free" in line for line in said)
    assert any(line.endswith(f"{tmp_path} is shared with this machine") for line in said)
    assert list(tmp_path.iterdir()) == []
    assert head.poll() is None
