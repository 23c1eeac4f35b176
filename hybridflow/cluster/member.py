"""Member: a group's rank in a host process, and what happened to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.cluster.control_tree import ControlTree
from hybridflow.cluster.future import Failure
from hybridflow.engines import process_groups
from hybridflow.engines.process_groups import RankContext


@dataclass
class Member:
    """A group's rank in this process; `incomplete` is the failure of a transfer that left its weights half written,
    `failed_update` what is known of the first update that raised, `calls` how often each method was run, and `buffers`
    the bytes on a CUDA device that building it left there beside its state."""

    role: str
    rank: int
    context: RankContext
    settings: Mapping[str, Any] = field(default_factory=dict)
    worker: Any = None
    failure: Failure | None = None
    incomplete: Failure | None = None
    failed_update: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    buffers: int = 0
    _controls: dict[tuple[int, ...], ControlTree] = field(default_factory=dict)

    def control(self, ranks: tuple[int, ...], seconds: float) -> ControlTree:
        """By which these ranks of the group, this one among them, agree."""
        if (found := self._controls.get(ranks)) is None:
            groups, address = self.context.groups, process_groups.gloo_address
            name, rank = groups.full_name("control", ranks), ranks.index(self.rank)
            found = self._controls[ranks] = ControlTree(groups.store, name, len(ranks), rank, address, seconds)
            groups.when_closed(found.close)
            if groups.meeting.lost:
                found.abort()
        return found

    def abort(self) -> None:
        """A rank of the group is gone: whatever waits for the others fails."""
        for control in list(self._controls.values()):
            control.abort()
        self.context.groups.abort()
