"""Brood: the children of one function while they live, and the nursery that starts them."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.child import Frames, frame, read_answer
from hybridflow.rewards.nursery import Nursery
from hybridflow.rewards.signature import name_of

LOADING = 120.0
"""Seconds that a child may take to import what the function needs."""

NOT_LOADED = "the reward function cannot be loaded in a child process: it"
_SHOWN_OUTPUT = 300


@dataclass(eq=False)
class Child:
    """One child process as we see it: `call` is the index of the call that it works on."""

    socket: socket.socket
    pid: int
    ended: int
    outbox: memoryview
    due: float
    ready: bool = False
    call: int | None = None
    frames: Frames = field(default_factory=Frames)

    @property
    def idle(self) -> bool:
        return self.ready and self.call is None


class Brood:
    """Children that are started and buried one by one; `load` comes first. Errors: ConfigError for the function."""

    def __init__(self, function: Callable[..., Any], memory_mb: float | None) -> None:
        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:  # pickling runs the user's classes: whatever they raise means the same
            raise ConfigError(
                f"{name_of(function)} cannot be sent to a child process ({type(error).__name__}: {error}). Let it make "
                f"what it needs when it is called."
            ) from error
        self.setup, self.memory_mb = frame(pickle.dumps({"function": pickled, "memory_mb": memory_mb})), memory_mb
        self.nursery = Nursery()
        self.children: list[Child] = []
        self.forks = False
        self.selector = selectors.DefaultSelector()

    def load(self) -> None:
        """Have the function loaded for all children. Errors: RewardError when that fails."""
        connection, pid = self.nursery.load()
        with connection:
            answer = _first_answer(connection, self.setup)
            if answer is None:
                status, output = self.nursery.reap(pid)
                raise RewardError(f"{NOT_LOADED} {_ending(status, output)}.")
        if answer[0] == "broken":
            raise RewardError(
                f"{NOT_LOADED} {answer[1]}. What it imports must be installed and on sys.path where it runs."
            )
        self.forks = answer[1]
        if not self.forks:
            _ = self.nursery.reap(pid)

    def spawn(self) -> None:
        connection, pid = self.nursery.fork() if self.forks else self.nursery.spawn()
        connection.setblocking(False)
        until = time.monotonic() + LOADING
        outbox = memoryview(b"" if self.forks else self.setup)
        child = Child(connection, pid, os.pidfd_open(pid), outbox, until)
        self.children.append(child)
        self.selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, child)
        self.selector.register(child.ended, selectors.EVENT_READ, child)

    def send(self, child: Child, payload: bytes) -> None:
        child.outbox = memoryview(payload)
        self.selector.modify(child.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, child)

    def flush(self, child: Child) -> None:
        """Send what the socket takes."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            child.outbox = child.outbox[child.socket.send(child.outbox) :]
        if not child.outbox:
            self.selector.modify(child.socket, selectors.EVENT_READ, child)

    def bury(self, child: Child) -> str:
        """Kill the child and forget it: how it ended, in words."""
        self.children.remove(child)
        self._let_go(child)
        return _ending(*self.nursery.reap(child.pid))

    def close(self) -> None:
        for child in self.children:
            self._let_go(child)
        self.children.clear()
        self.selector.close()
        self.nursery.close()

    def forget(self) -> None:
        """Close our copies of the descriptors, and nothing else: the selector is one with that of the owner."""
        for child in self.children:
            child.socket.close()
            with suppress(OSError):
                os.close(child.ended)
        self.selector.close()
        self.nursery.forget()

    def _let_go(self, child: Child) -> None:
        for end in (child.socket, child.ended):
            self.selector.unregister(end)
        child.socket.close()
        os.close(child.ended)


def _first_answer(connection: socket.socket, setup: bytes) -> tuple | None:
    """What the process says about loading the function; None when it is late or ended without a word."""
    connection.settimeout(LOADING)
    frames = Frames()
    try:
        connection.sendall(setup)
        while piece := connection.recv(1 << 16):
            for payload in frames.feed(piece):
                return read_answer(payload)
    except OSError:
        return None
    return None


def _ending(status: int, output: str) -> str:
    """`died with SIGSEGV`, `exited with code 3`: a wait status in words, and the last of what was printed."""
    code = os.waitstatus_to_exitcode(status)
    hint = " (killed; perhaps the machine had no memory left)" if -code == signal.SIGKILL else ""
    how = f"exited with code {code}" if code >= 0 else f"died with {signal.Signals(-code).name}{hint}"
    said = output.strip()[-_SHOWN_OUTPUT:]
    return how + (f"; it printed last: {said}" if said else "")
