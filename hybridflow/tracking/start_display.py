"""StartDisplay: what a driver does before its first iteration, on the console, and how long it took the last time."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hybridflow.tracking.kept_files import as_document

logger = logging.getLogger(__name__)
QUIET_SECONDS = 4.0
"""On plain output a line follows after this time."""
_MOST_RUNS = 64  # runs whose durations are kept
_SHOWN_SECONDS = 0.05  # shorter stages get no line on a terminal once they are over


@dataclass
class _RunningStage:
    name: str
    begin: float = field(default_factory=time.monotonic)
    progress: str = ""
    inner: float = 0.0  # seconds of the stages within

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin


class LastDurations:
    """Seconds of the stages of the last start, for each run: a small JSON file that may be missing or damaged."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        self.last = {name: float(value) for name, value in self._read().get(run, {}).items()}

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        runs = found.items() if isinstance(found, dict) else ()
        return {run: stages for run, stages in runs if isinstance(stages, dict) and all(map(_is_time, stages.values()))}

    def write(self, seconds: dict[str, float]) -> None:
        """Keep the seconds of these stages for the next start; a file that cannot be written is left out."""
        runs = self._read()
        runs[self.run] = runs.pop(self.run, {}) | {name: round(value, 2) for name, value in seconds.items()}
        try:
            with tempfile.NamedTemporaryFile("wb", dir=self.path.parent, delete=False) as file:
                file.write(as_document(dict(list(runs.items())[-_MOST_RUNS:])))
            os.replace(file.name, self.path)
        except OSError as error:
            logger.debug("%s cannot be written: %s", self.path, error)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


class StartDisplay:
    """Shows stages while they run: with `startup.listening(StartDisplay("runs/first")): ...`

    On a terminal the stages are a live list. Elsewhere each begins with a line, and a line follows after every
    `QUIET_SECONDS` without one. The durations are kept beside the run's directory, in `.stages.json`.
    """

    def __init__(self, directory: str | os.PathLike[str], console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout)
        path = Path(os.path.abspath(directory))
        self.started = False  # whether the first iteration is done
        self.directory: Path | None = None
        self._file = LastDurations(path.parent / ".stages.json", path.name)
        self._start = time.monotonic()
        self._open: list[_RunningStage] = []
        self._done: list[tuple[str, float]] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._spinner = Spinner("dots")
        self._live: Live | None = None
        self._spoke = self._start
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._table, refresh_per_second=4)
            self._live.start()
        else:
            threading.Thread(target=self._keep_speaking, name="start-display", daemon=True).start()

    def begin(self, name: str) -> None:
        with self._lock:
            if name not in [one.name for one in self._open]:
                self._open.append(_RunningStage(name))
                self._say(f"{name}{self._before(name, ' ({})')}")

    def end(self, name: str, failed: bool) -> None:
        with self._lock:
            found = next((one for one in reversed(self._open) if one.name == name), None)
            if found is not None:
                self._open.remove(found)
                if self._open:
                    self._open[-1].inner += found.seconds
                if not failed:
                    self._done.append((name, found.seconds - found.inner))

    def progress(self, text: str) -> None:
        with self._lock:
            if self._open:
                self._open[-1].progress = text

    def close(self, started: bool) -> None:
        """Keeps the durations, and ends the display. Stages that are open have ended if the driver has `started`."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            self.started = started
            for one in reversed(list(self._open)):
                self.end(one.name, failed=not started)
        if self._live is not None:
            self._live.stop()
        if self._done:
            self._file.write(dict(self._done))

    def _before(self, name: str, form: str) -> str:
        """The duration of the last time, if it is known and long enough to matter."""
        seconds = self._file.last.get(name, 0.0)
        return form.format(f"{seconds:.0f} s last time") if seconds >= 0.5 else ""

    def _keep_speaking(self) -> None:
        while not self._over.wait(max(0.1, QUIET_SECONDS - (time.monotonic() - self._spoke))):
            with self._lock:
                if time.monotonic() - self._spoke >= QUIET_SECONDS and not self._over.is_set():
                    self._say(self._current())

    def _current(self) -> str:
        if not self._open:
            return "..."
        one = self._open[-1]
        progress = f", {one.progress}" if one.progress else ""
        return f"{one.name}: {one.seconds:.0f} s{self._before(one.name, ', {}')}{progress}"

    def _say(self, text: str) -> None:
        """Print a line, except on a terminal."""
        self._spoke = time.monotonic()
        if self._live is None:
            with suppress(OSError, ValueError):  # the output may be closed
                line = Text(f"{self._spoke - self._start:6.1f} s  {text}")
                self._console.print(line, soft_wrap=True, highlight=False)

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        with self._lock:
            for name, seconds in self._done:
                if seconds >= _SHOWN_SECONDS:
                    table.add_row(Text("✓", style="green"), Text(name), Text(f"{seconds:.1f} s", style="dim"))
            for one in [] if self._over.is_set() else self._open:
                text = f"{one.seconds:.1f} s{self._before(one.name, ', {}')}"
                table.add_row(self._spinner, Text(one.name), Text(text, style="dim"))
            if self._open and (text := self._open[-1].progress):
                table.add_row("", Text(text, style="dim", overflow="ellipsis", no_wrap=True), "")
        return table
