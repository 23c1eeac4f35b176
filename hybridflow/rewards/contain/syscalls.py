"""The system calls that containment needs and Python 3.11 does not offer, through the C library."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS = 1, 4, 8
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
_CAPABILITY_VERSION, _CAPABILITIES = 0x20080522, 64

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every machine
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def machine() -> str:
    """Name of the processor's instruction set, "x86_64" or "aarch64" where programs can be contained."""
    return platform.machine()


def unshare(flags: int) -> None:
    """Put this process (its children, for CLONE_NEWPID) in new namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount, bind or remount, as mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags))
    _checked(_libc.mount(*arguments, options.encode() or None), f"mount {target}")


def change_root(directory: str) -> None:
    """Make a mounted directory the root of this mount namespace, and let go of the old root."""
    os.chdir(directory)
    _checked(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[machine()]), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount2")
    os.chdir("/")


def prctl(option: int, value: int = 0, pointer: ctypes.Array | ctypes.Structure | None = None) -> None:
    """prctl(2) with one number and perhaps a structure."""
    third = ctypes.byref(pointer) if pointer is not None else ctypes.c_ulong(0)
    _checked(
        _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), third, ctypes.c_ulong(0), ctypes.c_ulong(0)), "prctl"
    )


def drop_capabilities(keep: int | None = None) -> None:
    """Give up every capability for good, but for one to `keep`."""
    for capability in range(_CAPABILITIES):
        if capability != keep and _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break  # above the last one that the kernel knows, or without the right to: then there is none to lose
    kept = 0 if keep is None else 1 << keep
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept)  # effective, permitted, inheritable of capabilities 0 to 31
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(sets)), "capset")


def landlock(number: int, *arguments: object) -> int:
    """One of the three Landlock calls."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), "landlock")
