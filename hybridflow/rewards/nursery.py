"""The nursery: a small process of one thread that forks children, and sees to it that nothing outlives them.

A process with threads of torch or Ray must not fork, and what a child leaves behind (a process in a session of its
own, whose parent is gone) goes to whoever adopts it: the nursery does, and kills it. It runs no code of a user's, so it
always answers; it ends when the process that started it ends, however that happens, and children die with it. The
function is loaded once, in a process beside the children, which are forked from that one and handed to the nursery: a
child that was killed is replaced within milliseconds, whatever the function imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 for children unless said otherwise: there are many of them, and threads at import prevent forking."""

_KEPT_OUTPUT = 2000


class NurseryError(RewardError):
    """The nursery has ended, or does not answer; its children end with it."""


class Nursery:
    """The handle on a nursery process, started here. Errors: RewardError when it cannot be started, NurseryError."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=dict.fromkeys(_ONE_THREAD, "1") | os.environ,
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

    @property
    def alive(self) -> bool:
        """False when it has ended by itself, or was killed; its children may live for a moment more."""
        return self._process.poll() is None

    def load(self) -> tuple[socket.socket, int]:
        """A process that loads a function once, for `fork`: our end of its socket, and its process id."""
        return self._new(b"load")

    def fork(self) -> tuple[socket.socket, int]:
        """A child that has the function already."""
        return self._new(b"fork")

    def spawn(self) -> tuple[socket.socket, int]:
        """A child that loads the function itself."""
        return self._new(b"spawn")

    def _new(self, command: bytes) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reply = self._ask(command, theirs.fileno())
            except NurseryError:
                ours.close()
                raise
        if "error" in reply:
            ours.close()
            raise RewardError(f"a child process for a reward function cannot be started: {reply['error']}.")
        return ours, int(reply["pid"])

    def reap(self, pid: int) -> tuple[int, str]:
        """Kill the child and everything it started: its wait status, and the last of what it printed."""
        reply = self._ask(b"reap %d" % pid)
        return int(reply["status"]), str(reply["output"])

    def sweep(self) -> None:
        """Kill what children left behind: processes that they started and that have no parent any more."""
        _ = self._ask(b"sweep")

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
        self._process.returncode = 0  # it is no child of this process, which has nothing to wait for

    def _ask(self, command: bytes, *descriptors: int) -> dict:
        try:
            socket.send_fds(self._control, [command], list(descriptors))
        except OSError as error:
            raise NurseryError(f"the process that starts reward functions is gone ({error}).") from None
        return self._reply()

    def _reply(self) -> dict:
        try:
            packet = self._control.recv(1 << 16)
        except OSError as error:
            raise NurseryError(f"the process that starts reward functions does not answer ({error}).") from None
        if not packet:
            raise NurseryError("the process that starts reward functions is gone; was it killed?")
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


@dataclass
class _State:
    """The nursery: its children, and its end of the orders to the process that has loaded the function."""

    connection: socket.socket
    kids: dict[int, _Kid] = field(default_factory=dict)
    orders: socket.socket | None = None


def serve(control: int) -> None:
    """The nursery's loop: start what is asked for, kill on "reap PID", until the other end of `control` is closed."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    with socket.socket(fileno=control) as connection:
        state = _State(connection)
        kids = state.kids
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
            if connection in ready and not _obey(state):
                break
    for pid in list(kids):
        _ = _reap(pid, kids)


def _obey(state: _State) -> bool:
    """Do what is asked. False when nobody is there to ask."""
    try:
        command, descriptors, _, _ = socket.recv_fds(state.connection, 1 << 12, 1)
    except OSError:
        return False
    if not command:
        return False
    verb, _, number = command.partition(b" ")
    try:
        if verb == b"reap":
            reply = _reap(int(number), state.kids)
        elif verb == b"sweep":
            reply = _sweep(state.kids, all_sessions=True)
        else:
            reply = _start(verb, descriptors[0], state)
    except OSError as error:  # no process, no descriptor left, or the process that forks is gone
        reply = {"error": str(error)}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    try:
        state.connection.send(json.dumps(reply).encode())
    except OSError:
        return False
    return True


def _start(verb: bytes, descriptor: int, state: _State) -> dict:
    """A new process that talks over `descriptor`: the loader of the function, or a child, forked by it or by us."""
    output, theirs = os.pipe()
    try:
        pid = _forked(descriptor, theirs, state) if verb == b"fork" else _spawned(verb, descriptor, theirs, state)
    except OSError:
        os.close(output)
        raise
    finally:
        os.close(theirs)
    os.set_blocking(output, False)
    state.kids[pid] = _Kid(output)
    return {"pid": pid}


def _forked(descriptor: int, output: int, state: _State) -> int:
    if state.orders is None:
        raise OSError("no function is loaded")
    socket.send_fds(state.orders, [b"f"], [descriptor, output])
    pid = int(state.orders.recv(32) or b"0")
    if not pid:
        raise OSError("the process that has loaded the function is gone")
    return pid


def _spawned(verb: bytes, descriptor: int, output: int, state: _State) -> int:
    nursery = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        if verb == b"load":
            ours.settimeout(PATIENCE / 2)  # of whoever waits for our answer
            state.orders = ours
        else:
            ours.close()
        return pid
    status = 1
    try:  # nothing that happens in the child may ever come back to the nursery's loop
        state.connection.close()
        ours.close()
        for kid in state.kids.values():
            os.close(kid.output)
        _settle(nursery, output, False)
        with socket.socket(fileno=descriptor) as connection:
            if verb == b"load":
                child.stem(connection, theirs, functools.partial(_settle, nursery))
            else:
                child.live(connection)
        status = 0
    finally:
        os._exit(status)
    raise AssertionError("a child came back")


def _settle(nursery: int, output: int, adopted: bool) -> None:
    """In a fresh process: become a child that dies with the nursery. `adopted`: it has to be adopted first."""
    until = time.monotonic() + PATIENCE
    while adopted and os.getppid() != nursery and time.monotonic() < until:
        time.sleep(0.0005)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # of the parent that it has at this moment
    if os.getppid() != nursery:
        os._exit(1)
    child.prepare(output)


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


def _sweep(kids: dict[int, _Kid], *, all_sessions: bool = False) -> dict:
    """Kill what was adopted, and what that leaves in turn; the sessions of children at work are left alone."""
    until = time.monotonic() + 10.0
    while orphans := [pid for pid, _, session in _adopted(kids) if all_sessions or session not in kids]:
        for pid in orphans:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if time.monotonic() > until:  # something forks faster than it is killed
            break
    return {}


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
