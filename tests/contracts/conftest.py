"""Four gloo processes for all files that train with Megatron: importing it in each takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes import RankProcesses


@pytest.fixture(scope="session")
def started() -> Iterator[list[RankProcesses]]:
    """The processes that run now, if any do."""
    running: list[RankProcesses] = []
    yield running
    for processes in running:
        processes.close()


@pytest.fixture(scope="module")
def processes(started: list[RankProcesses]) -> RankProcesses:
    """Those of the file before, unless something failed in them: what one file breaks is not met by the next."""
    if started and started[-1].failed:
        started.pop().close()
    if not started:
        started.append(RankProcesses(4))
    return started[-1]
