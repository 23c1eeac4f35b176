"""Runs whose checkpoints are at an address: continued on other machines, after a kill, without the server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.cluster.session import Session
from hybridflow.engines.checkpoint.manifest import MANIFEST, saved_steps
from hybridflow.engines.checkpoint.remote_directory import RemoteDirectory
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.run import checkpoints as module
from hybridflow.run.checkpoint_store import CheckpointStore
from hybridflow.tracking.run_lock import RunLock
from tests import tiny_models
from tests.integration.test_checkpoints import DRIVER, ROOT, STEPS, Runs, records, runs, undisturbed
from tests.integration.test_training_run import Loader
from tests.s3_server import S3Server

__all__ = ["runs", "undisturbed"]
pytestmark = pytest.mark.usefixtures("no_parts")


@pytest.fixture
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def staging(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "staging"))
    return tmp_path / "staging"


@pytest.fixture(params=["memory", "file"])
def address(request, tmp_path) -> str:
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/there"


def close(session: Session) -> None:
    """What the end of the session does for the runs in it."""
    closing, session._closing = session._closing, []
    for callback in closing:
        callback()
    session.parts.clear()


def train(session: Session, run: hf.Run, steps: int = 6, until: int | None = None) -> list[int]:
    """The iterations that were done; `until` one of them the program ends."""
    done = []
    for batch in run.loop(Loader(steps)):
        done.append(run.checkpoints.done + 1)
        run.step(batch, {"loss": 1.0 / done[-1]})
        if done[-1] == until:
            run.checkpoints.save()
            break
    else:
        run.finish()
    close(session)
    return done


def steps(address: str) -> list[int]:
    return list(RemoteDirectory(f"{address}/checkpoints").complete_steps())


def test_a_run_continues_on_a_machine_that_has_nothing_of_it(cluster, address, tmp_path):
    def run(machine: str) -> hf.Run:
        return hf.Run(address, staging=tmp_path / machine, console=False, every=1, keep=2, best="-loss")

    assert train(cluster, run("first"), until=3) == [1, 2, 3]
    assert steps(address) == [3, 2]
    assert train(cluster, run("second"), until=5) == [4, 5]
    assert train(cluster, run("first")) == [6]  # which has older ones
    assert steps(address) == [6, 5]
    assert train(cluster, run("third")) == [1, 2, 3, 4, 5, 6]  # it has ended: a further run begins anew
    assert (steps(address), list(RemoteDirectory(f"{address}/checkpoints.1").complete_steps())) == ([6, 5], [6, 5])
    assert [path.name for path in saved_steps(tmp_path / "third/checkpoints")] == ["step-00000006", "step-00000005"]
    assert (tmp_path / "third/metrics.jsonl").exists()


def test_the_best_checkpoint_comes_from_the_address(cluster, address, tmp_path):
    def run(machine: str) -> hf.Run:
        return hf.Run(address, staging=tmp_path / machine, console=False, every=1, keep=1, best="loss")

    assert train(cluster, run("first"), until=3) == [1, 2, 3]
    assert steps(address) == [3, 1]
    second = run("second")
    assert train(cluster, second, until=4) == [4]
    assert not (tmp_path / "second/checkpoints/step-00000001").exists()  # not fetched without need
    assert steps(address) == [4, 1]
    assert second.checkpoints.best_saved == (1, 1.0)
    assert second.checkpoints.best_checkpoint == (tmp_path / "second/checkpoints/step-00000001", 1.0)
    assert (tmp_path / "second/checkpoints/step-00000001" / MANIFEST).exists()


def test_without_a_best_checkpoint_none_is_looked_for(tmp_path, monkeypatch):
    made = hf.Checkpoints(tmp_path / "checkpoints")
    monkeypatch.setattr(module, "complete_steps", lambda root: pytest.fail("manifests are read"))
    assert (made.best_saved, made.best_checkpoint) == (None, None)
    made._owners[0].release()


def test_a_damaged_checkpoint_here_is_fetched_again(cluster, address, tmp_path):
    kept: dict[str, Any] = {"staging": tmp_path / "here", "console": False, "every": 1}
    assert train(cluster, hf.Run(address, **kept), until=3) == [1, 2, 3]
    (tmp_path / "here/checkpoints/step-00000003" / MANIFEST).write_bytes(b"{}")
    assert train(cluster, hf.Run(address, **kept)) == [4, 5, 6]


def test_a_checkpoint_that_is_being_sent_stays_here(cluster, address, tmp_path, monkeypatch):
    """Otherwise uploads that take longer than the iterations between checkpoints would never be complete."""
    put, entered, goes_on, sent = RemoteDirectory.put, Event(), Event(), list[str]()

    def slow(self: RemoteDirectory, source: Path, name: str, *more: Any) -> None:
        entered.set()
        assert goes_on.wait(60)
        sent.append(name)
        put(self, source, name, *more)

    monkeypatch.setattr(RemoteDirectory, "put", slow)
    run = hf.Run(address, staging=tmp_path / "here", console=False, every=1, keep=1)
    for batch in run.loop(Loader(5)):
        run.step(batch, {"loss": 1.0})
        run.checkpoints._report(wait=True)
        assert entered.wait(60)
        if run.checkpoints.done == 5:
            found = [path.name for path in saved_steps(tmp_path / "here/checkpoints")]
            assert found == ["step-00000005", "step-00000001"]
            goes_on.set()
    close(cluster)
    assert [name for name in sent if name.endswith(MANIFEST)] == [f"step-0000000{n}/{MANIFEST}" for n in (1, 5)]
    assert steps(address) == [5]


def test_the_lock_is_kept_until_the_upload_has_ended(cluster, address, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_END_SECONDS", 0.2)
    put, release, stop = RemoteDirectory.put, RunLock.release, CheckpointStore.stop
    goes_on, sending = Event(), list[bool]()

    def slow(*given: Any) -> None:
        assert goes_on.wait(60)
        time.sleep(0.5)
        put(*given)

    def stopping(self: CheckpointStore, *seconds: float) -> None:
        goes_on.set()
        stop(self, *seconds)

    def released(self: RunLock) -> None:
        sending.append(uploads._thread is not None and uploads._thread.is_alive())
        release(self)

    monkeypatch.setattr(RemoteDirectory, "put", slow)
    monkeypatch.setattr(CheckpointStore, "stop", stopping)
    monkeypatch.setattr(RunLock, "release", released)
    run = hf.Run(address, staging=tmp_path / "here", console=False, every=1)
    assert run.checkpoints._store is not None
    uploads = run.checkpoints._store
    train(cluster, run, until=1)
    assert sending
    assert not any(sending)


def test_another_run_continues_from_an_address(cluster, address, tmp_path, staging):
    assert train(cluster, hf.Run(address, console=False, every=2), until=4) == [1, 2, 3, 4]
    run = hf.Run(tmp_path / "other", console=False, every=2, resume=f"{address}/checkpoints/step-00000002")
    assert train(cluster, run) == [3, 4, 5, 6]
    run = hf.Run(tmp_path / "another", console=False, every=2, resume=address)
    assert train(cluster, run) == [5, 6]
    with pytest.raises(CheckpointError, match="is not a checkpoint and has none that is complete"):
        train(cluster, hf.Run(tmp_path / "third", console=False, resume=f"{address}/nothing"))
    close(cluster)
    assert not list(staging.glob("**/.fetched-*/*"))


def test_a_run_whose_checkpoints_were_not_sent_says_so(cluster, server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_UPLOAD_SECONDS", 0.5)
    monkeypatch.setattr(module, "_END_SECONDS", 0.5)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    run = hf.Run("s3://runs/down", staging=tmp_path / "here", console=False, every=2)
    done = []

    def loop() -> None:
        for batch in run.loop(Loader(6)):
            run.step(batch, {"loss": 1.0})
            done.append(run.checkpoints.done)
            if done[-1] == 3:
                run.checkpoints._report(wait=True)
                assert run.checkpoints._store is not None
                run.checkpoints._store.wait(60)
                server.stop()

    with pytest.raises(CheckpointError, match=r"step-00000006, step-00000004.* is not at s3://runs/down/checkpoints"):
        loop()
    assert done == [1, 2, 3, 4, 5, 6]  # training did not stop
    close(cluster)
    server.start()
    assert train(cluster, hf.Run("s3://runs/down", staging=tmp_path / "here", console=False, every=2)) == []
    assert steps("s3://runs/down") == [6, 4, 2]


def test_a_run_that_is_asked_to_end_does_not_wait_long(cluster, server, tmp_path, monkeypatch, caplog):
    """Its status is that of SIGTERM, whatever was sent."""
    monkeypatch.setattr(module, "_TERMINATED_SECONDS", 0.2)
    monkeypatch.setattr(module, "_END_SECONDS", 0.2)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    run = hf.Run("s3://runs/asked", staging=tmp_path / "here", console=False, every=2)

    def loop() -> None:
        for batch in run.loop(Loader(6)):
            server.stop()
            patch.setattr(cluster.backend.termination, "asked", 128 + signal.SIGTERM)
            run.step(batch, {"loss": 1.0})

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        loop()
    assert ended.value.code == 128 + signal.SIGTERM
    assert any("step-00000001" in one.message for one in caplog.records if one.levelname == "ERROR")
    close(cluster)
    server.start()
    assert train(cluster, hf.Run("s3://runs/asked", staging=tmp_path / "here", console=False)) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("names", [[socket.gethostname(), "b"], ["b"]])  # the driver's, too
def test_several_machines_need_a_directory_that_all_see(cluster, tmp_path, monkeypatch, names):
    hosts = [SimpleNamespace(node_name=name) for name in names]
    monkeypatch.delenv("HYBRIDFLOW_STAGING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(cluster.groups, "actor", SimpleNamespace(ranks=SimpleNamespace(hosts=hosts)))
    address = f"file://{tmp_path}/there"
    for call in (lambda: hf.save(address), lambda: hf.load(address), lambda: hf.Checkpoints(address).resume(Loader(1))):
        with pytest.raises(ConfigError, match="processes on 2 machines have to share: set HYBRIDFLOW_STAGING"):
            call()
    cluster.groups.pop("actor")
    close(cluster)


def test_models_and_states_are_saved_at_addresses_and_read_from_there(place, pool, cluster, tmp_path, staging):
    """Two ranks write; rank 0, a process of its own, sends."""
    model = tiny_models.make_policy(tmp_path / "model")
    there = f"file://{tmp_path}/there"
    actor = place(hf.ReferenceWorker, pool[:2], model=model, train=hf.Megatron(tp=2), name="first")
    assert actor.save(f"{there}/model") == f"{there}/model"
    local = actor.save(tmp_path / "local")
    sent, written = tmp_path / "there/model", Path(local)
    assert sorted(path.name for path in sent.iterdir()) == sorted(path.name for path in written.iterdir())
    assert all((sent / path.name).read_bytes() == path.read_bytes() for path in written.iterdir())
    again = place(hf.ReferenceWorker, pool[:1], model=f"{there}/model", train=hf.FSDP(), name="second")
    again.save(tmp_path / "again")
    loader = Loader(9)
    cluster.attach(loader, "loader")
    loader.at = 4
    assert hf.save(f"{there}/state", parts=[loader]) == f"{there}/state"
    loader.at = 0
    hf.load(f"{there}/state", parts=[loader])
    assert loader.at == 4
    one, two = (load_file(path / "model.safetensors") for path in (written, tmp_path / "again"))
    assert all(one[name].equal(two[name]) for name in one)


def test_a_state_that_was_not_sent_is_saved_again(cluster, address, staging, monkeypatch):
    address = f"{address}/saved"
    there, loader = RemoteDirectory(address), Loader(9)
    cluster.attach(loader, "loader")
    loader.at = 3

    def down(self: RemoteDirectory, source: Path, name: str, *more: Any) -> None:
        self.write("state/part", b"1")  # one that had arrived
        (source.parent / "state").mkdir()
        (source.parent / "state/part").write_bytes(b"1")
        raise CheckpointError("down")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "put", down)
        with pytest.raises(CheckpointError, match="It was not sent as a whole"):
            hf.save(address, parts=[loader])
    loader.at = 4
    hf.save(address, parts=[loader])
    loader.at = 0
    hf.load(address, parts=[loader])
    assert loader.at == 4  # not the state of the save that failed
    with pytest.raises(CheckpointError, match="exists already: nothing is written over"):
        hf.save(address, parts=[loader])
    there.remove(MANIFEST)
    with pytest.raises(CheckpointError, match="exists already"):
        hf.save(address, parts=[loader])  # the files of others
    close(cluster)


def start(server: S3Server, runs: Runs, home: Path, address: str) -> subprocess.Popen[bytes]:
    """A driver with checkpoints at the address, on a machine of its own."""
    home.mkdir()
    words = [str(home), str(runs.model), str(runs.prompts), str(STEPS), "every=2", "record=1", f"checkpoints={address}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HYBRIDFLOW_STAGING": str(home / "staging")}
    environment |= server.environment | runs.warm.environment
    with (home / "log.txt").open("wb") as log:
        return subprocess.Popen([*runs.warm.command, str(DRIVER), *words], stdout=log, stderr=log, env=environment)


@pytest.mark.slow
def test_a_run_that_was_killed_during_an_upload_continues_elsewhere(server, runs: Runs, undisturbed, tmp_path):
    """The second machine has nothing but the address. It ends as the undisturbed run."""

    def kill(method: str, path: str) -> None:
        if method == "PUT" and "step-00000004/critic/" in path and first.poll() is None:
            first.send_signal(signal.SIGKILL)
            first.wait()

    first = start(server, runs, tmp_path / "first", "s3://runs/killed")
    server.before = kill
    assert first.wait(280) == -signal.SIGKILL, (tmp_path / "first/log.txt").read_text()[-4000:]
    server.before = lambda method, path: None
    left = objects(server, "killed/step-00000004/")
    assert left
    assert not any(name.endswith(MANIFEST) for name in left)
    second = start(server, runs, tmp_path / "second", "s3://runs/killed")
    assert second.wait(280) == 0, (tmp_path / "second/log.txt").read_text()[-4000:]
    one, two = records(tmp_path / "second"), records(undisturbed)
    assert sorted(one) == [3, 4, 5, 6]
    assert all(one[step] == two[step] for step in one)
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "second", undisturbed))
    assert all(weights[name].equal(others[name]) for name in weights)
    there = objects(server, "killed/")
    assert [name for name in there if name.endswith(MANIFEST)] == [
        f"killed/step-0000000{n}/{MANIFEST}" for n in (2, 4, 6)
    ]


def objects(server: S3Server, prefix: str) -> list[str]:
    return [one["Key"] for one in server.client.list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", ())]


@pytest.mark.slow
def test_a_minute_without_the_server_loses_nothing(server, runs: Runs, undisturbed, tmp_path):
    """It is stopped after the first checkpoint, and started again when the run waits for it at its end."""
    driver = start(server, runs, run := tmp_path / "run", "s3://runs/down")
    while not any("down/step-00000002" in path and path.endswith(MANIFEST) for path in server.sent()):
        assert driver.poll() is None, (run / "log.txt").read_text()[-4000:]
        time.sleep(0.05)
    server.stop()
    while "waiting until" not in (run / "log.txt").read_text():
        assert driver.poll() is None, (run / "log.txt").read_text()[-4000:]
        time.sleep(0.1)
    time.sleep(60)
    server.start()
    assert driver.wait(280) == 0, (run / "log.txt").read_text()[-4000:]
    assert (run / "log.txt").read_text().count("The run continues") == 1
    there = objects(server, "down/")
    assert [name for name in there if name.endswith(MANIFEST)] == [
        f"down/step-0000000{n}/{MANIFEST}" for n in (2, 4, 6)
    ]
    assert records(run) == records(undisturbed)
    lines = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines == [*range(1, STEPS + 1)]
