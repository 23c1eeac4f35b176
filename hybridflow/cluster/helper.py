"""Helper: numerical work of the controller, on a process of its own that needs no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.algorithms.advantage import advantage_reads, advantage_writes, check_advantage, compute_advantage
from hybridflow.algorithms.kl import FixedKL, KLState
from hybridflow.algorithms.lagrange import LagrangeState
from hybridflow.algorithms.metrics import batch_metrics, metric_columns
from hybridflow.algorithms.spread import Spread, batch_spread
from hybridflow.batch import Batch
from hybridflow.protocols import ONE_TO_ONE, register
from hybridflow.protocols.operation import Settings


def _check(settings: Settings, call: Settings) -> None:
    check_advantage(call["estimator"], call["options"], kl_coef=call["kl_coef"], kl=call["kl"])


class Helper:
    """Computes what needs the whole batch, but only a few of its columns."""

    def __init__(self) -> None:
        self._states: dict[str, KLState | LagrangeState] = {}

    @register(
        ONE_TO_ONE,
        reads=lambda settings, call: advantage_reads(call["estimator"], call["options"], kl_coef=call["kl_coef"]),
        writes=lambda settings, call: advantage_writes(call["estimator"], kl_coef=call["kl_coef"]),
        check=_check,
    )
    def compute_advantage(
        self,
        batch: Batch,
        estimator: str | Callable,
        kl_coef: float | FixedKL | KLState | None,
        kl: str | None,
        options: dict[str, Any],
        states: dict[str, str],
    ) -> Batch:
        """`states` says which arguments are states that live here between iterations, and under which name."""
        given = {"kl_coef": kl_coef, **options}
        given |= {argument: self._states.setdefault(name, given[argument]) for argument, name in states.items()}
        return compute_advantage(batch, estimator, kl=kl, **given)

    @register(ONE_TO_ONE, reads=lambda settings, call: metric_columns(call["batch"].columns))
    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        return batch_metrics(batch)

    @register(ONE_TO_ONE, reads=lambda settings, call: (call["by"], "group_id", "response_mask?"))
    def group_spread(self, batch: Batch, by: str) -> Spread:
        return batch_spread(batch, by)
