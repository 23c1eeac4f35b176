"""pytest's plugin on emulated CUDA: a test fails if a fault is found in its process or in one that it started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_cuda import findings

log_path = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Each process of pytest has a log of its own, named in the environment of the processes that it starts."""
    handle, name = tempfile.mkstemp(prefix="emulated-cuda-", suffix=".log")
    os.close(handle)
    config.stash[log_path] = Path(name)
    os.environ["EMULATED_LOG"] = name


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[log_path].unlink(missing_ok=True)


def faults(path: Path, start: int) -> tuple[str, int]:
    """Records after the first `start` bytes, and the length now."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read()
    return text.decode(errors="replace"), start + len(text)


@pytest.fixture(autouse=True)
def _no_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """No race, refused kernel, index on the CPU, mismatched collective or deadlock, here or in a child process."""
    path = request.config.stash[log_path]
    start = path.stat().st_size
    yield
    text, _ = faults(path, start)
    if text and "expected_faults" not in request.fixturenames:
        pytest.fail(f"emulated CUDA found faults:\n{text}", pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("EMULATED_REPORT"):
        terminalreporter.write_line(findings.report())
