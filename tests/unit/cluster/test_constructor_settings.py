"""Settings of workers whose constructors pass `**settings` on to a base class."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.settings import constructor_settings, own_settings


class Base:
    def __init__(self, *, model: str, train: int = 1, generate: int | None = None) -> None:
        self.built = {"model": model, "train": train, "generate": generate}


class Passing(Base):
    def __init__(self, *, pace: float, **settings: Any) -> None:
        super().__init__(**settings)


class Fixed(Base):
    def __init__(self, **settings: Any) -> None:
        super().__init__(model="m", train=2, **settings)


class Taking(Passing):
    def __init__(this, **settings: Any) -> None:  # noqa: N805
        this.judge = settings.pop("judge", None)
        super().__init__(**settings)


@pytest.mark.parametrize(
    ("worker", "given", "known", "built"),
    [
        (Base, {"model": "m"}, {"train": 1, "generate": None}, {"train": 1}),
        (Passing, {"pace": 1.0, "model": "m"}, {"train": 1, "generate": None}, {"train": 1}),
        (Passing, {"pace": 1.0, "model": "m", "train": 3}, {"train": 3}, {"train": 3}),
        (Fixed, {}, {"generate": None}, {"model": "m", "train": 2}),
        (Fixed, {"generate": 4}, {"generate": 4}, {"train": 2, "generate": 4}),
        (Taking, {"judge": 5, "pace": 1.0, "model": "m"}, {"judge": 5, "train": 1}, {"model": "m", "train": 1}),
    ],
)
def test_base_classes_have_defaults_for_what_is_passed_on(worker, given, known, built):
    settings = constructor_settings(worker, given)
    assert settings.items() >= (given | known).items()
    assert worker(**own_settings(worker, settings)).built.items() >= built.items()


def test_what_a_constructor_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"Base: no setting 'trian'\. Did you mean 'train'"):
        constructor_settings(Base, {"model": "m", "trian": 1})
    with pytest.raises(ConfigError, match="Passing: missing a required argument: 'pace'"):
        constructor_settings(Passing, {"model": "m"})
