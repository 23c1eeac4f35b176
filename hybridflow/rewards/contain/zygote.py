"""The zygote: a small process that is contained once, and from which every contained program is forked.

Its own program is `python -I -S -c`: it has read no user's site packages, inherits nothing but one socket, and its
environment holds nothing. Per program it forks a supervisor, which kills at the time limit or when the other end of
`control` is closed, and reports when nothing is left running. With namespaces:

    caller  ->  zygote  ->  supervisor  ->  init, process 1 of its own process ids  ->  program

When init goes, the kernel kills whatever the program has started; without namespaces the supervisor itself waits for
the program and gathers what it leaves behind.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

from hybridflow.rewards.contain import inside, landlock, namespaces, seccomp
from hybridflow.rewards.contain.syscalls import (
    CAP_DAC_OVERRIDE,
    CAP_DAC_READ_SEARCH,
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_KEEPCAPS,
    PR_SET_PDEATHSIG,
    drop_capabilities,
    prctl,
)

_THREADS = 32
_STACK = 64 << 20
_FILES = 64
_GATHER_SECONDS = 5.0


class Zygote(NamedTuple):
    """What the zygote knows: `processes` is a handle of /proc, None without namespaces.

    `search`: a capability that programs keep, None for none. Without a file system of their own they need one to read
    a Python that root has installed in a closed directory (/root); Landlock holds them to what they may read.
    """

    config: dict[str, Any]
    processes: int | None
    search: int | None

    @property
    def namespaces(self) -> bool:
        return self.processes is not None

    @property
    def root(self) -> bool:
        return self.config["first_uid"] is not None


class Ends(NamedTuple):
    """File descriptors of one run; `channel` is two, or none."""

    job: int
    status: int
    control: int
    stdin: int
    stdout: int
    stderr: int
    report: int
    channel: tuple[int, ...]

    def close_the_programs(self) -> None:
        for end in (self.job, self.stdin, self.stdout, self.stderr, self.report, *self.channel):
            os.close(end)


def main(config: dict[str, Any]) -> NoReturn:
    """Serve until the other end of the socket is closed; never returns."""
    connection = socket.socket(fileno=config["socket"])
    try:
        zygote = Zygote(config, _contain(config), _search_capability(config))
    except OSError as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        os._exit(1)
    sys.path[:] = [*(path for path in sys.path if path != config["root"]), *config["packages"]]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by pipe; the kernel buries them
    gc.collect()
    gc.freeze()
    connection.send(b"{}")
    me = os.getpid()
    while True:
        request, ends, _, _ = socket.recv_fds(connection, 1 << 16, 16)
        if not request:
            # a supervisor that is not done yet empties it without knowing that nobody else will remove it
            due = time.monotonic() + 5.0
            while not _remove_empty(config["scratch"]) and time.monotonic() < due:
                time.sleep(0.01)
            os._exit(0)
        if os.fork() == 0:
            with _told(ends[1]):
                connection.close()
                _supervise(zygote, json.loads(request), Ends(*ends[:7], channel=tuple(ends[7:])), me)
        for end in ends:
            os.close(end)


def _contain(config: dict[str, Any]) -> int | None:
    if config["mechanism"] == "namespaces":
        return namespaces.enter(readable=config["readable"], devices=config["devices"], first_uid=config["first_uid"])
    landlock.version()
    return None


def _search_capability(config: dict[str, Any]) -> int | None:
    if config["mechanism"] == "namespaces" or config["first_uid"] is None or not config["search"]:
        return None
    with open("/proc/self/status") as file:
        effective = int(next(line for line in file if line.startswith("CapEff:")).split()[1], 16)
    return next((one for one in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if effective >> one & 1), None)


def _supervise(zygote: Zygote, request: dict[str, Any], ends: Ends, parent: int) -> NoReturn:
    """In the supervisor: start the program, wait for its end, for the limit or for `control`, leave nothing behind."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    limits, slot = request["limits"], 1 + request["slot"] if zygote.root else None
    if zygote.processes is not None:
        namespaces.enter_private(zygote.processes, slot=slot, file_mb=limits["file_mb"])
        os.close(zygote.processes)
        directory = namespaces.DIRECTORY
    else:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        directory = os.path.join(zygote.config["scratch"], str(request["slot"]))
        os.mkdir(directory, 0o700)
        slot = None if slot is None else zygote.config["first_uid"] + slot
        if slot is not None:
            os.chown(directory, slot, slot)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL if zygote.namespaces else signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    try:
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            with _told(ends.status):
                (_init if zygote.namespaces else _program)(zygote, request, ends, directory, slot)
        ends.close_the_programs()
        end = _wait(child, ends.control, limits["seconds"], None if zygote.namespaces else directory, limits)
        _, status, used = os.wait4(child, 0)
        if not zygote.namespaces:
            _gather(slot)
            _tell(ends.status, exit=status, cpu=used.ru_utime + used.ru_stime)
        _tell(ends.status, end=end, seconds=time.monotonic() - start)
    finally:
        if not zygote.namespaces:
            _gather(slot)
            shutil.rmtree(directory, ignore_errors=True)
            if os.getppid() != parent:  # the caller is gone, and cannot do it
                _remove_empty(zygote.config["scratch"])
    os._exit(0)


