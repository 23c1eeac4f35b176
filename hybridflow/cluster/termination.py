"""Termination: SIGTERM ends a driver as Ctrl-C does, with status 143."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import ray._private.services as services
import ray._private.utils as utils

STATUS = 128 + signal.SIGTERM
_WITHIN_SECONDS = 30.0


class Termination:
    """What SIGTERM does to the driver between `taken` and `give_back`.

    KeyboardInterrupt is raised in the main thread, which is the only exception that Ray's waits let through as it is;
    what it ends leaves no traceback. More signals change nothing. A driver that has not ended `_WITHIN_SECONDS` later
    is ended as it stands, and its watcher cleans up. A handler that the user installed stays, and so does SIG_IGN;
    sessions of other threads, and of a prompt or notebook, where an exception ends a cell only, change nothing.
    """

    def __init__(self) -> None:
        self._came = self._held = False
        self._hook = sys.excepthook
        self._main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if self._main else None
        if getattr(before, "__module__", "").startswith("ray."):
            before = signal.SIG_DFL
        self._before = before
        self._ours = before == signal.SIG_DFL and not hasattr(sys, "ps1")

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Take the signal over from Ray, which is started inside; what comes meanwhile has its effect at the end.

        Ray's own handler ends Ray's processes first, whereupon the driver aborts, and so does a second signal. What
        goes to the driver's process group (Ctrl-C, `timeout`) would end them first too: they get groups of their own.
        """
        if not self._main or self._before is None:
            yield
            return
        rays, popen, self._held = utils.set_sigterm_handler, services.ConsolePopen, True
        utils.set_sigterm_handler = lambda handler: None
        services.ConsolePopen = partial(popen, process_group=0)
        try:
            self._install()
            yield
        except BaseException:
            self.give_back()
            self._ours = False
            raise
        finally:
            utils.set_sigterm_handler, services.ConsolePopen = rays, popen
            self._install()  # Ray has put one of C++ before it
            self._held = False
        if self._ours:
            sys.excepthook = self._ended
        if self._came:
            raise KeyboardInterrupt

    def _install(self) -> None:
        signal.signal(signal.SIGTERM, self._handle if self._ours else self._before)

    def give_back(self) -> None:
        """Leave the signal as it was found, unless it came: more of them must not interrupt the end."""
        if self._came or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
        if sys.excepthook == self._ended:
            sys.excepthook = self._hook

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            return
        self._came = True
        limit = threading.Timer(_WITHIN_SECONDS, os._exit, (STATUS,))
        limit.daemon = True
        limit.start()
        if not self._held:
            raise KeyboardInterrupt

    def _ended(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        """The hook for uncaught exceptions."""
        if not self._came:
            return self._hook(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            self._hook(kind, error, trace)
        raise SystemExit(STATUS)
