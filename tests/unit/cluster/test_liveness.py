"""LivenessServer: what a host process tells over a connection, also to clients that misbehave."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cluster import liveness
from hybridflow.cluster.incidents import Incidents
from hybridflow.cluster.liveness import ASK, STACKS, WATCH, LivenessServer, with_text
from hybridflow.engines.process_groups import SkippedStep
from hybridflow.engines.time_sharing import UPDATE_THREAD, PipelineTurn
from hybridflow.errors import HostLostError, WorkerError


@pytest.fixture
def server() -> Iterator[LivenessServer]:
    found = LivenessServer("127.0.0.1")
    yield found
    found.close()


def connect(server: LivenessServer) -> socket.socket:
    return socket.create_connection(server.address, timeout=10.0)


def answer(server: LivenessServer, service: bytes) -> str:
    with connect(server) as client:
        client.sendall(server.key + service)
        return client.makefile().read()


def test_one_byte_says_what_a_client_wants(server):
    with server.during("actor.update"):
        found = json.loads(answer(server, ASK))
        assert found["call"] == "actor.update"
        assert not found["waiting"]
        stacks = answer(server, STACKS)
    assert "MainThread (runs the calls: at cluster/test_liveness.py:" in stacks
    assert "in test_one_byte_says_what_a_client_wants" in stacks
    assert "thread liveness" in stacks
    assert answer(server, b"?") == ""
    assert json.loads(answer(server, ASK))["call"] == ""


@pytest.mark.parametrize("said", [ASK, STACKS, WATCH + ASK, bytes(16) + STACKS, bytes(16) + WATCH + ASK])
def test_other_users_of_the_machine_get_no_answer(server, said):
    with connect(server) as client:
        client.sendall(said)
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""
    assert json.loads(answer(server, ASK))["call"] == ""


def test_an_update_that_stops_is_named_while_the_thread_of_the_call_waits_for_it(server):
    turn, working, stop = PipelineTurn(), threading.Event(), threading.Event()

    def update() -> None:
        working.set()
        stop.wait()
        turn.settle()

    turn.announce([], 1.0)
    threading.Thread(target=turn.run, args=(update, []), name=UPDATE_THREAD).start()
    with server.during("actor.update and critic.update"), ThreadPoolExecutor() as asking:
        assert working.wait(30)
        hanging = asking.submit(until, server, lambda doing: not doing["waiting"] and "update" in doing["place"])
        waiting = asking.submit(lambda: (hanging.result(), stop.set(), until(server, lambda doing: doing["waiting"])))
        ended = asking.submit(lambda: (waiting.result(), turn.all_done()))
        turn.join()
        ended.result()


def until(server: LivenessServer, wanted: Callable[[dict[str, Any]], bool]) -> None:
    end = time.monotonic() + 30
    while not wanted(found := json.loads(answer(server, ASK))):
        assert time.monotonic() < end, found
        time.sleep(0.01)


def test_a_watcher_asks_again_and_again_while_others_are_served(server):
    with connect(server) as watcher:
        watcher.sendall(server.key + WATCH)
        lines = watcher.makefile()
        for _ in range(3):
            watcher.sendall(ASK)
            assert json.loads(lines.readline())["call"] == ""
            assert json.loads(answer(server, ASK))["call"] == ""


def test_clients_that_say_nothing_hold_up_nobody_and_are_dropped(server, monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.5)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(20)]
        watcher = stack.enter_context(connect(server))
        watcher.sendall(server.key + WATCH)
        assert json.loads(answer(server, ASK))["call"] == ""
        assert all(client.recv(1) == b"" for client in silent)
        watcher.sendall(ASK)
        assert watcher.recv(1) == b"{"  # a watcher stays


def test_the_end_of_a_process_ends_its_connections():
    program = (
        "import sys; from hybridflow.cluster.liveness import LivenessServer\n"
        "one = LivenessServer('127.0.0.1')\n"
        "print(*one.address, one.key.hex(), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    host, port, key = process.stdout.readline().split()
    with socket.create_connection((host, int(port)), timeout=30.0) as watcher:
        watcher.sendall(bytes.fromhex(key) + WATCH + ASK)
        assert watcher.recv(1) == b"{"
        process.kill()
        left = watcher.recv(1 << 16)
        assert left == b"" or watcher.recv(1) == b""
    process.wait(timeout=30)


def test_a_closed_server_ends_its_thread(server):
    before = threading.active_count()
    server.close()
    deadline = time.monotonic() + 30
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() < before


# Incidents


def test_skipped_steps_are_written_once_each(tmp_path):
    step = SkippedStep("actor", "update_actor", 7, 31, 2, "the loss is not finite on rank 1", (4, 9))
    incidents = Incidents(directory=lambda: tmp_path)
    incidents.write_skipped([step, step])
    incidents.write_skipped([step, SkippedStep("actor", "update_actor", None, 32, 1, "why")])
    first, second = map(json.loads, (tmp_path / "skipped.jsonl").read_text().splitlines())
    assert first == {
        "step": 7,
        "role": "actor",
        "method": "update_actor",
        "minibatch": 2,
        "reason": "the loss is not finite on rank 1",
        "row_ids": [4, 9],
    }
    assert (second["step"], second["row_ids"]) == (None, [])


@pytest.mark.parametrize("directory", [Path("/dev/full"), Path("/nowhere"), None])
def test_a_file_that_cannot_be_written_raises_nothing(directory, caplog):
    incidents = Incidents(directory=lambda: directory)
    with caplog.at_level(logging.WARNING):
        incidents.write_skipped([SkippedStep("actor", "update_actor", 7, 31, 2, "why", (4, 9))])
    assert bool(caplog.records) == (directory is not None)
    assert all("9" in record.getMessage() for record in caplog.records)


def test_a_lost_host_is_an_error_with_node_and_step():
    error = WorkerError("it is gone", role="actor", rank=1, node="gpu-7", step=12, cause=HostLostError("died"))
    found = with_text(error, " More.").as_cause()
    assert isinstance(found, HostLostError)
    assert str(found) == "it is gone More."
    assert (found.node, found.step, found.id) == ("gpu-7", 12, error.id)


def test_stacks_without_a_run_directory_are_kept_for_a_day(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with Incidents()._new_file("stacks-a") as first, Incidents()._new_file("stacks-a") as second:
        assert first.name != second.name
    (private,) = tmp_path.iterdir()
    assert private.stat().st_mode & 0o77 == 0
    os.utime(first.name, (0, time.time() - 90000))
    with Incidents()._new_file("stacks-b") as third:
        pass
    assert {path.name for path in (private / "stacks").iterdir()} == {
        os.path.basename(file.name) for file in (second, third)
    }
