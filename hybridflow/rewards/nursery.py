"""The nursery: a small process of one thread that forks children, and sees to it that nothing outlives them.

A process with threads of torch or Ray must not fork, and what a child leaves behind (a process in a session of its
own, whose parent is gone) goes to whoever adopts it: the nursery does, and kills it. It runs no code of a user's, so it
always answers; it ends when the process that started it ends, however that happens, and children die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from hybridflow.errors import RewardError
from hybridflow.rewards import child

PATIENCE = 60.0
"""Seconds for the nursery to start or to answer; it takes milliseconds, on a machine that is not overloaded."""

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[2])
from hybridflow.rewards import nursery
nursery.serve(int(sys.argv[1]))"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KEPT_OUTPUT = 2000


class Nursery:
    """The handle on a nursery process, started here. Errors: RewardError when it cannot be started or is gone."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the terminal is the driver's affair
            )
        try:
            _ = self._reply()
        except RewardError as error:
            self._process.kill()
            said = self._process.communicate(timeout=PATIENCE)[1].decode(errors="replace").strip()
            raise RewardError(f"child processes for reward functions do not start: {said or error}") from error
        finally:
            if self._process.stderr is not None:
                self._process.stderr.close()

    def spawn(self) -> tuple[socket.socket, int]:
        """A new child: our end of its socket, and its process id."""
        ours, theirs = socket.socketpair()
        with theirs:
            reply = self._ask(b"spawn", theirs.fileno())
        if "error" in reply:
            ours.close()
            raise RewardError(f"a child process for a reward function cannot be started: {reply['error']}")
        return ours, int(reply["pid"])

    def reap(self, pid: int) -> tuple[int, str]:
        """Kill the child and everything it started: its wait status, and the last of what it printed."""
        reply = self._ask(b"reap %d" % pid)
        return int(reply["status"]), str(reply["output"])

    def close(self) -> None:
        """End the nursery and all its children."""
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=PATIENCE)

    def forget(self) -> None:
        """In a process that was forked from the owner: let go of it."""
        self._control.close()

    def _ask(self, command: bytes, *descriptors: int) -> dict:
        try:
            socket.send_fds(self._control, [command], list(descriptors))
        except OSError as error:
            raise RewardError(f"the process that starts reward functions is gone ({error}).") from None
        return self._reply()

    def _reply(self) -> dict:
        try:
            packet = self._control.recv(1 << 16)
        except OSError as error:
            raise RewardError(f"the process that starts reward functions does not answer ({error}).") from None
        if not packet:
            raise RewardError("the process that starts reward functions is gone; was it killed?")
        return json.loads(packet)


@dataclass
class _Kid:
    """A running child: where its output comes from, and the last of it."""

    output: int
    said: bytearray = field(default_factory=bytearray)
    closed: bool = False

    def listen(self) -> bool:
        """Read some of what it printed; False when nothing is there, now or (closed) for good."""
        try:
            piece = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return False
        self.closed = not piece
        self.said += piece
        del self.said[:-_KEPT_OUTPUT]
        return bool(piece)


def serve(control: int) -> None:
    """The nursery's loop: fork on "spawn", kill on "reap PID", until nobody holds the other end of `control`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    kids: dict[int, _Kid] = {}
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    with socket.socket(fileno=control) as connection:
        connection.send(b"{}")
        os.dup2(1, 2)
        while True:
            outputs = {kid.output: kid for kid in kids.values() if not kid.closed}
            ready, _, _ = select.select([connection, woken, *outputs], [], [])
            for kid in [kid for output, kid in outputs.items() if output in ready]:
                _ = kid.listen()
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    _ = woken.recv(1 << 12)
                _bury(kids)
            if connection in ready and not _obey(connection, kids, libc):
                break
    for pid in list(kids):
        _ = _reap(pid, kids)


def _obey(connection: socket.socket, kids: dict[int, _Kid], libc: ctypes.CDLL) -> bool:
    """Do what is asked. False when nobody is there to ask."""
    try:
        command, descriptors, _, _ = socket.recv_fds(connection, 1 << 12, 1)
    except OSError:
        return False
    if not command:
        return False
    verb, _, number = command.partition(b" ")
    if verb == b"spawn":
        reply = _spawn(connection, descriptors[0], kids, libc)
    else:
        reply = _reap(int(number), kids)
    try:
        connection.send(json.dumps(reply).encode())
    except OSError:
        return False
    return True


def _spawn(control: socket.socket, descriptor: int, kids: dict[int, _Kid], libc: ctypes.CDLL) -> dict:
    nursery = os.getpid()
    theirs, ours = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        for end in (theirs, ours, descriptor):
            os.close(end)
        return {"error": str(error)}
    if pid:
        os.close(ours)
        os.close(descriptor)
        os.set_blocking(theirs, False)
        kids[pid] = _Kid(theirs)
        return {"pid": pid}
    status = 1
    try:  # nothing that happens in the child may ever come back to the nursery's loop
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == nursery:
            control.close()
            for kid in kids.values():
                os.close(kid.output)
            os.close(theirs)
            child.prepare(ours)
            with socket.socket(fileno=descriptor) as connection:
                child.live(connection)
            status = 0
    finally:
        os._exit(status)
    raise AssertionError("a child came back")


def _reap(pid: int, kids: dict[int, _Kid]) -> dict:
    """Kill the child, its session, and what it left to the nursery."""
    kid = kids.pop(pid)
    _kill(pid)
    _, status = os.waitpid(pid, 0)
    _sweep(kids)
    while kid.listen():
        pass
    os.close(kid.output)
    return {"status": status, "output": bytes(kid.said).decode(errors="replace")}


def _kill(pid: int) -> None:
    for send in (os.killpg, os.kill):  # it may not have had the time to make its session
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGKILL)


def _sweep(kids: dict[int, _Kid]) -> None:
    """Kill what was adopted from dead children, and what those leave in turn; a session that lives keeps its own."""
    until = time.monotonic() + 10.0
    while orphans := [pid for pid, _, session in _adopted(kids) if session not in kids]:
        for pid in orphans:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if time.monotonic() > until:  # something forks faster than it is killed
            return


def _bury(kids: dict[int, _Kid]) -> None:
    """Collect what was adopted and has ended; children are left for `reap`, which tells how they ended."""
    for pid, state, _ in _adopted(kids):
        if state == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _adopted(kids: dict[int, _Kid]) -> list[tuple[int, str, int]]:
    """Process id, state and session of every process whose parent is the nursery and that it did not fork."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) not in kids:
            try:
                with open(f"/proc/{name}/stat") as stat:
                    state, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            except OSError:  # it ended in between
                continue
            if int(parent) == os.getpid():
                found.append((int(name), state, int(session)))
    return found
