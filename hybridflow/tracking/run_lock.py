"""RunLock: one process at a time writes a run's files. The file of the lock names it; the kernel frees the lock of a
process that ended, and where another machine holds one, its file's time tells whether that process still runs."""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)
BEAT_SECONDS = 5.0
_MISSED = 3  # beats of a process that has ended, or whose machine has


class RunLock:
    """The lock at `path` for this process, which may take it several times; errors begin with `what`.

    A full or read-only file system does not stop a run here: what is written there fails with an error of its own.
    """

    _held: ClassVar[dict[Path, _Held]] = {}

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = Path(os.path.abspath(path)), what

    def take(self) -> None:
        """Errors: ConfigError that names the other process. Waits some seconds where another machine's did not end."""
        held = self._held.get(self._path)
        if held is None or held.pid != os.getpid():
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                held = self._held[self._path] = _Held(self._path, self._what)
            except OSError as error:
                logger.debug("%s cannot be locked: %s", self._path, error)
                return
        held.users.add(self)

    def release(self) -> None:
        """The last one removes the file. Can be called again."""
        held = self._held.get(self._path)
        if held is not None and held.pid == os.getpid() and self in held.users:
            held.users.remove(self)
            if not held.users:
                self._held.pop(self._path).close()


@atexit.register  # after a session that is open at the end, as the driver's functions import this module
def _release_all() -> None:
    while RunLock._held:
        if (held := RunLock._held.popitem()[1]).pid == os.getpid():
            held.close()


class _Held:
    """The file of a lock that this process holds, and the thread that gives it a new time every `BEAT_SECONDS`."""

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.users, self.pid = path, set[RunLock](), os.getpid()
        self._file = _locked(path, what)
        with suppress(OSError):  # a full disk
            holder = {"host": socket.gethostname(), "pid": self.pid, "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(holder).encode(), 0)
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._beats.start()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._file)

    def close(self) -> None:
        self._closed.set()
        self._beats.join()
        with suppress(OSError):
            if _is_at(self._file, self.path):
                self.path.unlink()
        os.close(self._file)


def _locked(path: Path, what: str) -> int:
    """The descriptor of the file, locked. Errors: ConfigError; OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            there: dict[str, Any] = {}  # who wrote the file, where it says so
            with suppress(ValueError, RecursionError):
                there = found if isinstance(found := json.loads(os.pread(file, 4096, 0)), dict) else {}
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = there.get("host", socket.gethostname()) != socket.gethostname() and _beats(file, path)
            except (BlockingIOError, PermissionError):
                taken = True
            except OSError:  # a file system without locks
                taken = bool(there) and _beats(file, path)
            if taken:
                who = f"process {there.get('pid', '(unknown)')} on {there.get('host', '(unknown)')}"
                seconds = time.time() - os.fstat(file).st_mtime
                raise ConfigError(
                    f"{what}: {who} has been writing there since {there.get('since', '(unknown)')}, and was alive "
                    f"{seconds:.0f} s ago. Stop it, or give this run a directory of its own."
                )
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its last holder has removed it meanwhile


def _beats(file: int, path: Path) -> bool:
    """Whether the file gets a new time; machines' clocks may differ."""
    before, seconds = os.fstat(file).st_mtime_ns, _MISSED * BEAT_SECONDS
    logger.warning("%s is of another machine: waiting %.0f s whether its process still runs", path, seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(BEAT_SECONDS / 5)
        with suppress(FileNotFoundError):
            if os.stat(path).st_mtime_ns != before:
                return True
    return False


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
