"""Recipes without a cluster: how long they are, what settings they take, and what scores their answers."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from ray import cloudpickle

import hybridflow as hf
from hybridflow.cli.command_line import help_text
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.tracing.trace import check_driver
from recipes import arithmetic, from_config, game, grpo, ppo, run_all, safe_rlhf, scorers, settings, task, tools
from recipes.small_model import SmallModel

ROOT = Path(__file__).resolve().parents[2]
LINES = {"safe_rlhf": 14}  # with the line of the `for`


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_the_algorithm_is_a_loop_of_a_few_lines(recipe):
    tree = ast.parse((ROOT / "recipes" / f"{recipe}.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    lines = loop.body[-1].end_lineno - loop.lineno + 1
    assert lines <= LINES.get(recipe, 10)
    assert ("compute_advantage" if recipe != "distill" else "teach") in ast.unparse(loop)
    assert "update_actor" in ast.unparse(loop)


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward_model"])
def test_recipes_that_learn_from_texts_have_loops_of_a_few_lines(recipe):
    tree = ast.parse((ROOT / "recipes" / f"{recipe}.py").read_text())
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    assert loop.body[-1].end_lineno - loop.lineno + 1 <= 4
    found = importlib.import_module(f"recipes.{recipe}")
    small, own = (settings.read(found.DEFAULTS, given, found.SMALL) for given in ([], ["model=x", "text_tokens=99"]))
    assert (small.text_tokens, own.text_tokens, small.name) == (64, 99, recipe)
    with pytest.raises(ConfigError, match=r"model=x and texts=None: give both"):
        found.main(["model=x"])
    with pytest.raises(ConfigError, match="there is no setting 'prompts'"):
        settings.read(found.DEFAULTS, ["prompts=x"])


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_settings_are_named_and_wrong_ones_refused(recipe):
    defaults = importlib.import_module(f"recipes.{recipe}").DEFAULTS
    cfg = settings.read(defaults, ["steps=3", "actor.optim.lr=1e-4", "actor.train.recompute=true", "data.split=train"])
    assert (cfg.name, cfg.steps, cfg.actor.optim.lr, cfg.data.split, cfg.seed) == (recipe, 3, 1e-4, "train", 1)
    assert hf.Megatron(**cfg.actor.train).recompute
    for wrong, message in (
        ("stpes=3", "there is no setting 'stpes'. Did you mean 'steps'"),
        ("actor.optm.lr=1", "there is no setting 'actor.optm.lr'. Did you mean 'actor.optim.lr'"),
        ("data=x", "replaces the settings prompt, answer"),
        ("steps", "'steps' is no setting: write key=value"),
        ("steps=many", "steps=many: give a whole number, such as 200"),
        ("lr=1", "there is no setting 'lr'. Did you mean 'actor.optim.lr'"),
        ("actor.optim.beta=1", "there is no setting 'actor.optim.beta'. Did you mean 'actor.optim.betas'"),
        ("actor.train.zero=1", "there is no setting 'actor.train.zero'. Known: tp, pp, dp"),
        ("actor.optim.lr=-1", r"actor.optim: Adam\(lr=-1\): must be at least 0"),
        ("--step=3", r"there is no setting 'step'. Did you mean 'steps'\?"),
        ("devices=[2", r"devices=\[2: while parsing"),
        ("actor=3", "actor=3 replaces the settings "),
        ("actor.train.stage_layers=[1,1]", r"actor.train: Megatron\(stage_layers=\(1, 1\)\): give one whole number"),
        ("evaluate_every=15", "checkpoint_every as a multiple of"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings.read(defaults, [wrong])


@pytest.mark.parametrize("recipe", run_all.RECIPES)
@pytest.mark.parametrize(("context", "longest"), [(256, 128), (40_960, 1024)])
def test_sizes_of_the_small_model_are_its_own(recipe, context, longest, tmp_path):
    """A user's model has responses as long as its context allows, and rates of the field."""
    found = importlib.import_module(f"recipes.{recipe}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": context}))
    small = settings.read(found.DEFAULTS, [], found.SMALL)
    own = settings.read(found.DEFAULTS, [f"model={tmp_path}"], found.SMALL)
    for cfg, tokens, most in ((small, 5, 1e-3), (own, longest, 1e-5)):
        assert (cfg.rollout if recipe == "async_grpo" else cfg.actor).generate.sampling.max_tokens == tokens
        assert all(cfg[role].optim.lr <= most for role in ("actor", "critic", "cost_critic") if role in cfg)
    assert small.steps < own.steps
    assert small.actor.optim.lr > own.actor.optim.lr
    chosen = settings.read(found.DEFAULTS, ["steps=7", "actor.optim.lr=0.25"], found.SMALL)
    assert (chosen.steps, chosen.actor.optim.lr) == (7, 0.25)


