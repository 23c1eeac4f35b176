"""Checkpoints of a run at an address: what is sent, when, and again. No cluster; addresses are in memory, on this disk
and on a real S3 server."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.engines.checkpoint.manifest import MANIFEST, CheckpointManifest, FileEntry, saved_steps
from hybridflow.engines.checkpoint.remote_directory import RemoteDirectory, fetched_checkpoint, written_here
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.run import checkpoint_store
from hybridflow.run.checkpoint_store import ENDED, CheckpointStore, to_send
from hybridflow.settings import is_address, staging_directory
from tests.example_checkpoints import make_checkpoint, rewrite, verify
from tests.s3_server import S3Server

SECONDS = 60.0
ROOT = Path(hf.__file__).parents[1]


@pytest.fixture
def server(monkeypatch) -> Iterator[S3Server]:
    server = S3Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(checkpoint_store, "_FIRST_RETRY", 0.05)
    monkeypatch.setattr(checkpoint_store, "_LONGEST_RETRY", 0.2)
    yield server
    server.close()


@pytest.fixture(params=["memory", "file", "s3"])
def address(request, tmp_path) -> str:
    """A directory that is reached through fsspec."""
    name = uuid.uuid4().hex
    if request.param == "s3":
        request.getfixturevalue("server")
    return {"memory": f"memory://{name}", "file": f"file://{tmp_path}/there", "s3": f"s3://runs/{name}"}[request.param]


@pytest.fixture
def opened() -> Iterator[Callable[..., CheckpointStore]]:
    """Makes uploads whose threads end with the test."""
    made: list[CheckpointStore] = []

    def make(address: str, staging: Path, keep: int = 3, best: Any = None, continues: bool = True) -> CheckpointStore:
        made.append(one := CheckpointStore(address, staging, keep, best))
        one.open()
        if continues:
            one.start()
        return one

    yield make
    for one in made:
        one.stop()


def steps(address: str) -> list[int]:
    return list(RemoteDirectory(address).complete_steps())


def test_addresses_and_paths_of_this_machine():
    for path in ("s3://bucket/run", Path("s3://bucket/run"), "gs://b", "a+b://c", "memory://x", "x::y://z"):
        assert is_address(path), path
    for path in ("runs/first", "runs/a:b", "/s3://x", "C:/x", "./s3://x", Path("runs")):
        assert not is_address(path), path


def test_what_comes_back_is_what_was_sent(address, tmp_path, opened):
    made = [make_checkpoint(tmp_path / "here", step, reward=float(step)) for step in (2, 4)]
    one = opened(address, tmp_path / "here")
    one.wait(SECONDS)
    assert steps(address) == [4, 2]
    assert {step: dict(one.there[step]) for step in one.there} == {4: {"reward": 4.0}, 2: {"reward": 2.0}}
    other = opened(address, tmp_path / "elsewhere", continues=False)
    found = list(other.steps())
    assert [path.name for path in found] == [path.name for path in made[::-1]]
    assert [verify(path) for path in found] == [verify(path) for path in made[::-1]]


def test_the_manifest_is_sent_last_and_removed_first(server, tmp_path, opened):
    make_checkpoint(tmp_path, 2)
    one = opened("s3://runs/first", tmp_path, keep=1)
    one.wait(SECONDS)
    make_checkpoint(tmp_path, 4)
    one.wait(SECONDS)
    assert server.sent("first/step-00000004")[-1].endswith(MANIFEST)
    removed = [path for method, path in server.seen if method in ("DELETE", "POST")]
    assert removed[0].endswith(f"step-00000002/{MANIFEST}")


@pytest.mark.parametrize(("kept", "sent"), [({}, "642"), ({"keep": 1, "best": "reward"}, "64")])
def test_newer_checkpoints_are_sent_first_and_what_would_be_removed_at_once_is_not(
    server, tmp_path, opened, kept, sent
):
    for step, reward in ((2, 1.0), (4, 3.0), (6, 2.0)):
        make_checkpoint(tmp_path, step, reward=reward)
    opened("s3://runs/first", tmp_path, **kept).wait(SECONDS)
    manifests = [path.split("/")[3] for path in server.sent() if path.endswith(MANIFEST)]
    assert manifests == [f"step-0000000{step}" for step in sent]


@pytest.mark.parametrize("best", [None, "reward", "-reward"])
def test_retention_is_that_of_the_run(address, tmp_path, opened, best):
    for step, reward in ((2, 5.0), (4, 1.0), (6, 3.0), (8, 3.0)):
        make_checkpoint(tmp_path / "first", step, reward=reward)
    opened(address, tmp_path / "first", keep=9).wait(SECONDS)
    make_checkpoint(tmp_path / "second", 10, reward=2.0)  # a machine that has none of the others
    one = opened(address, tmp_path / "second", keep=2, best=best)
    one.wait(SECONDS)
    assert steps(address) == [10, 8, *{None: [], "reward": [2], "-reward": [4]}[best]]


def test_what_is_not_continued_is_moved(address, tmp_path, opened):
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / ENDED).write_text("4 of 4\n")
    opened(address, tmp_path).wait(SECONDS)
    one = opened(address, tmp_path / "new", continues=False)
    assert (tmp_path / "new" / ENDED).read_text() == "4 of 4"
    one.continue_from(2)
    assert (steps(address), steps(f"{address}.1")) == ([2], [4])
    assert ENDED not in RemoteDirectory(address).sizes()
    one.continue_from(None)
    assert (steps(address), steps(f"{address}.1"), steps(f"{address}.2")) == ([], [4], [2])
    with fetched_checkpoint(f"{address}.2") as path:
        assert verify(path).step == 2
    assert not path.exists()


def test_a_run_that_took_the_address_over_is_continued(address, tmp_path, opened):
    """What this machine has is of an obsolete run."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path / "old", step)
    first = opened(address, tmp_path / "old")
    first.wait(SECONDS)
    first.stop(SECONDS)  # one process sends to an address at a time
    one = opened(address, tmp_path / "new", continues=False)
    one.continue_from(None)
    for step in (4, 6):
        rewrite(make_checkpoint(tmp_path / "new", step), lambda body: body.update(id="new"))
    one.start()
    one.wait(SECONDS)
    one.stop(SECONDS)
    make_checkpoint(tmp_path / "old", 8)  # was never sent
    one = opened(address, tmp_path / "old", continues=False)
    assert next(one.steps()) == tmp_path / "old/step-00000006"
    assert CheckpointManifest.read(tmp_path / "old/step-00000006").id == "new"
    assert [path.name[-1] for path in saved_steps(tmp_path / "old.1")] == ["8", "6", "4", "2"]
    assert [path.name[-1] for path in saved_steps(tmp_path / "old")] == ["6"]
    one.start()
    one.wait(SECONDS)
    assert {step: found.id for step, found in one.remote.complete_steps().items()} == {6: "new", 4: "new"}


