"""Stages of a driver's start (Ray starts, a group is built), reported to a display that listens. Without one, nothing
happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol


class StageListener(Protocol):
    """A display of stages. Its methods must not raise."""

    console: Any
    """Of rich: displays of the run share it."""
    directory: Path | None
    """Where the run's tracker writes."""

    def begin(self, name: str) -> None:
        """A stage begins, within those that have not ended."""

    def end(self, name: str, failed: bool) -> None: ...

    def progress(self, text: str) -> None:
        """How far the current stage is, or whom it waits for."""

    def close(self, started: bool) -> None:
        """The start is over: the first iteration is done, or the driver has ended before."""


_listeners: list[StageListener] = []


@contextmanager
def listening(listener: StageListener) -> Iterator[None]:
    """Reports the stages of this process to `listener`, until the start is over or the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _stop(listener, started=False)


def is_shown() -> bool:
    """Whether something listens."""
    return bool(_listeners)


def console() -> Any:
    """That of the display that listens, if one does."""
    return _listeners[-1].console if _listeners else None


def writes_to(directory: str | os.PathLike[str]) -> None:
    """Reports the run's directory."""
    for listener in _listeners:
        listener.directory = Path(directory)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs inside is a stage."""
    listeners, failed = list(_listeners), True
    for listener in listeners:
        listener.begin(name)
    try:
        yield
        failed = False
    finally:
        for listener in listeners:
            listener.end(name, failed)


def progress(text: Callable[[], str]) -> None:
    """Says how far the current stage is; `text` is called only where something listens."""
    for listener in _listeners:
        listener.progress(text())


def begin(name: str) -> None:
    """Begins a last stage, which ends with the start: the first iteration."""
    for listener in _listeners:
        listener.begin(name)


def started() -> None:
    """The start is over: the first iteration is done."""
    for listener in list(_listeners):
        _stop(listener, started=True)


def _stop(listener: StageListener, started: bool) -> None:
    if listener in _listeners:
        _listeners.remove(listener)
        listener.close(started)
