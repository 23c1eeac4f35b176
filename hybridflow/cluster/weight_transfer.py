"""Weight transfer: how weights travel from the ranks of one group to those of another, on the side of a host process.

    driver --TransferTask(channel, payload)--> every host of the channel, in the order of all other calls
    host:  plan -> agree -> at_work, storages -> agree -> move -> weights_arrived -> agree

A channel joins the host processes of two groups: some or all of them may be in both, and they may belong to different
pools, which share no torch world. Its process groups are formed by its members only, in the session's store. Plans and
transfers are built for the first use and kept.

The first agreement is there because `at_work` may be a collective of a group, which a rank that cannot take part would
not join. Until the ranks have agreed that all have their storages, nothing is written. From then on the receiving
group's weights count as incomplete, until all ranks have agreed that everything has arrived: no call ever computes with
half of an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.cluster.failure import Failure
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan.plan import WeightPlan, plan
from hybridflow.engine3d.transfer.transfer import Transfer
from hybridflow.engines.agreement import agree_on
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import LayoutError, WorkerError

WEIGHTS = "weights"
"""The payload of `sync_weights`; any other is a kind of optimizer state."""

Process = tuple[str, int]
"""A host process: its pool's name and its rank there."""


@dataclass(frozen=True)
class ChannelSpec:
    """Channel rank i is the process `processes[i]` on node `nodes[i]`.

    Rank i of the group that sends is channel rank `senders[i]`, rank i of the one that receives `receivers[i]`.
    """

    name: str
    processes: tuple[Process, ...]
    nodes: tuple[int, ...]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]


@dataclass(frozen=True)
class Setup:
    """Sent with the first use of a payload: its layouts on both sides.

    The first use of a channel also brings what its hosts answered when they were asked to open it.
    """

    source: Layout
    destination: Layout
    opened: tuple[RankOutput, ...] = ()


@dataclass(frozen=True)
class TransferTask:
    """Move `payload` (`WEIGHTS` or a kind of optimizer state) over `channel`, from the ranks with the key `source` to
    those of `destination`. `required`: if it fails, the receiver's weights are outdated and calls must not use them."""

    seq: int
    method: str
    channel: str
    source: str
    destination: str
    payload: str
    required: bool = False


class Side(Protocol):
    """A group's rank in this process; `incomplete` says why its weights must not be used."""

    worker: Any
    failure: Failure | None
    incomplete: Failure | None


