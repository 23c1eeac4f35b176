"""The template process of a `ProcessPool`: it loads the function once, and forks and ends workers as its owner asks.

It has one thread, so that it may fork, and imports only the standard library and cloudpickle. As a subreaper it adopts
and kills processes that workers leave behind. It ends, with every worker, when its parent ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import cloudpickle

from hybridflow.rewards.calling import plain, reason_of, settled
from hybridflow.rewards.sandbox.containment import die_with_parent, prctl

LARGEST_MESSAGE = 2**28
"""Bytes of one call or result. Larger results count as failures, to bound memory."""

UNSENT = "answered with what cannot be sent back"

_PR_SET_CHILD_SUBREAPER = 36
_LENGTH = struct.Struct("!Q")


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """Errors: ConnectionError when the other end is closed or sends more than a message may have; TimeoutError."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > LARGEST_MESSAGE + 2**20:
        raise ConnectionError(f"a message of {length} bytes")
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        if not (piece := connection.recv(min(count - len(found), 1 << 20))):
            raise ConnectionError("the other end is closed")
        found += piece
    return found


def serve(descriptor: int, *, preload: bool) -> NoReturn:
    """Load the function, then answer the owner until it closes its end of the socket or ends.

    Standard input holds the setup. Where loading the function starts threads, the process begins anew without it.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner = socket.socket(fileno=descriptor)
    with open(0, "rb", closefd=False) as given:
        setup = pickle.load(given)
    function = None
    if preload:
        try:
            function = cloudpickle.loads(setup["function"])
        except BaseException as error:  # the function's own imports run here
            owner.send(json.dumps(reason_of(error)).encode())
            os._exit(1)
        if len(os.listdir("/proc/self/task")) > 1:  # a fork could find their locks held for ever
            os.lseek(0, 0, os.SEEK_SET)
            os.execv(sys.executable, [*sys.orig_argv, "anew"])
        gc.collect()
        gc.freeze()  # pages shared with the workers stay shared
    workers: set[int] = set()
    try:
        owner_ended = os.pidfd_open(setup["owner"])
        if os.getppid() == setup["owner"]:
            owner.send(json.dumps("").encode())
            while _answered(owner, owner_ended, workers, function, setup):
                pass
    except OSError:  # the owner is gone
        pass
    finally:
        _sweep(set(), all_sessions=True)
        os._exit(0)


def _answered(
    owner: socket.socket,
    owner_ended: int,
    workers: set[int],
    function: Callable[..., Any] | None,
    setup: Mapping[str, Any],
) -> bool:
    """Do what the owner asks next: "fork" a worker, "end" one, or "sweep". False when it has ended."""
    if owner_ended in select.select([owner, owner_ended], [], [])[0]:
        return False
    request, ends, _, _ = socket.recv_fds(owner, 1 << 10, 2, socket.MSG_CMSG_CLOEXEC)
    if not request:
        return False
    what, pid = json.loads(request)
    if what == "sweep":
        _sweep(workers, all_sessions=True)
    elif what == "end":
        workers.remove(pid)
        _kill(pid)
        _, status = os.waitpid(pid, 0)
        _sweep(workers)
        owner.send(json.dumps(status).encode())
    else:
        template = os.getpid()
        pid = os.fork()
        if not pid:
            try:
                owner.close()
                os.close(owner_ended)
                _work(socket.socket(fileno=ends[0]), ends[1], template, function, setup)
            finally:
                os._exit(1)
        workers.add(pid)
        for end in ends:
            os.close(end)
        owner.send(json.dumps(pid).encode())
    return True


def _sweep(workers: set[int], *, all_sessions: bool = False) -> None:
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


def _work(
    connection: socket.socket,
    printed: int,
    template: int,
    function: Callable[..., Any] | None,
    setup: Mapping[str, Any],
) -> None:
    """The main function of a worker: load the function unless the template has, then answer calls.

    Errors: ConnectionError when the template has ended.
    """
    _prepare(printed, template)
    try:
        run = cloudpickle.loads(setup["function"]) if function is None else function
    except BaseException as error:  # the function's own imports run here
        send(connection, pickle.dumps(("broken", reason_of(error))))
        return
    _limit_memory(setup["memory_mb"])
    send(connection, pickle.dumps(("ready", None)))
    if setup["serves"]:
        run(connection)
        return
    while True:
        call = receive(connection)
        try:
            args, kwargs = pickle.loads(call)
            answer = ("value", settled(run(*args, **kwargs)))
        except MemoryError as error:
            limit = setup["memory_mb"]
            why = reason_of(error)
            answer = ("failed", why if limit is None else f"needed more memory than its {limit:g} MB ({why})")
        except BaseException as error:  # the user's code, whose SystemExit must not end the worker either
            answer = ("failed", reason_of(error))
        try:
            message = pickle.dumps(plain(answer))
            if len(message) > LARGEST_MESSAGE:
                raise ValueError(f"{len(message) / 2**20:.0f} MiB is more than an answer may have")
        except Exception as error:  # the answer is of a type of the user's, which may raise anything
            message = pickle.dumps(("failed", f"{UNSENT}: {reason_of(error)}"))
        send(connection, message)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the function closed it
                stream.flush()


def _prepare(printed: int, template: int) -> None:
    """Give a forked process a session, streams and signals of its own; it dies when the template does."""
    os.setsid()
    die_with_parent(template)
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


def _limit_memory(megabytes: float | None) -> None:
    """Let the process grow by so much beyond what it occupies now."""
    if megabytes is None:
        return
    with open("/proc/self/statm") as statm:
        occupied = int(statm.read().split()[0]) * resource.getpagesize()
    limit = occupied + int(megabytes * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
