"""Exchange: one cargo of weights goes over a link, on the side of a host process.

    driver --Exchange(link, cargo)--> every host of the link, in the order of all other calls
    host:  plan -> agree -> at_work, storages -> agree -> transfer -> weights_arrived -> agree

The first agreement is there because `at_work` may be a collective of a group, which a rank that cannot take part would
not join. Until the ranks have agreed that all have their storages, nothing is written. From then on the receiving
group's weights count as incomplete, until all ranks have agreed that everything has arrived: no call ever computes with
half of an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from hybridflow.cluster.columns import Part
from hybridflow.cluster.store import Failure
from hybridflow.cluster.weight_link import WEIGHTS, Cargo, WeightLink
from hybridflow.errors import WorkerError


@dataclass(frozen=True)
class Exchange:
    """Move the cargo named `cargo` over `link`, from the ranks with the key `source` to those of `destination`.

    `due`: without it the receiver's weights are outdated, so that calls must not use them if it fails.
    """

    seq: int
    method: str
    link: str
    source: str
    destination: str
    cargo: str
    due: bool = False


@dataclass(frozen=True)
class News:
    """What hosts are told with its first use and keep: what a cargo is.

    With a link's first use comes also what its ranks answered when they were asked to open it.
    """

    cargo: Cargo
    opened: tuple[Part, ...] = ()


class Side(Protocol):
    """A group's rank in this process; `incomplete` says why its weights must not be used."""

    worker: Any
    failure: Failure | None
    incomplete: Failure | None


def exchange(
    link: WeightLink,
    task: Exchange,
    news: News | None,
    sender: Side | None,
    receiver: Side | None,
    failed: Callable[[Exception], Failure],
) -> dict[str, float] | Failure:
    """Collective over the link: `bytes` that went over the wire and `seconds` of the slowest rank, or the Failure."""
    with ExitStack() as at_work:
        try:
            for prepare in (partial(_planned, link, task, news), partial(_storages, task.cargo, at_work)):
                try:
                    mine, storages = None, prepare(sender, receiver)
                except Exception as error:  # whatever it is, the other ranks must hear of it
                    mine, storages = failed(error), None
                if (failure := link.agree(mine)) is not None:
                    return failure
            assert storages is not None
            link.build(task.cargo, *storages)
        except Exception as error:
            return failed(error)
        return _moved(link, task.cargo, receiver, failed)


def _planned(link: WeightLink, task: Exchange, news: News | None, sender: Side | None, receiver: Side | None) -> None:
    """Plan what is new, whatever else is wrong: news come once. Errors: those of a rank that cannot take part."""
    if news is not None:
        link.load(news.cargo)
    link.check(task.cargo)
    for failure in (
        *(side.failure for side in (sender, receiver) if side is not None),
        sender.incomplete if sender is not None else None,
    ):
        if failure is not None:
            raise failure.error


def _storages(
    cargo: str, at_work: ExitStack, sender: Side | None, receiver: Side | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """What this process holds of both sides, at work until the stack ends."""
    for side in (sender, receiver):
        if side is not None:
            at_work.enter_context(side.worker.at_work())
    source, destination = ({} if side is None else _storage(side.worker, cargo) for side in (sender, receiver))
    return source, destination


def _moved(
    link: WeightLink, cargo: str, receiver: Side | None, failed: Callable[[Exception], Failure]
) -> dict[str, float] | Failure:
    """Move, and agree that everything has arrived; the receiver's weights are complete only then."""
    mine, start, received = None, time.monotonic(), 0
    try:
        received = link.run(cargo)
        if receiver is not None and cargo == WEIGHTS:
            receiver.worker.weights_arrived()
    except Exception as error:
        mine = failed(error)
    try:
        failure = link.agree(mine)
        rows = link.figures({"bytes": received, "seconds": time.monotonic() - start}) if failure is None else []
    except Exception as error:
        failure, rows = mine or failed(error), []
    if receiver is not None:
        receiver.incomplete = None if failure is None else incomplete(failure)
    if failure is not None:
        return failure
    return {"bytes": sum(row["bytes"] for row in rows), "seconds": max(row["seconds"] for row in rows)}


def _storage(worker: Any, cargo: str) -> Mapping[str, Tensor]:
    if cargo == WEIGHTS:
        return worker.weights_storage()
    return worker.optimizing_engine().optimizer_storage()[cargo]


def incomplete(failure: Failure) -> Failure:
    """For every later call on the receiving group; it is one failure, wherever the driver meets it."""
    why = failure.error
    error = WorkerError(
        f"these weights are incomplete: the last {why.method or 'exchange'} into them failed on the way "
        f"({str(why.args[0])[:400]}). Repeat it until it succeeds, or place the group again.",
        role=why.role,
        rank=why.rank,
        method=why.method,
        cause=why.cause,
        remote_traceback=why.remote_traceback,
    )
    error.id = why.id
    return Failure(error)
