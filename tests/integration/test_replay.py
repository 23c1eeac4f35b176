"""`hybridflow replay` on real hosts: a step of a recorded run again, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hybridflow.cluster.recorded_calls import BatchRecord, BatchRecords, RecordedProgram
from tests import tiny_models

DRIVER = Path(__file__).with_name("resuming_driver.py")
ROOT = Path(__file__).resolve().parents[2]
STEPS, STEP = 6, 4


def run_program(warm, *words: object) -> str:
    done = subprocess.run(
        [*warm.command, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | warm.environment,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def contents(run: Path) -> dict[str, bytes]:
    """All files but those of replays."""
    names = {path: str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith("replay-")}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines}


@pytest.mark.slow
def test_a_replayed_step_has_the_metrics_of_the_run(tmp_path, warm):
    """It continues from the checkpoint before, over a step without one; the run's files stay as they are."""
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": f"{'abc xyz'[i % 5 :]} k{i}"}) + "\n" for i in range(20)))
    model = tiny_models.make_policy(tmp_path / "model")
    settings = ("every=2", "asynchronous=0", "batches=1")
    driver = f"{DRIVER}:as_function"
    run_program(
        warm, ROOT / "hybridflow" / "__main__.py", "run", "--no-check", driver, run, model, prompts, STEPS, *settings
    )
    records = BatchRecords(run / "checkpoints" / "batches")
    assert records.steps == [*range(1, STEPS + 1)]
    assert BatchRecord.read(records.path(STEP, 0)).rows.rows == 16
    before = contents(run)
    told = run_program(warm, ROOT / "hybridflow" / "__main__.py", "replay", run, "--step", STEP)
    assert contents(run) == before
    assert RecordedProgram.read(records).driver == driver
    replayed = run / f"replay-{STEP}"
    assert metrics(replayed) == {step: metrics(run)[step] for step in (STEP - 1, STEP)}
    assert "\n0 of " in told, told
    methods = {json.loads(line).get("method") for line in (replayed / "events.jsonl").read_text().splitlines()}
    assert "update_actor" in methods
    assert "generate_sequences" not in methods
