"""Memory of this machine, or of its container where that has less. Without torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def capacity(group: Path = _GROUP) -> int:
    """Bytes in all."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit is "max"
        total = min(total, int((group / "memory.max").read_text()))
    return total


def available(meminfo: Path = Path("/proc/meminfo"), group: Path = _GROUP) -> int | None:
    """Bytes still available to a process."""
    found: list[int] = []
    with suppress(OSError):
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        found += [int(line[1]) * 1024 for line in lines if line[:1] == ["MemAvailable:"]]
    with suppress(OSError):  # what control group v2 leaves; pages of unused files are given back when they are needed
        limit, used = ((group / f"memory.{what}").read_text().strip() for what in ("max", "current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            found.append(max(0, int(limit) - int(used) + int(pages.get("inactive_file", 0))))
    return min(found, default=None)
