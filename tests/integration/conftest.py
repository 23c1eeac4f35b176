"""One Ray cluster and eight hosts for the whole test run, copies of one process with torch, Megatron and vLLM imported.

Hosts of drivers that tests start by `sys.executable` import them themselves, as those of users do.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest

import hybridflow as hf
from hybridflow.cluster.orphan_cleanup import processes
from recipes import arithmetic
from tests import tiny_models
from tests.warm_programs import WarmPrograms

DEVICES = 16
NODES = (8,)


@pytest.fixture(scope="session")
def cluster(warm) -> Iterator[Any]:
    """The session of a local cluster with 16 logical devices."""
    from hybridflow.cluster.session import Session

    if Session._current is None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in warm.environment.items():
                patch.setenv(name, value)
            hf.init(devices=DEVICES, peer_timeout=300.0, collective_timeout=60.0)
    yield Session.current()
    hf.shutdown()


@pytest.fixture(scope="session")
def hosts(cluster) -> hf.ResourcePool:
    """Eight hosts that every file shares; placements over these nodes use the same."""
    return hf.ResourcePool.over(NODES)


@pytest.fixture(scope="session")
def pool(hosts) -> hf.ResourcePool:
    """The first four of them."""
    return hosts[0:4]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """The directory of a tiny model with a tokenizer."""
    return tiny_models.make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def task() -> arithmetic.ArithmeticFiles:
    """The small model where the quickstart keeps it: made once, by whoever comes first."""
    return arithmetic.make(Path(__file__).resolve().parents[2] / ".cache")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return tiny_models.make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def other_pool(cluster) -> Iterator[hf.ResourcePool]:
    """Two more hosts, which share no torch world with the first four."""
    with hf.ResourcePool([2]) as pool:
        yield pool


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPrograms]:
    """Starts drivers, and hosts of their clusters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # a socket's path has at most 107 bytes
        programs = WarmPrograms(f"{directory}/programs")
        yield programs
        programs.close()


@pytest.fixture(scope="session")
def settle(cluster) -> Callable[[], None]:
    """Waits for the calls issued so far: their failures are known, and a loop must not meet them again."""

    def settle() -> None:
        while True:
            try:
                return cluster.iterations.drain()
            except hf.errors.WorkerError:
                continue

    return settle


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> None:
    """No test meets a failure or a loop that another one left."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("settle")()


@pytest.fixture
def no_parts(cluster) -> Iterator[None]:
    """No loader or tracker of another test is in checkpoints, and none of this one stays."""
    cluster.parts.clear()
    cluster.states.clear()
    yield
    cluster.parts.clear()
    cluster.states.clear()
    cluster.iterations.done_before = 0  # of loops that a test did not begin


@pytest.fixture
def outward(cluster) -> Callable[[], list[str]]:
    """Sockets of the session's processes, the driver included, that other machines could reach."""

    def outward() -> list[str]:
        found = []
        for pid in {os.getpid(), *processes(cluster.name, cluster.backend.directory)}:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for one in process.net_connections("inet"):
                    waits = one.status == psutil.CONN_LISTEN or (one.type == socket.SOCK_DGRAM and not one.raddr)
                    if waits and not ip_address(one.laddr.ip.removeprefix("::ffff:")).is_loopback:
                        found.append(f"{' '.join(process.cmdline())[:80]}: {one.laddr}")
        return found

    return outward


def _placing(cluster) -> Iterator[Any]:
    placed = []

    def place(worker_class: type, pool: hf.ResourcePool, **settings: Any) -> hf.WorkerGroup:
        group = hf.place(worker_class, pool, **settings)
        placed.append(group)
        return group

    yield place
    for group in placed:
        group.close()


place = pytest.fixture(_placing, name="place")
"""`hf.place` whose groups are closed after the test."""

keep = pytest.fixture(_placing, name="keep", scope="module")
"""`hf.place` whose groups are closed after the last test of the file."""
