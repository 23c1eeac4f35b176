"""pytest's plugin on emulated CUDA: a test fails if a fault is found in its process or in one that it started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_cuda import findings

log_path, log_read = pytest.StashKey[Path](), pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Each process of pytest has a log of its own, named in the environment of the processes that it starts."""
    handle, name = tempfile.mkstemp(prefix="emulated-cuda-", suffix=".log")
    os.close(handle)
    config.stash[log_path], config.stash[log_read] = Path(name), 0
    os.environ["EMULATED_LOG"] = name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[log_path].unlink(missing_ok=True)


def new_faults(config: pytest.Config) -> str:
    """Records since the last call."""
    with config.stash[log_path].open("rb") as file:
        file.seek(config.stash[log_read])
        text = file.read()
    config.stash[log_read] += len(text)
    return text.decode(errors="replace")


@pytest.fixture(autouse=True)
def _no_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """No race, refused kernel, index on the CPU, mismatched collective or deadlock, here or in a child process.

    What fixtures of a module did counts for the module's next test.
    """
    yield
    text = new_faults(request.config)
    if text and "expected_faults" not in request.fixturenames:
        pytest.fail(f"emulated CUDA found faults:\n{text}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("EMULATED_REPORT"):
        terminalreporter.write_line(findings.report())
