"""Environments whose packages are installed for another interpreter: a proxy here, and a process of that interpreter
(`interpreter_child.py`) for each environment under way. Processes that are done serve the next environments."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.environments.acting import LARGEST_TEXT, EnvironmentCallError
from hybridflow.environments.tool_calls import schema_from
from hybridflow.errors import ConfigError
from hybridflow.processes.supervisor import ending
from hybridflow.rewards.function_adapters import run_async

_CHILD = Path(__file__).with_name("interpreter_child.py")
_STARTING = 120.0  # seconds in which the other interpreter has to import the class, on the driver
_LONGEST_LINE = 16 * LARGEST_TEXT
_KEPT_OUTPUT = 4000


@dataclass(frozen=True)
class InterpreterEnvironment:
    """Makes environments of the class `target` in processes of the interpreter `python`, see `process`. `settings` and
    `description` are JSON. The description is the class's own: its methods of the contract, and its tools."""

    python: str
    target: str
    directory: str
    settings: str
    description: str = field(default="{}", compare=False)

    @cached_property
    def environment(self) -> type:
        """The class of the proxies, with the methods that the other interpreter's class has."""
        found = json.loads(self.description)
        methods = {name: _method(name) for name in found["contract"] if name != "close"}
        methods |= {tool["name"]: _method(tool["name"], schema_from(**tool)) for tool in found["tools"]}
        return type(self.__name__, (_Proxy,), methods)

    @property
    def __name__(self) -> str:
        return self.target.rpartition(":")[2]

    async def __call__(self) -> Any:
        """Errors: EnvironmentCallError where it cannot be made."""
        idle = _IDLE[self]
        child = idle.pop() if idle else await _Child.start(self)
        await child.ask(do="make", settings=json.loads(self.settings))
        return self.environment(self, child)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return type(self), (self.python, self.target, self.directory, self.settings, self.description)


def process(python: str | Path, target: str, **settings: Any) -> InterpreterEnvironment:
    """An environment whose package is installed for another interpreter, where its pins cannot clash with ours.

    `environment=hf.environments.process("envs/bin/python", "my_games:Wordle", words=5)`: the class is found as that
    interpreter would from this directory ("path/to/file.py:Class" names a file), called with `settings`, which are
    plain data, and keeps the contract of other environments. The interpreter needs Python 3.8 or later and the
    package; neither hybridflow nor torch. Each trajectory under way has a process of it. A call that is late, and a
    process that dies, fail its trajectory alone.
    Errors: ConfigError when the interpreter or the class is missing, or the class lacks the contract's methods.
    """
    asked = f"environments.process({str(python)!r}, {target!r})"
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise ConfigError(f"{asked}: give the class as 'module:Class' or 'path/to/file.py:Class'.")
    try:
        given = json.dumps(settings, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"{asked}: its settings must be plain data ({error}).") from None
    path = os.path.abspath(python) if os.sep in str(python) else str(python)  # a link says where its packages are
    target = f"{os.path.abspath(where)}:{name}" if where.endswith(".py") else target
    made = InterpreterEnvironment(path, target, os.getcwd(), given)
    description = run_async(_described(asked, made))
    contract = description["contract"]
    if "reset" not in contract or not {"step", "get_reward"} & set(contract):
        raise ConfigError(
            f"{asked}: the class has {', '.join(contract) or 'no method of the contract'}; it needs reset(**row), and "
            f"step(text) -> (observation, reward, done) or get_reward() beside public methods, which are tools."
        )
    made = replace(made, description=json.dumps(description))
    _ = made.environment  # errors of the tools' docstrings
    return made


async def _described(asked: str, made: InterpreterEnvironment) -> Mapping[str, Any]:
    child = None
    try:
        child = await _Child.start(made)
        return await asyncio.wait_for(child.ask(do="describe"), _STARTING)
    except TimeoutError:
        raise ConfigError(f"{asked}: importing the class took longer than {_STARTING:g} s.") from None
    except EnvironmentCallError as error:
        raise ConfigError(f"{asked}: {error}.") from None
    except Exception as error:  # the other interpreter's, by name
        raise ConfigError(
            f"{asked}: the class cannot be loaded there: {type(error).__name__}: {error}. What it imports must be "
            f"installed for this interpreter, and the module found from {made.directory}."
        ) from None
    finally:
        if child is not None:
            child.kill()
            _ = await child.ending()