def test_a_staging_directory_is_that_of_one_address(address, tmp_path, opened):
    make_checkpoint(tmp_path / "here", 2)
    opened(address, tmp_path / "here").wait(SECONDS)
    with pytest.raises(ConfigError, match=rf"has the checkpoints of {address}, not those of {address}/other: give"):
        opened(f"{address}/other", tmp_path / "here")
    opened(address, tmp_path / "here").wait(SECONDS)


def test_a_checkpoint_that_is_not_whole_there_does_not_count(address, tmp_path, opened):
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    opened(address, tmp_path).wait(SECONDS)
    remote = RemoteDirectory(address)
    remote.remove(f"step-00000006/{MANIFEST}")
    remote.write(f"step-00000004/{MANIFEST}", remote.read(f"step-00000004/{MANIFEST}")[:-10])
    assert steps(address) == [2]
    one = opened(address, tmp_path / "elsewhere")  # of a machine that is gone: nobody completes them
    one.wait(SECONDS)
    while any(name.startswith(("step-00000004", "step-00000006")) for name in remote.sizes()):
        time.sleep(0.01)
    assert steps(address) == [2]


def test_a_file_of_another_size_is_not_a_checkpoints(address, tmp_path, opened):
    path = make_checkpoint(tmp_path, 2)
    opened(address, tmp_path).wait(SECONDS)
    RemoteDirectory(address).write("step-00000002/actor/config", b"{ }")
    assert steps(address) == []
    opened(address, tmp_path).wait(SECONDS)
    assert RemoteDirectory(address).read("step-00000002/actor/config") == (path / "actor/config").read_bytes()


