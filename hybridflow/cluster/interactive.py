"""Notebooks and prompts: cells that run again replace their groups and pools, and Ctrl-C leaves calls complete."""

from __future__ import annotations

import ast
import linecache
import logging
import sys
import threading
from _signal import SIGINT, getsignal, signal  # type: ignore[import]  # without the enums of `signal`: a tenth of the time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from hybridflow.batch import markup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cell:
    """The run of a cell, and the place in it that makes a group or pool: its cell and the target of its assignment."""

    place: tuple[str, str]
    run: int = field(compare=False)

    def earlier(self, other: Cell | None) -> bool:
        """Whether `other` is of an earlier run, of this or another cell."""
        return other is not None and other.run < self.run

    def made_before(self, other: Cell | None) -> bool:
        """Whether an earlier run of the same place made `other`."""
        return other == self and self.earlier(other)


def current_cell() -> Cell | None:
    """The cell that runs now in IPython; None in a script."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (shell is not None and frame.f_globals is shell.user_ns is frame.f_locals):
        frame = frame.f_back
    if frame is None:
        return None
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    name = ((parent or {}).get("metadata") or {}).get("cellId") or frame.f_code.co_filename
    return Cell((str(name), _target(frame)), int(shell.execution_count))


def _target(frame: FrameType) -> str:
    """What the running statement assigns to, or the statement."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return str(line)
    around = [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    inner = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)), default=None)
    if isinstance(inner, ast.Assign):
        return ", ".join(map(ast.unparse, inner.targets))
    return str(line) if inner is None else ast.unparse(inner)


def replaced(what: str) -> None:
    """Say that an earlier run's object is closed."""
    logger.warning("%s of an earlier run of this cell is closed: the new one takes its place.", what)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end: either all ranks have their call or none, so that no rank waits in a
    collective for another one."""
    handler = getsignal(SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal(SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal(SIGINT, handler)
        if came:
            handler(*came[0])


def group_table(group: Any) -> str:
    """A `WorkerGroup`: devices, model and strategies, and the calls that its ranks were given."""
    shown = {name: group.settings.get(name) for name in ("model", "train", "generate")}
    closed = f", closed{group.closed}" if group.closed else ""
    rows = [("devices", f"{list(group.members)} of pool {group.pool_name}{closed}")]
    rows += [(name, markup.shown(value)) for name, value in shown.items() if value is not None]
    rows += [(f".{name}(...)", f"{group.calls_issued[name]} calls") for name in group.operations]
    return markup.table(repr(group)[1:-1], (), rows)


def pool_table(pool: Any) -> str:
    """A `ResourcePool`: node and groups of each device."""
    ranks = [(group.name, one) for group in pool.session.groups.values() for one in group.all_ranks]
    rows = []
    for device in pool.members:
        host = pool.hosts[device]
        here = dict.fromkeys(name for name, one in ranks if one.pool_name == pool.name and device in one.members)
        rows.append((str(device), host.node_name or str(host.node), ", ".join(here) or "-"))
    return markup.table(repr(pool), ("device", "node", "groups"), rows)
