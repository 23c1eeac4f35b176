"""SlowRanks: finds the ranks of a group that their peers wait for, again and again. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.cluster.liveness import Doing

WINDOW_SECONDS = 60.0
LEAST_SECONDS = 30.0
"""Samples must span this time before a rank is named, and its notices lie a window apart."""
_LEAST_SHARE = 0.2
_TIMES_OTHERS = 3.0
_FEW = 4  # at most one rank of this number is slow: else the peers of all wait for each other


@dataclass(frozen=True)
class Sample:
    """At a moment inside a call of a group: the ranks that work, and where, if all others wait for them."""

    at: float
    call: str
    working: dict[int, str]


def sample(role: str, at: float, doing: Sequence[Doing | None]) -> Sample | None:
    """A sample of the activities of all ranks (None: no answer), or None outside the group's calls."""
    calls = [each.call if each is not None and each.call.startswith(f"{role}.") else "" for each in doing]
    waiting = {rank for rank, each in enumerate(doing) if each is not None and each.waiting and calls[rank]}
    named = Counter(call for call in calls if call)
    if not named:
        return None
    working = {
        rank: "no answer from its process" if each is None else each.place
        for rank, each in enumerate(doing)
        if rank not in waiting and (each is None or calls[rank])
    }
    few = 0 < len(working) <= max(1, len(doing) // _FEW) and waiting
    return Sample(at, named.most_common(1)[0][0], working if few else {})


def slow(samples: Sequence[Sample], ranks: int) -> dict[int, float]:
    """Rank -> the share of the time in calls that its peers waited for it, of ranks that stand out from the others."""
    if not samples or samples[-1].at - samples[0].at < LEAST_SECONDS:
        return {}
    counts = Counter(rank for each in samples for rank in each.working)
    shares = [counts[rank] / len(samples) for rank in range(ranks)]
    usual = statistics.median_low(shares)
    found = {rank: share for rank, share in enumerate(shares) if share >= max(_LEAST_SHARE, _TIMES_OTHERS * usual)}
    return found if len(found) <= max(1, ranks // _FEW) else {}


class SlowRanks:
    """The latest samples of the group `role`, whose rank i is on `nodes[i]`."""

    def __init__(self, role: str, nodes: Sequence[str]) -> None:
        self._role, self._nodes = role, nodes
        self._samples: deque[Sample] = deque()
        self._noticed = -WINDOW_SECONDS

    def add(self, at: float, doing: Sequence[Doing | None]) -> None:
        """The activities of all ranks at `at` seconds."""
        if (found := sample(self._role, at, doing)) is not None:
            self._samples.append(found)
        while self._samples and self._samples[0].at < at - WINDOW_SECONDS:
            self._samples.popleft()

    def notice(self, now: float) -> str:
        """A message that names slow ranks, at most once a minute; "" without any."""
        if now - self._noticed < WINDOW_SECONDS or not (found := slow(self._samples, len(self._nodes))):
            return ""
        self._noticed = now
        span = self._samples[-1].at - self._samples[0].at
        said = []
        for rank, share in found.items():
            last = next(each for each in reversed(self._samples) if rank in each.working)
            node = f" (node {self._nodes[rank]})" if self._nodes[rank] else ""
            said.append(f"rank {rank}{node} for {share:.0%} of the time, last at {last.working[rank]}, in {last.call}")
        return f"{self._role} is slow: in its calls of the last {span:.0f} s its ranks waited for {'; '.join(said)}."