class _Child:
    """One process of the other interpreter. Its calls are made one after another."""

    def __init__(self, made: InterpreterEnvironment, running: asyncio.subprocess.Process) -> None:
        self._made, self._running = made, running
        self._lock = asyncio.Lock()
        self._printed = bytearray()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, made: InterpreterEnvironment) -> _Child:
        setup = {"target": made.target, "directory": made.directory, "parent": os.getpid()}
        command = made.python, str(_CHILD), json.dumps(setup)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        # without those that would have the other interpreter import our packages
        variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            running = await asyncio.create_subprocess_exec(*command, **pipes, limit=_LONGEST_LINE, env=variables)
        except OSError as error:
            raise EnvironmentCallError(f"{made.python} cannot be started: {error}") from None
        return cls(made, running)

    @property
    def alive(self) -> bool:
        return self._running.returncode is None

    async def ask(self, **request: Any) -> Any:
        """Errors: the environment's, by name; EnvironmentCallError when the process dies or answers with nonsense.

        A request that is given up takes the process with it.
        """
        line = json.dumps(request, default=_plain).encode() + b"\n"
        async with self._lock:
            try:
                answer = await self._answer(line)
            except BaseException:
                self.kill()
                raise
        if "error" in answer:
            kind, text = answer["error"]
            raise type(str(kind), (Exception,), {})(text)
        return answer["value"]

    async def _answer(self, line: bytes) -> Mapping[str, Any]:
        assert self._running.stdin is not None
        assert self._running.stdout is not None
        with suppress(OSError):  # it has ended, as is noticed next
            self._running.stdin.write(line)
            await self._running.stdin.drain()
        try:
            told = await self._running.stdout.readline()
        except ValueError:
            raise EnvironmentCallError(
                f"{self._made.__name__} answered with more than {_LONGEST_LINE} bytes; at most {LARGEST_TEXT} "
                f"characters are read"
            ) from None
        if not told.endswith(b"\n"):
            raise EnvironmentCallError(f"the process of {self._made.__name__} {await self.ending()}")
        with suppress(ValueError):
            answer = json.loads(told)
            if isinstance(answer, dict) and {"value", "error"} & set(answer):
                return answer
        raise EnvironmentCallError(f"{self._made.__name__} wrote {told[:200]!r} in place of an answer")

    async def ending(self) -> str:
        """End it, if it has not ended by itself. Returns how."""
        with suppress(TimeoutError):  # to be killed would hide its code
            await asyncio.wait_for(self._running.wait(), 1.0)
        self.kill()
        code = await self._running.wait()
        with suppress(TimeoutError):  # something that it started may hold the pipe
            await asyncio.wait_for(asyncio.shield(self._listening), 1.0)
        return ending(code, bytes(self._printed))

    async def _listen(self) -> None:
        assert self._running.stderr is not None
        while piece := await self._running.stderr.read(1 << 16):
            self._printed += piece
            del self._printed[:-_KEPT_OUTPUT]

    def kill(self) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                self._running.kill()


_IDLE: defaultdict[InterpreterEnvironment, list[_Child]] = defaultdict(list)
"""Processes of this process that wait for their next environment."""


class _Proxy:
    """An environment in `child`; the rest of the class is that of the description."""

    def __init__(self, made: InterpreterEnvironment, child: _Child) -> None:
        self._made, self._child = made, child

    async def close(self) -> None:
        if self._child.alive and "close" in json.loads(self._made.description)["contract"]:
            await self._child.ask(do="call", name="close", args=[], kwargs={})
        if self._child.alive:
            _IDLE[self._made].append(self._child)


def _method(name: str, json_schema: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    async def method(self: _Proxy, /, *args: Any, **kwargs: Any) -> Any:
        found = await self._child.ask(do="call", name=name, args=args, kwargs=kwargs)
        return tuple(found) if name == "step" and isinstance(found, list) else found

    method.__name__ = name
    method.json_schema = json_schema  # type: ignore[attr-defined]
    return method


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a column of {type(value).__name__} cannot be sent to another interpreter; leave it out")
