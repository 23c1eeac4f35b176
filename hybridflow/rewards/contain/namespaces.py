"""Namespaces: a file system of its own without the user's files, no network, and process ids that end together."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence

from hybridflow.rewards.contain.syscalls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_DUMPABLE,
    change_root,
    mount,
    prctl,
    unshare,
)

DIRECTORY = "/program"  # the only place that a contained program can write to
SLOTS = 256  # programs at the same time, each under a user id of its own
_BUILD_AT = "/tmp"  # hidden behind the new root while that is put together
_EMPTY = ("/tmp", "/var/tmp", "/dev/shm", "/proc", "/home")  # there, and read-only: refused rather than not found
_INODES = 4096


def enter(*, readable: Iterable[str], devices: Sequence[str], first_uid: int | None) -> int:
    """Move this process where only `readable` and `devices` exist; returns a handle of the /proc it came from.

    `first_uid`: for root, the first of `SLOTS` unused user ids that programs run under, as users 1, 2, ...; None for
    an ordinary user, under whose id they run. Errors: OSError where the machine does not allow it.
    """
    flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if first_uid is None:
        _unshare_as_myself(flags, os.open("/proc", os.O_PATH | os.O_CLOEXEC))
    else:
        _unshare_with_map(flags, f"0 0 1\n1 {first_uid} {SLOTS}\n")
    mount("", "/", None, MS_REC | MS_PRIVATE)
    processes = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
    _build_root(readable, devices)
    change_root(_BUILD_AT)
    mount("", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    return processes


def enter_private(processes: int, *, slot: int | None, file_mb: int) -> None:
    """Second step, for one program: a user, a directory and (for its children) process ids of its own.

    The user namespace of its own makes the kernel count this program's processes apart from all others.
    """
    if slot is not None:
        os.setgroups([])
        os.setresgid(slot, slot, slot)
        os.setresuid(slot, slot, slot)
        prctl(PR_SET_DUMPABLE, 1)  # or its files in /proc, and with them the map of ids, belong to root
    _unshare_as_myself(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID, processes)
    prctl(PR_SET_DUMPABLE, 0)
    options = f"size={file_mb}m,nr_inodes={_INODES},mode=700"
    mount("tmpfs", DIRECTORY, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _unshare_as_myself(flags: int, processes: int) -> None:
    """New namespaces in which this process keeps the user id that it has, the only one there is."""
    user, group = os.geteuid(), os.getegid()
    unshare(flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


def _unshare_with_map(flags: int, ids: str) -> None:
    """New namespaces with several user ids: only a process outside, here a child that waits, may map them."""
    start, go = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(go)
            if os.read(start, 1):
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/{parent}/{name}", "w") as file:
                        file.write(ids)
                code = 0
        finally:
            os._exit(code)
    os.close(start)
    try:
        unshare(flags)
        os.write(go, b"1")
    finally:
        os.close(go)
        _, status = os.waitpid(child, 0)
    if status:
        raise PermissionError(1, "the user ids of a new user namespace cannot be mapped")


def _build_root(readable: Iterable[str], devices: Sequence[str]) -> None:
    """A file system at `_BUILD_AT` that shows the readable paths, read-only, at their own places."""
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (*readable, *devices)}
    mount("tmpfs", _BUILD_AT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in (*_EMPTY, DIRECTORY):
        os.makedirs(_BUILD_AT + path, exist_ok=True)
    for path, source in sources.items():
        target = _BUILD_AT + path
        if stat.S_ISDIR(os.fstat(source).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)
        os.close(source)
    for target in _mounts_beneath(_BUILD_AT):
        if target.removeprefix(_BUILD_AT) not in devices:
            # What is set already is locked here: a remount without it is refused.
            kept = os.statvfs(target).f_flag & (MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
            mount("", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _mounts_beneath(directory: str) -> list[str]:
    with open("/proc/self/mountinfo") as file:
        points = [line.split(" ")[4].encode().decode("unicode_escape") for line in file]
    return [point for point in points if point.startswith(directory + "/")]
