"""ControllerWorker: computes the controller's own numbers (advantages, metrics, filters) beside the driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridflow.algorithms.advantage import AdvantageCall
from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.prompt_groups import GroupFilter, filter_groups
from hybridflow.algorithms.kl import AdaptiveKL
from hybridflow.algorithms.metrics import batch_metrics, metric_columns
from hybridflow.batch.batch import Batch
from hybridflow.protocols import ONE_TO_ONE, Settings, register


def _advantage(call: Settings) -> AdvantageCall:
    return AdvantageCall.of(call["estimator"], call["options"], call["kl_coef"], call["kl"])


class ControllerWorker:
    """Computes functions of the whole batch that read few columns, in a process of its own that needs no device."""

    def __init__(self) -> None:
        self._states: dict[str, float] = {}  # of adaptive coefficients, by identity

    @register(
        ONE_TO_ONE,
        reads=lambda settings, call: _advantage(call).reads,
        writes=lambda settings, call: _advantage(call).writes,
        check=lambda settings, call: _advantage(call) and None,
    )
    def compute_advantage(
        self,
        batch: Batch,
        estimator: str | Estimator | Callable[..., Any],
        kl_coef: float | AdaptiveKL | None,
        kl: str | None,
        options: dict[str, Any],
    ) -> Batch:
        call = AdvantageCall.of(estimator, options, kl_coef, kl)
        for controller in call.controllers:
            controller.state = self._states.get(controller.identity, controller.state)
        out = call(batch)
        self._states |= {controller.identity: controller.state for controller in call.controllers}
        return out

    @register(ONE_TO_ONE, reads=lambda settings, call: metric_columns(call["batch"].columns))
    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        return batch_metrics(batch)

    @register(ONE_TO_ONE, reads=lambda settings, call: (call["by"], "group_id", "response_mask?"))
    def filter_groups(self, batch: Batch, by: str) -> GroupFilter:
        return filter_groups(batch, by)
