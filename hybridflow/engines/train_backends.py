"""The training backends: from the type of a strategy to the modules that check, lay out and build it.

A backend is a folder of `engines/` with two modules. `layout` is pure: `check(strategy, spec, grid, role)` raises
errors before a process starts; `weights_layout(strategy, spec, grid)` and `state_layout(...)` return the layouts of the
parameters and of each kind of optimizer state. `engine` imports the framework: `build_model(context, strategy, spec,
optimizer)` returns a `ShardedModel`. A process imports only the frameworks that it runs, on first use.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import FSDP, Megatron, Optimizer, TrainStrategy, ZeRO
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import Uninitialized
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import ConfigError
from hybridflow.models.spec import Decoder
from hybridflow.topology import RankGrid


@dataclass(frozen=True)
class TrainBackend:
    """One strategy and its folder."""

    strategy: Any
    folder: str

    def check(self, spec: Decoder, grid: RankGrid, role: str = "the model") -> None:
        """Errors: ModelError, PlacementError when the strategy cannot cut `spec` over `grid`."""
        self.module("layout").check(self.strategy, spec, grid, role)

    def layout(self, spec: Decoder, grid: RankGrid) -> Layout:
        """Which rank of `grid` holds which boxes of `spec`. Errors: those of `check`."""
        return self.module("layout").weights_layout(self.strategy, spec, grid)

    def state_layout(self, spec: Decoder, grid: RankGrid) -> Layout:
        """The same for one kind of optimizer state. Errors: those of `check`."""
        return self.module("layout").state_layout(self.strategy, spec, grid)

    def module(self, name: str) -> Any:
        return importlib.import_module(f"hybridflow.engines.{self.folder}.{name}")


_FOLDERS: dict[type, str] = {Megatron: "megatron", FSDP: "fsdp", ZeRO: "zero"}


def backend_of(strategy: TrainStrategy) -> TrainBackend:
    """The backend of a strategy. Errors: ConfigError for a strategy without one."""
    if type(strategy) not in _FOLDERS:
        raise ConfigError(
            f"train={strategy!r} is not a training strategy. Use hf.Megatron(...), hf.FSDP(...) or hf.ZeRO(...)."
        )
    return TrainBackend(strategy, _FOLDERS[type(strategy)])


def build_engine(
    context: RankContext,
    strategy: TrainStrategy,
    spec: Decoder,
    checkpoint: str | Path | Uninitialized | None = None,
    optimizer: Optimizer | None = None,
) -> TrainEngine:
    """The engine of one rank that the type of `strategy` asks for. Errors: ConfigError, those of the engine."""
    build = backend_of(strategy).module("engine").build_model
    return TrainEngine(build, context, strategy, spec, checkpoint, optimizer)
