"""MovedState: a worker's part of moving its group's state to other ranks (hf.reallocate, GroupSizes)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import TrainState
from hybridflow.engines.train_engine import TrainEngine


@dataclass(frozen=True)
class TrainingState:
    """An optimizer's state: tensors of each of `kinds` in `layout`, and `counters`."""

    layout: Layout
    kinds: tuple[str, ...]
    counters: dict[str, Any]


class MovedState:
    """Mixin of `Worker`, which has `context` and `resident`."""

    _skipped: Any = None  # a model's SkippedSteps

    def optimizing_engine(self) -> TrainEngine | None:
        """The engine that holds the weights' optimizer state, within `resident`; None without training."""
        return None

    def open_generation(self) -> None:
        """Build the process's one generation engine. Collective; `__init__` does it unless `context.uninitialized`."""

    def close_generation(self) -> None:
        """Free the process's one generation engine, so that ranks of a new layout can build theirs."""

    def training_state(self: Any) -> TrainingState | None:
        """The optimizer's state kinds and counters, equal on all ranks and returned by rank 0; None without an
        optimizer."""
        with self.resident():
            engine = self.optimizing_engine()
            layout = None if engine is None else engine.optimizer_layout()
            if engine is None or layout is None or self.context.rank:
                return None
            skipped = {} if self._skipped is None else {"skipped": self._skipped.streak}
            return TrainingState(layout, tuple(engine.optimizer_storage()), engine.optimizer_counters() | skipped)

    def training_state_arrived(self: Any, counters: dict[str, Any]) -> None:
        """Called after the state was written: restores counters and weights."""
        with self.resident():
            if (engine := self.optimizing_engine()) is not None:
                engine.optimizer_moved(counters)
        if self._skipped is not None:
            self._skipped.streak = counters.get("skipped", 0)

    def step_aside(self: Any) -> None:
        """Free the process's one generation engine; on a GPU, offload the training state."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():
                engine = self.optimizing_engine()
            if engine is not None:
                engine.offload(get_args(TrainState))

    def step_back(self: Any) -> None:
        """Undo `step_aside`, even if it was interrupted."""
        self.close_generation()
        if self.context.device.type == "cuda":
            with self.resident():  # leaving it offloads an idle model
                if (engine := self.optimizing_engine()) is not None:
                    engine.reload(get_args(TrainState))
        self.open_generation()

    def sleep(self: Any) -> None:
        """Free the memory of all state and drop its content, until `wake_up`. Process groups stay."""
        self.engine.release()
        self._writer = None  # has a copy of the last checkpoint

    def wake_up(self: Any) -> None:
        """Allocate what `sleep` freed; state of other ranks is written there next."""
        self.engine.reload(get_args(TrainState))
