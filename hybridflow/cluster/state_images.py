"""State images: after each iteration the ranks of groups with weights of their own put their state into the memory of
their machine, and a rank on another machine keeps a copy. A run continues from them without a disk.

    rank of the group --image--> object store of its machine --keep--> that of another machine of the group

No copies travel where the ranks of the other machines hold everything that those of one machine hold: replicas.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster import liveness
from hybridflow.cluster.backend import HostProcess, RankGroup, SessionBackend
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import Move, plan
from hybridflow.errors import CheckpointError, LayoutError

_READY_SECONDS = 5.0

Part = tuple[Box, Box, tuple[Region, ...], int]
"""A box, the box of an image that contains it, the regions to fill, and the number of that image."""


@dataclass(frozen=True)
class StateImage:
    """What one rank holds: the bits of each box of each kind of state, and the state of its random generators."""

    arrays: Mapping[tuple[str, Box], Any]
    random: Mapping[str, Any]


@dataclass(frozen=True)
class ImageHead:
    """Of an image that is complete: its bytes, the optimizer's counters, and how often its rank has run each method."""

    bytes: int
    counters: dict[str, Any] | None
    calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptImage:
    """References to an image, and to its head, on the machine of `host`."""

    host: HostProcess
    content: Any
    head: Any


@dataclass
class GroupImages:
    """Of each rank of a group an image of one moment, and a copy of it, if there is one."""

    ranks: RankGroup
    settings: Mapping[str, Any] | None
    kept: list[list[KeptImage]]

    @classmethod
    def take(cls, ranks: RankGroup, settings: Mapping[str, Any] | None, copies: bool) -> GroupImages:
        """Ask all ranks, in the order of their calls; returns at once. `settings` are those of a group that does not
        train."""
        own = [KeptImage(host, *host.handle.image.remote(ranks.key, settings)) for host in ranks.hosts]
        kept = [[one] for one in own]
        for rank, images in enumerate(kept) if copies else ():
            turned = (*ranks.hosts[rank + 1 :], *ranks.hosts[:rank])
            if (other := next((host for host in turned if host.machine != images[0].host.machine), None)) is not None:
                images.append(KeptImage(other, *other.handle.keep.remote(images[0].content)))
        return cls(ranks, settings, kept)

    @property
    def complete(self) -> bool:
        """Whether all images are there, with their copies."""
        heads = [one.head for one in chain(*self.kept)]
        ready, _ = ray.wait(heads, num_returns=len(heads), timeout=0, fetch_local=False)
        return len(ready) == len(heads) and all(isinstance(_head(one), ImageHead) for one in chain(*self.kept))

    def agreed(self, calls: Mapping[str, int]) -> ImageHead:
        """The head of all ranks, which have run these calls. Errors: CheckpointError where they are not of one step."""
        heads = list[ImageHead]()
        for rank, (one, *_) in enumerate(self.kept):
            head = _head(one)
            if not isinstance(head, ImageHead):
                raise CheckpointError(f"rank {rank} of {self.ranks.name} has no image: {head}")
            heads.append(head)
        done = [({name: head.calls.get(name, 0) for name in calls}, head.counters) for head in heads]
        if any(one != (dict(calls), heads[0].counters) for one in done):
            raise CheckpointError(f"the images of {self.ranks.name} are not of one completed step: {done}, {calls}")
        return replace(heads[0], bytes=sum(head.bytes for head in heads))

    def readable(self) -> list[KeptImage | None]:
        """Of each rank the image, or else its copy, on a machine that answers."""
        hosts = {one.host.machine: one.host for one in chain(*self.kept)}
        there = {machine: _answers(host) for machine, host in hosts.items()}
        left = [[one for one in images if there[one.host.machine]] for images in self.kept]
        return [next((one for one in images if isinstance(_head(one), ImageHead)), None) for images in left]

    def give(self, backend: SessionBackend, ranks: RankGroup, head: ImageHead) -> str:
        """Have new ranks, in the same layout, take the state. Returns from where. Errors: CheckpointError where a lost
        rank's part is held by no other; those of a rank."""
        found = self.readable()
        layout = backend.ask(ranks, "state_layout", self.settings)[0] if None in found else None
        waiting, sources = [], set[str]()
        for rank, host in enumerate(ranks.hosts):
            images, parts = _parts(ranks.name, layout, rank, found)
            sources |= {one.host.node_name for one in images}
            contents = [one.content for one in images]
            one = replace(ranks, hosts=(host,))
            waiting.append(backend.tell(one, "take_image", self.settings, head.counters, parts, *contents))
        for wait in waiting:
            wait()
        return f"{ranks.name}: {head.bytes:,} bytes from memory of {', '.join(sorted(sources))}"


def redundant(ranks: RankGroup, layout: Layout) -> bool:
    """Whether the ranks of any one machine may be lost, and the others hold everything."""
    machines = [host.machine for host in ranks.hosts]
    return len(set(machines)) > 1 and all(
        _covers(layout, [rank for rank, machine in enumerate(machines) if machine != gone]) for gone in set(machines)
    )


def _covers(layout: Layout, holders: Sequence[int]) -> bool:
    with contextlib.suppress(LayoutError):
        plan(_only(layout, holders), layout, rank=0, exact=True)
        return True
    return False


def _only(layout: Layout, holders: Sequence[int]) -> Layout:
    """The layout, in which only these ranks hold anything."""
    return replace(layout, regions=lambda rank: layout.regions(rank) if rank in holders else (), part=None)


def _parts(
    name: str, layout: Layout | None, rank: int, found: Sequence[KeptImage | None]
) -> tuple[list[KeptImage], list[Part] | None]:
    """The images that a rank reads, and which parts of them: None for its own. Errors: CheckpointError."""
    if (own := found[rank]) is not None:
        return [own], None
    assert layout is not None
    left = [other for other, image in enumerate(found) if image is not None]
    try:
        moves: Sequence[Move] = plan(_only(layout, left), layout, rank=rank, exact=True).receives(rank)
    except LayoutError as error:
        raise CheckpointError(f"{name}: rank {rank} was lost, with state that no other rank holds: {error}") from None
    sources = sorted({move.source for move in moves})
    images = [image for other in sources if (image := found[other]) is not None]
    return images, [(move.box, move.origin.box, move.into, sources.index(move.source)) for move in moves]


def _head(image: KeptImage) -> Any:
    """Or what there is instead: of an image that is not complete, was refused, or is lost."""
    try:
        return ray.get(image.head, timeout=_READY_SECONDS)
    except ray.exceptions.RayError as error:
        return type(error).__name__


def _answers(host: HostProcess) -> bool:
    """Whether the machine of a process answers, also where the process is gone."""
    try:
        where, port, _ = ray.get(host.address, timeout=liveness.ANSWER_SECONDS)
        socket.create_connection((where, port), timeout=liveness.ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (ray.exceptions.RayError, OSError):
        return False
    return True
