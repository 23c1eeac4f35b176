"""Incidents: what went wrong in a session, known to the driver, and the files about it in the run directory."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.cluster.connection import private_directory
from hybridflow.cluster.liveness import STACKS, ask_all
from hybridflow.cluster.row_refs import IssuedCall
from hybridflow.engines.process_groups import SkippedStep

logger = logging.getLogger(__name__)
_MOST_FILES = 20  # of stacks, in one session
_KEPT_SECONDS = 86400.0  # without a run directory


@dataclass(frozen=True)
class LostHost:
    """A host process that is gone: its pool's name, its rank there, its machine's host name, and since when (seconds
    since the epoch)."""

    pool: str
    rank: int
    node: str
    at: float

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.at))
        return f"its host process died or its machine is gone (noticed at {at}). Close its pool and make a new one."


@dataclass
class Incidents:
    """Shared by all calls of a session. `reported` are the ids of errors that the driver has raised and does not raise
    again, `lost` the lost hosts by the reference to their address; `directory` returns the run directory, if any.

    Writing a file never raises: an error of the file system must not replace the error that the file is about.
    """

    reported: set[str] = field(default_factory=set)
    lost: dict[Any, LostHost] = field(default_factory=dict)
    directory: Callable[[], Path | None] = lambda: None
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _files: int = 0
    _written: set[tuple[str, int, int]] = field(default_factory=set)

    def write_stacks(self, calls: Sequence[IssuedCall]) -> str:
        """Write the Python stacks of all processes that run these calls to `stacks-<role>.<method>-<n>.txt`.

        Returns a sentence for the error message that names the file, or "". Takes a few seconds at most.
        """
        parts = list({status.address: status for call in calls for status in call.statuses if status.address}.values())
        if not parts or self._files >= _MOST_FILES:
            return ""
        self._files += 1
        try:
            origin = parts[0].origin
            text = "\n".join(f"{'=' * 16} {part.origin}\n{stacks}" for part, stacks in ask_all(parts, STACKS))
            name = re.sub(r"[^\w.-]", "_", f"{origin.role}.{origin.method}")
            with self._new_file(f"stacks-{name}") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {origin.role}.{origin.method}\n{text}")
            return f" Stacks of its processes: {file.name}"
        except Exception:
            logger.warning("the stacks of the processes that were waited for could not be written", exc_info=True)
            return ""

    def _new_file(self, start: str) -> Any:
        """A file that does not exist yet, numbered; earlier runs may have left some."""
        if (directory := self.directory()) is None:
            directory = private_directory() / "stacks"
            directory.mkdir(exist_ok=True)
            for old in directory.iterdir():
                if old.stat().st_mtime < time.time() - _KEPT_SECONDS:
                    old.unlink(missing_ok=True)
        while True:
            try:
                return open(directory / f"{start}-{next(self._numbers)}.txt", "x", encoding="utf-8")
            except FileExistsError:
                continue

    def write_skipped(self, steps: Iterable[SkippedStep]) -> None:
        """Append steps that are not written yet to `skipped.jsonl` in the run directory; without one, do nothing."""
        new = {(step.role, step.call, step.number): step for step in steps}
        new = {key: step for key, step in new.items() if key not in self._written}
        self._written |= new.keys()
        lines = [{name: value for name, value in asdict(step).items() if name != "call"} for step in new.values()]
        for line in lines:
            line["minibatch"] = line.pop("number")
        self.append("skipped.jsonl", lines)

    def append(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Append `lines` to a file of the run directory; without one, do nothing."""
        if not lines or (directory := self.directory()) is None:
            return
        text = "".join(json.dumps(line) + "\n" for line in lines)
        try:
            with open(directory / name, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            logger.warning("%s could not be written:\n%s", name, text, exc_info=True)
