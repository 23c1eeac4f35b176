"""A seccomp filter: the system calls that a program cannot make, whatever else holds it.

Refused calls return an error; nothing is killed for asking. The filter is classic BPF, built from lists of numbers.
"""

from __future__ import annotations

import ctypes
import errno
import struct

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LAST_KNOWN = 469  # calls that came to Linux later answer "not implemented" until somebody has looked at them
_CLONE_THREAD, _CLONE_NEW_ANY = 0x00010000, 0x7E020000
_PR_SET_PDEATHSIG = 1
_O_ACCMODE, _O_TRUNC = 3, 0o1000

# Numbers of refused calls on x86_64 and on aarch64; those from 424 on are the same on both.
_REFUSED = (
    # socket, connect, bind, listen (a socketpair ends in the program itself)
    ((41, 42, 49, 50), (198, 203, 200, 201)),
    # ptrace, process_vm_readv, process_vm_writev, kcmp, rt_sigqueueinfo, rt_tgsigqueueinfo, tkill
    ((101, 310, 311, 312, 129, 297, 200), (117, 270, 271, 272, 138, 240, 130)),
    # sched_setaffinity, _setscheduler, _setparam, _setattr, setpriority, ioprio_set, migrate_pages, move_pages
    ((203, 144, 142, 314, 141, 251, 256, 279), (122, 119, 118, 274, 140, 30, 238, 239)),
    # unshare, setns, mount, umount2, pivot_root, chroot
    ((272, 308, 165, 166, 155, 161), (97, 268, 40, 39, 41, 51)),
    # System V shared memory, semaphores and messages; POSIX messages: they would stay
    ((29, 30, 31, 67, 64, 65, 66, 220), (194, 196, 195, 197, 190, 193, 191, 192)),
    ((68, 69, 70, 71, 240, 241), (186, 189, 188, 187, 180, 181)),
    # memfd_create, add_key, request_key, keyctl: not counted for any process
    ((319, 248, 249, 250), (279, 217, 218, 219)),
    # bpf, perf_event_open, userfaultfd, fanotify_init, reboot, kexec, modules
    ((321, 298, 323, 300, 169, 246, 320, 175, 313, 176), (280, 241, 282, 262, 142, 104, 294, 105, 273, 106)),
    # swap, acct, quotactl, syslog, clocks, names of the host
    ((167, 168, 163, 179, 103, 164, 170), (224, 225, 89, 60, 116, 170, 161)),
    ((227, 159, 305, 171), (112, 171, 266, 162)),
    # vhangup, personality, file handles, lookup_dcookie, seccomp; ports and modify_ldt of x86_64
    ((153, 135, 303, 304, 212, 317, 172, 173, 154), (58, 92, 264, 265, 18, 277)),
)
# pidfds, madvise of others, mounts by descriptor, io_uring, memfd_secret, quotactl_fd
_REFUSED_ON_BOTH = (*range(424, 434), 434, 438, 440, 442, 443, 447, 448, 467)
# What Landlock does not know of: modes, owners, attributes and times of files, truncate
_METADATA = (
    ((90, 91, 268, 92, 93, 94, 260), (52, 53, 55, 54)),
    ((188, 189, 190, 197, 198, 199), (5, 6, 7, 14, 15, 16)),
    ((132, 235, 261, 280, 76), (88, 45)),
    ((452, 463, 466, 469), (452, 463, 466, 469)),
)
_CLONE, _CLONE3, _OPENAT2 = {"x86_64": 56, "aarch64": 220}, 435, 437
_FORKS = {"x86_64": (57, 58), "aarch64": ()}
_SIGNALS = {"x86_64": (62, 234), "aarch64": (129, 131)}  # kill, tgkill
_PRLIMIT, _PRCTL = {"x86_64": 302, "aarch64": 261}, {"x86_64": 157, "aarch64": 167}
_FALLOCATE = {"x86_64": 285, "aarch64": 47}
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}  # number, and which argument has the flags


class FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def build(machine: str, *, own_pid: int, metadata: bool) -> bytes:
    """The filter for a process `own_pid`, which remains one process and sends signals to none but itself.

    `metadata`: whether it may change modes, owners and times of files.
    """
    column = list(_AUDIT_MACHINE).index(machine)
    refused = [number for group in (_REFUSED if metadata else (*_REFUSED, *_METADATA)) for number in group[column]]
    code = [
        *(_step(_LOAD, _MACHINE), _step(_EQUAL, _AUDIT_MACHINE[machine], 1, 0), _step(_RETURN, _KILL)),
        *(_step(_LOAD, _NUMBER), *_answer_if(_ABOVE, _LAST_KNOWN, errno.ENOSYS)),
    ]
    for number in (*refused, *_REFUSED_ON_BOTH):
        code += _answer_if(_EQUAL, number, errno.EPERM)
    for number in (_CLONE3, _OPENAT2):  # their flags are in memory; the C library falls back to the older calls
        code += _answer_if(_EQUAL, number, errno.ENOSYS)
    for number in _FORKS[machine]:
        code += _answer_if(_EQUAL, number, errno.EAGAIN)
    thread = [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), _step(_RETURN, _ERROR | errno.EAGAIN)]
    code += _when(_CLONE[machine], 0, [*_answer_if(_ANY_BIT, _CLONE_NEW_ANY, errno.EPERM), *thread])
    code += _when(_PRCTL[machine], 0, _answer_if(_EQUAL, _PR_SET_PDEATHSIG, errno.EPERM))
    code += _when(_PRLIMIT[machine], 0, _answer_unless(0))
    for number in _SIGNALS[machine]:
        code += _when(number, 0, _answer_unless(own_pid))
    code += _answer_if(_EQUAL, _FALLOCATE[machine], errno.EOPNOTSUPP)  # faster than disk use is measured
    # Before its third version Landlock let O_TRUNC pass where reading is allowed.
    truncating = [_step(_AND, _O_ACCMODE | _O_TRUNC), *_answer_if(_EQUAL, _O_TRUNC, errno.EACCES)]
    for number, argument in _OPENS[machine]:
        code += _when(number, argument, truncating)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer_if(test: int, value: int, error: int) -> list[bytes]:
    """Answer `error` where the loaded word passes the test."""
    return [_step(test, value, 0, 1), _step(_RETURN, _ERROR | error)]


def _answer_unless(value: int) -> list[bytes]:
    return [_step(_EQUAL, value, 1, 0), _step(_RETURN, _ERROR | errno.EPERM)]


def _when(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Where the call is `number`: load the low word of an argument, run `body`, and allow what it did not answer."""
    inner = [_step(_LOAD, _ARGUMENTS + 8 * argument), *body, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inner)), *inner]