def test_an_upload_that_was_cut_off_continues(server, tmp_path, opened, monkeypatch):
    """Only what had not arrived is sent, and the file that was under way."""
    path = make_checkpoint(tmp_path, 2)
    names = list(verify(path).files)
    put, done = RemoteDirectory.put, threading.Event()

    def killed_at_the_fourth(self: RemoteDirectory, source: Path, name: str, *more: Any) -> None:
        if len(server.sent("first/step-00000002")) == 3:
            self.write(name, source.read_bytes()[:5])
            cut[0].stop()
            done.set()
            raise CheckpointError("cut off")
        put(self, source, name, *more)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "put", killed_at_the_fourth)
        cut = [opened("s3://runs/first", tmp_path, continues=False)]
        cut[0].start()
        assert done.wait(SECONDS)
        cut[0].open()  # waits for the thread
    assert steps("s3://runs/first") == []
    before = server.sent("first/step-00000002")
    assert len(before) == 4
    opened("s3://runs/first", tmp_path).wait(SECONDS)
    again = server.sent("first/step-00000002")[4:]
    assert [one.partition("step-00000002/")[2] for one in again] == [*names[3:], MANIFEST]
    assert steps("s3://runs/first") == [2]
    with fetched_checkpoint("s3://runs/first/step-00000002") as found:
        assert verify(found) == verify(path)


def test_what_is_moved_where_files_cannot_be_copied(tmp_path, opened, monkeypatch):
    """SFTP and FTP have no such call."""
    address = f"memory://{uuid.uuid4().hex}"
    here = tmp_path / "here"
    own = verify(make_checkpoint(here, 2))
    one = opened(address, here)
    one.wait(SECONDS)
    monkeypatch.setattr(type(one.remote._files), "cp_file", AbstractFileSystem.cp_file)
    one.continue_from(None)
    with fetched_checkpoint(f"{address}.1") as found:
        assert verify(found) == own


def test_copies_that_killed_processes_have_left_are_removed(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "staging"))
    make_checkpoint(tmp_path / "here", 2)
    opened(f"file://{tmp_path}/there", tmp_path / "here").wait(SECONDS)
    left = [staging_directory(f"file://{tmp_path}/{name}") for name in (".fetched-1", ".fetched-2")]
    for path in left:
        (path / "step-00000004").mkdir(parents=True)
    os.utime(left[0], (0, 0))
    with fetched_checkpoint(f"file://{tmp_path}/there"):
        assert [path.exists() for path in left] == [False, True]  # the other may be in use


def test_a_thread_that_is_stopped_completes_no_checkpoint(address, tmp_path, opened, monkeypatch):
    """The address may be another process's before its last file has arrived."""
    path, one = make_checkpoint(tmp_path / "here", 2), opened(address, tmp_path / "here", continues=False)
    *_, last = verify(path).files
    put = RemoteDirectory.put

    def stopping(self: RemoteDirectory, source: Path, name: str, *more: Any) -> None:
        if name.endswith(last):
            one.stop()
        put(self, source, name, *more)

    monkeypatch.setattr(RemoteDirectory, "put", stopping)
    one.start()
    assert one._thread is not None
    one._thread.join(SECONDS)
    assert f"step-00000002/{last}" in one.remote.sizes()
    assert steps(address) == []


def test_nothing_is_lost_while_the_server_is_down(server, tmp_path, opened, caplog):
    make_checkpoint(tmp_path, 2)
    one = opened("s3://runs/first", tmp_path)
    one.wait(SECONDS)
    server.stop()
    for step in (4, 6):
        make_checkpoint(tmp_path, step)
    with pytest.raises(CheckpointError, match=r"step-00000006, step-00000004 of .* is not at s3://runs/first after"):
        one.wait(0.2)
    while not (told := [record.message for record in caplog.records if "The run continues" in record.message]):
        time.sleep(0.01)
    assert [path.name for path in saved_steps(tmp_path)] == ["step-00000006", "step-00000004", "step-00000002"]
    assert len(told) == 1
    assert str(tmp_path) in told[0]
    server.start()
    one.wait(SECONDS)
    assert steps("s3://runs/first") == [6, 4, 2]
    assert any("is reached again" in record.message for record in caplog.records)


