"""One Ray cluster and one pool of four hosts for the whole test run: starting them costs more than most tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hybridflow as hf

DEVICES = 16


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The session of a local cluster with 16 logical devices."""
    from hybridflow.cluster.session import Session

    if Session._current is None:
        hf.init(devices=DEVICES, peer_timeout=300.0, collective_timeout=60.0)
    yield Session.current()
    hf.shutdown()


@pytest.fixture(scope="session")
def pool(cluster) -> hf.ResourcePool:
    """Four hosts that every file shares."""
    return hf.ResourcePool([4])


@pytest.fixture(scope="session")
def settle(cluster) -> Callable[[], None]:
    """Waits for the calls issued so far: their failures are known, and a loop must not meet them again."""

    def settle() -> None:
        while True:
            try:
                return cluster.drain()
            except hf.errors.WorkerError:
                continue

    return settle


@pytest.fixture
def place(cluster) -> Iterator[Any]:
    """`hf.place` whose groups are closed after the test."""
    placed = []

    def place(worker_class: type, pool: hf.ResourcePool, **settings: Any) -> hf.WorkerGroup:
        group = hf.place(worker_class, pool, **settings)
        placed.append(group)
        return group

    yield place
    for group in placed:
        group.close()
