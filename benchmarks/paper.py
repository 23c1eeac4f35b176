"""The papers' figures that this machine can make: each measured here beside its prediction and the published one.

Runs other programs with sizes that fit a CPU, for about seven minutes; on a node of eight GPUs give these programs
the papers' sizes. What needs more devices than are here says so. Writes a table to stderr and prints one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
GPUS, OTHER = "needs GPUs", "of other sizes"
LIMIT = 300  # seconds of a program


class Row(NamedTuple):
    """A figure of a paper: what is measured here, what the planner says, and what was published."""

    figure: str
    what: str
    here: str
    predicted: str
    published: str


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def throughput(found: dict[str, Any]) -> Iterator[Row]:
    what = f"{found['algorithm']}, small model on {found['devices']} processes"
    yield Row("HybridFlow 9; ReaL 8.1", what, f"{found['tokens_per_second']} tokens/s", "-", OTHER)


def placements(found: dict[str, Any]) -> Iterator[Row]:
    for name, row in found["placements"].items():
        yield Row("HybridFlow 12", f"PPO, {name}", _seconds(row["measured"]), _seconds(row["predicted"]), OTHER)


def calls(found: dict[str, Any]) -> Iterator[Row]:
    for layout, rows in found["layouts"].items():
        for name, row in rows.items():
            here, calibrated = _seconds(row["measured"]), f"{_seconds(row['calibrated'])} (calibrated)"
            yield Row("ReaL, tables 1 and 6", f"{name} at {layout}", here, calibrated, OTHER)


def generation_sizes(found: dict[str, Any]) -> Iterator[Row]:
    for size, row in found["t_g"].items():
        here = f"{_seconds(row['generation'])} + {_seconds(row['transition'])}"
        yield Row("HybridFlow 15", f"t = {found['t']}, t_g = {size}", here, _seconds(row["predicted"]), OTHER)


def transition(found: dict[str, Any]) -> Iterator[Row]:
    for way in (name for name in found if isinstance(found[name], dict) and "seconds" in found[name]):
        yield Row("HybridFlow 14", f"transition 1-4-1 to 1-2-2-1, {way}", _seconds(found[way]["seconds"]), "-", OTHER)


def planner_findings(found: dict[str, Any]) -> Iterator[Row]:
    for finding, value in found.items():
        if isinstance(value, dict) and "holds" in value:
            yield Row("HybridFlow 12 and 15", finding, GPUS, "holds" if value["holds"] else "does not hold", "holds")
    scaling = found["strong scaling"]
    what = "scaling efficiency to 128 A100, mean of four sizes"
    yield Row("HybridFlow 9", what, GPUS, f"{scaling['mean']}", f"{scaling['published']}")


PROGRAMS: tuple[tuple[Callable[[dict[str, Any]], Iterator[Row]], str], ...] = (
    *((throughput, f"--algorithm {name} --warm-up 3 --iterations 3") for name in ("ppo", "remax", "grpo --n 4")),
    (placements, "--placements 4 --repeats 1 --iterations 2 --warm 1"),
    (calls, "--repeats 2"),
    (generation_sizes, "--repeats 2"),
    (transition, "--repeats 3"),
    (planner_findings, ""),
)
NAMES = {placements: "planner_truth"}


def run(name: str, words: str) -> dict[str, Any] | str:
    """The line of a program, or why there is none."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *words.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return f"took more than {LIMIT} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows, failed, start = list[Row](), False, time.perf_counter()
    for rows_of, words in PROGRAMS:
        name = NAMES.get(rows_of, rows_of.__name__)
        print(f"{time.perf_counter() - start:5.0f} s  benchmarks.{name} {words}", file=sys.stderr, flush=True)
        found = run(name, words)
        failed |= isinstance(found, str)
        rows += [Row(name, words, found, "-", "-")] if isinstance(found, str) else rows_of(found)
    heading = Row("figure", "what", "here", "predicted", "published")
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    for row in (heading, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), file=sys.stderr)
    result = {
        "benchmark": "paper",
        "seconds": round(time.perf_counter() - start),
        "rows": [row._asdict() for row in rows],
    }
    print(json.dumps(result))
    sys.exit(failed)


if __name__ == "__main__":
    main()
