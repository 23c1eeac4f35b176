"""`hybridflow new` writes a program that runs on its own, from a checkout and from an installed package."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hybridflow.cli.commands import main, recipes_directory, write_recipe
from hybridflow.errors import ConfigError
from recipes.game import NUMBERS, Game, worksheet

ROOT = Path(__file__).resolve().parents[2]
HELPERS = {"arithmetic.py", "made_files.py", "scorers.py", "settings.py", "sizes.py", "small_model.py", "task.py"}


def run(home: Path, path: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_recipe_is_written_with_what_it_imports(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipes_directory() == ROOT / "recipes"
    assert main(["new", "grpo", "my_run.py"]) == 0
    assert "python my_run.py --help lists its settings" in capsys.readouterr().out
    assert {one.name for one in (tmp_path / "recipes").iterdir()} == HELPERS
    (tmp_path / "recipes" / "task.py").write_text("# mine\n" + (tmp_path / "recipes" / "task.py").read_text())
    written, kept = write_recipe("sft", "other.py")
    assert "task.py" not in {one.name for one in written}
    assert Path("recipes/settings.py") in kept
    assert main(["new", "ppo", "third.py"]) == 0
    assert "kept as they were: recipes/" in capsys.readouterr().out
    assert [one.name for one in written] == ["other.py", "texts.py"]
    assert (tmp_path / "recipes" / "task.py").read_text().startswith("# mine\n")
    assert "clip=0.2" in run(tmp_path, str(ROOT), "my_run.py", "--help")


def test_a_recipe_that_reads_a_file_is_written_with_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written, _ = write_recipe("from_config", "my_run.py")
    assert {"my_run.py", "calls.py", "from_config.yaml"} <= {one.name for one in written}
    text = (ROOT / "recipes" / "from_config.yaml").read_text()
    assert (tmp_path / "recipes" / "from_config.yaml").read_text() == text
    assert "loop=[]" in run(tmp_path, str(ROOT), "my_run.py", "--help")


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("grop", "a.py", "there is no recipe 'grop'. Did you mean 'grpo'"),
        ("settings", "a.py", "there is no recipe 'settings'"),
        ("grpo", "there.py", "there.py: give a new file of Python"),
        ("grpo", "none/a.py", "give a new file of Python in a folder that is there"),
        ("grpo", "a.txt", "give a new file of Python"),
        ("grpo", str(ROOT / "a.py"), "has the recipes themselves"),
    ],
)
def test_wrong_requests_are_refused(tmp_path, monkeypatch, name, target, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("")
    with pytest.raises(ConfigError, match=message):
        write_recipe(name, target)
    assert [one.name for one in tmp_path.iterdir()] == ["there.py"]


def test_what_is_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "link.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(ConfigError, match="give a new file"):
        write_recipe("grpo", str(tmp_path / "link.py"))
    assert not (tmp_path / "outside.py").exists()
    (tmp_path / "recipes").write_text("mine")
    with pytest.raises(ConfigError, match="recipes is there and no folder"):
        write_recipe("grpo", str(tmp_path / "a.py"))
    assert not (tmp_path / "a.py").exists()


@pytest.mark.slow
def test_the_installed_package_has_the_recipes(tmp_path):
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\0"):
        if name.startswith(("hybridflow/", "recipes/", "pyproject", "setup.py", "README", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(source, "", "-c", build, str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as found:
        found.extractall(tmp_path / "site")
    run(tmp_path, str(tmp_path / "site"), "-m", "hybridflow", "new", "dpo", "mine.py")
    assert "beta=0.1" in run(tmp_path, str(tmp_path / "site"), "mine.py", "--help")


def test_halving_finds_every_number_with_four_guesses():
    for number in range(NUMBERS):
        game, low, high = Game(), 0, NUMBERS - 1
        assert game.reset(number) is None
        for _ in range(4):
            guess = (low + high) // 2
            answer, reward, done = game.step(str(guess))
            if done:
                break
            low, high = (guess + 1, high) if answer == "h" else (low, guess - 1)
        assert (reward, done) == (1.0, True)


def test_drawn_answers_do_not_depend_on_the_number():
    counts = []
    for number in (0, 9):
        random.seed(3)
        game = Game(shuffled=True)
        game.reset(number)
        counts.append([game.step("5")[0] for _ in range(100)])
    assert counts[0] == counts[1]
    assert 30 < counts[0].count("h") < 70


def test_a_worksheet_is_a_game_that_has_not_ended():
    rng = random.Random(0)
    for _ in range(100):
        said, (guess,) = worksheet(rng)
        assert said[0] == "?"
        assert len(said) % 3 == 1
        assert 0 <= int(guess) < NUMBERS