def test_unknown_settings_are_looked_for_in_comments():
    with pytest.raises(ConfigError, match=r"no setting 'batch_size'. Did you mean 'rows' \(of a batch: "):
        settings.read(importlib.import_module("recipes.async_grpo").DEFAULTS, ["batch_size=4"])


def test_all_recipes_have_help(capsys):
    assert run_all.main(["--help"]) == 0
    assert "Recipes: ppo, " in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [grpo, tools, game])
def test_help_takes_no_library(recipe):
    code = (
        "import runpy, sys; sys.argv[1:] = ['--help']\n"
        f"runpy.run_path({recipe.__file__!r}, run_name='__main__')\n"
        "print(sorted({'torch', 'ray', 'rich', 'transformers', 'vllm'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout == help_text(str(recipe.__doc__), *recipe.DEFAULTS)


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_help_describes_every_setting(recipe):
    found = importlib.import_module(f"recipes.{recipe}")
    lines = help_text(found.__doc__, *found.DEFAULTS).splitlines()
    assert lines[0] == found.__doc__.splitlines()[0]
    for key, value in (pair for text in found.DEFAULTS for pair in OmegaConf.create(text).items()):
        shown = [line for line in lines if line.startswith((f"  {key}=", f"  {key}."))]
        assert shown, key
        assert isinstance(value, DictConfig) or "   " in shown[0].strip(), f"{key} has no comment"
    for option in ("micro_tokens=16384", "schedule=constant", "temperature=1.0", "max_length=null"):
        assert f"  {option}" in lines


def read(*arguments: str):
    return settings.read(grpo.DEFAULTS, arguments)


def test_settings_are_written_in_three_ways_and_the_last_wins(tmp_path):
    for form in (["steps=5"], ["--steps=5"], ["--steps", "5"], ["steps=7", "--steps", "5"]):
        assert read(*form).steps == 5
    assert read("--batch-size", "4", "--actor.optim.lr", "-0").batch_size == 4
    (tmp_path / "my.yaml").write_text(
        "steps: 9\nactor: {optim: {lr: 1.0e-3}, train: {pp: 2}}\ndata: {prompt: question}\n"
    )
    for form in ([f"config={tmp_path}/my.yaml"], ["--config", f"{tmp_path}/my.yaml"], [f"--config={tmp_path}/my.yaml"]):
        cfg = read("n=2", "steps=3", *form, "actor.optim.lr=1e-4")
        assert (cfg.n, cfg.steps, cfg.actor.optim.lr, cfg.actor.train) == (2, 9, 1e-4, {"tp": 2, "pp": 2})
        assert (cfg.data.prompt, cfg.data.answer) == ("question", "answer")
    (tmp_path / "again.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    assert read(f"config={tmp_path}/again.yaml") == OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("actor: {optim: {warmup: 1}}", "no setting 'actor.optim.warmup'. Did you mean 'actor.optim.warmup_steps'"),
        ("actor: 3", "actor=3 replaces the settings train, generate, optim"),
        ("- 3", "write settings as `key: value` lines"),
        ("just words", "write settings as `key: value` lines|there is no setting 'just words'"),
        ("a: [", "is not valid YAML"),
        ("steps: !!python/name:os.system", r"a YAML tag \('!'\) names a type"),
    ],
)
def test_wrong_files_of_settings_are_refused(tmp_path, content, message):
    (tmp_path / "my.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(f"config={tmp_path}/my.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read("config=nowhere.yaml")


@hypothesis.settings(max_examples=20)
@given(st.lists(st.sampled_from(["steps", "n", "clip", "actor.optim.lr", "actor.generate.sampling.top_k"]), max_size=8))
def test_the_last_value_of_each_key_wins(keys):
    cfg = read(*(f"{'--' * (i % 2)}{key}={i + 1}" for i, key in enumerate(keys)))
    for key in keys:
        assert OmegaConf.select(cfg, key) == max(i + 1 for i, other in enumerate(keys) if other == key)


def test_schedules_end_with_the_run():
    assert "total_steps" not in read().actor.optim
    linear = ("actor.optim.schedule=linear", "steps=30", "minibatches=4")
    assert read(*linear).actor.optim.total_steps == 120
    assert read(*linear, "actor.optim.total_steps=50").actor.optim.total_steps == 50
    assert settings.read(ppo.DEFAULTS, [*linear, "epochs=2"]).actor.optim.total_steps == 240
    assert settings.read(safe_rlhf.DEFAULTS, linear).actor.optim.total_steps == 150  # and one on texts each


def test_the_directory_of_a_run_is_its_name_or_a_path(tmp_path, monkeypatch):
    assert settings.directory(read()) == Path("runs/grpo")
    assert settings.directory(read("name=a/b")) == Path("a/b")
    assert settings.directory(read(f"name={tmp_path}")) == tmp_path
    assert settings.directory(read("name=./b")) == Path("b")
    monkeypatch.setenv("HYBRIDFLOW_STAGING", str(tmp_path))
    assert settings.directory(read("name=s3://bucket/b")) == tmp_path / "s3/bucket/b"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """Arguments for a model without training, and prompts for it."""
    home = tmp_path_factory.mktemp("small")
    SmallModel(steps=0).write(home / "model", lambda rng: ("1+1=", "2"))
    (home / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 20)
    return [f"model={home}/model", f"prompts={home}/train.jsonl", f"name={home}/run"]


@pytest.mark.parametrize("recipe", run_all.RECIPES)
def test_a_recipe_is_tried_before_anything_starts(recipe, small):
    more = [f"teacher={small[0].removeprefix('model=')}"] if recipe == "distill" else []
    check_driver(importlib.import_module(f"recipes.{recipe}").main, [*small, *more])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("minibatches=7", r"minibatches=7\): the batch has 256 rows, which would be 4 mini-batches of 37 rows"),
        ("minibatches=500", "every mini-batch needs a row"),
        ("n=1", "reads 'group_id'"),
        ("n=0", r"Sampling\(n=0\)"),
        ("clip=-1", r"PPO\(clip=-1\)"),
        ("actor.generate.sampling.max_tokens=64", "max_tokens=64 leaves no room for a prompt"),
        ("actor.train.tp=3", "the pool has 2"),
        ("actor.generate.tp=2", ""),
        ("model=nowhere", "the checkpoint directory nowhere does not exist|nowhere"),
        ("evaluate_every=5", "needs held-out prompts"),
    ],
)
def test_settings_of_later_calls_are_refused_before_anything_starts(wrong, message, small):
    with nullcontext() if not message else pytest.raises(HybridFlowError, match=message):
        check_driver(grpo.main, [*small, wrong])


