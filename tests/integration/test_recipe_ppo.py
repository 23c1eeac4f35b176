"""The main job: the recipe as it is started, what it leaves behind, and controls of its rise in reward."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import controls

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
LIMIT = 0.05


@dataclass(frozen=True)
class Finished:
    """Where a run kept its files, and what it said."""

    home: Path
    output: str


def start(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes/ppo.py"), *arguments],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def run(task, tmp_path_factory) -> Finished:
    """A short run of the recipe in a directory of its own."""
    home = tmp_path_factory.mktemp("recipe")
    (home / ".cache").symlink_to(ROOT / ".cache")
    evaluated = ("--evaluate-every", "1", "checkpoint_every=1")
    done = start(home, f"steps={STEPS}", "batch_size=32", "actor.optim.weight_decay=0.1", "name=short", *evaluated)
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(home / "runs/short", done.stdout)


def test_one_line_of_figures_per_iteration(run):
    lines = [json.loads(line) for line in (run.home / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert 0 <= line["reward/mean"] <= 1
        assert line["actor/rollout_log_prob_diff"] < 1e-3
        assert {"kl/ref", "response/length_mean", "perf/tokens_per_second", "actor/grad_norm", "critic/loss"} <= set(
            line
        )
    assert abs(lines[0]["kl/ref"]) < 1e-4 < abs(lines[-1]["kl/ref"])


def test_what_a_run_shows_and_keeps(run):
    for step in range(1, STEPS + 1):
        assert f"step {step} " in run.output
    assert (run.home / "reward.png").read_bytes().startswith(b"\x89PNG")
    notes = json.loads((run.home / "notes.json").read_text())
    assert set(notes) >= {"accuracy_before", "accuracy_after"}
    samples = [json.loads(line) for line in (run.home / "samples.jsonl").read_text().splitlines()]
    assert all({"prompt", "response", "answer", "rewards"} <= set(sample) for sample in samples)


def test_a_run_shows_its_start_and_says_where_everything_is(run):
    said = run.output
    stages = ("loading libraries", "checking the settings", "starting Ray", "starting host processes", "actor: loading")
    places = [said.index(text) for text in (*stages, "first iteration", "step 1 ", "The run has ended")]
    assert places == sorted(places)
    scores = [json.loads(line)["held_out/reward"] for line in (run.home / "metrics.jsonl").read_text().splitlines()]
    assert f"held_out/reward {max(scores):.3f}" in said
    assert "weight_decay: 0.1" in (run.home / "config.yaml").read_text()


def test_the_trained_model_is_a_hugging_face_directory(run, task):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (task.model, run.home / "model"))
    weights = before.state_dict()
    moved = {name: float((tensor - weights[name]).abs().max()) for name, tensor in after.state_dict().items()}
    assert min(moved.values()) > 0
    ids = torch.tensor(AutoTokenizer.from_pretrained(run.home / "model")("3+4=")["input_ids"])[None]
    assert after.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_a_wrong_setting_ends_before_anything_starts(tmp_path):
    done = start(tmp_path, "stpes=3")
    assert done.returncode != 0
    assert "there is no setting 'stpes'. Did you mean 'steps'?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("control", "seeds", "steps"),
    [
        ("none", (1,), 14),
        pytest.param("lr=0", (1,), 10, marks=pytest.mark.slow),
        pytest.param("shuffled", (1, 2), 10, marks=pytest.mark.slow),
    ],
)
def test_reward_rises_from_learning_only(pool, settle, task, control, seeds, steps):
    """It rises as the recipe is; without updates, or with rewards that belong to other rows, it stays where it is."""
    settle()
    settings = [controls.settings_of("batch_size=512", f"steps={steps}", f"seed={seed}") for seed in seeds]
    runs = [controls.rewards(pool[:2], task, each, control) for each in settings]
    assert all(0.1 < means[0] < 0.4 for means in runs)
    rise = statistics.mean(map(controls.rise, runs))
    if control == "none":
        assert rise > 3 * LIMIT, runs
    else:
        assert abs(rise) < LIMIT, runs
