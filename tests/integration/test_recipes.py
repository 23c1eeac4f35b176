"""The main job as it is started: what it leaves behind, and controls of its rise in reward; other recipes as programs:
two of them improve in a few iterations, the others run and log what they claim.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import controls
from recipes import run_all, tools
from recipes.small_model import SmallModel
from tests.warm_programs import WarmPrograms

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


LONGER = 16


def program(test: Any) -> Any:
    """Marks tests of whole recipes."""
    return pytest.mark.slow(pytest.mark.usefixtures("task")(test))


def figures(warm: WarmPrograms, recipe: str, home: Path, *arguments: str) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl` that a recipe leaves in a directory of its own."""
    (home / ".cache").symlink_to(ROOT / ".cache")
    warm.run(ROOT / "recipes" / f"{recipe}.py", *arguments, "name=short", cwd=home)
    return [json.loads(line) for line in (home / "runs/short/metrics.jsonl").read_text().splitlines()]


@program
def test_grpo_on_a_stream_improves(warm, tmp_path):
    lines = figures(warm, "async_grpo", tmp_path, f"steps={LONGER}")
    found = run_all.outcome("async_grpo", 1, lines, 0.0)
    assert found.end > found.start + 0.15, found
    assert max(line["stream/staleness_max"] for line in lines) <= 2


@pytest.mark.slow
@program
def test_a_loop_that_is_read_improves(warm, tmp_path):
    config = f"config={ROOT}/recipes/from_config.yaml"
    lines = figures(warm, "from_config", tmp_path, config, f"steps={LONGER}", "checkpoint_every=0")
    found = run_all.outcome("from_config", 1, lines, 0.0)
    assert len(lines) == LONGER
    assert found.end > found.start + 0.1, found
    assert all("actor/kl" in line or "actor/loss" in line for line in lines)
    assert (tmp_path / "runs/short/model/config.json").is_file()


@program
def test_safe_rlhf_lowers_the_cost_while_the_reward_rises(warm, tmp_path):
    lines = figures(warm, "safe_rlhf", tmp_path, f"steps={LONGER}")
    found = run_all.outcome("safe_rlhf", 1, lines, 0.0)
    assert found.cost is not None
    assert found.cost[0] > 0.6
    assert found.cost[1] < found.cost[0] - 0.3, found
    assert found.end > found.start + 0.15, found
    multipliers = [line["lagrange/multiplier"] for line in lines]
    rising = [line["cost/mean"] > 0.25 for line in lines[1:]]
    assert rising == [b > a for a, b in itertools.pairwise(multipliers)]
    assert {"critic/loss", "cost_critic/loss", "actor/pretrain_loss", "actor/loss"} <= set(lines[-1])


@program
def test_dapo_draws_until_groups_differ_on_a_model_and_prompts_of_ones_own(warm, tmp_path, task):
    """Parquet prompts with other columns, a reward function in a file, and held-out prompts in JSONL."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [json.loads(line) for line in task.train.read_text().splitlines()]
    columns = {"question": [r["prompt"] for r in records], "solution": [r["answer"] for r in records]}
    pq.write_table(pa.table(columns), tmp_path / "prompts.parquet")
    held_out = [dict(zip(columns, pair, strict=True)) for pair in list(zip(*columns.values(), strict=True))[:9]]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
    (tmp_path / "judge.py").write_text(
        "def right(completions, solution):\n    return [c == s for c, s in zip(completions, solution)]\n"
    )
    lines = figures(
        *(
            warm,
            "dapo",
            tmp_path,
            "steps=2",
            "rows=32",
            "batch_size=4",
            "n=4",
            f"model={task.model}",
            "prompts=prompts.parquet",
        ),
        *("held_out=held_out.jsonl", "data.prompt=question", "data.max_prompt_tokens=8", "reward=judge.py:right"),
    )
    assert len(lines) == 2
    for line in lines:
        assert line["sampling/rounds"] >= 2
        assert line["sampling/filled"] < 1
        assert {"sampling/reward", "reward/task/mean", "reward/overlong/mean", "actor/clip_fraction"} <= set(line)
    assert set(json.loads((tmp_path / "runs/short/notes.json").read_text())) == {"accuracy_before", "accuracy_after"}


@program
def test_a_calculator_is_called(warm, tmp_path):
    """A quarter of the recipe's own training before it is enough to write calls."""
    model = SmallModel(characters=tools.CHARACTERS, chat_template=tools.TEMPLATE, steps=100)
    model.write(tmp_path / "model", tools.worksheet)
    lines = figures(warm, "tools", tmp_path, "steps=2", "n=4", "minibatches=1", f"model={tmp_path / 'model'}")
    assert all(0.2 < line["environment/tool_calls"] < 0.8 for line in lines)
    assert all(line["environment/tool_errors"] < 0.3 for line in lines)
    assert all(line["reward/mean"] < 0.4 for line in lines)


@program
def test_a_game_of_several_turns_is_played(warm, tmp_path):
    lines = figures(warm, "game", tmp_path, "steps=2", "n=4", "minibatches=1")
    assert all(0.1 < line["reward/mean"] < 0.6 for line in lines)  # guesses at random find one number in three
    assert all(2 < line["environment/turns"] <= 4 for line in lines)


@pytest.mark.parametrize(
    ("recipe", "loss", "accuracy"),
    [("sft", (0.5, 0.2), None), ("dpo", (0.69, 0.5), 0.9), ("reward_model", (0.69, 0.5), 0.8)],
)
@program
def test_recipes_that_learn_from_texts_lower_the_held_out_loss(warm, tmp_path, recipe, loss, accuracy):
    lines = [line for line in figures(warm, recipe, tmp_path, "devices=[2]") if "held_out/loss" in line]
    notes = json.loads((tmp_path / "runs/short/notes.json").read_text())
    assert notes["loss_before"] > loss[0]
    assert notes["loss_after"] == pytest.approx(lines[-1]["held_out/loss"])
    assert notes["loss_after"] < loss[1]
    assert notes["best_checkpoint"].startswith("step-")
    if accuracy is not None:
        assert notes["accuracy_before"] == 0.0
        assert lines[-1]["held_out/accuracy"] > accuracy
    assert (tmp_path / "runs/short/model/config.json").exists()
