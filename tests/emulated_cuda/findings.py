"""What the emulation finds: host syncs by place, and faults, which are also written to the file EMULATED_LOG."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY, OWN = str(ROOT / "hybridflow") + os.sep, str(Path(__file__).parent) + os.sep
PROGRAMS = tuple(str(ROOT / name) + os.sep for name in ("recipes", "tests", "benchmarks"))
# Each is undefined, or an error, on a GPU. A record in the log starts with its kind; further lines are indented.
FAULTS = ("race", "kernel", "host index", "collective", "deadlock")
# The host waits for the device. A pageable copy to the device waits for no more than its own bytes, after the stream.
WAITS = ("synchronize", "blocking copy", "pageable copy", "pageable copy to the host", "data-dependent")

found: Counter[tuple[str, str, str]] = Counter()  # (kind, detail, place)
local = threading.local()  # `operator`: the one that runs; `quiet`: the emulation's own accesses


def place() -> str:
    """File and line of the library that led here, and of its caller there; else of the program."""
    frame, library, programs = sys._getframe(1), [], []
    while frame is not None and len(library) < 2:
        name = frame.f_code.co_filename
        if name.startswith(LIBRARY):
            library.append(f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}")
        elif name.startswith(PROGRAMS) and not name.startswith(OWN):
            programs.append(f"{name[len(str(ROOT)) + 1 :]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(library or programs[:1]) or "elsewhere"


def tell(kind: str, detail: str) -> None:
    if getattr(local, "quiet", 0):
        return
    if kind == "race":
        detail += f" in {getattr(local, 'operator', 'a call of the runtime')}"
    where = place()
    found[kind, detail, where] += 1
    if kind in FAULTS and (log := os.environ.get("EMULATED_LOG")):
        stack = "".join(traceback.format_stack(limit=16)[:-2]).rstrip().replace("\n", "\n ")
        with open(log, "a") as file:
            file.write(f"{kind}: {detail} at {where}\n {stack}\n")


def report() -> str:
    """A line for each kind and place; details of copies are left out."""
    total: Counter[tuple[str, str, str]] = Counter()
    for (kind, detail, where), count in found.items():
        total[kind, "" if "copy" in kind else detail[:100], where] += count
    ordered = sorted(total.items(), key=lambda item: (item[0][0], -item[1]))
    return "\n".join(f"{count:6d}  {kind:25s} {detail:30s} {where}" for (kind, detail, where), count in ordered)