def test_a_checkpoint_that_is_pruned_while_it_is_sent_is_given_up(server, tmp_path, opened):
    first = make_checkpoint(tmp_path, 2)
    entered = threading.Event()

    def prune(method: str, path: str) -> None:
        if method == "PUT" and "step-00000002" in path and not entered.is_set():
            entered.set()
            make_checkpoint(tmp_path, 4)
            shutil.rmtree(first)

    server.before = prune
    one = opened("s3://runs/first", tmp_path)
    assert entered.wait(SECONDS)
    one.wait(SECONDS)
    while any(name.startswith("step-00000002") for name in one.remote.sizes()):
        time.sleep(0.01)
    assert steps("s3://runs/first") == [4]


def test_a_damaged_checkpoint_does_not_hold_up_others(server, tmp_path, opened, caplog):
    make_checkpoint(tmp_path, 2)
    (make_checkpoint(tmp_path, 4) / "actor" / "config").unlink()
    opened("s3://runs/first", tmp_path).wait(SECONDS)
    assert steps("s3://runs/first") == [2]
    assert any("is not sent" in record.message for record in caplog.records if record.levelno == logging.ERROR)


entries = st.dictionaries(
    st.sampled_from(["a", "b/c", "b/d", "e"]), st.builds(FileEntry, st.integers(0, 2), st.sampled_from(["x", "y"]))
)


@given(files=entries, sent=entries, there=st.dictionaries(st.sampled_from(["a", "b/c", "b/d", "z"]), st.integers(0, 2)))
def test_what_is_sent_again(files, sent, there):
    """A file is left out only if it was sent with this checksum and is there with this size; what is there afterwards
    is the checkpoint."""
    missing, surplus = to_send(files, sent, there)
    for name in files:
        arrived = name in sent and sent[name] == files[name] and there.get(name) == files[name].bytes
        assert (name in missing) == (not arrived)
    after = {name: size for name, size in there.items() if name not in surplus}
    after |= {name: files[name].bytes for name in missing}
    assert after == {name: entry.bytes for name, entry in files.items()}
    assert to_send(files, {**sent, **{name: files[name] for name in missing}}, after) == ([], [])


def test_a_directory_is_sent_whole_or_not_at_all(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "staging"))
    for words in ("one", "two"):
        with written_here("s3://runs/model") as target:
            target.mkdir(parents=True)
            for name in ("config.json", f"model-{words}.safetensors"):
                (target / name).write_text(words)
        assert not target.exists()
    assert server.sent("model/")[-1].endswith("config.json")
    remote = RemoteDirectory("s3://runs/model")
    assert sorted(remote.sizes()) == ["config.json", "model-two.safetensors"]
    remote.write("checkpoints/kept", b"1")
    with written_here("s3://runs/model") as target:
        target.mkdir(parents=True)
        for name in ("config.json", "model-two.safetensors"):
            (target / name).write_text("two")
    assert sorted(remote.sizes()) == ["checkpoints/kept", "config.json", "model-two.safetensors"]
    RemoteDirectory("s3://runs/notes").write("notes.txt", b"1")
    with pytest.raises(CheckpointError, match=r"has other files, such as notes\.txt"):
        RemoteDirectory("s3://runs/notes").send_model(tmp_path)
    copy = remote.fetch_model(("*.json", "*.safetensors"))
    assert (copy / "config.json").read_text() == "two"
    assert remote.fetch_model(("*.json", "*.safetensors")) == copy
    remote.write("config.json", b"new")
    assert (remote.fetch_model(("*.json",)) / "config.json").read_text() == "new"
    remote.remove("config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json or adapter_config\.json"):
        remote.fetch_model(("*",))
    server.stop()
    try:
        target = staging_directory("s3://runs/.sending/x")
        target.mkdir(parents=True)
        (target / "config.json").write_text("kept")
        with pytest.raises(CheckpointError, match="It was not sent as a whole, and is in"), written_here("s3://runs/x"):
            pass
        assert (target / "config.json").read_text() == "kept"
    finally:
        server.start()


