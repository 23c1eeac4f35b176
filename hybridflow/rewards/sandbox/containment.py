"""Containment: a process permanently gives up its access rights before it runs a program.

With bubblewrap the process is in namespaces without network and without the user's files; here it gets a file system
for its own directory. Without, Landlock restricts which files it may open. Both add resource limits, a seccomp filter
and the loss of all rights of root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import secrets
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.processes.fork_server import checked, prctl

NOBODY = 65534
DIRECTORY = "/program"  # with bubblewrap, the only place that a program can write to
EMPTY = ("/tmp", "/var/tmp", "/dev/shm", "/proc", "/home")  # there, and read-only: refused rather than not found
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_RDONLY = 2, 4, 1
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 4, 8, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 24, 38, 2
_CAPABILITY_VERSION, _DAC_OVERRIDE, _DAC_READ_SEARCH = 0x20080522, 1, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's calls, the same on every machine
_THREADS, _INODES, _DEEPEST, _STACK, _OPEN_FILES = 32, 4096, 64, 64 << 20, 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def mount_directory(file_mb: int) -> str:
    """An empty file system for one program, in a mount namespace of its own, where /proc is empty as well."""
    checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(DIRECTORY, _MS_NOSUID | _MS_NODEV, f"size={file_mb}m,nr_inodes={_INODES},mode=777")
    _mount("/proc", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=1m,mode=555")
    return DIRECTORY


def _mount(target: str, flags: int, options: str) -> None:
    arguments = (b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode())
    checked(_libc.mount(*arguments), f"mount {target}")


def give_up_rights(*, keep_search: bool) -> None:
    """Become an unprivileged user where this is root, and lose every capability.

    `keep_search`: except the one by which root reads closed directories: Python may be installed in one, and Landlock
    holds the program to what it may read.
    """
    keep = None
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31; then of the others
    if os.getuid() == 0:
        checked(_libc.capget(ctypes.byref(header), ctypes.byref(sets)), "capget")
        if keep_search:
            keep = next((one for one in (_DAC_READ_SEARCH, _DAC_OVERRIDE) if sets[0] >> one & 1), None)
        prctl(_PR_SET_KEEPCAPS, int(keep is not None))
        for capability in range(64):
            if capability != keep and _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
                break  # above the last one that the kernel knows, or without the right to drop any
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    kept = 0 if keep is None else 1 << keep
    sets[:] = [kept, kept, 0, 0, 0, 0]
    checked(_libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")


def limit(limits: dict[str, Any]) -> None:
    memory = limits["memory_mb"] << 20
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # no file has room in it; with 0, a core still goes to the machine's handler of cores
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: min(_STACK, memory // 8),
    }
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


def filter_calls(*, metadata: bool) -> None:
    """Install the seccomp filter on this process. `metadata`: see `build_filter`; with Landlock it must be False."""
    prctl(_PR_SET_DUMPABLE, int(not metadata))  # with Landlock, the process that counts its files must see them
    code = build_filter(platform.machine(), own_pid=os.getpid(), metadata=metadata)
    held = ctypes.create_string_buffer(code, len(code))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(held)))


# The system calls that a program can make, whatever else holds it.
_LOAD, _EQUAL, _ABOVE, _FROM, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LAST_KNOWN = 469  # calls that came to Linux later answer "not implemented" until somebody has looked at them
_CLONE_THREAD, _CLONE_FILES, _CLONE_NEW_ANY = 0x00010000, 0x00000400, 0x7E020000
_O_ACCMODE, _O_TRUNC = 3, 0o1000

# Numbers of calls for files, memory, threads, time and signals of the program itself. Whatever reaches other processes
# or the network is left out, and what a user or a machine has a fixed number of (locks by flock, watches of files,
# asynchronous I/O, timers by POSIX, keys, messages), and memory that no limit counts (vmsplice, memfd_create).
_ALLOWED = {
    "x86_64": "0-15 17-28 32-40 45 47-48 51-52 55 59-61 63 74-75 77-89 95-100 102 104 107-108 110-111 115 118 120-121 "
    "124-125 127-128 130-131 133 137-138 140 143 145-148 158 186 191-196 201-202 204 213 217-219 221 228-233 239 247 "
    "257-259 262-267 269-271 273 281-284 286-287 289-293 295-296 309 316 318 326-328 332 334 439 441 449",
    "aarch64": "8-13 17 19-24 33-38 43-44 46 48-50 56-57 59 61-74 78-80 82-83 85-87 90 93-96 98-99 101-103 113-115 "
    "120-121 123-128 132-137 139 141 148 150 153 155-156 158 160 163 165-166 168-169 172-179 204-205 207 209-210 212 "
    "214-216 221-223 226-227 232-233 236 260 276 278 285-287 291 293 439 441 449",
}
# What Landlock does not know of: modes, owners, attributes and times of files, truncate
_METADATA = {
    "x86_64": "76 90-94 132 188-190 197-199 235 260-261 268 280 452 463 466",
    "aarch64": "5-7 14-16 45 52-55 88 452 463 466",
}
_CLONE, _CLONE3, _OPENAT2 = {"x86_64": 56, "aarch64": 220}, 435, 437
_FORKS = {"x86_64": (57, 58), "aarch64": ()}
# kill, tgkill, and which argument the signal is
_SIGNALS = {"x86_64": ((62, 1), (234, 2)), "aarch64": ((129, 1), (131, 2))}
_PRLIMIT, _PRCTL = {"x86_64": 302, "aarch64": 261}, {"x86_64": 157, "aarch64": 167}
_PRCTL_OPTIONS = (2, 3, 15, 16, 21, 23, 39)  # what it only tells, and the name of a thread
# Pairs of Unix sockets, which end in the program; one for datagrams could send to other addresses.
_SOCKETPAIR, _SENDTO = {"x86_64": 53, "aarch64": 199}, {"x86_64": 44, "aarch64": 206}
# What may be asked of a file descriptor: nothing by which it names an owner, or a signal to be sent.
_FCNTL, _IOCTL = {"x86_64": 72, "aarch64": 25}, {"x86_64": 16, "aarch64": 29}
_F_SETFL, _O_ASYNC = 4, 0o20000
# Duplicates, flags, locks, the size of a pipe, seals, hints.
_FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 1030, 1032, 1033, 1034, 1035, 1036, 1037, 1038)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2
_IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
_CLOSE_RANGE, _UNSHARE = 436, 2
_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}  # number, and which argument has the flags


def build_filter(machine: str, *, own_pid: int, metadata: bool) -> bytes:
    """A seccomp filter for a process `own_pid`, which remains one process and sends signals to none but itself.

    It is classic BPF. Refused calls return an error; nothing is killed for asking. `metadata`: whether it may change
    modes, owners and times of files.
    """
    code = [
        *(_step(_LOAD, _MACHINE), _step(_EQUAL, _AUDIT_MACHINE[machine], 1, 0), _step(_RETURN, _KILL)),
        *(_step(_LOAD, _NUMBER), *_answer_if(_ABOVE, _LAST_KNOWN, errno.ENOSYS)),
    ]
    for number in (_CLONE3, _OPENAT2):  # their flags are in memory; the C library falls back to the older calls
        code += _answer_if(_EQUAL, number, errno.ENOSYS)
    for number in _FORKS[machine]:
        code += _answer_if(_EQUAL, number, errno.EAGAIN)
    # Threads only, which share one table of descriptors: files that are only in another one are not counted.
    failed = _step(_RETURN, _ERROR | errno.EAGAIN)
    thread = [step for bit in (_CLONE_THREAD, _CLONE_FILES) for step in (_step(_ANY_BIT, bit, 1, 0), failed)]
    code += _when(_CLONE[machine], 0, [*_answer_if(_ANY_BIT, _CLONE_NEW_ANY, errno.EPERM), *thread])
    code += _when(_CLOSE_RANGE, 2, _answer_if(_ANY_BIT, _UNSHARE, errno.EPERM))
    flags = [_load(2), *_answer_if(_ANY_BIT, _O_ASYNC, errno.EPERM), _step(_RETURN, _ALLOW)]
    setting = [_step(_EQUAL, _F_SETFL, 0, len(flags)), *flags]
    code += _when(_FCNTL[machine], 1, [*setting, *_answer_unless(*_FCNTL_COMMANDS)])
    code += _when(_IOCTL[machine], 1, _answer_unless(*_IOCTL_COMMANDS))
    code += _when(_PRCTL[machine], 0, _answer_unless(*_PRCTL_OPTIONS))
    cores = [_load(1), *_answer_if(_EQUAL, resource.RLIMIT_CORE, errno.EPERM)]  # see `limit`
    code += _when(_PRLIMIT[machine], 0, [*_answer_unless(0), *cores])
    code += _when(_SOCKETPAIR[machine], 0, _answer_unless(socket.AF_UNIX))
    code += _when(_SENDTO[machine], 5, _answer_unless(0))  # the length of an address
    for number, argument in _SIGNALS[machine]:  # it is not to continue where `Usage` has stopped it
        continuing = [_load(argument), *_answer_if(_EQUAL, signal.SIGCONT, errno.EPERM)]
        code += _when(number, 0, [*_answer_unless(own_pid), *continuing])
    code += _answer_if(_EQUAL, _FALLOCATE[machine], errno.EOPNOTSUPP)  # faster than disk use is measured
    # Before its third version Landlock let O_TRUNC pass where reading is allowed.
    truncating = [_step(_AND, _O_ACCMODE | _O_TRUNC), *_answer_if(_EQUAL, _O_TRUNC, errno.EACCES)]
    for number, argument in _OPENS[machine]:
        code += _when(number, argument, truncating)
    for part in f"{_ALLOWED[machine]} {_METADATA[machine] if metadata else ''}".split():
        first, last = int(part.partition("-")[0]), int(part.rpartition("-")[2])
        code += [_step(_ABOVE, last, 2, 0), _step(_FROM, first, 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*code, _step(_RETURN, _ERROR | errno.EPERM)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer_if(test: int, value: int, error: int) -> list[bytes]:
    """Answer `error` where the loaded word passes the test."""
    return [_step(test, value, 0, 1), _step(_RETURN, _ERROR | error)]


def _answer_unless(*values: int) -> list[bytes]:
    """Answer EPERM where the loaded word is not one of the values."""
    tests = [_step(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return [*tests, _step(_RETURN, _ERROR | errno.EPERM)]


def _load(argument: int) -> bytes:
    """The low word of an argument of the call."""
    return _step(_LOAD, _ARGUMENTS + 8 * argument)


def _when(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Where the call is `number`: load the low word of an argument, run `body`, and allow what it did not answer."""
    inner = [_load(argument), *body, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inner)), *inner]


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = (1 << 6) | (1 << 11)  # character and block devices


