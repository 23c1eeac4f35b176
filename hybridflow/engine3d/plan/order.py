"""The order in which a rank does its part of a plan, and when its tensors need memory.

Rounds overlap: round k+1 is packed and posted while round k is in flight, so two buffers take turns. Local copies are
made while a round is in flight, those of a tensor beside the round that carries the rest of it. From this order
follows when each source tensor is read for the last time, and when each destination tensor is written first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hybridflow.engine3d.plan.plan import Move
from hybridflow.engine3d.transfer.buffers import Message
from hybridflow.engine3d.transfer.local_plan import LocalCopies

Kind = Literal["post", "copy", "finish"]


@dataclass
class Step:
    """One thing that a run does: post or finish round `index`, or make the local copies of tensor number `index`.

    `reads` are source storages and `writes` destination storages in use by it. `acquire` are the destination storages
    that nothing has written before, `release` the source storages that nothing reads after it.
    """

    kind: Kind
    index: int
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    acquire: list[str] = field(default_factory=list)
    release: list[str] = field(default_factory=list)


def make_steps(
    rounds: Sequence[Sequence[Move]], messages: Sequence[Iterable[Message]], local: Mapping[str, LocalCopies]
) -> list[Step]:
    """All steps of a run for the rounds (their moves and messages) and the local copies by canonical tensor."""
    copies: dict[int, list[Step]] = {}
    for i, (at, group) in enumerate(zip(_copy_rounds(local, rounds), local.values(), strict=True)):
        copies.setdefault(at, []).append(Step("copy", i, group.reads, group.writes))
    out = [] if rounds else copies.get(0, [])
    posted = [_message_steps(i, parts) for i, parts in enumerate(messages)]
    for i, (post, finish) in enumerate(posted):
        out += ([post] if i == 0 else []) + [step for step, _ in posted[i + 1 : i + 2]]
        out += [*copies.get(i, ()), finish]
    _place_memory(out)
    return out


def _copy_rounds(local: Iterable[str], rounds: Sequence[Sequence[Move]]) -> Iterator[int]:
    """The round beside which each tensor is copied: the first in which it travels, or where its predecessor is."""
    first: dict[str, int] = {}
    for at, moves in enumerate(rounds):
        for move in moves:
            first.setdefault(move.box.tensor, at)
    at = 0
    for tensor in local:
        at = max(at, first.get(tensor, 0))
        yield at


def _message_steps(index: int, messages: Iterable[Message]) -> tuple[Step, Step]:
    """Posting and finishing a round. A message without a buffer uses the storage while it is under way."""
    post, finish = Step("post", index), Step("finish", index)
    for message in messages:
        names = {name for parcel in message.parcels for name in parcel.storages}
        if message.sent:
            (finish if message.flat is not None else post).reads.update(names)
        else:
            (post if message.flat is not None else finish).writes.update(names)
    return post, finish


def _place_memory(steps: Iterable[Step]) -> None:
    last: dict[str, Step] = {}
    seen: set[str] = set()
    for step in steps:
        step.acquire = sorted(step.writes - seen)
        seen |= step.writes
        last.update(dict.fromkeys(step.reads, step))
    for name, step in last.items():
        step.release.append(name)
