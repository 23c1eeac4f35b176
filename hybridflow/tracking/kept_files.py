"""KeptFiles: the files of a run; lines that cannot be written are kept for later."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.settings import is_number

logger = logging.getLogger(__name__)
_AT_ONCE = 1000  # lines in one write


_CHECKS: dict[str, Callable[[Any], bool]] = {  # the parts of a tracker's state
    "run": lambda found: isinstance(found, str) and re.fullmatch("[0-9a-f]{32}", found) is not None,
    "step": lambda found: type(found) is int and 0 <= found < 2**62,
    "seconds": lambda found: is_number(found) and found >= 0,
    "notes": lambda found: isinstance(found, dict) and all(isinstance(name, str) for name in found),
}


def checked_state(state: Any) -> tuple[str, int, float, dict[str, Any]]:
    """The run's id, its last step, seconds so far and notes of `Tracker.state`. Errors: ConfigError naming the first
    damaged part."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"the tracker's state is a {type(state).__name__}: give what Tracker.state() has given.")
    for part, is_right in _CHECKS.items():
        if not is_right(found := state.get(part)):
            raise ConfigError(
                f"the tracker's state has {part}={found!r:.80}, which Tracker.state() never gives: it is damaged. "
                f"Use the state of another checkpoint."
            )
    return state["run"], state["step"], float(state["seconds"]), dict(state["notes"])


class KeptFiles:
    """Files in `directory`; a reader sees complete lines or complete files.

    An OSError, such as a full disk, does not stop the run: each kind is logged once, and every later write first
    retries the pending ones. Before the first write, the `names` that an earlier run has left are renamed to
    `<stem>.<n><suffix>`, all with the first free number, unless `rewind` comes first. Files of `also` (name, content)
    are written with the first of the others.
    """

    def __init__(self, directory: Path, names: Sequence[str] = (), also: Mapping[str, bytes] | None = None) -> None:
        self.directory, self._names, self._also = directory, tuple(names), dict(also or {})
        self._first: Callable[[], None] | None = self._set_aside if names else None
        self._lines: defaultdict[str, list[bytes]] = defaultdict(list)
        self._contents: dict[str, bytes] = {}
        self._ends: dict[str, int] = {}  # end of the complete lines; a write may have left half a line
        self._why, self._reported = "", set[int | None]()
        self._lock = threading.RLock()  # checkpoints and samples come from other threads

    def append(self, name: str, records: Sequence[bytes]) -> None:
        """Append whole records, such as lines with their end."""
        with self._lock:
            self._lines[name] += records
            self.write()

    def replace(self, name: str, content: bytes) -> None:
        with self._lock:
            self._contents[name] = content
            self.write()

    def rewind(self, step: int, contents: Mapping[str, bytes]) -> None:
        """Continue the files of `names` after `step`.

        Lines of a later step go to `<stem>.<n>.jsonl`, and other files that differ from `contents` (absent: empty) are
        renamed likewise. Half a last line is cut. Warns of that, and if the first file ends before `step`.
        """
        with self._lock:
            n = self._free_number()
            for name in self._names:
                for line in self._lines.pop(name, ()):
                    self._lines[name if _step_of(line) <= step else _numbered(name, n)].append(line)
            self._contents.clear()
            self._first = partial(self._cut_after, step, {**contents, **self._also}, n)
            self.write()

    def write(self) -> None:
        """Retry all pending writes."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        if self._first == self._set_aside and not (self._contents or any(self._lines.values())):
            return  # nothing is written yet: the run may still be continued
        if self._first is not None:
            with self.forgiving(self.directory):
                self._first()
                self._first = None
        if self._first is not None:
            return
        for name, lines in self._lines.items():
            with self.forgiving(self.directory / name):
                while lines:
                    self._append(name, b"".join(lines[:_AT_ONCE]))
                    del lines[:_AT_ONCE]
        for name in list(self._contents):
            with self.forgiving(self.directory / name):
                replace_file(self.directory / name, self._contents[name])
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
            if error.errno not in self._reported:
                self._reported.add(error.errno)
                logger.warning("%s cannot be written: %s. The run continues; this is written later.", what, self._why)

    def _set_aside(self) -> None:
        n = self._free_number()
        paths = [self.directory / name for name in self._names]
        here = [path for path in paths if path.exists() and path.stat().st_size]
        for path in here:
            path.rename(self.directory / _numbered(path.name, n))
        if here:
            logger.info("%s had an earlier run: its files are now called *.%d.*", self.directory, n)
        self._contents |= self._also

    def _cut_after(self, step: int, contents: dict[str, bytes], n: int) -> None:
        for name in [name for name in self._names if name.endswith(".jsonl")]:
            path = self.directory / name
            *lines, half = path.read_bytes().split(b"\n") if path.exists() else [b""]
            kept, later = [[one for one in lines if (_step_of(one) > step) == after] for after in (False, True)]
            if later:
                replace_file(self.directory / _numbered(name, n), b"".join(line + b"\n" for line in later))
            if later or half:
                replace_file(path, b"".join(line + b"\n" for line in kept))
                self._ends.pop(name, None)
            if half:
                logger.warning("%s ends in half a line (%r), which is cut.", path, half[:80])
            last = max(map(_step_of, [*kept, *self._lines.get(name, ())]), default=0)
            if name == self._names[0] and last < step:
                message = "%s ends at step %d, the saved state is of step %d: the lines between are lost."
                logger.warning(message, path, last, step)
        for name, content in contents.items():
            path = self.directory / name
            if path.exists() and path.read_bytes() != content:
                path.rename(self.directory / _numbered(name, n))
            if content:
                self._contents[name] = content

    def _free_number(self) -> int:
        taken = (any((self.directory / _numbered(name, n)).exists() for name in self._names) for n in count(1))
        return 1 + sum(takewhile(bool, taken))

    def _append(self, name: str, records: bytes) -> None:
        with (self.directory / name).open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size  # smaller than before: the file was removed
            end = min(self._ends.setdefault(name, size), size)
            os.ftruncate(file.fileno(), end)  # half a line of an earlier attempt
            try:
                rest = memoryview(records)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), end)
                raise
        del self._ends[name]


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file: a reader sees the earlier or the new content. Errors: OSError."""
    new = path.with_name(f".{path.name}.partial")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def _numbered(name: str, n: int) -> str:
    return f"{Path(name).stem}.{n}{Path(name).suffix}"


def _step_of(line: bytes) -> float:
    """The `step` of a line; infinite if it cannot be read."""
    try:
        step = json.loads(line)["step"]
        return step if isinstance(step, int) else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


def as_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, default=_plain).encode() + b"\n"


def as_document(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, default=_plain, indent=2).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Tensors and arrays as numbers and lists; anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
