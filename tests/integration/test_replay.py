"""`hybridflow replay` on real hosts: a step of a recorded run again, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from hybridflow.cluster.batch_records import BatchRecord, BatchRecords
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


def test_a_replayed_step_has_the_metrics_of_the_run(tmp_path, warm):
    """It continues from the checkpoint before; older batches are gone; the run's files stay as they are."""
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": f"{'abc xyz'[i % 5 :]} k{i}"}) + "\n" for i in range(20)))
    model = tiny_models.make_policy(tmp_path / "model")
    run_program(warm, DRIVER, run, model, prompts, STEPS, "every=1", "asynchronous=0", "batches=1")
    records = BatchRecords(run / "checkpoints" / "batches")
    assert records.steps == [5, 6]  # three checkpoints are kept: 4, 5, 6
    step, before = 6, contents(run)
    assert BatchRecord.read(records.path(step, 0)).rows.rows == 16
    told = run_program(warm, ROOT / "hybridflow" / "cli.py", "replay", run, "--step", step)
    assert contents(run) == before
    assert metrics(run / f"replay-{step}") == {step: metrics(run)[step]}
    assert "0 of " in told.splitlines()[-2], told
    assert json.loads((run / f"replay-{step}" / "events.jsonl").read_text().splitlines()[0])["kind"] == "run"
