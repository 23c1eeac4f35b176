"""Environments of known packages (gymnasium, textarena, reasoning-gym, skyrl-gym), and of OpenEnv servers, in our
contract: `reset(**row)`, `step(text) -> (observation, reward, done)`.

The draws of an episode follow from the row's column `seed`, or from `row_id`: the responses to one prompt play the same
game.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from hybridflow.environments.acting import LARGEST_TEXT, EnvironmentCallError
from hybridflow.errors import ConfigError

_REACHING = 10.0  # seconds in which a server must answer, on the driver
Made = Callable[[], Any]
"""Makes an environment, as `environment=` takes it."""
_DRAWING = threading.Lock()
"""textarena seeds Python's global generator."""


class GymnasiumGame:
    """A gymnasium environment whose observations and actions are texts."""

    PACKAGE = "gymnasium"

    def __init__(self, name: str, **settings: Any) -> None:
        self._game = importlib.import_module(self.PACKAGE).make(name, **settings)

    def reset(self, **row: Any) -> str:
        observation, _ = self._game.reset(seed=seed_of(row))
        return _text(observation)

    def step(self, text: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self._game.step(text)
        return _text(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._game.close()


class TextArenaGame:
    """A textarena game for one player. Each turn shows the model what is new."""

    PACKAGE = "textarena"

    def __init__(self, name: str, **settings: Any) -> None:
        raw = name if name.endswith("-raw") else f"{name}-raw"  # others repeat all that was said
        self._game = importlib.import_module(self.PACKAGE).make(raw, **settings)

    def reset(self, **row: Any) -> str:
        with _DRAWING:
            self._game.reset(num_players=1, seed=seed_of(row))
        return self._seen()

    def step(self, text: str) -> tuple[str, float, bool]:
        done, _ = self._game.step(action=text)
        if not done:
            return self._seen(), 0.0, False
        rewards, _ = self._game.close()
        return "", float((rewards or {}).get(0, 0.0)), True

    def _seen(self) -> str:
        _, messages = self._game.get_observation()
        return "\n".join(message for sender, message, *_ in messages if sender < 0) or "Go on."


class ReasoningGymTask:
    """One question of a reasoning-gym dataset; the reward is its own score of the answer, between 0 and 1. Where the
    model writes <answer>...</answer>, that part is scored."""

    PACKAGE = "reasoning_gym"

    def __init__(self, name: str, **settings: Any) -> None:
        self._name, self._settings = name, settings

    def reset(self, **row: Any) -> str:
        package = importlib.import_module(self.PACKAGE)
        self._task = package.create_dataset(self._name, size=1, seed=seed_of(row), **self._settings)
        self._entry = self._task[0]
        return self._entry["question"]

    def step(self, text: str) -> tuple[str, float, bool]:
        extracted = importlib.import_module("reasoning_gym.utils").extract_answer(text)
        answer = text.strip() if extracted is None else extracted
        return "", float(self._task.score_answer(answer=answer, entry=self._entry)), True


class SkyRLGame:
    """A skyrl-gym environment. The row's columns are its `extras`, `prompt` its first messages."""

    PACKAGE = "skyrl_gym"

    def __init__(self, name: str, **settings: Any) -> None:
        self._name, self._settings = name, settings

    def reset(self, prompt: Any = None, **row: Any) -> Any:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        self._game = importlib.import_module(self.PACKAGE).make(self._name, extras=row, **self._settings)
        begun, _ = self._game.init(list(asked))
        if list(begun[: len(asked)]) != asked:
            raise ValueError(f"{self._name} rewrites the row's prompt; give the prompt as it should be")
        return list(begun[len(asked) :]) or None

    def step(self, text: str) -> tuple[Any, float, bool]:
        found = self._game.step(text)
        return list(found["observations"]), float(found["reward"]), bool(found["done"])

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()


def seed_of(row: Mapping[str, Any]) -> int | None:
    found = row.get("seed", row.get("row_id"))
    return None if found is None else int(found)


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(
            f"the observation {observation!r} is no text: wrap the environment so that it observes and takes texts"
        )
    return observation


def gymnasium(name: str, **settings: Any) -> Made:
    """A gymnasium environment whose observations and actions are texts; `settings` go to `gymnasium.make`.

    A name such as "my_games:Quiz-v0" imports the module that registers it. The row's column `seed` (otherwise
    `row_id`) seeds it.
    Errors: ConfigError when the package is not installed.
    """
    return _made(GymnasiumGame, name, settings)


def textarena(name: str, **settings: Any) -> Made:
    """A textarena game for one player, such as "GuessTheNumber-v0"; `settings` go to `textarena.make`.

    See `gymnasium` for seeds and errors.
    """
    return _made(TextArenaGame, name, settings)


def reasoning_gym(name: str, **settings: Any) -> Made:
    """One question of a reasoning-gym dataset, such as "leg_counting", with its score as the reward; `settings` are
    the dataset's.

    See `gymnasium` for seeds and errors.
    """
    return _made(ReasoningGymTask, name, settings)


def skyrl_gym(name: str, **settings: Any) -> Made:
    """A skyrl-gym environment, such as "gsm8k"; the row's columns are its `extras`, `settings` its other arguments.

    See `gymnasium` for errors.
    """
    return _made(SkyRLGame, name, settings)


def _made(kind: Any, name: str, settings: dict[str, Any]) -> Made:
    package = kind.PACKAGE
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"environments.{package}({name!r}): the package {package} is not installed. Install it, or serve the "
            f"environment from an interpreter that has it (environments.openenv)."
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
