"""Weight links: how weights go from the ranks of one group to those of another, whichever processes these are in.

A link joins the host processes of two groups: some or all of them may be in both, and they may belong to different
pools, which share no torch world. Its process groups are formed by its members only, in the store of one of the pools.
Plans and transfers are built for the first exchange and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import WeightPlan, plan
from hybridflow.engine3d.transfer import Transfer
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import LayoutError

if TYPE_CHECKING:
    from hybridflow.cluster.store import Failure

WEIGHTS = "weights"
"""The cargo of `sync_weights`; any other is a kind of optimizer state."""

Process = tuple[str, int]
"""A host process: its pool's name and its rank there."""


@dataclass(frozen=True)
class LinkSpec:
    """Link rank i is the process `processes[i]` on node `nodes[i]`, which has rank `ranks[i]` in its own torch world.

    Rank i of the group that sends is link rank `senders[i]`, rank i of the one that receives `receivers[i]`. `store` is
    the address of the rendezvous store of the pool `store_pool`.
    """

    name: str
    processes: tuple[Process, ...]
    nodes: tuple[int, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    store_pool: str
    store: tuple[str, int]


@dataclass(frozen=True)
class Cargo:
    """What travels over a link: `name` is `WEIGHTS` or a kind of optimizer state, with the layouts of both sides."""

    name: str
    source: Layout
    destination: Layout


@dataclass
class _Move:
    """A cargo as this process takes part in it."""

    plan: WeightPlan
    transfer: Transfer | None = None


@dataclass
class WeightLink:
    """One process's end of a link. `timeout` seconds bound a collective, `patience` the wait for busy peers."""

    spec: LinkSpec
    process: Process
    store: dist.Store
    device: torch.device
    timeout: float
    patience: float
    _moves: dict[str, _Move] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.spec.processes.index(self.process)
        # torch finds this process in a group by its rank in its own world; of the others it wants different numbers
        own, size = dist.get_rank(), dist.get_world_size()
        ranks = [own if i == self.rank else size + i for i in range(len(self.spec.processes))]
        self.groups = ProcessGroups(self.store, self.spec.name, ranks, self.rank, self.device, self.timeout)

    @property
    def size(self) -> int:
        return len(self.spec.processes)

    def load(self, cargo: Cargo) -> None:
        """Plan this rank's part of a cargo that is new. Errors: LayoutError when the two sides do not fit."""
        source = cargo.source.placed(self.spec.senders, self.size)
        destination = cargo.destination.placed(self.spec.receivers, self.size)
        self._moves[cargo.name] = _Move(
            plan(source, destination, self.spec.nodes.__getitem__, rank=self.rank, exact=True)
        )

    def check(self, cargo: str) -> None:
        """Errors: LayoutError when a cargo is not planned."""
        if cargo not in self._moves:
            raise LayoutError(
                f"how {cargo} travel was not planned on this rank: the first exchange of them failed. Repeat it."
            )

    def agree(self, mine: Failure | None) -> Failure | None:
        """None when no rank of the link has failed; else one failure, the same on all of them but those with their
        own. Collective."""
        return mine if self.size == 1 else agreed_failure(self._control(), mine)

    def _control(self) -> dist.ProcessGroup:
        return self.groups.new("control", range(self.size), "gloo", self.patience)

    def build(self, cargo: str, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
        """Bind a cargo to the storages, once. Collective. Errors: LayoutError on all ranks, before a byte moves."""
        move = self._moves[cargo]
        if move.transfer is None:
            group = self.groups.everyone() if self.size > 1 else None
            move.transfer = Transfer(move.plan, source, destination, group, self.rank)

    def run(self, cargo: str) -> int:
        """Move the current values; returns the bytes that came over the wire. Collective. Errors: WaitTimeoutError."""
        transfer = self._moves[cargo].transfer
        assert transfer is not None
        before = transfer.received_bytes
        transfer.run()
        transfer.release()
        return transfer.received_bytes - before

    def figures(self, mine: Mapping[str, float]) -> list[dict[str, float]]:
        """These numbers of every rank. Collective."""
        row = torch.tensor(list(mine.values()), dtype=torch.float64)
        rows = [row.clone() for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(rows, row, group=self._control())
        return [dict(zip(mine, one.tolist(), strict=True)) for one in rows]

    def close(self) -> None:
        """Let go of buffers and process groups. Call on every member."""
        self._moves.clear()
        self.groups.close()


def agreed_failure(control: dist.ProcessGroup, mine: Failure | None) -> Failure | None:
    """Of the ranks of a gloo group: None when none has failed, this rank's own failure, or that of the first."""
    failed = torch.tensor([mine is not None], dtype=torch.int32)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=control)
    if not int(failed):
        return None
    everyone: list[Failure | None] = [None] * control.size()
    dist.all_gather_object(everyone, mine, group=control)
    return mine or next(failure for failure in everyone if failure is not None)
