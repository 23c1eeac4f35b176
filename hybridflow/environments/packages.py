"""Environments of known packages (gymnasium, textarena, reasoning-gym, skyrl-gym), here or in another interpreter; and
of OpenEnv servers."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hybridflow.environments import package_adapters
from hybridflow.environments.acting import LARGEST_TEXT, EnvironmentCallError
from hybridflow.environments.interpreter import process
from hybridflow.environments.package_adapters import GymnasiumGame, ReasoningGymTask, SkyRLGame, TextArenaGame, seed_of
from hybridflow.errors import ConfigError

_REACHING = 10.0  # seconds in which a server must answer, on the driver
Made = Callable[[], Any]
"""Makes an environment, as `environment=` takes it."""


def gymnasium(name: str, *, python: str | Path | None = None, **settings: Any) -> Made:
    """A gymnasium environment whose observations and actions are texts; `settings` go to `gymnasium.make`.

    A name such as "my_games:Quiz-v0" imports the module that registers it. The row's column `seed` (otherwise
    `row_id`) seeds it. With `python`, the package is that of another interpreter (see `process`).
    Errors: ConfigError when the package is not installed.
    """
    return _made(GymnasiumGame, python, name, settings)


def textarena(name: str, *, python: str | Path | None = None, **settings: Any) -> Made:
    """A textarena game for one player, such as "GuessTheNumber-v0"; `settings` go to `textarena.make`.

    See `gymnasium` for seeds, `python` and errors.
    """
    return _made(TextArenaGame, python, name, settings)


def reasoning_gym(name: str, *, python: str | Path | None = None, **settings: Any) -> Made:
    """One question of a reasoning-gym dataset, such as "leg_counting", with its score as the reward; `settings` are
    the dataset's.

    See `gymnasium` for seeds, `python` and errors.
    """
    return _made(ReasoningGymTask, python, name, settings)


def skyrl_gym(name: str, *, python: str | Path | None = None, **settings: Any) -> Made:
    """A skyrl-gym environment, such as "gsm8k"; the row's columns are its `extras`, `settings` its other arguments.

    See `gymnasium` for `python` and errors.
    """
    return _made(SkyRLGame, python, name, settings)


def _made(kind: Any, python: str | Path | None, name: str, settings: dict[str, Any]) -> Made:
    if python is not None:
        return process(python, f"{package_adapters.__file__}:{kind.__name__}", name=name, **settings)
    package = kind.PACKAGE
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"environments.{package}({name!r}): the package {package} is not installed. Install it, or give the "
            f"interpreter that has it as python=."
        )
    return partial(kind, name, **settings)


class OpenEnvGame:
    """One episode of an OpenEnv server, over its WebSocket, where a connection is an episode (the messages are those of
    openenv-core 0.3, which is not needed here)."""

    def __init__(self, url: str, action: str, observation: str | None) -> None:
        self._url, self._action, self._observation = url, action, observation
        self._session: Any = None

    async def reset(self, **row: Any) -> str:
        import aiohttp

        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=16 * LARGEST_TEXT)
        except aiohttp.ClientError as error:
            raise EnvironmentCallError(f"the OpenEnv server at {self._url} cannot be reached: {error}") from None
        seed = seed_of(row)
        found = await self._ask("reset", {} if seed is None else {"seed": seed})
        return self._seen(found)

    async def step(self, text: str) -> tuple[str, float, bool]:
        found = await self._ask("step", {self._action: text})
        return self._seen(found), found.get("reward") or 0.0, bool(found.get("done"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._socket.send_json({"type": what, "data": data})
        told = await self._socket.receive()
        try:
            answer = json.loads(told.data)
            kind, found = answer["type"], answer["data"]
        except (TypeError, ValueError, KeyError):
            raise EnvironmentCallError(
                f"the OpenEnv server at {self._url} answered {what} with {str(told.data)[:200]!r} ({told.type.name})"
            ) from None
        if kind != "observation":
            raise EnvironmentCallError(f"the OpenEnv server at {self._url} answered {what}: {json.dumps(found)[:500]}")
        return found

    def _seen(self, found: Mapping[str, Any]) -> str:
        whole = found.get("observation")
        if self._observation is None:
            return whole if isinstance(whole, str) else json.dumps(whole)
        if not isinstance(whole, Mapping) or self._observation not in whole:
            raise EnvironmentCallError(
                f"the OpenEnv server at {self._url} has no field {self._observation!r} in its observation {whole!r}"
            )
        return str(whole[self._observation])


def openenv(url: str, *, action: str = "message", observation: str | None = None) -> Made:
    """An environment of the OpenEnv server at `url`, such as "http://127.0.0.1:8000".

    What the model says is the field `action` of the server's actions. It sees the field `observation` of the
    observations; None: all of them, as JSON. The row's column `seed` (otherwise `row_id`) seeds the episode.
    Errors: ConfigError when no server is at `url`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(f'environments.openenv({url!r}): give a URL, such as "http://127.0.0.1:8000".')
    secure = parts.scheme in ("https", "wss")
    try:
        socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), _REACHING).close()
    except OSError as error:
        raise ConfigError(f"environments.openenv({url!r}): no server answers there ({error}). Start it.") from None
    scheme = "wss" if secure else "ws"
    return partial(OpenEnvGame, f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws", action, observation)
