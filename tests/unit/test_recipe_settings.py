"""Recipes without a cluster: how long they are, what settings they take, and what scores their answers."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

import hybridflow as hf
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from recipes import arithmetic, run_all, safe_rlhf, scorers, settings, task

ROOT = Path(__file__).resolve().parents[2]
LINES = {"safe_rlhf": 16}


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_the_algorithm_is_a_loop_of_a_few_lines(recipe):
    tree = ast.parse((ROOT / "recipes" / f"{recipe}.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    lines = loop.body[-1].end_lineno - loop.body[0].lineno + 1
    assert lines <= LINES.get(recipe, 11)
    assert ("compute_advantage" if recipe != "distill" else "teach") in ast.unparse(loop)
    assert "update_actor" in ast.unparse(loop)


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_settings_are_named_and_wrong_ones_refused(recipe):
    defaults = importlib.import_module(f"recipes.{recipe}").DEFAULTS
    cfg = settings.read(defaults, ["steps=3", "actor.optim.lr=1e-4", "actor.train.recompute=true", "data.split=train"])
    assert (cfg.name, cfg.steps, cfg.actor.optim.lr, cfg.data.split, cfg.seed) == (recipe, 3, 1e-4, "train", 1)
    assert hf.Megatron(**cfg.actor.train).recompute
    for wrong, message in (
        ("stpes=3", "there is no setting 'stpes'. Did you mean 'steps'"),
        ("actor.optm.lr=1", "there is no setting 'actor.optm.lr'. Did you mean 'optim'"),
        ("data=x", "replaces the settings prompt, answer"),
        ("steps", "'steps' is no setting: write key=value"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings.read(defaults, [wrong])


def config(*arguments: str):
    return settings.read("name: test", arguments)


def test_a_model_or_prompts_alone_are_refused():
    for alone in ("model=somewhere", "prompts=some.jsonl"):
        with pytest.raises(ConfigError, match="give both, a model and prompts"):
            task.of(config(alone))


def test_prompts_and_columns_are_those_asked_for():
    job = task.of(
        config(
            *("model=m", "prompts=openai/gsm8k", "held_out=openai/gsm8k", "reward=math", "data.name=main"),
            *("data.prompt=question", "data.split=train", "data.held_out_split=test", "data.max_prompt_tokens=64"),
        )
    )
    assert (job.model, job.train, job.held_out) == ("m", "openai/gsm8k", "openai/gsm8k")
    both = {"prompt": "question", "name": "main"}
    assert job.columns == both | {"split": "train", "max_prompt_tokens": 64, "tokenizer": "m"}
    assert job.held_out_columns == both | {"split": "test"}
    assert isinstance(job.reward["function"], hf.rewards.Math)


def test_verifiers_are_chosen_by_name_and_read_the_column_named():
    found = scorers.scorer(config("data.answer=solution", "scoring.workers=2", "scoring.timeout=3"), "reward")
    assert found["function"].reads == ("solution",)
    assert (found["workers"], found["timeout"], found["on_failure"]) == (2, 3, "raise")
    assert set(found) == {"function", "workers", "timeout", "on_failure"}
    digits = scorers.scorer(config("reward=regex", r"data.pattern=(\d+)"), "reward")["function"]
    assert digits(["a"], ["so 7"], answer=["7"]) == [1.0]


def test_a_directory_is_a_reward_model(tmp_path):
    found = scorers.scorer(config(f"reward={tmp_path}", "scoring.train.tp=2", "model=actor"), "reward")
    assert found == {"model": str(tmp_path), "train": hf.Megatron(tp=2), "tokenizer": "actor"}
    with pytest.raises(ConfigError, match="overlong can only be added to rewards of functions"):
        scorers.together(found, overlong=len)


FILE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Judge:
    good: float

def half() -> float:
    return Judge(0.5).good

def mine(prompts, completions):
    return [half() if text else 0.0 for text in completions]

nothing = 3
"""


def test_a_function_in_a_file_travels_to_other_processes(tmp_path):
    path = tmp_path / "json.py"  # the name of a module is no hindrance
    path.write_text(FILE)
    function = scorers.scorer(config(f"reward={path}:mine"), "reward")["function"]
    assert function(["a"], ["b"]) == [0.5]
    (tmp_path / "pickled").write_bytes(cloudpickle.dumps(function))
    path.unlink()
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(['a'], ['b']))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pickled")], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert (done.stdout.strip(), done.stderr) == ("[0.5]", "")


def test_what_scores_nothing_is_refused(tmp_path):
    (tmp_path / "file.py").write_text(FILE)
    for wrong, message in (
        ("exakt", "reward=exakt is not one of exact, math.* Did you mean 'exact'"),
        (f"{tmp_path}/none.py:mine", "there is no file"),
        (f"{tmp_path}/file.py:mien", "has no function 'mien'. Did you mean 'mine'"),
        (f"{tmp_path}/file.py:nothing", "has no function 'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            scorers.scorer(config(f"reward={wrong}"), "reward")


def test_functions_are_added_under_names():
    found = scorers.together(scorers.scorer(config(), "reward"), overlong=len)
    assert list(found["function"]) == ["task", "overlong"]
    assert isinstance(found["function"]["task"], hf.rewards.Exact)


def test_the_cost_of_arithmetic_is_that_of_large_numbers():
    cost = scorers.scorer(config() | {"cost": "too_large"}, "cost")["function"]
    assert cost(completions=["6", "5", "4", "", "5+"], answer=["5"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_texts_are_worksheets_or_what_was_asked_for(tmp_path):
    """For arithmetic worksheets as the model knows them; else prompts with their answers, or texts of one's own."""
    files = arithmetic.make(ROOT / ".cache")
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1=2"}\n' * 9)

    def batch(*arguments: str) -> hf.Batch:
        cfg = settings.read(safe_rlhf.DEFAULTS, [*arguments, "batch_size=8"])
        return next(task.texts(cfg, task.of(cfg)).drawn())

    sheets = batch()
    assert len(sheets) == 8
    assert int(sheets["num_tokens"].max()) <= len("29+29=59") + 1
    own = (f"model={files.model}", f"prompts={files.train}")
    answered = batch(*own)
    for prompt, response in zip(answered["prompt_ids"].tolist(), answered["response_ids"].tolist(), strict=True):
        a, b = load_tokenizer(files.model).decode([prompt])[0].removesuffix("=").split("+")
        assert load_tokenizer(files.model).decode([response]) == [str(int(a) + int(b))]
    texts = batch(*own, f"texts={tmp_path / 'texts.jsonl'}")
    assert texts["response_ids"].lengths.tolist() == [len("+1=2") + 1] * 8


def test_a_run_is_judged_by_its_first_and_last_iterations():
    lines = [{"reward/mean": r, "cost/mean": c} for r, c in (*[(0.2, 0.8)] * 3, *[(0.51, 0.2)] * 5)]
    found = run_all.outcome("safe_rlhf", 1, lines, 12.3)
    assert (found.start, found.end) == pytest.approx((0.2, 0.51))
    assert found.cost == pytest.approx((0.8, 0.2))
    assert found.improved
    assert found.row() == "| safe_rlhf | 1 | 0.200 | 0.510 | 0.80 to 0.20 | 12 | yes |"
    assert not run_all.outcome("safe_rlhf", 1, [line | {"cost/mean": 0.3} for line in lines], 1.0).improved
    selected = [line | {"sampling/reward": 0.1} for line in lines]
    assert not run_all.outcome("dapo", 1, selected, 1.0).improved
