"""What a user asks of a placement beforehand: pinned groups, capped devices, groups kept apart or together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from hybridflow.errors import PlacementError, nearest
from hybridflow.planner.plans import Mesh, Parallel


@dataclass(frozen=True)
class Pin:
    """All calls of `group` run on `devices`, its training and inference calls with `parallel`, generation with
    `generate`. What is None stays open."""

    group: str
    devices: tuple[int, ...] | None = None
    parallel: Parallel | None = None
    generate: Parallel | None = None

    def __post_init__(self) -> None:
        if self.devices is not None:
            object.__setattr__(self, "devices", Mesh(tuple(sorted(self.devices))).devices)
        for parallel in (self.parallel, self.generate):
            if self.devices is not None and parallel is not None and parallel.size != len(self.devices):
                raise PlacementError(
                    f"{self} contradicts itself: p*t*d = {parallel.size} devices, and {len(self.devices)} are pinned."
                )

    def __str__(self) -> str:
        asked = {"devices": self.devices and Mesh(self.devices), "parallel": self.parallel, "generate": self.generate}
        return f"Pin({self.group}, {', '.join(f'{name}={value}' for name, value in asked.items() if value)})"


@dataclass(frozen=True)
class Cap:
    """No call of `group` runs on more than `devices` devices."""

    group: str
    devices: int

    def __post_init__(self) -> None:
        if type(self.devices) is not int or self.devices < 1:
            raise PlacementError(f"Cap({self.group!r}, {self.devices!r}): give a whole number of at least 1.")

    def __str__(self) -> str:
        return f"Cap({self.group}, {self.devices})"


@dataclass(frozen=True)
class Apart:
    """The two groups share no device."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"Apart({self.first}, {self.second})"


@dataclass(frozen=True)
class Together:
    """The two groups are on the same devices."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"Together({self.first}, {self.second})"


@dataclass(frozen=True)
class OneLayout:
    """All calls of `group` have one layout; generation has sizes of its own on the same devices, which divide it."""

    group: str

    def __str__(self) -> str:
        return f"OneLayout({self.group})"


Constraint = Pin | Cap | Apart | Together | OneLayout


class Rules:
    """Constraints, checked against each other and ready to be asked.

    Errors: PlacementError for an unknown group, devices beyond the cluster, and for two constraints that contradict
    each other, naming both.
    """

    def __init__(self, constraints: Sequence[Constraint], groups: Sequence[str], devices: int) -> None:
        self.constraints = tuple(constraints)
        self.pins = {c.group: c for c in self.constraints if isinstance(c, Pin)}
        self.caps = {c.group: c for c in self.constraints if isinstance(c, Cap)}
        self.apart = [c for c in self.constraints if isinstance(c, Apart)]
        self.together = [c for c in self.constraints if isinstance(c, Together)]
        self.one_layout = tuple(dict.fromkeys(c.group for c in self.constraints if isinstance(c, OneLayout)))
        for constraint in self.constraints:
            _check_known(constraint, groups, devices)
        self._check_doubled()
        self._check_sizes(devices)
        self._check_pairs(groups)

    def devices(self, group: str) -> tuple[int, ...] | None:
        """The devices that a group is pinned to."""
        return self.pins[group].devices if group in self.pins else None

    def pinned_sizes(self, group: str, parallel: Parallel) -> bool:
        """Some call of this group is to have these sizes."""
        pin = self.pins.get(group)
        return pin is not None and any(x and x.sizes == parallel.sizes for x in (pin.parallel, pin.generate))

    def allows(self, group: str, mesh: Mesh, parallel: Parallel, generates: bool = False) -> bool:
        """A call of this group may run so, as far as this group's own constraints go."""
        if group in self.caps and mesh.size > self.caps[group].devices:
            return False
        if (pin := self.pins.get(group)) is None:
            return True
        if pin.devices is not None and mesh.devices != pin.devices:
            return False
        asked = pin.generate if generates else pin.parallel
        return asked is None or (asked.p, asked.t, asked.d) == (parallel.p, parallel.t, parallel.d)

    def allows_mesh(self, group: str, mesh: Mesh) -> bool:
        """Some call of this group may run there, as far as this group's own constraints go."""
        if group in self.caps and mesh.size > self.caps[group].devices:
            return False
        pinned = self.devices(group)
        return pinned is None or mesh.devices == pinned

    def allows_sets(self, sets: Iterable[Iterable[str]]) -> bool:
        """Groups may be colocated in these sets, each on devices of its own."""
        at = {group: i for i, names in enumerate(sets) for group in names}
        joined = all(at[c.first] == at[c.second] for c in self.together)
        return joined and all(at[c.first] != at[c.second] for c in self.apart)

    def _check_doubled(self) -> None:
        for first, second in combinations(self.constraints, 2):
            if isinstance(first, Apart | Together) or isinstance(second, Apart | Together):
                continue
            if type(first) is type(second) and first.group == second.group and first != second:
                raise PlacementError(f"{first} and {second} contradict each other: give one of them.")

    def _check_sizes(self, devices: int) -> None:
        for group, pin in self.pins.items():
            cap = self.caps.get(group)
            for parallel in (pin.parallel, pin.generate):
                if parallel is not None and parallel.size > devices:
                    raise PlacementError(
                        f"{pin} needs p*t*d = {parallel.size} devices, the cluster has {devices}. Use smaller sizes."
                    )
            sizes = [len(pin.devices)] if pin.devices else [x.size for x in (pin.parallel, pin.generate) if x]
            if cap and any(size > cap.devices for size in sizes):
                raise PlacementError(
                    f"{pin} and {cap} contradict each other: {max(sizes)} devices are pinned, {cap.devices} allowed."
                )

    def _check_pairs(self, groups: Sequence[str]) -> None:
        linked = {group: [group] for group in groups}
        for joined in self.together:
            merged = list(dict.fromkeys(linked[joined.first] + linked[joined.second]))
            for group in merged:
                linked[group] = merged
            pinned = [self.pins[group] for group in merged if self.devices(group) is not None]
            if odd := next((pin for pin in pinned if pin.devices != pinned[0].devices), None):
                raise PlacementError(
                    f"{pinned[0]} and {odd} contradict each other: {joined} asks for the same devices."
                )
        for parted in self.apart:
            if parted.second in linked[parted.first]:
                joined = next(c for c in self.together if {c.first, c.second} & set(linked[parted.first]))
                raise PlacementError(f"{parted} and {joined} contradict each other: drop one of them.")
            first, second = self.devices(parted.first), self.devices(parted.second)
            if first and second and set(first) & set(second):
                raise PlacementError(
                    f"{parted} contradicts {self.pins[parted.first]} and {self.pins[parted.second]}: "
                    f"both are pinned to devices {sorted(set(first) & set(second))}."
                )


def _check_known(constraint: Constraint, groups: Sequence[str], devices: int) -> None:
    pair = isinstance(constraint, Apart | Together)
    named = [constraint.first, constraint.second] if pair else [constraint.group]
    for group in named:
        if group not in groups:
            raise PlacementError(f"{constraint}: the loop has no group {group!r}.{nearest(group, groups)}")
    if len(named) == 2 and named[0] == named[1]:
        raise PlacementError(f"{constraint} names the same group twice.")
    if isinstance(constraint, Pin) and constraint.devices is not None and constraint.devices[-1] >= devices:
        raise PlacementError(
            f"{constraint}: device {constraint.devices[-1]} is not in the cluster, which has 0 to {devices - 1}."
        )
