"""Supervisor: workers that are forked from a fork server, their messages, deadlines and ends, seen by their owner."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.processes.channel import Incoming, framed

_PROGRAM = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hybridflow.processes import fork_server
fork_server.main(int(sys.argv[2]), preload=len(sys.argv) == 3)"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Set for workers unless set by the user: threads that start at import prevent forking."""

_LOADING = 120.0  # seconds in which a process has to import what the function needs
_PATIENCE = 60.0  # seconds in which the fork server has to fork or end a worker, or to end
_KEPT_OUTPUT, _SHOWN_OUTPUT = 2000, 300
_RESTARTS = 3
_LOST = "ended when something killed the template process of the workers"


class ServerProcess:
    """The process of a fork server, which `command` starts with the descriptor of its socket, and `given` as its input.

    Its first answer, within `seconds`, is "" or why it cannot serve. Errors: OSError with the reason, or what it
    printed, where it does not start.
    """

    def __init__(
        self,
        command: Callable[[int], list[str]],
        *,
        given: bytes = b"",
        environment: dict[str, str],
        seconds: float,
        directory: str | None = None,
    ) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as reading:
            reading.write(given)
            reading.seek(0)
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                stdin=reading,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=directory,
                start_new_session=True,  # an interrupt from the terminal is for this process only
            )
            theirs.close()
            self._socket.settimeout(seconds)
            try:
                broken = self.answer()
            except BaseException as error:
                os.killpg(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
                if not isinstance(error, OSError):
                    self.close()
                    raise
                output.seek(0)
                late = isinstance(error, TimeoutError)
                broken = f"took longer than {seconds:g} s" if late else ending(code, output.read())
        self._socket.settimeout(_PATIENCE)
        if broken:
            self.close()
            raise OSError(broken)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, what: str, given: Any = None, ends: Sequence[int] = ()) -> None:
        """Errors: OSError when the server has ended."""
        socket.send_fds(self._socket, [json.dumps([what, given]).encode()], ends)

    def answer(self) -> Any:
        """Errors: OSError when the server has ended."""
        if not (answer := self._socket.recv(1 << 16)):
            raise ConnectionError("the fork server has ended")
        return json.loads(answer)

    def close(self) -> None:
        """End the server (in a process that was forked from the owner: forget it)."""
        if os.getpid() != self._owner:
            self._socket.close()
            self._process.returncode = 0  # not a child of this process, which has nothing to wait for
            return
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@dataclass(eq=False)
class WorkerProcess:
    """One worker process. It is killed at `due` with the words `late`; `ready` once it has loaded the function;
    `retiring`: it gets no new work."""

    server: ServerProcess
    pid: int
    socket: socket.socket
    ended: int  # a pidfd
    output: io.FileIO  # what it prints
    due: float = math.inf
    late: str = ""
    ready: bool = False
    retiring: bool = False
    printed: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: Incoming = field(default_factory=Incoming)

    def allow(self, seconds: float, late: str = "took longer than") -> None:
        """Its deadline, in `seconds` from now."""
        self.due, self.late = time.monotonic() + seconds, f"{late} {seconds:g} s"

    def send(self, message: bytes) -> None:
        """Does not block: what the socket does not take now is sent by `Supervisor.poll`."""
        self.outgoing += framed(message)
        self.flush()

    def flush(self) -> None:
        with suppress(OSError):  # it is full; or the worker has ended, as is noticed next
            while self.outgoing:
                del self.outgoing[: self.socket.send(memoryview(self.outgoing)[: 1 << 20].tobytes())]

    def read(self) -> list[bytes] | None:
        """Messages that have arrived; None at the end of them, or of sense in them."""
        try:
            piece = self.socket.recv(1 << 20)
            return self.incoming.add(piece) if piece else None
        except BlockingIOError:
            return []
        except (OSError, ValueError):
            return None

    def listen(self) -> bool:
        """Read some of its output; False when nothing is available."""
        piece = None if self.output.closed else self.output.read(1 << 16)
        if piece == b"":
            self.output.close()
        self.printed += piece or b""
        del self.printed[:-_KEPT_OUTPUT]
        return bool(piece)

    def close(self) -> None:
        self.socket.close()
        self.output.close()
        os.close(self.ended)


