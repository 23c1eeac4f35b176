"""A seccomp filter: the system calls that a contained program cannot make, whatever else holds it.

Refused calls return an error; nothing is killed for asking. The filter is classic BPF, built from lists of numbers.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from typing import NamedTuple

from hybridflow.rewards.contain.syscalls import (
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    PR_SET_SECCOMP,
    SECCOMP_MODE_FILTER,
    machine,
    prctl,
)

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_AUDIT_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LAST_KNOWN = 469  # calls that came to Linux later answer "not implemented" until somebody has looked at them

_CLONE_THREAD, _CLONE_NEW_ANY = 0x00010000, 0x7E020000
_O_ACCMODE, _O_TRUNC = 3, 0o1000


class Numbers(NamedTuple):
    """One system call on x86_64 and on aarch64; -1 where the machine does not have it."""

    x86_64: int
    aarch64: int


def _same(*numbers: int) -> tuple[Numbers, ...]:
    return tuple(Numbers(number, number) for number in numbers)


def _pairs(*numbers: tuple[int, int]) -> tuple[Numbers, ...]:
    return tuple(Numbers(*pair) for pair in numbers)


# socket (socketpair stays: a pair ends in the program itself)
_NETWORK = _pairs((41, 198), (42, 203), (49, 200), (50, 201))
_OTHER_PROCESSES = (
    *_pairs((101, 117), (310, 270), (311, 271), (312, 272)),  # ptrace, process_vm_readv, process_vm_writev, kcmp
    *_same(434, 424, 438, 440, 448),  # pidfd_open, pidfd_send_signal, pidfd_getfd, process_madvise, process_mrelease
    *_pairs((129, 138), (297, 240), (200, 130)),  # rt_sigqueueinfo, rt_tgsigqueueinfo, tkill
    *_pairs((203, 122), (144, 119), (142, 118), (314, 274)),  # sched_setaffinity, _setscheduler, _setparam, _setattr
    *_pairs((141, 140), (251, 30), (256, 238), (279, 239)),  # setpriority, ioprio_set, migrate_pages, move_pages
)
_MOUNTS_AND_NAMESPACES = (
    *_pairs((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51)),  # unshare .. chroot
    *_same(428, 429, 430, 431, 432, 433, 442, 467),  # open_tree, move_mount, fsopen .. fspick, mount_setattr
)
# What outlives the program or counts for nobody's memory: System V and POSIX message objects, files in memory, keys.
_OBJECTS = (
    *_pairs((29, 194), (30, 196), (31, 195), (67, 197)),  # shared memory
    *_pairs((64, 190), (65, 193), (66, 191), (220, 192)),  # semaphores
    *_pairs((68, 186), (69, 189), (70, 188), (71, 187), (240, 180), (241, 181)),  # message queues
    *_pairs((319, 279), (447, 447), (250, 219), (248, 217), (249, 218)),  # memfd_create, memfd_secret, keys
)
_KERNEL = (
    *_pairs((321, 280), (298, 241), (323, 282), (300, 262)),  # bpf, perf_event_open, userfaultfd, fanotify_init
    *_same(425, 426, 427),  # io_uring
    *_pairs((169, 142), (246, 104), (320, 294), (175, 105), (313, 273), (176, 106)),  # reboot, kexec, modules
    *_pairs((167, 224), (168, 225), (163, 89), (179, 60), (443, 443), (103, 116)),  # swap, acct, quotactl, syslog
    *_pairs((164, 170), (227, 112), (159, 171), (305, 266), (170, 161), (171, 162)),  # clocks, names of the host
    *_pairs((172, -1), (173, -1), (153, 58), (135, 92), (303, 264), (304, 265)),  # ports, vhangup, personality, handles
    *_pairs((154, -1), (212, 18), (317, 277)),  # modify_ldt, lookup_dcookie, seccomp
)
# Landlock does not know of these, and the program may run as the user whose files lie around.
_METADATA = (
    *_pairs((90, -1), (91, 52), (268, 53), (452, 452), (92, -1), (93, 55), (94, -1), (260, 54)),  # modes, owners
    *_pairs((188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16)),  # attributes
    *_same(463, 466, 469),  # setxattrat, removexattrat, file_setattr
    *_pairs((132, -1), (235, -1), (261, -1), (280, 88), (76, 45)),  # times, truncate
)
_CLONE, _CLONE3, _FORK, _VFORK = Numbers(56, 220), Numbers(435, 435), Numbers(57, -1), Numbers(58, -1)
_KILL_CALL, _TGKILL, _PRLIMIT, _PRCTL = Numbers(62, 129), Numbers(234, 131), Numbers(302, 261), Numbers(157, 167)
_OPEN, _OPENAT, _OPENAT2 = Numbers(2, -1), Numbers(257, 56), Numbers(437, 437)


def install(*, fork: bool, metadata: bool, own_pid: int | None) -> None:
    """Install the filter on this process and all that it will start; there is no way back.

    `fork`: whether it may start processes. `metadata`: whether it may change modes, owners and times of files.
    `own_pid`: the one process that it may send signals to, itself; None: any that it can see.
    """
    program = build(machine(), fork=fork, metadata=metadata, own_pid=own_pid)
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, Program(len(program) // 8, ctypes.addressof(code)))


def build(name: str, *, fork: bool, metadata: bool, own_pid: int | None) -> bytes:
    """The filter for machine `name`, 8 bytes an instruction."""
    code = [
        *(_step(_LOAD, _MACHINE), _step(_EQUAL, _AUDIT_MACHINE[name], 1, 0), _step(_RETURN, _KILL)),
        *(_step(_LOAD, _NUMBER), *_answer_if(_ABOVE, _LAST_KNOWN, errno.ENOSYS)),
    ]
    refused = [*_NETWORK, *_OTHER_PROCESSES, *_MOUNTS_AND_NAMESPACES, *_OBJECTS, *_KERNEL]
    for numbers in refused if metadata else [*refused, *_METADATA]:
        code += _refuse(getattr(numbers, name), errno.EPERM)
    code += _refuse(getattr(_CLONE3, name), errno.ENOSYS)  # its flags are in memory; the C library falls back to clone
    code += _refuse(getattr(_OPENAT2, name), errno.ENOSYS)
    for numbers in () if fork else (_FORK, _VFORK):
        code += _refuse(getattr(numbers, name), errno.EAGAIN)
    threads = [] if fork else [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), _step(_RETURN, _ERROR | errno.EAGAIN)]
    code += _when(getattr(_CLONE, name), 0, [*_answer_if(_ANY_BIT, _CLONE_NEW_ANY, errno.EPERM), *threads])
    code += _when(getattr(_PRCTL, name), 0, _answer_if(_EQUAL, PR_SET_PDEATHSIG, errno.EPERM))
    code += _when(getattr(_PRLIMIT, name), 0, _answer_unless(0))
    if own_pid is not None:
        code += _when(getattr(_KILL_CALL, name), 0, _answer_unless(own_pid))
        code += _when(getattr(_TGKILL, name), 0, _answer_unless(own_pid))
        # Before its third version Landlock let O_TRUNC pass where reading is allowed.
        truncating = [_step(_AND, _O_ACCMODE | _O_TRUNC), *_answer_if(_EQUAL, _O_TRUNC, errno.EACCES)]
        code += _when(getattr(_OPENAT, name), 2, truncating) + _when(getattr(_OPEN, name), 1, truncating)
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer_if(test: int, value: int, error: int) -> list[bytes]:
    """Answer `error` where the loaded word passes the test."""
    return [_step(test, value, 0, 1), _step(_RETURN, _ERROR | error)]


def _answer_unless(value: int) -> list[bytes]:
    return [_step(_EQUAL, value, 1, 0), _step(_RETURN, _ERROR | errno.EPERM)]


def _refuse(number: int, error: int) -> list[bytes]:
    return _answer_if(_EQUAL, number, error) if number >= 0 else []


def _when(number: int, argument: int, body: list[bytes]) -> list[bytes]:
    """Where the call is `number`: load the low word of an argument, run `body`, and allow what it did not answer."""
    if number < 0:
        return []
    inner = [_step(_LOAD, _ARGUMENTS + 8 * argument), *body, _step(_RETURN, _ALLOW)]
    return [_step(_EQUAL, number, 0, len(inner)), *inner]
