"""Environments in another interpreter, which has neither hybridflow nor torch."""

import os
import select
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hybridflow import environments
from hybridflow.environments.acting import EnvironmentLoop
from hybridflow.environments.agent import Agent
from hybridflow.errors import ConfigError
from tests.session_runs import call, run

GAMES = '''
"""Games that another interpreter has."""
import os, sys, time
from typing import List, Literal, Optional


class Guess:
    def __init__(self, most=9):
        print("noise on standard output")
        self.most = most

    def reset(self, number):
        self.number = number
        return f"Guess a number up to {self.most}."

    def step(self, text):
        guess = int(text)
        if self.number == 5:
            print("no fives", file=sys.stderr)
            os._exit(3)
        if self.number == 6:
            time.sleep(1000)
        if self.number == 7:
            return "x" * 10_000_000, 0.0, False
        if self.number == 8:
            raise KeyError("eight")
        return ("higher" if guess < self.number else "lower"), float(guess == self.number), guess == self.number


class Shop:
    def reset(self, **row):
        self.bought, self.closed = [], False
        return str(sorted(row))

    def buy(self, name: str, count: int = 1, sizes: Optional[List[int]] = None, how: Literal["now", "later"] = "now"):
        """Buy a product.

        Args:
            name: Its name.
            count: How many.
            sizes: Of each.
            how: When.
        """
        if name == "nothing":
            raise ValueError("there is nothing")
        self.bought.append(name)
        return f"{os.getpid()} {'torch' in sys.modules} {count}"

    def get_reward(self):
        return len(self.bought)


class Bare:
    def reset(self):
        return "no reward"


class Undescribed(Shop):
    def sell(self, name):
        """Sell it."""
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("interpreter")
    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")


@pytest.fixture(scope="module")
def games(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("games") / "games.py"
    file.write_text(GAMES)
    return str(file)


def test_a_game_of_another_interpreter(python, games, checkpoint):
    made = environments.process(python, f"{games}:Guess", most=30)
    asked = []

    def says(row, turn, heard):
        asked.append(heard)
        return str(turn)

    rows = [{"number": number} for number in (0, 2, 20)]
    found = run(EnvironmentLoop(made, 4), checkpoint, rows, says)
    assert [(one.ending.stop, one.ending.reward, one.trajectory.turns) for one in found] == [
        ("done", 1.0, 1), ("done", 1.0, 3), ("turns", 0.0, 4),
    ]  # fmt: skip
    assert any("up to 30" in heard for heard in asked)


def test_tools_of_another_interpreter(python, games, checkpoint):
    made = environments.process(python, f"{games}:Shop")
    (schema,) = Agent(environment=made).act.schemas
    assert schema["function"]["description"] == "Buy a product."
    parameters = schema["function"]["parameters"]
    assert parameters["required"] == ["name"]
    assert parameters["properties"] == {
        "name": {"type": "string", "description": "Its name."},
        "count": {"type": "integer", "description": "How many."},
        "sizes": {"type": "array", "items": {"type": "integer"}, "nullable": True, "description": "Of each."},
        "how": {"type": "string", "enum": ["now", "later"], "description": "When."},
    }
    heard_last = []

    def says(row, turn, heard):
        heard_last.append(heard)
        calls = [call("buy", name="tea", count=2), call("buy", name="nothing"), call("buy", size=1)]
        return calls[turn] if turn < 3 else "done"

    (one,) = run(EnvironmentLoop(made, 5), checkpoint, [{"prompt": "Go."}], says)
    assert (one.failure, one.ending.reward) == (None, 1.0)
    assert one.ending.metrics == {"tool_calls": 3.0, "tool_errors": 2.0}
    assert "False 2\n" in heard_last[-1]
    assert str(os.getpid()) not in heard_last[-1]
    assert "Error: ValueError: there is nothing" in heard_last[-1]
    assert "Error: TypeError" in heard_last[-1]
    assert "['prompt']" in heard_last[-1]


def test_processes_that_die_or_are_late_fail_alone(python, games, checkpoint):
    made = environments.process(python, f"{games}:Guess")
    rows = [{"number": number} for number in (5, 6, 7, 8, 1, 1, 1)]
    died, hung, large, raised, *fine = run(
        EnvironmentLoop(made, 4), checkpoint, rows, lambda _, turn, __: str(turn), 5.0
    )
    last = "noise on standard output\nno fives"
    assert died.failure == f"the process of Guess exited with code 3; it printed last: {last}"
    assert hung.failure == "Guess.step took longer than 5 s"
    assert large.failure is not None
    assert "at most 262144 characters are read" in large.failure
    assert raised.failure is not None
    assert raised.failure.startswith("raised KeyError: 'eight' (games.py:")
    assert [(one.failure, one.ending.reward) for one in fine] == [(None, 1.0)] * 3
    assert not running(games)  # nothing outlives the processes of the sessions


def running(games: str) -> list[str]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(line)] * (games.encode() in line.read_bytes())
        except OSError:
            continue
    return found


def test_a_hung_process_ends_with_its_parent(python, games, tmp_path):
    """The parent is killed while the environment sleeps."""
    program = (
        "import asyncio, sys\n"
        "from hybridflow import environments\n"
        "async def main():\n"
        "    made = environments.process(sys.argv[1], sys.argv[2])\n"
        "    one = await made()\n"
        "    await one.reset(number=6)\n"
        "    print(one._child._running.pid, flush=True)\n"
        "    await one.step('1')\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, python, f"{games}:Guess"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    assert select.select([child], [], [], 30.0)[0] == [child]


@pytest.mark.parametrize(
    ("path", "target", "told"),
    [
        ("/no/python", "games:Guess", "cannot be started"),
        (None, "games", "give the class as 'module:Class'"),
        (None, "no_module_of_this_name:Guess", "ModuleNotFoundError: No module named 'no_module_of_this_name'"),
        (None, "{games}:Nothing", "AttributeError: module 'games' has no attribute 'Nothing'"),
        (None, "{games}:Bare", "the class has reset; it needs reset"),
        (None, "{games}:Undescribed", "the argument name has no type hint"),
        ("/bin/false", "games:Guess", "exited with code 1"),
    ],
)
def test_what_cannot_run_is_said_before_groups_start(python, games, path, target, told):
    with pytest.raises(ConfigError, match=r"environments\.process") as caught:
        environments.process(path or python, target.format(games=games))
    assert told in str(caught.value)


def test_settings_are_plain_data(python, games):
    with pytest.raises(ConfigError, match="plain data"):
        environments.process(python, f"{games}:Guess", most=object())
