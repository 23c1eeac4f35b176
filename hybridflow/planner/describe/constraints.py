"""Constraints of a user on a placement: pinned groups, capped devices, groups apart or together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, product

from hybridflow.errors import PlacementError, nearest
from hybridflow.planner.describe.mesh import Mesh, Parallel
from hybridflow.topology import check_sizes


@dataclass(frozen=True)
class Pin:
    """All calls of `group` run on `devices`, its training and inference calls with `parallel`, generation with
    `generate`; with `offload` its model waits in host memory between them, with False it never does. What is None
    stays open."""

    group: str
    devices: tuple[int, ...] | None = None
    parallel: Parallel | None = None
    generate: Parallel | None = None
    offload: bool | None = None

    def __post_init__(self) -> None:
        if self.devices is not None:
            object.__setattr__(self, "devices", Mesh(tuple(sorted(self.devices))).devices)
        for parallel in (self.parallel, self.generate):
            if self.devices is not None and parallel is not None and parallel.size != len(self.devices):
                count = f"p*t*d = {parallel.size} devices, and {len(self.devices)} are pinned"
                raise PlacementError(f"{self} contradicts itself: {count}.")

    def joined(self, other: Pin) -> Pin | None:
        """Both pins of a group as one; None where they contradict each other."""
        both = [(getattr(self, name), getattr(other, name)) for name in ("devices", "parallel", "generate", "offload")]
        if any(mine is not None and theirs is not None and mine != theirs for mine, theirs in both):
            return None
        with suppress(PlacementError):
            return Pin(self.group, *(theirs if mine is None else mine for mine, theirs in both))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of devices that it asks for."""
        if self.devices is not None:
            return (len(self.devices),)
        return tuple(x.size for x in (self.parallel, self.generate) if x is not None)

    def __str__(self) -> str:
        asked = {"devices": self.devices and Mesh(self.devices), "parallel": self.parallel, "generate": self.generate}
        asked |= {"offload": self.offload}
        return (
            f"Pin({self.group}, {', '.join(f'{name}={value}' for name, value in asked.items() if value is not None)})"
        )


class _Named:
    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, vars(self).values()))})"


@dataclass(frozen=True)
class Cap(_Named):
    """No call of `group` runs on more than `devices` devices."""

    group: str
    devices: int

    def __post_init__(self) -> None:
        check_sizes(f"Cap({self.group!r})", devices=self.devices)


@dataclass(frozen=True)
class _Pair(_Named):
    first: str
    second: str


class Apart(_Pair):
    """The two groups share no device."""


class Together(_Pair):
    """The two groups are on the same devices."""


@dataclass(frozen=True)
class OneLayout(_Named):
    """All calls of `group` have one layout; generation has sizes of its own on the same devices, which divide it."""

    group: str


Constraint = Pin | Cap | Apart | Together | OneLayout


def groups_of(constraint: Constraint) -> tuple[str, ...]:
    """The groups that it names."""
    if isinstance(constraint, Apart | Together):
        return constraint.first, constraint.second
    return (constraint.group,)


