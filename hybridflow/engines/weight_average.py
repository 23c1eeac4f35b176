"""WeightAverage: an exponential moving average, in float32, of the weights that a frozen model receives."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.contract import TrainState
from hybridflow.engines.train_engine import TrainEngine

_ROOM = 1 << 20  # float32 numbers that are taken in at once


class WeightAverage:
    """average := decay * average + (1 - decay) * the weights that arrived, from the weights of the model on.

    The model has it rounded to its dtype; alone it would lose steps that are smaller than its rounding. In checkpoints
    and moves to other ranks it takes the place of an optimizer's main parameters, so its methods are those of its
    `engine`. `on_host` keeps it in host memory.
    """

    adapters = None

    def __init__(self, engine: TrainEngine, decay: float, on_host: bool = False) -> None:
        self._engine, self._decay = engine, decay
        self._device = torch.device("cpu") if on_host else engine.device
        weights = engine.storage().items()
        self._average = {name: weight.to(self._device, torch.float32, copy=True) for name, weight in weights}
        widest = max((math.prod(weight.shape[1:]) for _, weight in weights), default=0)
        # made here: a rank that ran out of memory in an update would be a step behind the others
        self._room = torch.empty(max(_ROOM, widest), dtype=torch.float32, device=self._device)
        self.memory = Residency(self._average, engine.device)
        self.layout = self.optimizer_layout = engine.layout

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights that have been written into the model."""
        for name, weight in self._engine.storage().items():
            whole, average = torch.atleast_1d(weight, self._average[name])
            rows = max(1, len(self._room) // max(1, math.prod(whole.shape[1:])))
            for new, own in zip(whole.split(rows), average.split(rows), strict=True):
                own.lerp_(self._room[: new.numel()].view(new.shape).copy_(new), 1 - self._decay)
        self.optimizer_moved({})

    def storage(self) -> Mapping[str, Tensor]:
        return self._average

    def exact_weights(self) -> tuple[Layout, Mapping[str, Tensor]]:
        return self.layout(), self.storage()

    def optimizer_storage(self, writes: bool = False) -> dict[str, Mapping[str, Tensor]]:
        if writes:
            self.memory.changed()
        return {"main": self.storage()}

    def optimizer_counters(self) -> dict[str, Any]:
        return {}

    @torch.no_grad()
    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """The average was written from outside: copy it to the model."""
        del counters
        self.memory.changed()
        for name, weight in self._engine.storage().items():
            weight.copy_(self._average[name])
        self._engine.weights_loaded()

    def offload(self, what: Collection[TrainState]) -> None:
        self._engine.offload(what)
        self.memory.offload()

    def reload(self, what: Collection[TrainState]) -> None:
        self._engine.reload(what)
        self.memory.acquire()