class Supervisor:
    """Workers that each call `function` (pickled) with a connection to their owner.

    Their fork server starts with the first one. Where something kills it, they end with it, and the next one starts it
    anew. Errors: RewardError when the function cannot be loaded.
    """

    def __init__(self, function: bytes) -> None:
        self.workers: list[WorkerProcess] = []
        self._given = pickle.dumps({"function": function, "owner": os.getpid()})
        self.server: ServerProcess | None = None
        self.lost = 0  # servers; the owner may count anew

    def fork(self) -> WorkerProcess:
        """Errors: RewardError also where too many servers were `lost`."""
        ours, theirs = socket.socketpair()
        read, printed = os.pipe()
        output = io.FileIO(read)
        with theirs, io.FileIO(printed, "w"):
            server, pid = self._forked([theirs.fileno(), printed])
        os.set_blocking(read, False)
        ours.setblocking(False)
        self.workers.append(worker := WorkerProcess(server, pid, ours, os.pidfd_open(pid), output))
        worker.allow(_LOADING)
        return worker

    def _forked(self, ends: list[int]) -> tuple[ServerProcess, int]:
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)]
        settings: dict[str, Any] = {"given": self._given, "environment": ONE_THREAD | os.environ}
        while self.lost <= _RESTARTS:
            try:
                server = self.server or ServerProcess(lambda end: [*command, str(end)], seconds=_LOADING, **settings)
            except OSError as error:
                raise _not_loaded(f"{error}. What it imports must be installed and on sys.path where it runs") from None
            try:
                self.server = server
                server.ask("fork", ends=ends)
                return server, server.answer()
            except OSError:
                server.close()
                self.server, self.lost = None, self.lost + 1
        raise RewardError(f"the template process of the workers is gone. It was started anew {_RESTARTS} times before.")

    def end(self, worker: WorkerProcess) -> str:
        """Kill the worker and what it started. Returns how it ended."""
        self.workers.remove(worker)
        how = _LOST
        with suppress(OSError):  # its server has ended
            worker.server.ask("end", worker.pid)
            code = os.waitstatus_to_exitcode(worker.server.answer())
            while worker.listen():
                pass
            how = ending(code, bytes(worker.printed))
        worker.close()
        return how

    def poll(self, seconds: float) -> list[tuple[WorkerProcess, bytes | str]]:
        """Messages (bytes) of workers, and how others ended (texts), waiting up to `seconds` (1000 at most) for them.

        A worker that is late is ended here. Errors: RewardError where the function cannot be loaded in a worker.
        """
        waiting = select.poll()
        for worker in self.workers:
            waiting.register(worker.socket, select.POLLIN | (select.POLLOUT if worker.outgoing else 0))
            for end in (worker.ended, *([] if worker.output.closed else [worker.output])):
                waiting.register(end, select.POLLIN)
        due = min((worker.due for worker in self.workers), default=math.inf)
        ready = dict(waiting.poll(1000 * max(0.0, min(seconds, due - time.monotonic(), 1000.0))))
        found: list[tuple[WorkerProcess, bytes | str]] = []
        for worker in list(self.workers):
            _ = worker.listen()
            worker.flush()
            state = ready.get(worker.socket.fileno(), 0)
            # An answer from before its end is read before the end is seen.
            over = worker.ended in ready or not worker.server.alive
            messages = worker.read() if state & ~select.POLLOUT else None if over else []
            if messages and not worker.ready:
                if why := messages.pop(0):
                    raise _not_loaded(why.decode(errors="replace"))
                worker.ready, worker.due = True, math.inf
            if messages is None or (worker.due <= time.monotonic() and not messages):
                late = "" if messages is None else worker.late
                how = self.end(worker)
                if not worker.ready and how != _LOST:
                    raise _not_loaded(late or how)
                found.append((worker, late or how))
            found += [(worker, message) for message in messages or ()]
        return found

    def sweep(self) -> None:
        """Kill the daemons that workers left behind."""
        if self.server is not None:
            with suppress(OSError):  # it has ended, and they with it
                self.server.ask("sweep")

    def close(self) -> None:
        """End the server and its workers (in a process forked from the owner: forget them); `fork` begins anew."""
        while self.workers:
            self.workers.pop().close()
        if self.server is not None:
            self.server.close()
            self.server = None


def ending(code: int, output: bytes) -> str:
    """`died with SIGSEGV`, `exited with code 3`: an exit code in words, and the last of what was printed."""
    hint = " (killed; perhaps the machine had no memory left)" if -code == signal.SIGKILL else ""
    how = f"exited with code {code}" if code >= 0 else f"died with {signal.Signals(-code).name}{hint}"
    said = output.decode(errors="replace").strip()[-_SHOWN_OUTPUT:]
    return how + (f"; it printed last: {said}" if said else "")


def _not_loaded(why: str) -> RewardError:
    return RewardError(f"the function cannot be loaded in a worker process: it {why}.")
