"""LivePlot: curves of a run's metrics that grow in a notebook while its loop runs."""

from __future__ import annotations

import base64
import importlib
import io
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)
_SECONDS = 1.0  # between two pictures
_SIZE = (4.5, 3.0)  # inches, of each metric


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
        if time.monotonic() - self._drawn > _SECONDS:
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
        figure = _figure(_SIZE[0] * len(self.points), _SIZE[1])
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
