"""Every program of benchmarks/ runs with its smallest sizes and prints one JSON line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {
    "calls": "--rows 8 --repeats 1 --layouts 1,1,2",
    "checkpoints": "--repeats 1 --rows 2 --directory {tmp}",
    "controller": "--ranks 2 --megabytes 0.1 --repeats 1 --calls 10 --many-ranks 8",
    "controls": "steps=10 batch_size=8 devices=[1]",
    "elastic": "--prompts 8 --n 2 --minibatches 2 --median 8 --iterations 1 --rounds 1",
    "elastic_policies": "--devices 8 --seeds 1",
    "environments": "--sessions 10 --turns 1",
    "fault_simulation": "--devices 16 --days 1 --seeds 2",
    "generation": "--repeats 1 --models 0.6M",
    "generation_sizes": "--rows 8 --repeats 1",
    "iteration": "--iterations 2 --devices 1",
    "loops": "--rows 8 --n 2 --median 8 --iterations 1 --warm-up 1 --rounds 1 --repeats 1",
    "paper": "",
    "packing": "--rows 8 --repeats 1",
    "planner": "--devices 16 --budgets 1",
    "planner_findings": "",
    "planner_truth": "--placements 1 --repeats 1 --iterations 1 --warm 1 --budget 1",
    "reallocation": "--repeats 1",
    "rewards": "--rows 20 --programs 2",
    "streams": "--batches 4 --rows 8 --n 2 --median 8 --warm-up 1 --rounds 1",
    "throughput": "--rows 8 --warm-up 1 --iterations 1",
    "timesharing": "--repeats 1 --slot 0.01 --rows 4",
    "train_step": "--repeats 1",
    "transition": "--repeats 1",
}


def test_every_program_is_run():
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert programs == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_program_prints_its_line(name, tmp_path):
    words = ARGUMENTS[name].format(tmp=tmp_path).split()
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        capture_output=True, text=True, timeout=800, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = done.stdout.splitlines()
    assert json.loads(line)["benchmark"] == name
