"""What a driver calls that is no group: sessions, advantages, and the loader that bounds what is in flight."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from hybridflow.algorithms.kl import AdaptiveKL, FixedKL, KLState
from hybridflow.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.host import Deadlines
from hybridflow.cluster.session import Session
from hybridflow.errors import BatchError


def init(
    address: str | None = None,
    devices: int | None = None,
    *,
    peer_timeout: float = 1800.0,
    collective_timeout: float = 600.0,
) -> None:
    """Connect to the Ray cluster at `address` (or `RAY_ADDRESS`), or start a local one with `devices` logical devices.

    Called by the first `ResourcePool` if the driver does not. Timeouts in seconds: to wait for results of other
    groups, and to be inside a collective. Errors: ConfigError when a session is open.
    """
    Session.open(address=address, devices=devices, deadlines=Deadlines(peer_timeout, collective_timeout))


def shutdown() -> None:
    """Free all models and devices and stop the Ray that was started. Can be called again; runs at exit too."""
    if Session._current is not None:
        Session._current.shutdown()


def compute_advantage(
    batch: BatchRef | Batch,
    estimator: str | Callable[..., Any],
    *,
    kl_coef: float | FixedKL | AdaptiveKL = 0.0,
    kl: str = "k1",
    **options: Any,
) -> BatchRef:
    """`advantages` and `returns`, ragged [B, R] float32, computed on the helper process (paper, table 4).

    `estimator` is a name ("gae", "grpo", "rloo", "remax", "reinforce") with its `options`, or a function
    `f(token_rewards, batch, **options) -> (advantages, returns)`. `kl_coef` * KL(actor || reference) per token, as
    estimated by `kl` ("k1", "k2", "k3", "abs"), is taken from the rewards; an `AdaptiveKL` keeps its coefficient from
    one iteration to the next. Returns at once. Errors: ConfigError, MissingColumnError.
    """
    session = Session.current()
    if isinstance(batch, Batch):
        batch = BatchRef.from_batch(batch, session)
    if not isinstance(batch, BatchRef):
        raise BatchError(f"compute_advantage takes a batch, got {type(batch).__name__}.")
    controller = ""
    coef: float | FixedKL | KLState = kl_coef  # type: ignore[assignment]
    if isinstance(kl_coef, AdaptiveKL):
        controller = _identity(kl_coef)
        coef = KLState(kl_coef)
    return session.helper.compute_advantage(batch, estimator, coef, kl, controller, options)


def _identity(controller: AdaptiveKL) -> str:
    """Names one controller object: two runs with equal settings do not share a coefficient."""
    name = getattr(controller, "_identity", None)
    if name is None:
        name = uuid.uuid4().hex
        object.__setattr__(controller, "_identity", name)
    return name
