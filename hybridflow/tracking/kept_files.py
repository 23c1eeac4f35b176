"""KeptFiles: the files of a run; lines that cannot be written are kept for later. RunState: where a run continues."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)
_AT_ONCE = 1000  # lines in one write


@dataclass(frozen=True)
class RunState:
    """Where a run continues: its id, the last step, seconds so far, the reward curve, and single figures."""

    run: str
    step: int
    seconds: float
    rewards: list[tuple[int, float]]
    notes: dict[str, Any]

    @classmethod
    def read(cls, state: Any) -> RunState:
        """From `as_json`. Errors: ConfigError naming the first damaged part."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"the tracker's state is a {type(state).__name__}: give what Tracker.state() has given.")
        parts: dict[str, Any] = {part: state.get(part) for part in _CHECKS}
        for part, is_right in _CHECKS.items():
            if not is_right(parts[part]):
                raise _damaged(part, parts[part])
        if parts["rewards"] and parts["rewards"][-1][0] > parts["step"]:
            raise _damaged("step", parts["step"])
        rewards = [(step, float(reward)) for step, reward in parts["rewards"]]
        return cls(parts["run"], parts["step"], float(parts["seconds"]), rewards, dict(parts["notes"]))

    def as_json(self) -> dict[str, Any]:
        notes = json.loads(as_document(self.notes), parse_constant=lambda _: None)  # JSON has no NaN
        return vars(self) | {"rewards": [list(point) for point in self.rewards], "notes": notes}


class KeptFiles:
    """Files in `directory`; a reader sees complete lines or complete files.

    An OSError, such as a full disk, does not stop the run: each kind is logged once, and every later write first
    retries the pending ones. Before the first write, the `names` that an earlier run has left are renamed to
    `<stem>.<n><suffix>`, all with the first free number, unless `rewind` comes first.
    """

    def __init__(self, directory: Path, names: Sequence[str] = ()) -> None:
        self.directory, self._names = directory, tuple(names)
        self._first: Callable[[], None] | None = self._set_aside if names else None
        self._lines: dict[str, list[bytes]] = {}
        self._contents: dict[str, bytes] = {}
        self._ends: dict[str, int] = {}  # end of the complete lines; a write may have left half a line
        self._why, self._told = "", set[int | None]()

    def append(self, name: str, records: Sequence[bytes]) -> None:
        """Append whole records, such as lines with their end."""
        self._lines.setdefault(name, []).extend(records)
        self.write()

    def replace(self, name: str, content: bytes) -> None:
        self._contents[name] = content
        self.write()

    def rewind(self, step: int, contents: Mapping[str, bytes]) -> None:
        """Continue the files of `names` after `step`.

        Lines of a later step go to `<stem>.<n>.jsonl`, and other files that differ from `contents` (absent: empty) are
        renamed likewise. Half a last line is cut. Warns of that, and if the first file ends before `step`.
        """
        n = self._free_number()
        for name in [name for name in self._lines if name in self._names]:
            lines, self._lines[name] = self._lines[name], []
            for line in lines:
                where = name if _step_of(line) <= step else _numbered(name, n)
                self._lines.setdefault(where, []).append(line)
        self._contents.clear()
        self._first = partial(self._cut_after, step, dict(contents), n)
        self.write()

    def waiting(self, name: str) -> int:
        """The number of lines that could not be written yet."""
        return len(self._lines.get(name, ()))

    def write(self) -> None:
        """Retry all pending writes."""
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

    def _set_aside(self) -> None:
        here = [name for name in self._names if self._size(name)]
        n = self._free_number()
        for name in here:
            (self.directory / name).rename(self.directory / _numbered(name, n))
        if here:
            logger.info("%s had an earlier run: its files are now called *.%d.*", self.directory, n)

    def _cut_after(self, step: int, contents: dict[str, bytes], n: int) -> None:
        last = {}
        for name in self._names:
            path, aside = self.directory / name, self.directory / _numbered(name, n)
            if path.suffix != ".jsonl":
                continue
            *lines, half = path.read_bytes().split(b"\n") if path.exists() else [b""]
            kept = [line for line in lines if _step_of(line) <= step]
            later = [line for line in lines if _step_of(line) > step]
            if later:
                self._replace(aside, b"".join(line + b"\n" for line in later))
            if later or half:
                self._replace(path, b"".join(line + b"\n" for line in kept))
                self._ends.pop(name, None)
            if half:
                logger.warning("%s ends in half a line (%r), which is cut.", path, half[:80])
            last[name] = max(map(_step_of, [*kept, *self._lines.get(name, ())]), default=0)
        for name, content in contents.items():
            path = self.directory / name
            if path.exists() and path.read_bytes() != content:
                path.rename(self.directory / _numbered(name, n))
            if content:
                self._contents[name] = content
        if last[self._names[0]] < step:
            found = f"{self.directory / self._names[0]} ends at step {last[self._names[0]]:g}"
            logger.warning("%s, the saved state is of step %d: the lines between are lost.", found, step)

    def _free_number(self) -> int:
        n = 1
        while any((self.directory / _numbered(name, n)).exists() for name in self._names):
            n += 1
        return n

    def _size(self, name: str) -> int:
        path = self.directory / name
        return path.stat().st_size if path.exists() else 0

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


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # not NaN


def _is_curve(points: Any) -> bool:
    if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 2 for point in points):
        return False
    known = all(type(step) is int and _is_number(reward) for step, reward in points)
    return known and all(a < b for a, b in pairwise([0, *(step for step, _ in points)]))


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "run": lambda found: isinstance(found, str) and re.fullmatch("[0-9a-f]{32}", found) is not None,
    "step": lambda found: type(found) is int and 0 <= found < 2**62,
    "seconds": lambda found: _is_number(found) and found >= 0,
    "rewards": _is_curve,
    "notes": lambda found: isinstance(found, dict) and all(isinstance(name, str) for name in found),
}


def _damaged(part: str, found: Any) -> ConfigError:
    return ConfigError(
        f"the tracker's state has {part}={found!r:.80}, which Tracker.state() never gives: it is damaged. Use the "
        f"state of another checkpoint."
    )
