"""Environments of known packages in our contract: `reset(**row)`, `step(text) -> (observation, reward, done)`.

Each class needs its package and the standard library only, so that another interpreter can load this file
(`interpreter.py`). The draws of an episode follow from the row's column `seed`, or from `row_id`: the responses to one
prompt play the same game.
"""

from __future__ import annotations

import importlib
import threading
import typing

_DRAWING = threading.Lock()
"""textarena seeds Python's global generator."""


class GymnasiumGame:
    """A gymnasium environment whose observations and actions are texts."""

    PACKAGE = "gymnasium"

    def __init__(self, name: str, **settings: typing.Any) -> None:
        self._game = importlib.import_module(self.PACKAGE).make(name, **settings)

    def reset(self, **row: typing.Any) -> str:
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

    def __init__(self, name: str, **settings: typing.Any) -> None:
        raw = name if name.endswith("-raw") else f"{name}-raw"  # others repeat all that was said
        self._game = importlib.import_module(self.PACKAGE).make(raw, **settings)

    def reset(self, **row: typing.Any) -> str:
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

    def __init__(self, name: str, **settings: typing.Any) -> None:
        self._name, self._settings = name, settings

    def reset(self, **row: typing.Any) -> str:
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

    def __init__(self, name: str, **settings: typing.Any) -> None:
        self._name, self._settings = name, settings

    def reset(self, prompt: typing.Any = None, **row: typing.Any) -> typing.Any:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
        self._game = importlib.import_module(self.PACKAGE).make(self._name, extras=row, **self._settings)
        begun, _ = self._game.init(list(asked))
        if list(begun[: len(asked)]) != asked:
            raise ValueError(f"{self._name} rewrites the row's prompt; give the prompt as it should be")
        return list(begun[len(asked) :]) or None

    def step(self, text: str) -> tuple[typing.Any, float, bool]:
        found = self._game.step(text)
        return list(found["observations"]), float(found["reward"]), bool(found["done"])

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()


def seed_of(row: typing.Mapping[str, typing.Any]) -> int | None:
    found = row.get("seed", row.get("row_id"))
    return None if found is None else int(found)


def _text(observation: typing.Any) -> str:
    if not isinstance(observation, str):
        raise TypeError(
            f"the observation {observation!r} is no text: wrap the environment so that it observes and takes texts"
        )
    return observation