class Rules:
    """Constraints, checked against each other and ready to be asked. Errors: PlacementError for an unknown group,
    devices beyond the cluster, and for constraints that contradict each other, naming them."""

    def __init__(self, constraints: Sequence[Constraint], groups: Sequence[str], devices: int) -> None:
        self.pins: dict[str, Pin] = {}
        for constraint in constraints:
            _check_known(constraint, groups, devices)
            if isinstance(constraint, Pin):
                known = self.pins.get(constraint.group)
                if (both := constraint if known is None else known.joined(constraint)) is None:
                    raise PlacementError(f"{known} and {constraint} contradict each other: give one of them.")
                self.pins[constraint.group] = both
        caps = sorted((c for c in constraints if isinstance(c, Cap)), key=lambda cap: -cap.devices)
        self.caps = {cap.group: cap for cap in caps}
        self.apart = [c for c in constraints if isinstance(c, Apart)]
        self.together = [c for c in constraints if isinstance(c, Together)]
        self.one_layout = tuple(dict.fromkeys(c.group for c in constraints if isinstance(c, OneLayout)))
        joined = {group: (group,) for group in groups}  # all groups on the devices of each
        for pair in self.together:
            merged = tuple(dict.fromkeys(joined[pair.first] + joined[pair.second]))
            joined |= dict.fromkeys(merged, merged)
        for members in dict.fromkeys(joined.values()):
            self._check_sizes(members, devices)
        for parted in self.apart:
            self._check_parted(parted, joined[parted.first], joined[parted.second], devices)

    def devices(self, group: str) -> tuple[int, ...] | None:
        return self.pins[group].devices if group in self.pins else None

    def pinned_sizes(self, group: str, parallel: Parallel) -> bool:
        """Some call of this group is to have these sizes."""
        pin = self.pins.get(group)
        return pin is not None and any(x and x.cut == parallel.cut for x in (pin.parallel, pin.generate))

    def allows(self, group: str, mesh: Mesh, parallel: Parallel, generates: bool = False) -> bool:
        """A call of this group may run so, as far as this group's own constraints go."""
        pin = self.pins.get(group)
        asked = pin and (pin.generate if generates else pin.parallel)
        return self.allows_mesh(group, mesh) and (asked is None or asked.cut == parallel.cut)

    def allows_mesh(self, group: str, mesh: Mesh) -> bool:
        """Some call of this group may run there, as far as this group's own constraints go."""
        if group in self.caps and mesh.size > self.caps[group].devices:
            return False
        return (pinned := self.devices(group)) is None or mesh.devices == pinned

    def allows_sets(self, sets: Iterable[Iterable[str]]) -> bool:
        """Groups may be colocated in these sets, each on devices of its own."""
        at = {group: i for i, names in enumerate(sets) for group in names}
        joined = all(at[c.first] == at[c.second] for c in self.together)
        return joined and all(at[c.first] != at[c.second] for c in self.apart)

    def _check_sizes(self, members: Sequence[str], devices: int) -> None:
        """Of groups that are to be on the same devices."""
        pins = [self.pins[group] for group in members if group in self.pins]
        because = "" if len(members) == 1 else f": {self._why(members)} asks for the same devices"
        for pin in pins:
            for size in pin.sizes:
                if size > devices:
                    needs = f"{pin} needs p*t*d = {size} devices"
                    raise PlacementError(f"{needs}, the cluster has {devices}. Use smaller sizes.")
                for cap in (self.caps[group] for group in members if group in self.caps):
                    if size > cap.devices:
                        both, allowed = f"{pin} and {cap} contradict each other", f"{cap.devices} allowed{because}"
                        raise PlacementError(f"{both}: {size} devices are pinned, {allowed}.")
            one = pin.group in self.one_layout
            if (one or because) and len(set(pin.sizes)) > 1:
                both = f"{pin} and {OneLayout(pin.group) if one else self._why(members)} contradict each other"
                raise PlacementError(f"{both}: generation is pinned to other devices than training.")
        for first, second in combinations(pins, 2):
            both = first.devices is not None and second.devices is not None
            if first.devices != second.devices if both else {*first.sizes} != {*second.sizes}:
                raise PlacementError(f"{first} and {second} contradict each other{because}.")

    def _check_parted(self, parted: Apart, first: Sequence[str], second: Sequence[str], devices: int) -> None:
        if first == second:
            raise PlacementError(f"{parted} and {self._why(first)} contradict each other: drop one of them.")
        a, b = ([self.pins[group] for group in members if group in self.pins] for members in (first, second))
        for mine, other in product(a, b):
            if common := {*(mine.devices or ())} & {*(other.devices or ())}:
                where = Mesh(tuple(sorted(common)))
                raise PlacementError(f"{parted} contradicts {mine} and {other}: both are pinned to devices {where}.")
        most = [max([(size, str(pin)) for pin in pins for size in pin.sizes], default=(1, "")) for pins in (a, b)]
        if (asked := most[0][0] + most[1][0]) > devices:
            named = " and ".join([str(parted), *(text for _, text in most if text)])
            verb = "contradict each other: they ask" if any(text for _, text in most) else "asks"
            raise PlacementError(f"{named} {verb} for {asked} devices at least, and the cluster has {devices}.")

    def _why(self, members: Sequence[str]) -> Together:
        return next(c for c in self.together if c.first in members)


def _check_known(constraint: Constraint, groups: Sequence[str], devices: int) -> None:
    named = groups_of(constraint)
    for group in named:
        if group not in groups:
            raise PlacementError(f"{constraint}: the loop has no group {group!r}.{nearest(group, groups)}")
    if len(named) == 2 and named[0] == named[1]:
        raise PlacementError(f"{constraint} names the same group twice.")
    if isinstance(constraint, Pin) and constraint.devices is not None and constraint.devices[-1] >= devices:
        last = f"device {constraint.devices[-1]} is not in the cluster, which has 0 to {devices - 1}"
        raise PlacementError(f"{constraint}: {last}.")
