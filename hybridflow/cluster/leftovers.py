"""Shared memory segments that a killed process could not remove itself."""

from __future__ import annotations

import contextlib
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def remove_leftovers(session: str) -> list[str]:
    """Remove shared memory segments whose name carries the session's name; returns their names."""
    if not session or not SHARED_MEMORY.is_dir():
        return []
    found = [path for path in SHARED_MEMORY.iterdir() if session in path.name]
    for path in found:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()
    return [path.name for path in found]
