"""Runs every recipe on its small model and prints a table of results.

    python recipes/run_all.py [SEEDS] [RECIPE ...]      make recipes SEEDS="1 2 3"

The table has the mean reward of sampled answers in the first three and the last five iterations. A recipe has
improved if it rises by 0.3; Safe-RLHF's cost must also end below its limit.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("ppo", "remax", "grpo", "safe_rlhf", "rloo", "reinforce_plus_plus", "dapo", "gspo", "async_grpo", "distill")
ALL = (*RECIPES, "tools", "game", "vision")  # the last three have tasks of their own
RISE, LIMIT, FIRST, LAST = 0.3, 0.25, 3, 5
_TIMEOUT = 1200.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of one run; `cost` is None for recipes without costs."""

    recipe: str
    seed: int
    start: float
    end: float
    cost: tuple[float, float] | None
    seconds: float

    @property
    def improved(self) -> bool:
        return self.end - self.start >= RISE and (self.cost is None or self.cost[1] < LIMIT)

    def row(self) -> str:
        cost = "" if self.cost is None else f"{self.cost[0]:.2f} to {self.cost[1]:.2f}"
        rewards, improved = f"{self.start:.3f} | {self.end:.3f}", "yes" if self.improved else "NO"
        return f"| {self.recipe} | {self.seed} | {rewards} | {cost} | {self.seconds:.0f} | {improved} |"


HEADER = "| recipe | seed | reward at the start | at the end | cost | seconds | improved |\n" + "|---" * 7 + "|"


def outcome(recipe: str, seed: int, lines: Sequence[dict[str, float]], seconds: float) -> Outcome:
    """Outcome from the lines of `metrics.jsonl`. With dynamic sampling the reward is that of all sampled answers."""

    def ends(name: str) -> tuple[float, float]:
        figures = [line[name] for line in lines]
        return mean(figures[:FIRST]), mean(figures[-LAST:])

    start, end = ends("sampling/reward" if "sampling/reward" in lines[0] else "reward/mean")
    cost = ends("cost/mean") if "cost/mean" in lines[0] else None
    return Outcome(recipe=recipe, seed=seed, start=start, end=end, cost=cost, seconds=seconds)


def run(recipe: str, seed: int) -> Outcome:
    """Run a recipe; its output goes to `runs/<recipe>-<seed>.log`. Errors: CalledProcessError, TimeoutExpired."""
    name, began = f"{recipe}-{seed}", time.perf_counter()
    home = ROOT / "runs"
    home.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), f"seed={seed}", f"name={name}"]
    with (home / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=_TIMEOUT, check=True)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()]
    return outcome(recipe, seed, lines, seconds)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__, f"Recipes: {', '.join(ALL)}.")
        return 0
    seeds = [int(argument) for argument in arguments if argument.isdigit()] or [1]
    chosen = [argument for argument in arguments if not argument.isdigit()] or list(ALL)
    if unknown := sorted({*chosen} - {*ALL}):
        sys.exit(f"there is no recipe {unknown[0]!r}: {', '.join(ALL)}.")
    print(HEADER)
    failed = 0
    for recipe, seed in itertools.product(chosen, seeds):
        try:
            found = run(recipe, seed)
        except (subprocess.SubprocessError, OSError) as error:
            failed += 1
            print(f"| {recipe} | {seed} | failed: {error}; see runs/{recipe}-{seed}.log |", flush=True)
        else:
            failed += not found.improved
            print(found.row(), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
