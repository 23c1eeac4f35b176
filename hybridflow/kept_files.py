"""KeptFiles: the files of a run. Lines that cannot be written are kept and written later."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class KeptFiles:
    """Files in `directory`; a reader sees complete lines or complete files.

    An OSError, such as a full disk, does not stop the run: each kind is logged once, and every later write first
    retries the pending ones.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines: dict[str, list[bytes]] = {}
        self._contents: dict[str, bytes] = {}
        self._ends: dict[str, int] = {}  # end of the complete lines; a write may have left half a line
        self._why, self._told = "", set[int | None]()

    def append(self, name: str, lines: Sequence[str]) -> None:
        self._lines.setdefault(name, []).extend(f"{line}\n".encode() for line in lines)
        self.write()

    def replace(self, name: str, content: bytes) -> None:
        self._contents[name] = content
        self.write()

    def write(self) -> None:
        """Retry all pending writes."""
        for name, lines in self._lines.items():
            with self.forgiving(self.directory / name):
                while lines:
                    self._append(name, lines[0])
                    lines.pop(0)
        for name in list(self._contents):
            with self.forgiving(self.directory / name):
                self._replace(self.directory / name, self._contents[name])
                del self._contents[name]

    def missing(self) -> str:
        """Names the pending writes and the reason; empty if there are none."""
        lines = [f"{len(kept)} lines of {name}" for name, kept in self._lines.items() if kept]
        return f"{', '.join([*lines, *self._contents])} ({self._why})" if lines or self._contents else ""

    @contextmanager
    def forgiving(self, what: object) -> Iterator[None]:
        """Logs an OSError inside as a warning, once per kind."""
        try:
            yield
        except OSError as error:
            self._why = error.strerror or str(error)
            if error.errno not in self._told:
                self._told.add(error.errno)
                logger.warning(
                    "%s cannot be written: %s. The run continues; figures are kept for later.", what, self._why
                )

    def _append(self, name: str, line: bytes) -> None:
        path = self.directory / name
        try:
            with path.open("ab", buffering=0) as file:
                self._cut(name, file.fileno())
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError), path.open("ab") as file:
                self._cut(name, file.fileno())
            raise
        del self._ends[name]

    def _cut(self, name: str, descriptor: int) -> None:
        """Remove half a line that an earlier attempt may have left."""
        size = os.fstat(descriptor).st_size  # smaller than before: the file was removed
        os.ftruncate(descriptor, min(self._ends.setdefault(name, size), size))

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
