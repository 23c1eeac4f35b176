"""State images: after each iteration the ranks of groups with weights of their own put their state into the memory of
their machine, and a rank on another machine keeps a copy. A run continues from them without a disk.

    rank of the group --image--> object store of its machine --keep--> that of another machine of the group

No copies travel where the ranks of the other machines hold everything that those of one machine hold: replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster.backend import HostProcess, RankGroup, SessionBackend
from hybridflow.cluster.liveness import lives
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import Move, plan
from hybridflow.errors import CheckpointError, LayoutError

_READY_SECONDS = 5.0

Part = tuple[Box, Box, tuple[Region, ...], int]
"""A box, the box of an image that contains it, the regions to fill, and the number of that image."""


@dataclass(frozen=True)
class StateImage:
    """What one rank holds: the bits of each box of each kind of state."""

    arrays: Mapping[tuple[str, Box], Any]


@dataclass(frozen=True)
class ImageHead:
    """Of an image that is complete: its bytes, the optimizer's counters, how often its rank has run each method, the
    state of its random generators, and the value of a subclass's `state()`. The driver has it."""

    bytes: int
    counters: dict[str, Any] | None
    calls: Mapping[str, int] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class KeptImage:
    """References to an image, and to its head, on the machine of `host`."""

    host: HostProcess
    content: Any
    head: Any


Reading = tuple[ImageHead, list[KeptImage], list[Part] | None]
"""What a new rank takes: its head, the images that it reads, and which parts of them (None: its own, all of it)."""


@dataclass
class GroupImages:
    """Of each rank of a group an image of one moment, and a copy of it, if there is one; `calls` are the updates that
    the driver had issued, `layout` that of the tensors, if there are any."""

    ranks: RankGroup
    settings: Mapping[str, Any] | None
    kept: list[list[KeptImage]]
    calls: Mapping[str, int]
    layout: Layout | None = None

    @classmethod
    def take(
        cls,
        ranks: RankGroup,
        settings: Mapping[str, Any] | None,
        calls: Mapping[str, int],
        layout: Layout | None,
        copies: bool,
    ) -> GroupImages:
        """Ask all ranks, in the order of their calls; returns at once. `settings` are those of a group that follows no
        other."""
        ask = (ranks.key, settings, layout is not None)
        own = [KeptImage(host, *host.handle.image.remote(*ask)) for host in ranks.hosts]
        kept = [[one] for one in own]
        for rank, images in enumerate(kept) if copies else ():
            turned = (*ranks.hosts[rank + 1 :], *ranks.hosts[:rank])
            if (other := next((host for host in turned if host.machine != images[0].host.machine), None)) is not None:
                images.append(KeptImage(other, *other.handle.keep.remote(images[0].content)))
        return cls(ranks, settings, kept, calls, layout)

    @property
    def answered(self) -> bool:
        """Whether all images and copies were made, or refused."""
        heads = [one.head for one in chain(*self.kept)]
        ready, _ = ray.wait(heads, num_returns=len(heads), timeout=0, fetch_local=False)
        return len(ready) == len(heads)

    def check(self) -> None:
        """Errors: CheckpointError where the images are not of one completed step, or a copy is missing."""
        self.agreed()
        if not all(isinstance(_head(one), ImageHead) for one in chain(*self.kept)):
            raise CheckpointError(f"the copies of the images of {self.ranks.name} are not complete")

    def agreed(self) -> list[ImageHead]:
        """The head of each rank. Errors: CheckpointError where they are not of one completed step."""
        heads = list[ImageHead]()
        for rank, (one, *_) in enumerate(self.kept):
            head = _head(one)
            if not isinstance(head, ImageHead):
                why = str(getattr(head, "error", head)).splitlines()[0]
                raise CheckpointError(f"rank {rank} of {self.ranks.name} has no image: {why}")
            heads.append(head)
        done = [({name: head.calls.get(name, 0) for name in self.calls}, head.counters) for head in heads]
        if any(one != (dict(self.calls), heads[0].counters) for one in done):
            said = f"{done}, {dict(self.calls)}"
            raise CheckpointError(f"the images of {self.ranks.name} are not of one completed step: {said}")
        return heads

    def readings(self) -> list[Reading]:
        """What each rank would take now. Errors: CheckpointError where the images are not of one completed step, or a
        lost rank's part is held by no other."""
        heads, found = self.agreed(), self._readable()
        return [(head, *_parts(self.ranks.name, self.layout, rank, found)) for rank, head in enumerate(heads)]

    def _readable(self) -> list[KeptImage | None]:
        """Of each rank the image, or else its copy, on a machine that answers: rather on one of whose processes one
        lives, since a machine that has started anew refuses like one whose process was killed."""
        hosts = dict[str, list[HostProcess]]()
        for one in chain(*self.kept):
            hosts.setdefault(one.host.machine, []).append(one.host)
        alive = {machine: _lives(those) for machine, those in hosts.items()}
        found = list[KeptImage | None]()
        for images in self.kept:
            left = [one for one in images if alive[one.host.machine] is not None]
            left.sort(key=lambda one: not alive[one.host.machine])
            found.append(next((one for one in left if isinstance(_head(one), ImageHead)), None))
        return found

    def give(self, backend: SessionBackend, ranks: RankGroup, readings: Sequence[Reading]) -> str:
        """Have new ranks, in the same layout, take the state. Returns from where. Errors: those of a rank."""
        waiting, sources = [], set[str]()
        for host, (head, images, parts) in zip(ranks.hosts, readings, strict=True):
            sources |= {one.host.node_name for one in images}
            contents = [one.content for one in images]
            one = replace(ranks, hosts=(host,))
            tensors = self.layout is not None
            waiting.append(backend.tell(one, "take_image", self.settings, tensors, head, parts, *contents))
        for wait in waiting:
            wait()
        size = sum(head.bytes for head, *_ in readings)
        return f"{ranks.name}: {size:,} bytes from memory of {', '.join(sorted(sources))}"


def redundant(ranks: RankGroup, layout: Layout) -> bool:
    """Whether the ranks of any one machine may be lost, and the others hold everything."""
    machines = [host.machine for host in ranks.hosts]
    if len(set(machines)) < 2:
        return False
    try:
        for gone in set(machines):
            left = [rank for rank, machine in enumerate(machines) if machine != gone]
            plan(_only(layout, left), layout, rank=0, exact=True)
    except LayoutError:
        return False
    return True


def _only(layout: Layout, holders: Sequence[int]) -> Layout:
    """The layout, in which only these ranks hold anything."""
    return replace(layout, regions=lambda rank: layout.regions(rank) if rank in holders else (), part=None)


def _parts(
    name: str, layout: Layout | None, rank: int, found: Sequence[KeptImage | None]
) -> tuple[list[KeptImage], list[Part] | None]:
    """The images that a rank reads, and which parts of them: None for its own. Errors: CheckpointError."""
    if (own := found[rank]) is not None:
        return [own], None
    if layout is None:  # no tensors
        return [], []
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


def _lives(hosts: Sequence[HostProcess]) -> bool | None:
    """Whether one of these processes of a machine lives; None where the machine does not answer."""
    found = None
    for host in dict.fromkeys(hosts):
        if (one := lives(host.address)) is not False:
            return one or found
        found = False
    return found
