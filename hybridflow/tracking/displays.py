"""Displays: on one console StartDisplay until the first iteration is done, then RunDisplay; LivePlot in a notebook."""

from __future__ import annotations

import base64
import importlib
import io
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hybridflow.cluster import startup
from hybridflow.settings import is_number
from hybridflow.tracking.kept_files import as_document, replace_file

logger = logging.getLogger(__name__)
QUIET_SECONDS = 4.0
"""On plain output a line follows after this time."""
_MOST_RUNS = 64  # runs whose durations are kept
_SHOWN_SECONDS = 0.05  # shorter stages get no line on a terminal once they are over
_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("KL", "kl/ref", "{:.4f}"),
    ("length", "response/length_mean", "{:.1f}"),
    ("tokens/s", "perf/tokens_per_second", "{:,.0f}"),
    ("drift", "actor/rollout_log_prob_diff", "{:.1e}"),
    ("s/iteration", "time/iteration", "{:.2f}"),
)
_NO_STAGE = ("time/iteration", "time/total")
_BARS = "▁▂▃▄▅▆▇█"
_PLOT_SECONDS = 1.0  # between two pictures
_PLOT_SIZE = (4.5, 3.0)  # inches, of each metric


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
        self.last = self._read().get(run, {})

    def _read(self) -> dict[str, dict[str, float]]:
        """By run; without what is damaged."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        runs = {run: own for run, own in found.items() if isinstance(own, dict)} if isinstance(found, dict) else {}
        good = {run for run, own in runs.items() if all(is_number(s) and 0 <= s < 1e9 for s in own.values())}
        return {run: own for run, own in runs.items() if run in good}

    def write(self, seconds: dict[str, float]) -> None:
        """Keep the seconds of these stages for the next start; a file that cannot be written is left out."""
        runs = self._read()
        runs[self.run] = runs.pop(self.run, {}) | {name: round(value, 2) for name, value in seconds.items()}
        try:
            replace_file(self.path, as_document(dict(list(runs.items())[-_MOST_RUNS:])))
        except OSError as error:
            logger.debug("%s cannot be written: %s", self.path, error)


class StartDisplay:
    """Shows stages while they run: with `startup.listening(StartDisplay("runs/first")): ...`

    On a terminal the stages are a live list. Elsewhere each begins with a line, and a line follows after every
    `QUIET_SECONDS` without one. The durations are kept beside the run's directory, in `.stages.json`.
    """

    def __init__(self, directory: str | os.PathLike[str], console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stdout)
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
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._table, refresh_per_second=4)
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
        """The duration of the last start, if it is known and at least half a second."""
        seconds = self._file.last.get(name, 0.0)
        return form.format(f"{seconds:.0f} s last time") if seconds >= 0.5 else ""

    def _keep_speaking(self) -> None:
        while not self._over.wait(max(0.1, QUIET_SECONDS - (time.monotonic() - self._spoke))):
            with self._lock:
                if time.monotonic() - self._spoke < QUIET_SECONDS or self._over.is_set():
                    continue
                text = "..."
                if self._open:
                    one = self._open[-1]
                    progress = f", {one.progress}" if one.progress else ""
                    text = f"{one.name}: {one.seconds:.0f} s{self._before(one.name, ', {}')}{progress}"
                self._say(text)

    def _say(self, text: str) -> None:
        """Print a line, except on a terminal."""
        self._spoke = time.monotonic()
        if self._live is None:
            with suppress(OSError, ValueError):  # the output may be closed
                _print_line(self.console, Text(f"{self._spoke - self._start:6.1f} s  {text}"))

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


class RunDisplay:
    """Shows each iteration, with a progress bar when `total` is known. `console` defaults to that of the start, and
    without one to standard output."""

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        self._console = console or startup.console() or Console()
        self._rewards: list[float] = []
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("iteration"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task("iteration", total=total)

    def iteration(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of one iteration, as `Tracker` writes them; missing ones are left out."""
        startup.started()
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if not self._console.is_terminal:
            shown = [f"{name} {form.format(metrics[key])}" for name, key, form in _SHOWN if key in metrics]
            line = f"step {metrics['step']:g}  " + "  ".join(shown) + f"  ({self._stages(metrics).plain})"
            _print_line(self._console, line.removesuffix("  ()"))
            return
        self._progress.update(self._task, completed=int(metrics["step"]))
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.update(Group(self._progress, self._table(metrics), self._stages(metrics)))

    def samples(self, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """A table of rows; texts are shown as they are, without markup."""
        if not rows:
            return
        table = Table(title=title, title_justify="left", show_lines=False)
        names = list(dict.fromkeys(name for row in rows for name in row))
        for name in names:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_short(row.get(name))) for name in names))
        # a live display on the screen adds itself to what its console prints, and has replaced sys.stdout, above it
        shown, terminal = io.StringIO(), self._console.is_terminal
        Console(file=shown, width=self._console.width, force_terminal=terminal).print(table)
        (sys.stdout if terminal else self._console.file).write(shown.getvalue())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, metrics: Mapping[str, float]) -> Table:
        table = Table(show_edge=False, pad_edge=False, box=None)
        values = []
        for name, key, form in _SHOWN:
            if key in metrics:
                table.add_column(name, justify="right")
                values.append(form.format(metrics[key]))
        table.add_column("reward so far")
        table.add_row(*values, sparkline(self._rewards[-60:]))
        return table

    def _stages(self, metrics: Mapping[str, float]) -> Text:
        stages = [
            f"{key.rpartition('.')[2]} {value:.2f}"
            for key, value in metrics.items()
            if key.startswith("time/") and key not in _NO_STAGE and key.count("/") == 1
        ]
        return Text("  ".join(stages), style="dim")


