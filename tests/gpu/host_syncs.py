"""Counts how often the host waits for the device, by the place that made it wait.

Emulated CUDA counts exactly. A real device has no such counter: there `counted` is False, and tests skip the numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class HostSyncs:
    """What a block of code made the host wait for."""

    by_place: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, place) -> number. Place: "hybridflow/file.py:line < its caller", or "elsewhere" (no Python frame)."""
    counted: bool = False
    """Whether the device counts."""

    @property
    def total(self) -> int:
        """Waits: synchronisations, blocking copies, copies to pageable memory, operators with sizes of data.

        A copy from pageable memory ("pageable copy") waits only where a "synchronize" beside it says so.
        """
        return sum(number for (kind, _), number in self.by_place.items() if kind != "pageable copy")

    def __str__(self) -> str:
        lines = (f"{number:4d}  {kind:25s} {place}" for (kind, place), number in self.by_place.most_common())
        return "\n".join(lines) or "none"


@contextlib.contextmanager
def host_syncs() -> Iterator[HostSyncs]:
    """`with host_syncs() as found:` fills `found` when the block ends; all threads of this process count."""
    syncs = HostSyncs()
    emulation = sys.modules.get("tests.emulated_cuda.findings")
    if emulation is None:
        yield syncs
        return
    before = Counter(emulation.found)
    yield syncs
    syncs.counted = True
    for (kind, _, place), number in (Counter(emulation.found) - before).items():
        if kind in emulation.WAITS:
            syncs.by_place[kind, place] += number
