"""Landlock: which files a process may read and write, for machines without user namespaces."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

from hybridflow.rewards.contain.syscalls import (
    LANDLOCK_ADD_RULE,
    LANDLOCK_CREATE_RULESET,
    LANDLOCK_RESTRICT_SELF,
    PR_SET_NO_NEW_PRIVS,
    landlock,
    prctl,
)

_VERSION = 1  # flag: answer the version instead of making a ruleset
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
_MAKE_DEVICES = (1 << 6) | (1 << 11)  # character and block devices
_TCP = 3  # bind, connect
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Version of Landlock in the running kernel. Errors: OSError where it is missing or switched off."""
    return landlock(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))


def restrict(*, readable: Iterable[str], devices: Sequence[str], writable: str) -> None:
    """Hold this process, and all that it will start, to reading `readable` and writing beneath `writable`."""
    known = version()
    files = _FIRST_VERSION
    files |= (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0) | (_IOCTL_DEVICE if known >= 5 else 0)
    ruleset = _Ruleset(files, _TCP if known >= 4 else 0, _ABSTRACT_SOCKETS_AND_SIGNALS if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    handle = landlock(LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint32(0))
    for path in readable:
        _allow(handle, path, _EXECUTE | _READ_FILE | _READ_DIR)
    for path in devices:
        _allow(handle, path, _READ_FILE | _WRITE_FILE)
    _allow(handle, writable, files & ~_MAKE_DEVICES & ~_IOCTL_DEVICE)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    landlock(LANDLOCK_RESTRICT_SELF, ctypes.c_int(handle), ctypes.c_uint32(0))
    os.close(handle)


def _allow(handle: int, path: str, access: int) -> None:
    with suppress(FileNotFoundError):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            files_only = 0 if os.path.isdir(path) else _READ_DIR
            rule = _Beneath(access & ~files_only, parent)
            landlock(
                LANDLOCK_ADD_RULE,
                *(ctypes.c_int(handle), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)),
            )
        finally:
            os.close(parent)
