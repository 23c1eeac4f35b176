"""The training backends: from the type of a strategy to the modules that check, lay out and build it.

A backend is a folder of `engines/` with two modules. `layout` is pure: `check(strategy, spec, grid, role)` raises
errors before a process starts; `weights_layout(strategy, spec, grid)` and `state_layout(...)` return the layouts of the
parameters and of each kind of optimizer state. `engine` imports the framework: `build_model(context, strategy, spec,
optimizer)` returns a `ShardedModel`. A process imports only the frameworks that it runs, on first use.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Literal

from hybridflow.config import FSDP, Megatron, Optimizer, TrainStrategy, ZeRO
from hybridflow.engines.contract import Uninitialized
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder

_FOLDERS: dict[type, str] = {Megatron: "megatron", FSDP: "fsdp", ZeRO: "fsdp"}


def backend(strategy: TrainStrategy, module: Literal["layout", "engine"]) -> Any:
    """A module of the strategy's backend. Errors: ConfigError for a strategy without one."""
    if type(strategy) not in _FOLDERS:
        raise ConfigError(
            f"train={strategy!r} is not a training strategy. Use hf.Megatron(...), hf.FSDP(...) or hf.ZeRO(...)."
        )
    return importlib.import_module(f"hybridflow.engines.{_FOLDERS[type(strategy)]}.{module}")


def build_engine(
    context: RankContext,
    strategy: TrainStrategy,
    spec: Decoder,
    checkpoint: str | Path | Uninitialized | None = None,
    optimizer: Optimizer | None = None,
) -> TrainEngine:
    """The engine of one rank that the type of `strategy` asks for. Errors: ConfigError, those of the engine."""
    return TrainEngine(backend(strategy, "engine").build_model, context, strategy, spec, checkpoint, optimizer)
