"""HybridEngine: moves an actor's weights from its training layout to its generation layout (paper, section 5).

It is given two things that have a layout and storage, and never imports an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.engine3d.transfer import Transfer


class Holder(Protocol):
    """Something that holds weights: a training engine, a generation engine."""

    def layout(self) -> Layout: ...

    def storage(self) -> Mapping[str, Tensor]: ...


class Generator(Holder, Protocol):
    """A holder that generates, and must be told when its weights changed."""

    def weights_changed(self) -> None: ...


class HybridEngine:
    """One rank's training and generation weights of the same model in the same process.

    The generation copy is brought up to date before the first generation after an update, by one plan from the
    training boxes to the generation boxes: with the paper's grouping each rank already holds part of its generation
    shard and receives the rest from its micro data parallel group. Building is collective over `group` (the training
    ranks, in rank order), and so is `to_generation` when the weights are stale.
    """

    def __init__(self, train: Holder, generate: Generator, group: dist.ProcessGroup | None, rank: int) -> None:
        self._generate = generate
        self.plan: WeightPlan = plan(train.layout(), generate.layout())
        self._transfer = Transfer(self.plan, train.storage(), generate.storage(), group, rank)
        self.stale = True

    def to_generation(self) -> None:
        """Make generation see the current training weights."""
        if self.stale:
            self._transfer.run()
            self._generate.weights_changed()
            self.stale = False

    def trained(self) -> None:
        """Say that the training weights changed."""
        self.stale = True
