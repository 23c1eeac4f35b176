"""Contention: devices of a node that slow each other down, as logical devices on the cores of one host do. Pure.

A call takes `slow(n)` times as long when n devices of its node work as it does when one does; a device that waits half
of the time is half a device. Seconds of a call count its own devices already; in a timeline those of other calls come
and go, so what a call still has to do is followed from one start or end of a call to the next (processor sharing).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridflow.planner.describe.cluster_spec import ClusterSpec, NodeSpec

_DONE = 1e-9  # of a call's seconds: what is left when it ends, by rounding


@dataclass(frozen=True)
class Contention:
    """Nodes with their devices, one bit for each."""

    nodes: tuple[tuple[int, NodeSpec], ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Contention | None:
        """None where no device slows another down."""
        if not any(node.slowdown for node in cluster.nodes):
            return None
        nodes = []
        for i, node in enumerate(cluster.nodes):
            devices = cluster.devices_of(i)
            nodes.append((((1 << len(devices)) - 1) << devices[0], node))
        return cls(tuple(nodes))

    def load(self, mask: int, busy: float) -> tuple[float, ...]:
        """Of each node, how many of the devices of `mask` work at a time if each does for the share `busy`."""
        return tuple((mask & devices).bit_count() * busy for devices, _ in self.nodes)

    def factor(self, own: Sequence[float], total: Sequence[float]) -> float:
        """How much longer a call with the load `own` takes while `total` works, its own part included."""
        most = 1.0
        for (_, node), mine, all_of_it in zip(self.nodes, own, total, strict=True):
            if mine:
                most = max(most, node.slow(all_of_it) / node.slow(mine))
        return most


class ContendedRun:
    """One run of a schedule whose calls slow each other down: `waiting`, `after`, `seconds`, `masks` and `shares` are
    as `GraphSchedule.run` has them, nodes of later iterations behind those of earlier ones."""

    def __init__(
        self,
        sharing: Contention,
        waiting: Sequence[int],
        after: Sequence[Sequence[int]],
        seconds: Sequence[float],
        masks: Sequence[int],
        shares: Sequence[float],
        in_program: bool,
    ) -> None:
        self.loads = [sharing.load(mask, share) for mask, share in zip(masks, shares, strict=True)]
        self.sharing, self.waiting, self.after = sharing, list(waiting), after
        self.seconds, self.masks, self.in_program = seconds, masks, in_program
        total = len(waiting)
        self.starts, self.stops = [0.0] * total, [0.0] * total
        ready = [(0.0, i) for i in range(total) if not waiting[i]]
        # what has not begun, in the order in which it may claim devices
        self.queue = [(0.0, i) for i in range(total)] if in_program else ready
        self.left: dict[int, float] = {}  # seconds that each running call still needs, alone
        self.busy, self.now = 0, 0.0

    def run(self) -> tuple[list[float], list[float]]:
        """Start and stop of each node."""
        self._begin()
        while self.left:
            loads = {i: self.loads[i % len(self.loads)] for i in self.left}
            total = [sum(own) for own in zip(*loads.values(), strict=True)]
            factors = {i: self.sharing.factor(own, total) for i, own in loads.items()}
            passed = min(self.left[i] * factors[i] for i in self.left)
            self.now += passed
            for i, factor in factors.items():
                self.left[i] -= passed / factor
            for i in [i for i, left in self.left.items() if left <= _DONE * self._seconds(i)]:
                del self.left[i]
                self.busy &= ~self._mask(i)
                self._end(i)
            self._begin()
        return self.starts, self.stops

    def _begin(self) -> None:
        """Start every call that waits for nothing and whose devices no earlier call claims.

        Of those that became ready together, none claims a device before all that can start have started.
        """
        begun = True
        while begun:  # what takes no time lets others begin at once
            begun, claimed = False, self.busy
            for _, together in groupby(list(self.queue), key=lambda entry: entry if self.in_program else entry[0]):
                left = 0
                for entry in together:
                    i = entry[1]
                    if self.waiting[i] or self._mask(i) & claimed:
                        left |= self._mask(i)
                        continue
                    self.queue.remove(entry)
                    self.starts[i], begun = self.now, True
                    if self._seconds(i) > 0:
                        self.left[i] = self._seconds(i)
                        self.busy |= self._mask(i)
                        claimed |= self._mask(i)
                    else:
                        self._end(i)
                claimed |= left

    def _end(self, i: int) -> None:
        self.stops[i] = self.now
        for other in self.after[i]:
            self.waiting[other] -= 1
            if not self.waiting[other] and not self.in_program:
                insort(self.queue, (self.now, other))

    def _mask(self, i: int) -> int:
        return self.masks[i % len(self.masks)]

    def _seconds(self, i: int) -> float:
        return self.seconds[i % len(self.seconds)]
