"""WorkerSpec: what a worker class says about a group on the driver, before a rank is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hybridflow.engine3d.layout import Layout
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import Cost
from hybridflow.protocols.operation import Settings
from hybridflow.topology import RankGrid


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a class says about a group with some settings: `worker_spec(settings)`, a class method.

    Asked for whenever a part is needed, so only `resolve`, `check`, `model` and `layout` may read files.
    """

    resolve: Callable[[Settings], Mapping[str, Any]] = dict
    """The settings as ranks get them: relative paths become absolute."""
    grid: Callable[[int], RankGrid] = lambda devices: RankGrid(d=devices)
    """The rank grid on a number of devices. Errors: PlacementError."""
    check: Callable[[RankGrid, str], None] = lambda grid, device_type: None
    """Checks resolved settings for a grid and a device type ("cuda" or "cpu"), before any rank is built."""
    model: Callable[[], Decoder] | None = None
    """Reads the sizes and tensors of its model."""
    token_cost: Cost | None = None
    """A row's cost as a function of its tokens, which balanced calls spread evenly over data parallel ranks; None: the
    model's, and without a model the token count."""
    layout: Callable[[RankGrid], Layout] | None = None
    """The boxes of canonical tensors that each rank holds, for weights that move to other ranks. If only built ranks
    know them, it is not `complete`, and their `runtime_layout` is."""
    fixed: str = ""
    """Why other groups may not write its weights."""
    shares_stages: bool = False
    """Whether its updates can share pipeline stages with another group's (`engines.time_sharing`)."""
    sends_parts: bool = False
    """Whether the last optimizer step of its updates sends each part of the weights while it updates the next."""
    waits: bool | None = None
    """Whether its model is in host memory between calls; None where it cannot be there as a whole."""
    without_generation: Settings = field(default_factory=lambda: {"generate": None})
    """The settings that change in a group that no longer generates."""
    replicas: Mapping[str, tuple[type, Settings]] = field(default_factory=dict)
    """By kind of operation, class and settings of replicas that run its calls in another layout, with the group's
    weights; other calls run on the group's own ranks only."""

    @cached_property
    def row_cost(self) -> Cost | None:
        """`token_cost`, or that of its model."""
        return self.model().cost if self.token_cost is None and self.model is not None else self.token_cost


def spec_of(worker_class: Any, settings: Settings) -> WorkerSpec:
    """What the class says; the default for a class that says nothing."""
    found = getattr(worker_class, "worker_spec", None)
    return WorkerSpec() if found is None else found(settings)
