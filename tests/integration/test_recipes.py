"""Recipes as programs: two of them improve in a few iterations, the others run and log what they claim."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest

from recipes import run_all, tools
from recipes.small_model import SmallModel
from tests.warm_programs import WarmPrograms

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("task")]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16


def figures(warm: WarmPrograms, recipe: str, home: Path, *arguments: str) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl` that a recipe leaves in a directory of its own."""
    (home / ".cache").symlink_to(ROOT / ".cache")
    done = subprocess.run(
        [*warm.command, str(ROOT / "recipes" / f"{recipe}.py"), *arguments, "name=short"],
        cwd=home,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | warm.environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (home / "runs/short/metrics.jsonl").read_text().splitlines()]


def test_grpo_on_a_stream_improves(warm, tmp_path):
    lines = figures(warm, "async_grpo", tmp_path, f"steps={STEPS}")
    found = run_all.outcome("async_grpo", 1, lines, 0.0)
    assert found.end > found.start + 0.15, found
    assert max(line["stream/staleness_max"] for line in lines) <= 2


@pytest.mark.slow
def test_a_loop_that_is_read_improves(warm, tmp_path):
    config = f"config={ROOT}/recipes/from_config.yaml"
    lines = figures(warm, "from_config", tmp_path, config, f"steps={STEPS}", "checkpoint_every=0")
    found = run_all.outcome("from_config", 1, lines, 0.0)
    assert len(lines) == STEPS
    assert found.end > found.start + 0.1, found
    assert all("actor/kl" in line or "actor/loss" in line for line in lines)
    assert (tmp_path / "runs/short/model/config.json").is_file()


def test_safe_rlhf_lowers_the_cost_while_the_reward_rises(warm, tmp_path):
    lines = figures(warm, "safe_rlhf", tmp_path, f"steps={STEPS}")
    found = run_all.outcome("safe_rlhf", 1, lines, 0.0)
    assert found.cost is not None
    assert found.cost[0] > 0.6
    assert found.cost[1] < found.cost[0] - 0.3, found
    assert found.end > found.start + 0.15, found
    multipliers = [line["lagrange/multiplier"] for line in lines]
    rising = [line["cost/mean"] > 0.25 for line in lines[1:]]
    assert rising == [b > a for a, b in itertools.pairwise(multipliers)]
    assert {"critic/loss", "cost_critic/loss", "actor/pretrain_loss", "actor/loss"} <= set(lines[-1])


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


def test_a_calculator_is_called(warm, tmp_path):
    """A quarter of the recipe's own training before it is enough to write calls."""
    model = SmallModel(characters=tools.CHARACTERS, chat_template=tools.TEMPLATE, steps=100)
    model.write(tmp_path / "model", tools.worksheet)
    lines = figures(warm, "tools", tmp_path, "steps=2", "n=4", "minibatches=1", f"model={tmp_path / 'model'}")
    assert all(0.2 < line["environment/tool_calls"] < 0.8 for line in lines)
    assert all(line["environment/tool_errors"] < 0.3 for line in lines)
    assert all(line["reward/mean"] < 0.4 for line in lines)


def test_a_game_of_several_turns_is_played(warm, tmp_path):
    lines = figures(warm, "game", tmp_path, "steps=2", "n=4", "minibatches=1")
    assert all(0.1 < line["reward/mean"] < 0.6 for line in lines)  # guesses at random find one number in three
    assert all(2 < line["environment/turns"] <= 4 for line in lines)


@pytest.mark.parametrize(
    ("recipe", "loss", "accuracy"),
    [("sft", (0.5, 0.2), None), ("dpo", (0.69, 0.5), 0.9), ("reward_model", (0.69, 0.5), 0.8)],
)
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
