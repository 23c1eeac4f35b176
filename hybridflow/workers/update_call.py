"""UpdateCall: the declaration of an update, of actor and critic: the columns that its loss reads, and early checks."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from hybridflow.algorithms.losses.distillation import TEACHER
from hybridflow.algorithms.losses.loss import Loss
from hybridflow.algorithms.masked import or_sampled
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.engines.router_replay import ROUTING
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.images import IMAGES
from hybridflow.protocols.operation import Settings
from hybridflow.settings import require

_OWN = ("minibatches", "epochs", "loss", "batch", "uneven")  # other settings of the call are options of the loss


@dataclass(frozen=True)
class UpdateCall:
    """The declaration of an update operation, for `@register(binds=..., reads=..., check=...)`.

    `find_loss(loss, **options)` returns the loss of a call; `also_reads` are columns besides prompts, responses and the
    loss's own.
    """

    role: str
    find_loss: Callable[..., Loss]
    also_reads: tuple[str, ...] = ()

    def binds(self, settings: Settings, call: Settings) -> Settings:
        """The loss as a value in place of its name and options. Errors: ConfigError for an unknown one."""
        del settings
        options = {name: value for name, value in call.items() if name not in _OWN}
        for name in options:
            if difflib.get_close_matches(name, _OWN, n=1, cutoff=0.75):
                raise ConfigError(f"there is no setting {name!r}.{nearest(name, _OWN)}")
        own = {name: value for name, value in call.items() if name in _OWN}
        return own | {"loss": self.find_loss(call["loss"], **options)}

    def reads(self, settings: Settings, call: Settings) -> tuple[str, ...] | None:
        loss = call["loss"]
        teacher = (TEACHER,) if "ref_logits" in loss.outputs else ()
        if (own := loss.reads) is None:
            return None
        routing = (ROUTING,) if settings.get("replay_routing") else ()
        known = ("prompt_ids", "response_ids", *or_sampled(own), *teacher, *routing, *self.also_reads)
        return (*known, "row_id?", "trajectory_id?", *IMAGES)

    def check(self, settings: Settings, call: Settings) -> None:
        """Errors: ConfigError for a worker without optimizer or teacher, and mini-batches of different sizes."""
        worker, good = f"{self.role.capitalize()}Worker", settings["optim"] is not None
        require(good, f"this {self.role} has no optimizer: give {worker}.on(..., optim=hf.Adam(lr=...)).")
        for name in ("minibatches", "epochs"):
            good = type(call[name]) is int and call[name] >= 1
            require(good, f"{name}={call[name]!r} must be a whole number of at least 1.")
        self._check_even(call)
        asks = "ref_logits" in call["loss"].outputs
        good = not asks or settings.get("teacher") is not None
        require(good, f"this loss reads the logits of a teacher: give {worker}.on(..., teacher=), its model.")

    def _check_even(self, call: Settings) -> None:
        """Each mini-batch is one step, so rows of a smaller one weigh more.

        Errors: ConfigError for mini-batches of different sizes, unless the call says `uneven=True`.
        """
        batch, parts, uneven = call["batch"], call["minibatches"], call.get("uneven", False)
        require(type(uneven) is bool, f"uneven={uneven!r}: give True or False.")
        if not isinstance(batch, BatchRef) or parts == 1 or parts > batch.rows:
            return
        rows, what = batch.rows, "rows"
        if "trajectory_id" in batch.columns:
            ids = batch.get("trajectory_id").peek("trajectory_id")
            rows, what = len(ids.unique()), "trajectories"  # type: ignore[union-attr]
        few = f"the batch has {rows} {what}, and every mini-batch needs one. Use at most {rows}."
        require(parts <= rows, f"update_{self.role}(minibatches={parts}): {few}")
        if uneven or rows % parts == 0:
            return
        fewer = next(n for n in range(parts, 0, -1) if rows % n == 0)
        more = next(n for n in range(parts, rows + 1) if rows % n == 0)
        small, larger = divmod(rows, parts)
        raise ConfigError(
            f"update_{self.role}(minibatches={parts}): the batch has {rows} {what}, which would be {larger} "
            f"mini-batches of {small + 1} {what} and {parts - larger} of {small}, and each of a smaller one counts for "
            f"more. Use minibatches={fewer} or {more}, or uneven=True."
        )
