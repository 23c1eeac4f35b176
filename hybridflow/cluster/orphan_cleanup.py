"""Cleans up after a driver that was killed, or interrupted during its own clean-up.

A process of a session carries the session's name in its environment (Ray's agents overwrite theirs, but keep log files
of their cluster open), and its shared memory segments carry it in their names. A watcher process outlives the driver,
ends these processes and removes these segments. It runs this file as a program that needs only Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "HYBRIDFLOW_SESSION"
_SHARED_MEMORY = Path("/dev/shm")
_PROCESSES = Path("/proc")
_GRACE_SECONDS = 3.0
_KILL_SECONDS = 60.0


class Watcher:
    """Waits for the end of this process, or for `sweep`, in a process that a terminal's Ctrl-C does not reach.

    `directory` is that of the session's own Ray cluster, or empty.
    """

    def __init__(self, session: str, directory: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, session, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def sweep(self) -> None:
        """Return once the session's processes and segments are gone. Can be called again."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=4 * _GRACE_SECONDS)


@contextlib.contextmanager
def marked(session: str):
    """Processes started inside carry the session's name."""
    os.environ[MARK] = session
    try:
        yield
    finally:
        del os.environ[MARK]


def processes(session: str, directory: str = "") -> list[int]:
    if not _PROCESSES.is_dir():
        return []
    found, mark = [], f"{MARK}={session}".encode()
    for entry in _PROCESSES.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
                if marked or (directory and _is_agent(entry, directory)):
                    found.append(int(entry.name))
    return found


def _is_agent(process: Path, directory: str) -> bool:
    if not (process / "cmdline").read_bytes().startswith(b"ray::"):
        return False
    return any(os.readlink(open_file).startswith(f"{directory}/") for open_file in (process / "fd").iterdir())


def remove(session: str, directory: str) -> None:
    """Give the session's processes a moment to end, kill the rest, remove its shared memory."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while processes(session, directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline += _KILL_SECONDS
    while (left := processes(session, directory)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    if _SHARED_MEMORY.is_dir():
        for path in _SHARED_MEMORY.iterdir():
            if session in path.name:
                with contextlib.suppress(OSError):
                    path.unlink()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a job's SIGTERM goes to all of its processes
    sys.stdin.read()  # ends when the driver does
    remove(*sys.argv[1:])
