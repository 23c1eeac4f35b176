"""UpdateCall: what the driver checks and sends for `update_actor` and `update_critic`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.algorithms.losses.loss import Loss
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.errors import ConfigError, nearest
from hybridflow.protocols.operation import Settings

_OWN = ("minibatches", "epochs", "loss", "batch", "uneven")  # every other setting of the call is an option of the loss


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
        """Errors: ConfigError for a worker without optimizer, a misspelt setting, an unknown loss or option, and
        mini-batches of different sizes."""
        if settings["optim"] is None:
            worker = f"{self.role.capitalize()}Worker"
            raise ConfigError(f"this {self.role} has no optimizer: give {worker}.on(..., optim=hf.Adam(lr=...)).")
        _check_spelling(call, _OWN)
        _check_positive(call, "minibatches", "epochs")
        _check_even(self.role, call)
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


def _check_even(role: str, call: Settings) -> None:
    """Every mini-batch is one step, in which a row of a smaller one counts for more.

    Errors: ConfigError for mini-batches of different sizes, unless the call says `uneven=True`.
    """
    batch, parts, uneven = call["batch"], call["minibatches"], call.get("uneven", False)
    if type(uneven) is not bool:
        raise ConfigError(f"uneven={uneven!r}: give True or False.")
    session = Session.existing()
    placeholder = not isinstance(batch, BatchRef) or (session is not None and session.traces)
    if uneven or placeholder or parts > batch.rows or batch.rows % parts == 0:
        return
    rows = batch.rows
    fewer = next(n for n in range(parts, 0, -1) if rows % n == 0)
    more = next(n for n in range(parts, rows + 1) if rows % n == 0)
    small, larger = divmod(rows, parts)
    raise ConfigError(
        f"update_{role}(minibatches={parts}): the batch has {rows} rows, which would be {larger} mini-batches of "
        f"{small + 1} rows and {parts - larger} of {small}, and a row of a smaller one counts for more. Use "
        f"minibatches={fewer} or {more}, or uneven=True."
    )