def test_drivers_that_cannot_be_tried_are_not_refused():
    def unlucky() -> None:
        hf.ResourcePool(1)
        raise ZeroDivisionError

    check_driver(unlucky)
    check_driver(lambda: hf.ResourcePool(1).events())


def test_errors_of_settings_are_a_paragraph_and_others_keep_their_traceback(tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(PROGRAM)

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(program), *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    wrong = start("--step=3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "mine.py: there is no setting 'step'. Did you mean 'steps'?\n"
    refused = start("fails=config")
    assert (refused.returncode, refused.stderr) == (2, "mine.py, line 8: two words\n")
    failed = start("fails=else")
    assert failed.returncode == 1
    assert "Traceback" in failed.stderr
    assert "loading libraries" in failed.stdout


PROGRAM = """'Mine.'
from hybridflow.errors import ConfigError
import hybridflow as hf
from recipes import settings
DEFAULTS = settings.defaults("{name: mine, steps: 3, fails: nothing}")
def main(arguments):
    if settings.read(DEFAULTS, arguments).fails == "config":
        raise ConfigError("two\\n  words")
    raise ZeroDivisionError
hf.run(main)
"""


def test_a_run_keeps_its_settings_and_notes(tmp_path):
    cfg = read(f"name={tmp_path}/run", "evaluate_every=5")
    with pytest.raises(ConfigError, match=r"evaluate_every=5 needs held-out prompts: give held_out=\."):
        settings.run(cfg)
    cfg.evaluate_every = 0
    run = settings.run(cfg)
    run.tracker.note(accuracy_before=0.5)
    settings.finish(run)
    assert json.loads((tmp_path / "run" / "notes.json").read_text()) == {"accuracy_before": 0.5}
    assert read(f"config={tmp_path}/run/config.yaml").actor == cfg.actor


def config(*arguments: str):
    return settings.read(settings.defaults("name: test"), arguments)


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


@pytest.mark.parametrize("recipe", run_all.ALL)
@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 8])
def test_sizes_that_are_not_given_fit_the_devices_that_are_there(recipe, gpus, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    defaults = importlib.import_module(f"recipes.{recipe}").DEFAULTS
    cfg = settings.read(defaults, [])
    pools = [cfg[name] for name in ("devices", "train_devices", "rollout_devices") if name in cfg]
    assert not gpus or sum(map(sum, pools)) <= gpus
    first = (gpus + len(pools) - 1) // len(pools) if gpus else 2
    assert pools[0] == [min(2, first)]
    for options in cfg.values():
        if isinstance(options, DictConfig) and "train" in options and "tp" in options.train:
            assert hf.Megatron(**options.train).grid(pools[0][0]).size == pools[0][0]
            assert options.train.tp == (1 if recipe in ("tools", "game", "vision") else pools[0][0])


@pytest.mark.parametrize(("devices", "tp"), [("[1]", 1), ("[3]", 1), ("[4]", 2), ("[8,8]", 2), ("[2,1]", 1)])
def test_tensor_parallelism_that_is_not_given_follows_the_devices(devices, tp):
    cfg = settings.read(ppo.DEFAULTS, [f"devices={devices}"])
    assert (cfg.actor.train.tp, cfg.critic.train.tp, cfg.reference.train.tp) == (tp, tp, tp)
    assert settings.read(ppo.DEFAULTS, [f"devices={devices}", "actor.train.tp=1"]).actor.train.tp == 1


@pytest.mark.parametrize("devices", ["2", "two", "[two]", "[2.5]", "[true]", "[[2]]"])
def test_devices_that_are_no_list_of_numbers_are_refused_with_the_cure(devices):
    with pytest.raises(ConfigError, match=r"devices=.*: give .* each node as a list, such as devices=\[2\]"):
        settings.read(ppo.DEFAULTS, [f"devices={devices}"])


def test_the_accuracy_of_dapo_is_that_of_the_task():
    """Not of the rewards that its length penalty has shaped; a row that it leaves out does not count."""

    class Answers(dict[str, Any]):
        def __or__(self, other: Any) -> Any:
            return Answers({**self, **other})

        def select(self) -> hf.Batch:
            return hf.Batch({"rewards": self["rewards"]}).select()

        def get(self, names: Any) -> Any:  # type: ignore[override]
            return hf.Batch({name: self[name] for name in names})

    class Reward:
        @staticmethod
        def compute_reward(batch: Any) -> dict[str, torch.Tensor]:
            return {"rewards": torch.tensor([0.2, 0.0, 0.0]), "rewards/task": torch.tensor([1.0, 0.0, math.nan])}

    class Actor:
        @staticmethod
        def generate_sequences(batch: hf.Batch, **sampling: Any) -> Any:
            return Answers(prompt=batch["prompt"])

    noted: dict[str, float] = {}
    tracker: Any = SimpleNamespace(samples=lambda *rows, **title: None, note=noted.update)
    actor, reward, prompts = cast(Any, Actor), cast(Any, Reward), [{"prompt": text} for text in "abc"]
    held_out = hf.HeldOut(actor, reward, prompts, every=1, column="rewards/task")
    held_out.measure("after", tracker)
    assert noted["accuracy_after"] == 0.5
    assert held_out.after(1).get() == {"held_out/reward": 0.5}
    assert 'column="rewards/task"' in (Path(run_all.__file__).parent / "dapo.py").read_text()


CONFIG = f"config={ROOT}/recipes/from_config.yaml"


def config_file(tmp_path: Path, was: str, now: str) -> str:
    """The example with one change."""
    text = (ROOT / "recipes" / "from_config.yaml").read_text()
    assert was in text
    (tmp_path / "mine.yaml").write_text(text.replace(was, now))
    return f"config={tmp_path}/mine.yaml"


def test_a_loop_that_is_read_is_tried_before_anything_starts(small, capsys):
    check_driver(from_config.main, [CONFIG, *small])
    assert len((ROOT / "recipes" / "from_config.py").read_text().splitlines()) < 50
    assert "loop=[]" in help_text(from_config.__doc__ or "", *from_config.DEFAULTS)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ("batch_size: 16", "batch_sise: 16", "no setting 'batch_sise'.*Did you mean 'batch_size'"),
        ("lr: 5.0e-5", "lrr: 5.0e-5", "no setting 'actor.optim.lrr'.*'actor.optim.lr'"),
        ("actor.compute_log_prob", "actr.compute_log_prob", "loop: 'actr' is no role. Did you mean 'actor'"),
        ("actor.compute_log_prob", "actor.compute_log_probs", "actor has no operation.*'compute_log_prob'"),
        ("- compute_advantage", "- compute_advantages", "no call. Did you mean 'compute_advantage'"),
        ("estimator: grpo", "estimator: gropo", "estimator 'gropo' is unknown. Did you mean 'grpo'"),
        ("{n: 8}", "{nn: 8}", "nn"),
        ("clip: 0.2", "clp: 0.2", "Did you mean 'clip'"),
        ("  - reward.compute_reward", "", "give calls of the actor and of the reward"),
        (
            "  - reward.compute_reward",
            "  - reward.compute_reward\n  - actor.generate_sequences",
            "overwrite the answers",
        ),
        ("  - actor.update_actor:", "  - actor.compute_log_prob:", "no call updates a model"),
        ("  - reward.compute_reward", "  - 7", "7 is no call. Write lines like"),
        ("  - reward.compute_reward", "  - {reward.compute_reward: 3}", "is no call"),
        ("  - reference.compute_ref_log_prob", "", "ref_log_probs"),
        ("reward: exact", "reward: no_module_here:score", "No module named 'no_module_here'"),
        ("reward: exact", "reward: tests.called_rewards:no_function", "no_function.*Give MODULE:FUNCTION"),
    ],
)
def test_what_is_misspelt_in_a_file_is_refused_before_anything_starts(was, now, message, small, tmp_path, capfd):
    with pytest.raises(HybridFlowError, match=message):
        check_driver(from_config.main, [config_file(tmp_path, was, now), *small])
    assert "starting" not in "".join(capfd.readouterr())


def test_a_loop_is_asked_for(small):
    with pytest.raises(ConfigError, match=r"loop: give calls.*from_config\.yaml"):
        check_driver(from_config.main, small)


def test_a_reward_of_a_module(small):
    assert scorers.load("math:sqrt")(4) == 2
    check_driver(from_config.main, [CONFIG, *small, "reward=tests.unit.test_recipe_settings:mine"])


def mine(completions: list[str], answer: list[str]) -> list[float]:
    return [float(one == other) for one, other in zip(completions, answer, strict=True)]