def sparkline(values: Sequence[float]) -> str:
    """One character per value, scaled from the lowest to the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in values)


def _short(value: Any) -> str:
    plain = value.tolist() if hasattr(value, "tolist") else value
    return f"{plain:.3g}" if isinstance(plain, float) else str(plain)


def _print_line(console: Console, text: str | Text) -> None:
    console.print(text, soft_wrap=True, highlight=False)


class LivePlot:
    """Curves of the metrics `names` over iterations. A cell that ends with it shows the picture, which then follows the
    run; `png()` is the picture of now."""

    def __init__(self, names: Sequence[str]) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        self._shown: Any = None
        self._drawn = -math.inf

    def iteration(self, line: Mapping[str, Any]) -> None:
        """The metrics of one iteration, `step` among them."""
        for name, points in self.points.items():
            value = line.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                points.append((int(line["step"]), float(value)))
        if time.monotonic() - self._drawn > _PLOT_SECONDS:
            self.close()

    def close(self) -> None:
        """Bring the shown picture up to date."""
        if self._shown is None:
            return
        try:
            self._shown.update(self._picture(), raw=True)
        except Exception:  # a notebook that was closed, or no font
            logger.warning("the plot cannot be drawn", exc_info=True)
            self._shown = None
        self._drawn = time.monotonic()

    def forget(self, step: int) -> None:
        """Drop the points after this iteration, which are computed again."""
        self.points = {name: [point for point in points if point[0] <= step] for name, points in self.points.items()}

    def png(self) -> bytes:
        figure = _figure(_PLOT_SIZE[0] * len(self.points), _PLOT_SIZE[1])
        for i, (name, points) in enumerate(self.points.items(), 1):
            axes = figure.add_subplot(1, len(self.points), i, xlabel="iteration", title=name)
            axes.plot([step for step, _ in points], [value for _, value in points], marker="o", markersize=3)
            axes.grid(alpha=0.3)
        return _png(figure)

    def _picture(self) -> dict[str, str]:
        return {"image/png": base64.b64encode(self.png()).decode(), "text/plain": repr(self)}

    def _ipython_display_(self) -> None:
        display = importlib.import_module("IPython.display").display
        self._shown = display(self._picture(), raw=True, display_id=True)

    def __repr__(self) -> str:
        latest = [f"{name} {points[-1][1]:.4g}" for name, points in self.points.items() if points]
        return f"LivePlot({', '.join(latest) or 'no iteration yet'})"


def drawn_curve(points: Sequence[tuple[int, float]], window: int = 5) -> bytes:
    """The mean reward over iterations, and its mean over `window` iterations, as a PNG."""
    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    smooth = [sum(rewards[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(rewards))]
    figure = _figure(7, 4)
    axes = figure.add_subplot(xlabel="iteration", ylabel="mean reward", title="Reward")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, marker="o", markersize=3, label="each iteration")
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of {window}")
    axes.grid(alpha=0.3)
    axes.legend()
    return _png(figure)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(png := io.BytesIO())
    return png.getvalue()
