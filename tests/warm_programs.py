"""Python programs that start as copies of a process with vLLM and Megatron imported: others import for 15 s.

    python -I -S warm_programs.py ADDRESS PROGRAM.py WORDS ...

is PROGRAM in a copy of the process at ADDRESS: with these words, this directory, this environment and these standard
streams; it ends as PROGRAM does, and who kills it kills PROGRAM. Ray starts its workers so too, see `WarmPrograms`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import subprocess

_LENGTH = 8


class WarmPrograms:
    """The process that others are copies of. `command` starts a copy; in `environment` Ray's workers are copies too."""

    def __init__(self, address: str) -> None:
        from multiprocessing import Pipe

        from tests.contracts.rank_processes import forking

        self.command = [sys.executable, "-I", "-S", __file__, address]
        settings = {"runtime_env": {"py_executable": shlex.join(self.command)}}
        self.environment = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(settings)}
        ready, theirs = Pipe()
        self._process = forking().Process(target=_serve, args=(address, theirs))
        self._process.start()
        ready.recv()

    def run(
        self, *words: object, status: int = 0, cwd: Any = None, timeout: float = 280, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A program and its words, in this repository's environment, which ends with `status`."""
        from subprocess import run

        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        environment = os.environ | {"PYTHONPATH": here} | self.environment | environment
        command = [*self.command, *map(str, words)]
        done = run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd)
        assert done.returncode == status, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return done

    def close(self) -> None:
        """Programs that still run are killed."""
        self._process.terminate()
        self._process.join()


def _serve(address: str, ready: Any) -> None:
    """Start programs until the process that asked for them has ended, or on SIGTERM."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ready.send(True)
    owner = parent_process()
    assert owner is not None
    programs: dict[int, tuple[int, socket.socket]] = {}  # by the file that says that it has ended
    clients: dict[socket.socket, int] = {}
    try:
        while True:
            for event in wait([listener, owner.sentinel, *programs, *clients]):
                if event == owner.sentinel:
                    return
                elif event is listener:
                    client, _ = listener.accept()
                    if (pid := _start(client, [listener, *clients])) is not None:
                        clients[client] = pid
                        programs[os.pidfd_open(pid)] = pid, client
                elif isinstance(event, socket.socket):  # who asked for this program has ended
                    if (pid := clients.pop(event, None)) is not None:
                        os.kill(pid, signal.SIGKILL)
                elif isinstance(event, int):
                    pid, client = programs.pop(event)
                    os.close(event)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    if clients.pop(client, None):
                        with suppress(OSError):  # it may have ended, too
                            client.sendall(str(status).encode())
                    client.close()
    finally:
        for pid, _ in programs.values():
            os.kill(pid, signal.SIGKILL)


def _start(client: socket.socket, others: Sequence[socket.socket]) -> int | None:
    """Fork a process that runs what this client asks for. Returns its number; None when the client has ended."""
    client.settimeout(60.0)
    try:
        length, streams, _, _ = socket.recv_fds(client, _LENGTH, 3)
        with client.makefile("rb") as file:
            words, directory, environment = json.loads(file.read(int.from_bytes(length)))
    except (OSError, ValueError):
        client.close()
        return None
    client.settimeout(None)
    pid = os.fork()
    for number, stream in enumerate(streams):
        if not pid:
            os.dup2(stream, number)
        os.close(stream)
    if not pid:
        for other in [client, *others]:
            other.close()
        _run(words, directory, environment)
    return pid


def _run(words: list[str], directory: str, environment: Mapping[str, str]) -> NoReturn:
    """What the interpreter does with a program, from its start to its end."""
    import atexit
    import threading
    import types

    import numpy as np

    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    _show(environment)
    os.environ.update(environment)
    os.chdir(directory)
    np.random.seed()
    sys.argv = words
    sys.path[:0] = [os.path.dirname(words[0]), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = words[0]
    status: Any = 0
    try:
        try:
            with open(words[0], "rb") as source:
                exec(compile(source.read(), words[0], "exec"), main.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
    except SystemExit as error:
        status = error.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 255)


def _show(environment: Mapping[str, str]) -> None:
    """Do what a start does with the environment: show the session to its watcher, set malloc."""
    import ctypes
    from pathlib import Path

    from hybridflow.cluster.orphan_cleanup import MARK

    *_, start, end, _ = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    shown = f"{MARK}={environment[MARK]}\0".encode() if MARK in environment else b""
    assert len(shown) < int(end) - int(start)
    ctypes.memset(int(start), 0, int(end) - int(start))
    ctypes.memmove(int(start), shown, len(shown))
    for name, number in (("MALLOC_TRIM_THRESHOLD_", -1), ("MALLOC_MMAP_THRESHOLD_", -3)):
        if name in environment:
            ctypes.CDLL(None).mallopt(number, int(environment[name]))


def _ask(address: str, words: list[str]) -> int:
    """Run a program in a copy of the process at `address`. Returns its status, or minus the signal that ended it."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [len(message).to_bytes(_LENGTH)], [0, 1, 2])
        server.sendall(message)
        return int(server.recv(16) or -signal.SIGKILL)


if __name__ == "__main__":
    if (status := _ask(sys.argv[1], sys.argv[2:])) < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)