def _wait(child: int, control: int, seconds: float, watched: str | None, limits: dict[str, Any]) -> str:
    """Wait and, unless the child ends by itself, kill it: "exit", "timeout", "files" or "stopped"."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)  # and hang-ups, when the caller is gone
    due = time.monotonic() + seconds
    end = "timeout"
    while (left := due - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * (min(left, 0.1) if watched else left) + 1)]
        if ready:
            end = "exit" if ended in ready else "stopped"
            break
        if watched and _occupied(watched) > limits["file_mb"] << 20:
            end = "files"
            break
    if end != "exit":
        os.kill(child, signal.SIGKILL)
    return end


def _occupied(directory: str) -> int:
    """Bytes of the files in a directory, as far as they can be seen while a program works on it."""
    total, entries, stack = 0, 0, [directory]
    while stack and entries < 10_000:
        with suppress(OSError), os.scandir(stack.pop()) as found:
            for entry in found:
                entries += 1
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
    return total


def _remove_empty(directory: str | None) -> bool:
    """Whether there is no such directory any more; while a supervisor uses it, it is not empty."""
    if directory is not None:
        with suppress(OSError):
            os.rmdir(directory)
    return directory is None or not os.path.exists(directory)


def _gather(uid: int | None) -> None:
    """Kill what the program left behind: its orphans have become children of this process."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    if uid is not None:  # one call for all processes of a user, which none can outrun
        helper = os.fork()
        if helper == 0:
            try:
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
    until = time.monotonic() + _GATHER_SECONDS
    while time.monotonic() < until:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
    return found


def _init(zygote: Zygote, request: dict[str, Any], ends: Ends, directory: str, slot: int | None) -> NoReturn:
    """Process 1 of its namespace: starts the program, buries orphans, and takes all others with it when it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    program = os.fork()
    if program == 0:
        with _told(ends.status):
            _program(zygote, request, ends, directory, slot)
    ends.close_the_programs()
    os.close(ends.control)
    ended = None
    while ended != program:
        ended, status, used = os.wait3(0)
    _tell(ends.status, exit=status, cpu=used.ru_utime + used.ru_stime)
    os._exit(0)


def _program(zygote: Zygote, request: dict[str, Any], ends: Ends, directory: str, slot: int | None) -> NoReturn:
    """In the process of the program: give everything up, and run it."""
    limits, config = request["limits"], zygote.config
    with os.fdopen(os.dup(ends.job), "rb") as file:
        job = json.loads(file.read())
    others = 0 if zygote.namespaces or zygote.root else _tasks_of(os.getuid())
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _keep_only([ends.stdin, ends.stdout, ends.stderr, ends.report, *ends.channel])
    os.chdir(directory)
    inside.write_files(job.get("files", {}), slot if not zygote.namespaces else None)
    if zygote.namespaces:
        drop_capabilities()
    else:
        readable = (*config["readable"], directory)
        landlock.restrict(readable=readable, devices=config["devices"], writable=directory)
        if slot is not None:
            prctl(PR_SET_KEEPCAPS, 1)
            os.setgroups([])
            os.setresgid(slot, slot, slot)
            os.setresuid(slot, slot, slot)
        drop_capabilities(zygote.search)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _limit(limits, others)
    seccomp.install(
        fork=limits["processes"] > 1,
        metadata=zygote.namespaces or (zygote.root and zygote.search != CAP_DAC_OVERRIDE),
        own_pid=None if zygote.namespaces else os.getpid(),
    )
    inside.run(job, directory, limits)


def _keep_only(ends: list[int]) -> None:
    """Make `ends` the descriptors 0, 1, 2, ... and close all others."""
    high = [os.dup2(end, 100 + index, inheritable=True) for index, end in enumerate(ends)]
    for index, end in enumerate(high):
        os.dup2(end, index, inheritable=True)
    os.closerange(len(ends), 1 << 16)


def _tasks_of(uid: int) -> int:
    """Processes and threads of a user: without namespaces the kernel counts them all together."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                found += len(os.listdir(f"/proc/{name}/task")) if os.stat(f"/proc/{name}").st_uid == uid else 0
    return found


def _limit(limits: dict[str, Any], others: int) -> None:
    memory, size = limits["memory_mb"] << 20, limits["file_mb"] << 20
    processes = limits["processes"]
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: min(_STACK, memory // 8),
        # The supervisor and init count as well.
        resource.RLIMIT_NPROC: others + 2 + (processes if processes > 1 else _THREADS),
    }
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


@contextmanager
def _told(status: int) -> Iterator[None]:
    """For all that a forked process does: tell what went wrong, and never come back into the code of its parent."""
    try:
        yield
    except BaseException as error:  # told to the caller, who raises
        with suppress(OSError):  # the program itself has lost this end before it runs
            _tell(status, error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def _tell(status: int, **facts: Any) -> None:
    os.write(status, json.dumps(facts).encode() + b"\n")
