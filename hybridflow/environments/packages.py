"""Environments of known packages: gymnasium, textarena, reasoning-gym and skyrl-gym, here or in another interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.environments import package_adapters
from hybridflow.environments.interpreter import process
from hybridflow.environments.package_adapters import GymnasiumGame, ReasoningGymTask, SkyRLGame, TextArenaGame
from hybridflow.errors import ConfigError

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
