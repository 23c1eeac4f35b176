"""Isolation: how a process gives up what it could reach and use, for good, before it runs a program.

With bubblewrap the process is in namespaces without network and without the user's files; here it gets a file system
for its own directory. Without, Landlock restricts which files it may open. Both add resource limits, a seccomp filter
and the loss of all rights of root.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.rewards.sandbox import seccomp

NOBODY = 65534
DIRECTORY = "/program"  # with bubblewrap, the only place that a program can write to
EMPTY = ("/tmp", "/var/tmp", "/dev/shm", "/proc", "/home")  # there, and read-only: refused rather than not found
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_RDONLY = 2, 4, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP = 1, 4, 8, 22
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 24, 38, 2
_CAPABILITY_VERSION, _DAC_OVERRIDE, _DAC_READ_SEARCH = 0x20080522, 1, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock's calls, the same on every machine
_THREADS, _INODES = 32, 4096
_STACK, _OPEN_FILES = 64 << 20, 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, third: Any = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), third, ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has forked it, ends; if it has already, end."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def mount_directory(file_mb: int) -> str:
    """An empty file system for one program, in a mount namespace of its own, where /proc is empty as well."""
    _checked(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(DIRECTORY, _MS_NOSUID | _MS_NODEV, f"size={file_mb}m,nr_inodes={_INODES},mode=777")
    _mount("/proc", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=1m,mode=555")
    return DIRECTORY


def _mount(target: str, flags: int, options: str) -> None:
    arguments = (b"tmpfs", target.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*arguments), f"mount {target}")


def give_up_rights(*, keep_search: bool) -> None:
    """Become an unprivileged user where this is root, and lose every capability.

    `keep_search`: except the one by which root reads closed directories: Python may be installed in one, and Landlock
    holds the program to what it may read.
    """
    keep = None
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31; then of the others
    if os.getuid() == 0:
        _checked(_libc.capget(ctypes.byref(header), ctypes.byref(sets)), "capget")
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
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")


def limit(limits: dict[str, Any]) -> None:
    """Resource limits of this process."""
    memory = limits["memory_mb"] << 20
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: limits["cpu"],
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_STACK: min(_STACK, memory // 8),
    }
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


def filter_calls(*, metadata: bool) -> None:
    """Install the seccomp filter on this process. `metadata`: see `seccomp.build`; with Landlock it must be False."""
    prctl(_PR_SET_DUMPABLE, int(not metadata))  # with Landlock, the process that counts its files must see them
    code = seccomp.build(platform.machine(), own_pid=os.getpid(), metadata=metadata)
    held = ctypes.create_string_buffer(code, len(code))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    program = seccomp.FilterProgram(len(code) // 8, ctypes.addressof(held))
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_MAKE_DEVICES = (1 << 6) | (1 << 11)  # character and block devices


def landlock_version() -> int:
    """Errors: OSError where the running kernel has no Landlock, or it is switched off."""
    return _landlock(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _landlock(number: int, *arguments: Any) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), "landlock")


def restrict_files(*, readable: Iterable[str], devices: Sequence[str], writable: str) -> None:
    """By Landlock, let this process read only `readable` and write only beneath `writable`."""
    known = landlock_version()
    files = (1 << 13) - 1
    files |= (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0) | (_IOCTL_DEVICE if known >= 5 else 0)
    # And from version 4 on no TCP, from 6 on no signals and no abstract sockets of others.
    ruleset = _Ruleset(files, 3 if known >= 4 else 0, 3 if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    handle = _landlock(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    allowed = dict.fromkeys(readable, _EXECUTE | _READ_FILE | _READ_DIR)
    allowed |= dict.fromkeys(devices, _READ_FILE | _WRITE_FILE)
    allowed[writable] = files & ~_MAKE_DEVICES & ~_IOCTL_DEVICE
    for path, access in allowed.items():
        with suppress(FileNotFoundError):
            parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = _PathBeneath(access if os.path.isdir(path) else access & ~_READ_DIR, parent)
            _landlock(_ADD_RULE, ctypes.c_int(handle), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
            os.close(parent)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _landlock(_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    os.close(handle)


class Usage:
    """What no limit of the kernel holds, measured from outside: threads, and files where no file system bounds them.

    `exceeded` measures, every `pause` seconds. Files count with the blocks that they occupy, once for all their names;
    deleted ones while the process has them open or mapped, but for `not_counted`. What cannot be measured (a directory
    closed to its owner, or nested beyond reach, more than 4096 entries) counts as exceeded. Beyond `most` bytes a
    program writes at most its rate of writing times `pause`, plus what is written until a busy machine lets the
    measuring process run. As root, this process sees deleted files only with CAP_SYS_PTRACE; unseen ones are bounded by
    the limits on open files and on the size of each.
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
        start = time.monotonic()
        occupied = sum(self._named(self._directory).values()) + sum(self._deleted().values())
        pause = 0.01 if occupied == self._occupied else 0.001
        self.pause, self._occupied = max(pause, 9 * (time.monotonic() - start)), occupied
        return "files" if occupied > self._most else ""

    def _named(self, top: str) -> dict[int, int]:
        found: dict[int, int] = {}
        entries, left = 0, [top]
        while left:
            directory = left.pop()
            try:
                with os.scandir(directory) as inside:
                    for entry in inside:
                        entries += 1
                        with suppress(FileNotFoundError):
                            found[entry.inode()] = entry.stat(follow_symlinks=False).st_blocks * 512
                            if entry.is_dir(follow_symlinks=False):
                                left.append(entry.path)
            except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
                continue
            except OSError:
                return {0: self._most + 1}
            if entries > _INODES or len(directory) > 2048:  # beyond 4096 characters the kernel does not find a path
                return {0: self._most + 1}
        return found

    def _deleted(self) -> dict[int, int]:
        found: dict[int, int] = {}
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self._process}/fd"):
                with suppress(OSError):
                    file = os.stat(f"/proc/{self._process}/fd/{name}")
                    if stat.S_ISREG(file.st_mode) and not file.st_nlink and file.st_ino not in self._not_counted:
                        found[file.st_ino] = file.st_blocks * 512
            with open(f"/proc/{self._process}/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    parts = line.rstrip("\n").split(maxsplit=5)
                    if len(parts) == 6 and parts[1][3] == "s" and parts[5].endswith(" (deleted)"):
                        first, last = (int(end, 16) for end in parts[0].split("-"))
                        found.setdefault(int(parts[4]), last - first)
        return found
