"""The fork server: a process that loads once what its workers need, and forks and ends them as its owner asks.

    owner (`supervisor`)  --[socket: what, descriptors]-->  fork server  --fork-->  workers

It has one thread, so that it may fork. As a subreaper it adopts and kills what workers leave behind. It ends, with
every worker, when its owner ends. `serve` is the loop; `main`, the server of a `Supervisor`, runs a pickled function.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from hybridflow.processes.channel import Channel

Run = Callable[[Any, list[int]], object]
"""What a forked worker does with the request and the descriptors that came with it."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LONGEST_REASON = 1000

_libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """The result of a call of the C library. Errors: OSError for one that failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, third: Any = 0) -> None:
    checked(_libc.prctl(option, ctypes.c_ulong(value), third, ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has forked it, ends; if it has already, end."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def reason_of(error: BaseException) -> str:
    """`raised ValueError: what it says (rewards.py:12)`, not longer than a paragraph."""
    text = str(error)
    text = text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + "..."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}" + (f": {text}" if text else "") + place


def serve(owner: socket.socket, run: Run, *, owner_ended: int | None = None, answers: bool = True) -> None:
    """Do what the owner asks until it closes its socket or ends (`owner_ended` is its pidfd).

    "fork": a worker that does `run(given, descriptors)`, and answer with its process id if this server `answers`;
    "end": kill that worker and what it left behind, and answer with its status; "sweep": kill what workers left behind.
    """
    workers: set[int] = set()
    watched = [owner] if owner_ended is None else [owner, owner_ended]
    while owner_ended not in select.select(watched, [], [])[0]:
        request, ends, _, _ = socket.recv_fds(owner, 1 << 16, 16, socket.MSG_CMSG_CLOEXEC)
        if not request:
            return
        what, given = json.loads(request)
        if what == "sweep":
            sweep(workers, all_sessions=True)
        elif what == "end":
            workers.remove(given)
            _kill(given)
            _, status = os.waitpid(given, 0)
            sweep(workers)
            owner.send(json.dumps(status).encode())
        else:
            if not (pid := os.fork()):
                try:
                    for mine in watched:
                        os.close(mine if isinstance(mine, int) else mine.detach())
                    run(given, ends)
                finally:
                    os._exit(1)
            for end in ends:
                os.close(end)
            if answers:
                workers.add(pid)
                owner.send(json.dumps(pid).encode())


def sweep(workers: set[int], *, all_sessions: bool = False) -> None:
    """Kill adopted processes; those in the session of a worker only with `all_sessions`."""
    until = time.monotonic() + 10.0  # something may fork faster than it is killed
    while time.monotonic() < until:
        adopted = [(pid, session) for pid, session in _children() if pid not in workers]
        orphans = [pid for pid, session in adopted if all_sessions or session not in workers]
        if not orphans:
            return
        for pid in orphans:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # it may not have had the time to make its session
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _children() -> list[tuple[int, int]]:
    """Process id and session of every child of this process, adopted ones included."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended in between
            with open(f"/proc/{name}/stat") as stat:
                _, parent, _, session = stat.read().rpartition(")")[2].split()[:4]
            if int(parent) == os.getpid():
                found.append((int(name), int(session)))
    return found


def main(descriptor: int, *, preload: bool) -> NoReturn:
    """Load the function, then serve the owner. Each worker calls it with a socket of its own.

    Standard input holds the setup. Where loading the function starts threads, the process begins anew without it: its
    workers then load it themselves.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner = socket.socket(fileno=descriptor)
    with open(0, "rb", closefd=False) as given:
        setup = pickle.load(given)
    function = None
    if preload:
        try:
            function = pickle.loads(setup["function"])
        except BaseException as error:  # the function's own imports run here
            owner.send(json.dumps(reason_of(error)).encode())
            os._exit(1)
        if len(os.listdir("/proc/self/task")) > 1:  # a fork could find their locks held for ever
            os.lseek(0, 0, os.SEEK_SET)
            os.execv(sys.executable, [*sys.orig_argv, "anew"])
        gc.collect()
        gc.freeze()  # pages shared with the workers stay shared
    me = os.getpid()
    try:
        owner_ended = os.pidfd_open(setup["owner"])
        if os.getppid() == setup["owner"]:
            owner.send(json.dumps("").encode())
            serve(owner, lambda _, ends: _work(ends[0], ends[1], me, function, setup), owner_ended=owner_ended)
    except OSError:  # the owner is gone
        pass
    finally:
        sweep(set(), all_sessions=True)
        os._exit(0)


def _work(end: int, printed: int, server: int, function: Callable[..., Any] | None, setup: dict[str, Any]) -> None:
    """A worker, with a session, streams and signals of its own, which dies when the server does: load the function
    unless the server has, say so by an empty message (or why not), and call it."""
    os.setsid()
    die_with_parent(server)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(printed)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")  # a machine out of memory takes a verifier before a model
    connection = socket.socket(fileno=end)
    loading = Channel(end, end)
    try:
        run = pickle.loads(setup["function"]) if function is None else function
    except BaseException as error:  # the function's own imports run here
        loading.write(reason_of(error).encode())
        return
    loading.write(b"")
    run(connection)
