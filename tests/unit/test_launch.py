"""`hybridflow run` of drivers as users write them: with `main`, as a script, with settings of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hybridflow as hf
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.placement import GroupPlacement, Placement
from hybridflow.tracing.trace import check_driver
from recipes.small_model import SmallModel

ROOT = Path(__file__).resolve().parents[2]


def hybridflow(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hybridflow", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env=env)


MAIN = '''"""Mine."""
import sys
import hybridflow as hf

def main(arguments):
    tracker = hf.Tracker("out/mine", console=False)
    tracker.note(given=" ".join(arguments))
    print("main", arguments, sys.argv[1:])
    tracker.finish()

if __name__ == "__main__":
    raise SystemExit("not this one")
'''
SCRIPT = '''"""A script."""
import sys
import hybridflow as hf

def main():
    print("script", sys.argv[1:])

hf.Tracker("out/script", console=False)
main()
sys.exit()
'''
WRONG = """
import hybridflow as hf
def main():
    hf.ResourcePool(2)
    hf.Sampling(n=0)
"""


@pytest.mark.parametrize(
    ("text", "said"), [(MAIN, "main ['a=1', '--b'] ['a=1', '--b']"), (SCRIPT, "script ['a=1', '--b']")]
)
def test_a_driver_is_shown_runs_once_and_says_where_everything_is(tmp_path: Path, text: str, said: str):
    (tmp_path / "mine.py").write_text(text)
    done = hybridflow("mine.py", "a=1", "--b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(said) == 1  # what the check prints is dropped
    assert "loading libraries" in done.stdout
    assert "checking the settings" in done.stdout
    name = "mine" if text is MAIN else "script"
    assert f"metrics      out/{name}/metrics.jsonl" in done.stdout
    assert ("given: a=1 --b" in done.stdout) == (text is MAIN)
    unchecked = hybridflow("--no-check", "mine.py", cwd=tmp_path)
    assert "checking the settings" not in unchecked.stdout


def test_errors_of_settings_are_a_paragraph_with_the_line(tmp_path: Path):
    (tmp_path / "mine.py").write_text(WRONG)
    done = hybridflow("mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mine.py, line 5: Sampling(n=0)")
    assert "Traceback" not in done.stderr
    (tmp_path / "mine.py").write_text("def main(): raise ZeroDivisionError('mine')\n")
    done = hybridflow("mine.py", cwd=tmp_path)
    assert (done.returncode, "ZeroDivisionError: mine" in done.stderr, "Traceback" in done.stderr) == (1, True, True)
    for name, message in (("none.py", "there is no driver none.py"), ("mine.py:other", "has no function 'other'")):
        done = hybridflow(name, cwd=tmp_path)
        assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_help_is_the_drivers(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MAIN)
    plain = hybridflow("mine.py", "--help", cwd=tmp_path)
    assert plain.stdout == "Mine.\n\nThe driver gets all arguments as they are.\n"
    (tmp_path / "mine.py").write_text(f"{MAIN}\nDEFAULTS = 'steps: 3  # iterations'\n")
    assert "steps=3" in hybridflow("mine.py", "--help", cwd=tmp_path).stdout
    wrong = hybridflow("mine.py", "stpes=4", cwd=tmp_path)
    assert wrong.stderr == "mine.py: there is no setting 'stpes'. Did you mean 'steps'?\n"
    assert hybridflow(str(ROOT / "recipes" / "grpo.py"), "--help", cwd=tmp_path).stdout.startswith("GRPO (Shao")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("small")
    SmallModel(steps=0).write(home / "model", lambda rng: ("1+1=", "2"))
    return str(home / "model")


def positive(batch: hf.BatchRef) -> hf.BatchRef:
    return batch[[i for i, reward in enumerate(batch["rewards"].get()) if reward > 0]]


def best_of_each_group(batch: hf.BatchRef) -> hf.BatchRef:
    found = batch.get(["group_id", "rewards"])
    best = dict[int, int]()
    for row, group in enumerate(found["group_id"].tolist()):
        if found["rewards"][row] > found["rewards"][best.get(group, row)] or group not in best:
            best[group] = row
    return batch[[row for row in best.values() if found["rewards"][row] > 0.5]]


def masked(batch: hf.BatchRef) -> hf.BatchRef:
    return batch[batch["rewards"].get() > 0]


def long_texts(batch: hf.BatchRef) -> hf.Batch:
    found = batch.get()
    return found[[i for i, text in enumerate(found["response"]) if "answer" in text]]


def refused(batch: hf.BatchRef) -> hf.BatchRef:
    if float(batch.get("rewards")["rewards"].mean()) < 0.1:
        raise hf.errors.ConfigError("this model learns nothing")
    return batch


def drawn_again(batch: hf.BatchRef) -> hf.BatchRef:
    while not float(batch["rewards"].get().mean()):
        batch = batch.without("rewards") | reward_of(batch)
    return batch


def reward_of(batch: hf.BatchRef) -> hf.BatchRef:
    return hf.RewardWorker.on(hf.ResourcePool(1), function=lambda completions: completions).compute_reward(batch)


@pytest.mark.parametrize("choose", [positive, best_of_each_group, masked, long_texts, refused, drawn_again])
def test_a_driver_that_uses_results_is_not_refused_for_made_up_ones(model: str, choose):
    reached = list[bool]()

    def main(read: bool) -> None:
        pool = hf.ResourcePool(1)
        actor = hf.ActorWorker.on(
            pool, model=model, optim=hf.Adam(lr=1e-5), generate=hf.VLLM(sampling=hf.Sampling(max_tokens=4))
        )
        reward = hf.RewardWorker.on(pool, function=lambda completions: [1.0] * len(completions))
        for prompts in hf.PromptLoader([{"prompt": "1+1="}] * 8, batch_size=4, tokenizer=load_tokenizer(model)):
            batch = actor.generate_sequences(prompts, n=4)
            batch |= reward.compute_reward(batch)
            batch |= actor.compute_log_prob(batch)
            batch |= hf.compute_advantage(batch, "grpo")
            reached.append(True)
            actor.update_actor(choose(batch) if read else batch, minibatches=7 if not read else 2)

    check_driver(main, True)
    assert reached
    with pytest.raises(hf.errors.HybridFlowError, match="minibatches=7"):
        check_driver(main, False)


@pytest.mark.parametrize("later", [False, True])
def test_models_read_token_ids_of_their_own_tokenizer(model: str, tmp_path: Path, later: bool):
    """Another order of the same tokens fits the sizes, and would give values of other texts."""
    other = SmallModel(steps=0, characters="9876543210+= ")
    other.write(tmp_path / "other", lambda rng: ("1+1=", "2"))

    def main(critic: str) -> None:
        pool = hf.ResourcePool(1)
        places = [
            lambda: hf.ActorWorker.on(pool, model=model, generate=hf.VLLM()),
            lambda: hf.CriticWorker.on(pool, model=critic),
        ]
        for place in reversed(places) if later else places:
            place()

    check_driver(main, model)
    with pytest.raises(ConfigError, match=r"(?s)critic has the model .*other, whose tokenizer is not .*'\d' is token"):
        check_driver(main, str(tmp_path / "other"))


def test_a_driver_may_exit_in_its_check():
    def main(read: bool, code: object) -> None:
        batch = reward_of(hf.BatchRef.from_batch(hf.Batch({"prompt": ["a"], "response": ["b"]})))
        if read:
            batch.get()
        sys.exit(code)  # type: ignore[arg-type]

    check_driver(main, False, 0)
    check_driver(main, True, "bad results")
    with pytest.raises(SystemExit):
        check_driver(main, False, "bad settings")


def test_the_function_keeps_its_name_beside_the_package_of_runs():
    """`hybridflow.run` is a package, too, whose import binds its name."""
    code = "import hybridflow as hf; hf.Run; import hybridflow.run.replay; assert callable(hf.run), hf.run"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


PLACED = """
import hybridflow as hf

def score(completions):
    return [1.0] * len(completions)

def main():
    reward = hf.RewardWorker.on(hf.ResourcePool(1), function=score)
    print("placed on", reward.members)
    hf.shutdown()
"""


def test_a_driver_runs_with_a_placement_of_a_file(tmp_path: Path):
    nodes = (2,)
    (tmp_path / "mine.py").write_text(PLACED)
    for group in ("reward", "rewards"):
        Placement(nodes, {group: GroupPlacement((1,), nodes)}).save(tmp_path / f"{group}.yaml")
    done = hybridflow("--placement", "reward.yaml", "mine.py", cwd=tmp_path)
    assert done.stdout.splitlines().count("placed on (1,)") == 1, done.stderr
    said = {
        "rewards": "a group 'rewards', which the driver does not place. Did you mean 'reward'?",
        "none": "none.yaml",
    }
    for file, text in said.items():
        done = hybridflow("--placement", f"{file}.yaml", "mine.py", cwd=tmp_path)
        assert done.returncode == 2
        assert text in " ".join(done.stderr.split())
        assert "Traceback" not in done.stderr
