"""UpdateCall: what the driver checks and sends for `update_actor` and `update_critic`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.algorithms.loss import Loss
from hybridflow.errors import ConfigError, nearest
from hybridflow.protocols.operation import Settings

_OWN = ("minibatches", "epochs", "loss", "batch")  # every other setting of the call is an option of the loss


@dataclass(frozen=True)
class UpdateCall:
    """The declaration of an update operation, for `@register(reads=..., check=...)`.

    `find_loss(loss, **options)` gives the loss of a call; `also_reads` are columns beside prompts, responses and those
    that the loss reads.
    """

    role: str
    find_loss: Callable[..., Loss]
    also_reads: tuple[str, ...] = ()

    def reads(self, settings: Settings, call: Settings) -> tuple[str, ...] | None:
        own = self._loss(call).reads
        return None if own is None else ("prompt_ids", "response_ids", *own, *self.also_reads)

    def check(self, settings: Settings, call: Settings) -> None:
        """Errors: ConfigError for a worker without optimizer, a misspelt setting, an unknown loss or option."""
        if settings["optim"] is None:
            worker = f"{self.role.capitalize()}Worker"
            raise ConfigError(f"this {self.role} has no optimizer: give {worker}.on(..., optim=hf.Adam(lr=...)).")
        _check_spelling(call, _OWN)
        _check_positive(call, "minibatches", "epochs")
        _ = self._loss(call)

    def _loss(self, call: Settings) -> Loss:
        return self.find_loss(call["loss"], **{name: value for name, value in call.items() if name not in _OWN})


def _check_spelling(call: Settings, known: Sequence[str]) -> None:
    """Errors: ConfigError for a setting that looks like one of `known` and is not; other names go to the loss."""
    for name in call:
        if name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.75):
            raise ConfigError(f"there is no setting {name!r}.{nearest(name, known)}")


def _check_positive(call: Settings, *names: str) -> None:
    """Errors: ConfigError when one of the settings is no whole number of at least 1."""
    for name in names:
        if type(call[name]) is not int or call[name] < 1:
            raise ConfigError(f"{name}={call[name]!r} must be a whole number of at least 1.")
