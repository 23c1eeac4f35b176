"""Environments of real packages and of another interpreter, to their ends, in the processes that run agents."""

import asyncio
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from aiohttp import web

from hybridflow import environments
from hybridflow.environments.acting import EnvironmentLoop, ToolLoop
from hybridflow.environments.agent import Agent
from hybridflow.errors import ConfigError
from tests.session_runs import call, run

OPENENV = os.environ.get("OPENENV_PYTHON", "")
QUIZ = """
import gymnasium


class Quiz(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def __init__(self, most=10):
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.left = int(self.np_random.integers(self.most)), 3
        return f"Say {self.number}.", {}

    def step(self, action):
        self.left -= 1
        right = action == str(self.number)
        return "No.", float(right), right, self.left == 0, {}


gymnasium.register("Quiz-v0", Quiz)
"""
SERVER = '''
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a == 13:
        raise ToolError("no thirteens")
    return a + b


server.run()
'''
ECHO = """
import sys
import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns = 0
        return Heard(text=f"Seed {seed}.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "fail":
            raise KeyError("lost")
        self.turns += 1
        return Heard(text=f"heard {action.message}", done=self.turns == 2, reward=float(len(action.message)))

    @property
    def state(self):
        return State()


uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


def test_gymnasium(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "quiz_of_a_test.py").write_text(QUIZ)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    made = environments.gymnasium("quiz_of_a_test:Quiz-v0", most=1000)
    asked = []

    def says(row, turn, heard):
        asked.append(re.findall(r"Say (\d+)\.", heard)[0])
        return asked[-1] if row["row_id"] < 2 else "pass"

    rows = [{"row_id": 1}, {"row_id": 1}, {"row_id": 2}]
    found = run(EnvironmentLoop(made, 5), checkpoint, rows, says)
    assert [(one.failure, one.ending.reward, one.trajectory.turns) for one in found] == [
        (None, 1.0, 1), (None, 1.0, 1), (None, 0.0, 3),
    ]  # fmt: skip
    assert sorted(asked.count(one) for one in set(asked)) == [2, 3]  # one row_id, one game


def test_textarena(checkpoint):
    def says(row, turn, heard):
        low, high = 1, 20
        for guess, hint in re.findall(r"\[(\d+)\]<\|im_end\|>\n<\|im_start\|>user\nThe target number is (\w+)", heard):
            low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
        return f"[{(low + high) // 2}]"

    rows = [{"row_id": number} for number in (1, 1, 2, 3)]
    found = run(EnvironmentLoop(environments.textarena("GuessTheNumber-v0"), 10), checkpoint, rows, says)
    assert [(one.failure, one.ending.stop, one.ending.reward) for one in found] == [(None, "done", 1.0)] * 4
    assert found[0].trajectory.rows[0].token_ids == found[1].trajectory.rows[0].token_ids


@pytest.mark.slow
def test_reasoning_gym(checkpoint):
    import reasoning_gym

    made = environments.reasoning_gym("basic_arithmetic", min_terms=2, max_terms=2)
    tasks = [reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=s, min_terms=2, max_terms=2) for s in (4, 5)]

    def says(row, turn, heard):
        task = tasks[row["seed"] - 4][0]
        assert task["question"] in heard
        return f"So <answer>{task['answer']}</answer>" if row["seed"] == 4 else "no idea"

    right, wrong = run(EnvironmentLoop(made, 3), checkpoint, [{"seed": 4}, {"seed": 5}], says)
    assert (right.failure, right.ending.stop, right.ending.reward) == (None, "done", 1.0)
    assert wrong.ending.reward is not None
    assert wrong.ending.reward < 0.1


def test_skyrl_gym(checkpoint):
    rows = [{"prompt": "2 + 2?", "reward_spec": {"ground_truth": answer}} for answer in ("4", "5")]
    found = run(EnvironmentLoop(environments.skyrl_gym("gsm8k"), 3), checkpoint, rows, lambda *_: "#### 4")
    assert [(one.failure, one.ending.stop) for one in found] == [(None, "done")] * 2
    assert [one.ending.reward for one in found] == [1.0, 0.0]


@pytest.mark.slow
def test_an_mcp_server(checkpoint, tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    tools = environments.mcp([sys.executable, str(tmp_path / "server.py")])
    (schema,) = Agent(tools=tools).act.schemas
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    last = []

    def says(row, turn, heard):
        last.append(heard)
        return call("add", a=row["a"], b=3) if turn == 0 else "done"

    rows = [{"prompt": "Add.", "a": number} for number in (2, 13, 7)]
    found = run(ToolLoop(tuple(tools), 3), checkpoint, rows, says)
    assert [one.failure for one in found] == [None] * 3
    assert [one.ending.metrics.get("tool_errors", 0) for one in found] == [0, 1, 0]
    assert any("<tool_response>\n10\n</tool_response>" in heard for heard in last)
    assert any("no thirteens" in heard for heard in last)


@pytest.mark.parametrize("within", [False, True], ids=["alone", "in a running loop"])
def test_an_mcp_server_that_is_not_there(within):
    async def asked():
        environments.mcp(["/no/server"])

    with pytest.raises(ConfigError, match="cannot be asked for its tools: FileNotFoundError"):
        asyncio.run(asked()) if within else environments.mcp(["/no/server"])


def failure_of_the_second(made, checkpoint) -> str:
    """Three episodes of an echo, of which the second says "fail"."""
    rows = [{"seed": 7, "says": "abc"}, {"row_id": 8, "says": "fail"}, {"seed": 9, "says": "a"}]
    heard = []

    def says(row, turn, text):
        heard.append(text)
        return row["says"]

    long, failed, short = run(EnvironmentLoop(made, 5), checkpoint, rows, says)
    assert (long.failure, long.ending.stop, long.ending.reward) == (None, "done", 6.0)
    assert (short.failure, short.ending.reward) == (None, 2.0)
    assert all(any(said in one for one in heard) for said in ("Seed 7.", "Seed 8.", "heard abc"))
    assert failed.failure is not None
    return failed.failure


@pytest.mark.skipif(not OPENENV, reason="OPENENV_PYTHON names no interpreter that has openenv-core")
def test_an_openenv_server(checkpoint, tmp_path):
    (tmp_path / "server.py").write_text(ECHO)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([OPENENV, str(tmp_path / "server.py"), str(port)])
    try:
        while True:
            assert server.poll() is None
            try:
                made = environments.openenv(url, observation="text")
                break
            except ConfigError:
                time.sleep(0.2)
        assert "lost" in failure_of_the_second(made, checkpoint)
    finally:
        server.kill()
        server.wait()


@contextmanager
def stand_in() -> Iterator[str]:
    """The address of a server with the messages of OpenEnv's, whose episodes last two steps."""

    async def episode(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        steps = 0
        async for message in socket:
            asked = json.loads(message.data)
            if asked["type"] == "reset":
                found = {"observation": {"text": f"Seed {asked['data'].get('seed')}."}}
            elif (said := asked["data"]["message"]) == "fail":
                await socket.send_json({"type": "error", "data": {"message": "lost"}})
                continue
            else:
                steps += 1
                found = {"observation": {"text": f"heard {said}"}, "reward": float(len(said)), "done": steps == 2}
            await socket.send_json({"type": "observation", "data": found})
        return socket

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/ws", episode)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    loop = asyncio.new_event_loop()
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(serve(), loop).result(30)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def test_a_server_that_speaks_as_those_of_openenv(checkpoint):
    with stand_in() as url:
        failure = failure_of_the_second(environments.openenv(url, observation="text"), checkpoint)
    assert 'answered step: {"message": "lost"}' in failure


@pytest.mark.parametrize("url", ["localhost", "http://127.0.0.1:9"])
def test_an_openenv_server_that_is_not_there(url):
    with pytest.raises(ConfigError, match=r"environments\.openenv"):
        environments.openenv(url)


def test_a_package_that_is_missing_is_said_before_groups_start(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package textarena is not installed"):
        environments.textarena("GuessTheNumber-v0")
    with pytest.raises(ConfigError, match="No module named 'no_package'"):
        environments.process(sys.executable, "no_package:Game")


def test_a_package_that_another_interpreter_lacks_is_said_before_groups_start(tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    with pytest.raises(ConfigError, match="No module named 'textarena'"):
        environments.textarena("GuessTheNumber-v0", python=tmp_path / "bin" / "python")


def test_a_package_in_another_interpreter(checkpoint, tmp_path):
    """The other interpreter has the package by a path file, and none of ours."""
    import gymnasium

    venv.create(tmp_path, with_pip=False, symlinks=True, system_site_packages=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    packages = {os.path.dirname(os.path.dirname(one.__file__)) for one in (gymnasium, numpy)}
    (site / "games.pth").write_text("\n".join([*packages, str(tmp_path)]))
    (tmp_path / "quiz_of_a_test.py").write_text(QUIZ)
    made = environments.gymnasium("quiz_of_a_test:Quiz-v0", python=tmp_path / "bin" / "python", most=1000)

    def says(row, turn, heard):
        return re.findall(r"Say (\d+)\.", heard)[0]

    (one,) = run(EnvironmentLoop(made, 5), checkpoint, [{"row_id": 1}], says)
    assert (one.failure, one.ending.reward, one.trajectory.turns) == (None, 1.0, 1)


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