def test_two_fetches_of_one_model_at_once(tmp_path, monkeypatch):
    """The second begins while the first one fetches, and is slower."""
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "staging"))
    remote, get = RemoteDirectory(f"file://{tmp_path}/model"), RemoteDirectory.get
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    for name in names:
        remote.write(name, b"1")
    other = list[Path]()

    def first(self: RemoteDirectory, name: str, target: Path) -> None:
        if name == names[1] and not other:
            other.append(target)
            other[0] = remote.fetch_model(("*",))
        get(self, name, target)

    monkeypatch.setattr(RemoteDirectory, "get", first)
    copy = remote.fetch_model(("*",))
    assert copy == other[0]
    assert sorted(path.name for path in copy.iterdir()) == names
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("there", ["README.md", "optimizer.pt", MANIFEST])
def test_a_model_replaces_no_other_files(there, address, tmp_path):
    remote, model = RemoteDirectory(address), tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("new")
        remote.write(name, b"old")
    remote.write(there, b"kept")
    with pytest.raises(CheckpointError, match=f"has other files, such as {there}"):
        remote.send_model(model)
    old = {"config.json": b"old", "model.safetensors": b"old", there: b"kept"}
    assert {name: remote.read(name) for name in remote.sizes()} == old
    remote.remove(there)
    remote.remove("config.json")  # as a send that was cut off
    remote.send_model(model)
    assert remote.read("config.json") == b"new"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s4://bucket/run", r"fsspec has no scheme 's4'\. Did you mean 's3'"),
        ("gs://bucket/run", "needs the package gcsfs, which is not installed: pip install gcsfs"),
        ("simplecache::s3://bucket", "chain of addresses"),
        ("s3://bucket/../other", r"without '\.\.'"),
        ("http://127.0.0.1:9/run", "cannot be written"),
        ("s3://me:hidden@bucket/run", r"^the address s3://\.\.\. has a password: credentials go into the environment"),
        ("s3://me:hid/den@bucket/run", r"^the address s3://\.\.\. has a password"),
        ("sftp://me:22hidden@host:22/run", r"^the address sftp://\.\.\. has a password"),
    ],
)
@pytest.mark.parametrize("made", [hf.Checkpoints, hf.Run])
def test_addresses_that_cannot_be_used(address, says, made, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "staging"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        made(address)
    assert not (tmp_path / "s3:").exists()


def test_credentials_are_checked_at_once(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path))
    with pytest.raises(ConfigError, match=r"s3://absent/run/.* cannot be written: .*Check the address"):
        hf.Checkpoints("s3://absent/run")
    for owner in hf.Checkpoints("s3://runs/run")._owners:
        owner.release()
    assert "runs/run" not in str(RemoteDirectory("s3://runs/run").sizes())
    server.stop()
    try:
        with pytest.raises(ConfigError, match=r"s3://runs/run/.* cannot be written"):
            hf.Checkpoints("s3://runs/run")
    finally:
        server.start()


@pytest.mark.parametrize("where", ["abfss://box@account.net/run", "sftp://me@host:22/run", "hdfs://host:8020/a:b"])
def test_names_and_ports_are_no_passwords(where):
    assert staging_directory(where).parts[-2:] == tuple(where.split("/")[2:])
    assert staging_directory(Path(where)) == staging_directory(where)


def test_two_processes_at_one_address_with_two_staging_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = f"file://{tmp_path}/there"
    program = f"import hybridflow as hf; hf.Checkpoints({address!r}, staging={str(tmp_path / 'other')!r})"
    mine = hf.Checkpoints(address, staging=tmp_path / "mine")
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "has been writing there since" in other.stderr
    for owner in mine._owners:
        owner.release()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_staging_directories(tmp_path, monkeypatch):
    monkeypatch.delenv("HYBRIDFLOW_STAGING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert staging_directory("s3://bucket/run") == tmp_path / "hybridflow/staging/s3/bucket/run"
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path / "all"))
    assert staging_directory(Path("s3://bucket/run")) == tmp_path / "all/s3/bucket/run"
    with pytest.raises(ConfigError, match="is for an address"):
        hf.Checkpoints(tmp_path / "local", staging=tmp_path)