@dataclass
class WeightChannel:
    """One process's end of a channel. `timeout` seconds bound a collective, `patience` the wait for busy peers."""

    spec: ChannelSpec
    process: Process
    store: dist.Store
    device: torch.device
    timeout: float
    patience: float
    _plans: dict[str, WeightPlan] = field(default_factory=dict)
    _transfers: dict[str, Transfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.size = self.spec.processes.index(self.process), len(self.spec.processes)
        # torch finds this process in a group by its rank in its own world; of the others it wants different numbers
        own, size = dist.get_rank(), dist.get_world_size()
        ranks = [own if i == self.rank else size + i for i in range(self.size)]
        self._groups = ProcessGroups(self.store, self.spec.name, ranks, self.rank, self.device, self.timeout)

    def run(
        self,
        task: TransferTask,
        setup: Setup | None,
        sender: Side | None,
        receiver: Side | None,
        failed: Callable[[Exception], Failure],
    ) -> dict[str, float] | Failure:
        """Collective over the channel: `bytes` over the wire and `seconds` of the slowest rank, or the Failure."""
        with ExitStack() as at_work:
            try:
                for prepare in (partial(self._plan, task.payload, setup), partial(_storages, task.payload, at_work)):
                    try:
                        mine, storages = None, prepare(sender, receiver)
                    except Exception as error:  # whatever it is, the other ranks must hear of it
                        mine, storages = failed(error), None
                    if (failure := self._agree(mine)) is not None:
                        return failure
                assert storages is not None
                self._bind(task.payload, *storages)
            except Exception as error:
                return failed(error)
            return self._move(task.payload, receiver, failed)

    def _plan(self, payload: str, setup: Setup | None, sender: Side | None, receiver: Side | None) -> None:
        """Plan a new payload, whatever else is wrong: its setup comes once. Errors: those of a rank that cannot take
        part, LayoutError when the two sides do not fit."""
        if setup is not None:
            source = setup.source.placed(self.spec.senders, self.size)
            destination = setup.destination.placed(self.spec.receivers, self.size)
            self._plans[payload] = plan(source, destination, self.spec.nodes.__getitem__, rank=self.rank, exact=True)
            self._transfers.pop(payload, None)
        if payload not in self._plans:
            raise LayoutError(
                f"how {payload} travel was not planned on this rank: the first transfer of them failed. Repeat it."
            )
        unfit = [side.failure for side in (sender, receiver) if side is not None]
        for failure in [*unfit, sender and sender.incomplete]:
            if failure is not None:
                raise failure.error

    def _agree(self, mine: Failure | None) -> Failure | None:
        """None when no rank of the channel has failed; else the failure of the first that has. Collective."""
        return mine if self.size == 1 else agree_on(self._control(), mine)[0]

    def _control(self) -> dist.ProcessGroup:
        return self._groups.new("control", range(self.size), "gloo", self.patience)

    def _bind(self, payload: str, source: Mapping[str, Tensor], destination: Mapping[str, Tensor]) -> None:
        """Bind a payload to the storages, once. Collective. Errors: LayoutError on all ranks, before a byte moves."""
        if payload not in self._transfers:
            group = self._groups.everyone() if self.size > 1 else None
            self._transfers[payload] = Transfer(self._plans[payload], source, destination, group, self.rank)

    def _move(
        self, payload: str, receiver: Side | None, failed: Callable[[Exception], Failure]
    ) -> dict[str, float] | Failure:
        """Move, and agree that everything has arrived; the receiver's weights are complete only then."""
        mine, start, received = None, time.monotonic(), 0
        try:
            transfer = self._transfers[payload]
            before = transfer.received_bytes
            transfer.run()
            transfer.release()
            received = transfer.received_bytes - before
            if receiver is not None and payload == WEIGHTS:
                receiver.worker.weights_arrived()
        except Exception as error:
            mine = failed(error)
        total = {}
        try:
            if (failure := self._agree(mine)) is None:
                total = self._total(received, time.monotonic() - start)
        except Exception as error:
            failure = mine or failed(error)
        if receiver is not None:
            receiver.incomplete = None if failure is None else incomplete(failure)
        return total if failure is None else failure

    def _total(self, received: int, seconds: float) -> dict[str, float]:
        """The bytes of all ranks and the seconds of the slowest. Collective."""
        row = torch.tensor([received, seconds], dtype=torch.float64)
        rows = [row.clone() for _ in range(self.size)]
        if self.size > 1:
            dist.all_gather(rows, row, group=self._control())
        return {"bytes": float(sum(one[0] for one in rows)), "seconds": max(float(one[1]) for one in rows)}

    def close(self) -> None:
        """Let go of buffers and process groups. Call on every member."""
        self._transfers.clear()
        self._groups.close()


def _storages(
    payload: str, at_work: ExitStack, sender: Side | None, receiver: Side | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """What this process holds of both sides, at work until the stack ends."""
    for side in (sender, receiver):
        if side is not None:
            at_work.enter_context(side.worker.at_work())
    source, destination = ({} if side is None else _storage(side.worker, payload) for side in (sender, receiver))
    return source, destination


def _storage(worker: Any, payload: str) -> Mapping[str, Tensor]:
    if payload == WEIGHTS:
        return worker.weights_storage()
    return worker.optimizing_engine().optimizer_storage()[payload]


def incomplete(failure: Failure) -> Failure:
    """For every later call on the receiving group; it is one failure, wherever the driver observes it."""
    why = failure.error
    error = WorkerError(
        f"these weights are incomplete: the last {why.method or 'transfer'} into them failed on the way "
        f"({str(why.args[0])[:400]}). Repeat it until it succeeds, or place the group again.",
        role=why.role,
        rank=why.rank,
        method=why.method,
        cause=why.cause,
        remote_traceback=why.remote_traceback,
    )
    error.id = why.id
    return Failure(error)
