"""RunDisplay: a run's iterations on the console; the reward curve as a picture."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hybridflow.cluster import startup

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


class RunDisplay:
    """Shows each iteration, with a progress bar when `total` is known. `console` defaults to standard output."""

    def __init__(self, total: int | None = None, console: Console | None = None) -> None:
        self._console = console or Console()
        self._rewards: list[float] = []
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("iteration"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task("iteration", total=total)

    def iteration(self, figures: Mapping[str, float]) -> None:
        """Show the metrics of one iteration, as `Tracker` writes them; missing ones are left out."""
        startup.started()
        if "reward/mean" in figures:
            self._rewards.append(figures["reward/mean"])
        if not self._console.is_terminal:
            shown = [f"{name} {form.format(figures[key])}" for name, key, form in _SHOWN if key in figures]
            line = f"step {figures['step']:g}  " + "  ".join(shown) + f"  ({self._stages(figures).plain})"
            self._console.print(line.removesuffix("  ()"), soft_wrap=True, highlight=False)
            return
        self._progress.update(self._task, completed=int(figures["step"]))
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.update(Group(self._progress, self._table(figures), self._stages(figures)))

    def samples(self, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """A table of rows; texts are shown as they are, without markup."""
        if not rows:
            return
        table = Table(title=title, title_justify="left", show_lines=False)
        names = list(dict.fromkeys(name for row in rows for name in row))
        for name in names:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_cell(row.get(name))) for name in names))
        with self._console.capture() as printed:
            self._console.print(table)
        # another live display may be on the screen: it has replaced sys.stdout to print above itself
        (sys.stdout if self._console.is_terminal else self._console.file).write(printed.get())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self, figures: Mapping[str, float]) -> Table:
        table = Table(show_edge=False, pad_edge=False, box=None)
        values = []
        for name, key, form in _SHOWN:
            if key in figures:
                table.add_column(name, justify="right")
                values.append(form.format(figures[key]))
        table.add_column("reward so far")
        table.add_row(*values, sparkline(self._rewards[-60:]))
        return table

    def _stages(self, figures: Mapping[str, float]) -> Text:
        stages = [
            f"{key.rpartition('.')[2]} {value:.2f}"
            for key, value in figures.items()
            if key.startswith("time/") and key not in _NO_STAGE and key.count("/") == 1
        ]
        return Text("  ".join(stages), style="dim")


def sparkline(values: Sequence[float]) -> str:
    """One character per value, scaled from the lowest to the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in values)


def _cell(value: Any) -> str:
    plain = value.tolist() if hasattr(value, "tolist") else value
    return f"{plain:.3g}" if isinstance(plain, float) else str(plain)


def drawn_curve(points: Sequence[tuple[int, float]], window: int = 5) -> bytes:
    """The mean reward over iterations, and its mean over `window` iterations, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    smooth = [sum(rewards[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(rewards))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="iteration", ylabel="mean reward", title="Reward")
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, marker="o", markersize=3, label="each iteration")
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of {window}")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(png := io.BytesIO())
    return png.getvalue()
