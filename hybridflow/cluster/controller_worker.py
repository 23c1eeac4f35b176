"""ControllerWorker: computes the controller's own numbers (advantages, metrics, filters) beside the driver."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridflow.algorithms.advantage import AdvantageCall
from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.prompt_groups import GroupFilter, filter_groups
from hybridflow.algorithms.advantages.token_rewards import RunningNorm
from hybridflow.algorithms.kl import AdaptiveKL, Controller
from hybridflow.algorithms.masked import or_sampled
from hybridflow.algorithms.metrics import batch_metrics, metric_columns
from hybridflow.algorithms.registry import find_estimator
from hybridflow.batch.batch import Batch
from hybridflow.cluster.recorded_calls import BatchRecord
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import thumbnail
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import ONE_TO_ONE


def _advantage(call: Settings) -> AdvantageCall:
    estimator = find_estimator(call["estimator"], call["options"])
    return AdvantageCall(estimator, call["kl_coef"], call["kl"], call["reward_norm"])


_TRAJECTORIES = ("trajectory_id?", "row_id?", "group_id?")
"""What says which rows are one sequence."""


class ControllerWorker:
    """Computes functions of the whole batch that read few columns, in a process of its own that needs no device."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, Any]] = {}  # kind and state of adaptive coefficients, by identity
        self._restored: list[tuple[str, str, Any]] = []  # of a checkpoint: identity, kind, state

    @register(
        ONE_TO_ONE,
        reads=lambda settings, call: (
            None if (own := _advantage(call).reads) is None else (*or_sampled(own), *_TRAJECTORIES)
        ),
        writes=lambda settings, call: _advantage(call).writes,
        check=lambda settings, call: _advantage(call),
    )
    def compute_advantage(
        self,
        batch: Batch,
        estimator: str | Estimator | Callable[..., Any],
        kl_coef: float | AdaptiveKL | None,
        kl: str | None,
        options: dict[str, Any],
        reward_norm: RunningNorm | None = None,
    ) -> Batch:
        call = AdvantageCall(find_estimator(estimator, options), kl_coef, kl, reward_norm)
        restored = [*self._restored]
        for controller in call.controllers:
            controller.state = self._state_of(controller, restored)
        out = call(batch)
        self._restored = restored  # after a call that fails the next one still finds its state
        self._states |= {one.identity: (type(one).__name__, one.state) for one in call.controllers}
        return out

    def _state_of(self, controller: Controller, restored: list[tuple[str, str, Any]]) -> Any:
        """Its state. In a run that continues, a new object takes the next state of its kind."""
        if controller.identity in self._states:
            return self._states[controller.identity][1]
        found = next((one for one in restored if one[1] == type(controller).__name__), None)
        if found is None:
            return controller.state
        restored.remove(found)
        return found[2]

    def state(self) -> list[list[Any]]:
        """Identity, kind and state of every adaptive coefficient, in order of first use."""
        left = [list(one) for one in self._restored]
        return [[identity, kind, state] for identity, (kind, state) in self._states.items()] + left

    def load_state(self, state: list[list[Any]]) -> None:
        """Objects of this process keep their identity; new ones take the states in order of first use."""
        states = [(str(identity), str(kind), value) for identity, kind, value in state]
        known = {identity for identity, _, _ in states} & self._states.keys()
        self._states = {identity: (kind, value) for identity, kind, value in states if identity in known}
        self._restored = [one for one in states if one[0] not in known]

    @register(ONE_TO_ONE, reads=lambda settings, call: metric_columns(call["batch"].columns))
    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        return batch_metrics(batch)

    @register(ONE_TO_ONE, reads=lambda settings, call: (call["by"], "group_id", "response_mask?"))
    def filter_groups(self, batch: Batch, by: str) -> GroupFilter:
        return filter_groups(batch, by)

    @register(ONE_TO_ONE, reads=("images",), writes=("images",))
    def thumbnails(self, batch: Batch) -> Batch:
        """The images of rows as small ones for pages: here, since whole ones would fill the driver's memory."""
        rows = [row if isinstance(row, list | tuple) else () for row in batch["images"]]  # or of a user's own
        return Batch({"images": [[thumbnail(one) for one in row if isinstance(one, EncodedImage)] for row in rows]})

    @register(ONE_TO_ONE, reads=None)
    def write_record(self, prompts: Batch, rows: Batch, path: str, role: str, method: str, factor: int) -> str:
        """The reason why the record could not be written, which does not stop the run; "" once it is."""
        try:
            BatchRecord(role, method, factor, prompts, rows).write(Path(path))
        except (OSError, TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
            return f"{path}: {error}"
        return ""