def landlock_version() -> int:
    """Errors: OSError where the running kernel has no Landlock, or it is switched off."""
    return _landlock(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _landlock(number: int, *arguments: Any) -> int:
    return checked(_libc.syscall(ctypes.c_long(number), *arguments), "landlock")


def restrict_files(*, readable: Iterable[str], devices: Sequence[str], writable: str) -> None:
    """By Landlock, let this process read only `readable` and write only beneath `writable`."""
    known = landlock_version()
    files = (1 << 13) - 1
    files |= (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0) | (_IOCTL_DEVICE if known >= 5 else 0)
    # And from version 4 on no TCP, from 6 on no signals and no abstract sockets of others.
    ruleset = struct.pack("=QQQ", files, 3 if known >= 4 else 0, 3 if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    handle = _landlock(_CREATE_RULESET, ruleset, ctypes.c_size_t(size), ctypes.c_uint32(0))
    allowed = dict.fromkeys(readable, _EXECUTE | _READ_FILE | _READ_DIR)
    allowed |= dict.fromkeys(devices, _READ_FILE | _WRITE_FILE)
    allowed[writable] = files & ~_MAKE_DEVICES & ~_IOCTL_DEVICE
    for path, access in allowed.items():
        with suppress(FileNotFoundError):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access if os.path.isdir(path) else access & ~_READ_DIR, parent)
            _landlock(_ADD_RULE, ctypes.c_int(handle), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            os.close(parent)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _landlock(_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    os.close(handle)


def remove_tree(top: str) -> None:
    """Remove a directory, whatever is in it, by no recursion: what is in a directory below it is moved up first.

    Nothing in it may run any more. What cannot be removed stays.
    """
    name, moved, before = os.path.join(top, secrets.token_hex(8)), 0, None
    with suppress(OSError):  # it is gone, or beyond reach
        while (entries := list(os.scandir(top))) and before != (before := {entry.name for entry in entries}):
            for entry in entries:
                with suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)  # the program may have closed it
                    for inner in list(os.scandir(entry.path)):
                        if inner.is_dir(follow_symlinks=False):
                            os.chmod(inner.path, 0o700)  # else it cannot be moved
                        os.rename(inner.path, f"{name}{(moved := moved + 1)}")
                    os.rmdir(entry.path)
        os.rmdir(top)


class Usage:
    """Usage without a kernel limit, measured from outside: threads, and files where no file system bounds them.

    `exceeded` measures, every `pause` seconds, while a program that has files stands still: else it could move them
    past the measurement. Files count with the blocks that they occupy, once for all their names; deleted ones while the
    process has them open or mapped, except `not_counted`. What cannot be measured (a directory closed to its owner, or
    more than 64 deep, more than 4096 entries) counts as exceeded. Beyond `most` bytes a program writes at most its rate
    of writing times `pause`, plus what is written until a busy machine lets the measuring process run. As root, this
    process sees deleted files only with CAP_SYS_PTRACE; unseen ones are bounded by the limits on open files and on the
    size of each.
    """

    def __init__(self, process: int, directory: str | None, most: int, not_counted: Sequence[int]) -> None:
        self.pause = 0.01
        self._process, self._directory, self._most, self._occupied = process, directory, most, 0
        self._not_counted = {os.fstat(end).st_ino for end in not_counted}

    def exceeded(self) -> str:
        """ "threads", "files", or "" for neither."""
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if len(os.listdir(f"/proc/{self._process}/task")) > _THREADS:
                return "threads"
        if self._directory is None:
            return ""
        start, occupied = time.process_time(), 0
        if os.listdir(self._directory) or self._deleted():
            os.kill(self._process, signal.SIGSTOP)
            os.waitid(os.P_PID, self._process, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            occupied = sum(self._named(self._directory).values()) + sum(self._deleted().values())
            os.kill(self._process, signal.SIGCONT)
        pause = 0.01 if occupied == self._occupied else 0.001
        self.pause, self._occupied = max(pause, 9 * (time.process_time() - start)), occupied
        return "files" if occupied > self._most else ""

    def _named(self, top: str) -> dict[int, int]:
        found: dict[int, int] = {}
        entries, left = 0, [(top, 0)]
        while left:
            directory, depth = left.pop()
            try:
                with os.scandir(directory) as inside:
                    for entry in inside:
                        entries += 1
                        found[entry.inode()] = entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            left.append((entry.path, depth + 1))
            except OSError:
                return {0: self._most + 1}
            if entries > _INODES or depth > _DEEPEST or len(directory) > 2048:  # of 4096 that a path may have
                return {0: self._most + 1}
        return found

    def _deleted(self) -> dict[int, int]:
        """Of the first thread that has not ended: all share one table of descriptors and one memory.

        A file that is mapped only counts with the most that a file can have.
        """
        found: dict[int, int] = {}
        for thread in os.listdir(f"/proc/{self._process}/task"):
            place = f"/proc/{self._process}/task/{thread}"
            with suppress(OSError):  # an ordinary user may not ask a thread that has ended
                with open(f"{place}/maps", encoding="utf-8", errors="replace") as maps:
                    lines = maps.read().splitlines()
                for line in lines:
                    parts = line.split(maxsplit=5)
                    own = len(parts) == 6 and parts[5].startswith(f"{self._directory}/")
                    if own and parts[5].endswith(" (deleted)"):
                        found[int(parts[4])] = self._most
                for name in os.listdir(f"{place}/fd"):
                    with suppress(OSError):
                        file = os.stat(f"{place}/fd/{name}")
                        if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_ino not in self._not_counted:
                            found[file.st_ino] = file.st_blocks * 512
                if lines:
                    break
        return found
