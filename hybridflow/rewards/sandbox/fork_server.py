"""The fork server: a small process from which every contained program is forked.

It has read no user's site packages, inherits nothing but one socket, and its environment holds nothing. Per program it
forks a supervisor, which forks the program, kills it at the time limit or when the other end of `control` is closed,
and reports when it has ended:

    caller  ->  fork server  ->  supervisor  ->  program, which is one process and remains it
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from hybridflow.rewards.sandbox import containment, runner


class Ends(NamedTuple):
    """File descriptors of one run; `channel` is two, or none."""

    control: int
    job: int
    stdin: int
    stdout: int
    stderr: int
    channel: tuple[int, ...]


def main(config: dict[str, Any]) -> NoReturn:
    """Serve until the other end of the socket is closed; never returns."""
    connection = socket.socket(fileno=config["socket"])
    try:
        if config["scratch"] is not None:
            containment.landlock_version()
    except OSError as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    # Programs may import what is installed beside hybridflow, but not from the directory of its sources.
    sys.path[:] = [*(path for path in sys.path if path != config["root"]), *config["packages"]]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by themselves; the kernel buries them
    gc.collect()
    gc.freeze()
    connection.send(b"{}")
    me = os.getpid()
    while True:
        request, ends, _, _ = socket.recv_fds(connection, 1 << 16, 16)
        if not request:
            _remove(config["scratch"])
            os._exit(0)
        if os.fork() == 0:
            with _never_back(ends[0]):
                connection.close()
                _supervise(config, json.loads(request), Ends(*ends[:5], channel=tuple(ends[5:])), me)
        for end in ends:
            os.close(end)


def _remove(scratch: str | None) -> None:
    """Supervisors end when the caller does; with them, or soon after, their directories go."""
    due = time.monotonic() + 5.0
    while scratch is not None and os.path.exists(scratch) and time.monotonic() < due:
        with suppress(OSError):  # not empty: one is not done yet
            os.rmdir(scratch)
        time.sleep(0.01)


def _supervise(config: dict[str, Any], limits: dict[str, Any], ends: Ends, parent: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    scratch = None if config["scratch"] is None else os.path.join(config["scratch"], str(os.getpid()))
    if scratch is not None:
        os.mkdir(scratch, 0o700)
        if os.getuid() == 0:
            os.chown(scratch, containment.NOBODY, containment.NOBODY)
    try:
        start, me = time.monotonic(), os.getpid()
        child = os.fork()
        if child == 0:
            with _never_back(ends.control):
                _become_program(config, limits, ends, scratch, me)
        counted = containment.Usage(child, scratch, limits["file_mb"] << 20, ends[2:5])
        for end in (ends.job, ends.stdin, ends.stdout, ends.stderr, *ends.channel):
            os.close(end)
        end = _wait(child, ends.control, limits["seconds"], counted, parent)
        _, status, used = os.wait4(child, 0)
        cpu, seconds = used.ru_utime + used.ru_stime, time.monotonic() - start
    finally:
        if scratch is not None:
            _empty(scratch)
    _tell(ends.control, end=end, exit=status, cpu=cpu, seconds=seconds)


def _wait(child: int, control: int, seconds: float, used: containment.Usage, parent: int) -> str:
    """Wait for its end, or kill it: "exit", "timeout", "files", "threads" or "stopped"."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)  # and hang-ups, when the caller is gone
    due, end = time.monotonic() + seconds, "timeout"
    while (left := due - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left, used.pause))]
        if ended in ready or control in ready or os.getppid() != parent:
            end = used.exceeded() or ("exit" if ended in ready else "stopped")  # after the last write, too
            break
        if over := used.exceeded():
            end = over
            break
    if end != "exit":
        os.kill(child, signal.SIGKILL)
    return end


def _empty(directory: str) -> None:
    for top, names, _ in os.walk(directory):
        for path in (os.path.join(top, name) for name in names):
            with suppress(OSError):  # beyond reach
                if not os.path.islink(path):
                    os.chmod(path, 0o700)  # the program may have closed it
    shutil.rmtree(directory, ignore_errors=True)


def _become_program(
    config: dict[str, Any], limits: dict[str, Any], ends: Ends, scratch: str | None, parent: int
) -> None:
    """In the process of the program: give everything up, and run it."""
    with os.fdopen(os.dup(ends.job), "rb") as file:
        job = json.loads(file.read())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _keep_only([ends.stdin, ends.stdout, ends.stderr, *ends.channel])
    if scratch is None:
        directory = containment.mount_directory(limits["file_mb"])
    else:
        directory = scratch
        readable = (*config["readable"], directory)
        containment.restrict_files(readable=readable, devices=config["devices"], writable=directory)
    os.chdir(directory)
    containment.give_up_rights(keep_search=scratch is not None and config["search"])
    containment.die_with_parent(parent)
    containment.limit(limits)
    containment.filter_calls(metadata=scratch is None)
    runner.run(job, directory)


def _keep_only(ends: list[int]) -> None:
    """Make `ends` the descriptors 0, 1, 2, ... and close all others."""
    high = [os.dup2(end, 100 + index, inheritable=True) for index, end in enumerate(ends)]
    for index, end in enumerate(high):
        os.dup2(end, index, inheritable=True)
    os.closerange(len(ends), 1 << 16)


@contextmanager
def _never_back(control: int) -> Iterator[None]:
    """For all that a forked process does: tell what went wrong, and never come back into the code of its parent."""
    try:
        yield
        os._exit(0)
    except BaseException as error:  # told to the caller, who raises
        try:
            _tell(control, error=f"{type(error).__name__}: {error}")
        except OSError:  # the program has lost this end before it runs
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _tell(control: int, **facts: Any) -> None:
    os.write(control, json.dumps(facts).encode() + b"\n")
