"""What holds a program by itself: the filter of system calls, and the channel between the tests and the program."""

from __future__ import annotations

import asyncio
import collections
import datetime
import decimal
import errno
import fractions
import itertools
import json
import math
import os
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.sandbox.containment import build_filter
from hybridflow.rewards.sandbox.program import NotJudged, Opaque, ProgramEnded, Remote, ValueChannel, decode, encode

ALLOW, ERROR, KILL = 0x7FFF0000, 0x00050000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def answer(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """What the kernel's BPF machine would answer to a system call."""
    data = struct.pack("=IIQ6Q", number, machine, 0, *(list(arguments) + [0] * 6)[:6])
    steps, at, word = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            word = struct.unpack_from("=I", data, value)[0]
        elif code == 0x54:
            word &= value
        elif code == 0x06:
            return value
        else:
            passed = {0x15: word == value, 0x25: word > value, 0x35: word >= value, 0x45: bool(word & value)}[code]
            at += if_true if passed else if_false


# Numbers on x86_64 and aarch64 of calls that are allowed, and refused, with any arguments
ALLOWED = {
    "read": (0, 63), "execve": (59, 221), "futex": (202, 98), "mmap": (9, 222), "unlinkat": (263, 35),
    "clock_gettime": (228, 113), "statx": (332, 291), "rseq": (334, 293),
}  # fmt: skip
REFUSED = {
    "connect": (42, 203), "ptrace": (101, 117), "mount": (165, 40), "unshare": (272, 97), "bpf": (321, 280),
    "memfd_create": (319, 279), "chmod of a path": (268, 53), "io_uring_setup": (425, 425),
    "timer_create": (222, 107), "io_setup": (206, 0), "inotify_init1": (294, 26), "vmsplice": (278, 75),
    "splice": (275, 76), "flock": (73, 32), "sync": (162, 81), "setsockopt": (54, 208),
    "descriptors under way": (46, 211), "many descriptors under way": (307, 269),
}  # fmt: skip
# Numbers, arguments, the error expected (0: allowed).
CALLS = {
    **{name: (*numbers, (), 0) for name, numbers in ALLOWED.items()},
    **{name: (*numbers, (), errno.EPERM) for name, numbers in REFUSED.items()},
    "openat": (257, 56, (0, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0),
    "openat that truncates by reading": (257, 56, (0, 0, os.O_RDONLY | os.O_TRUNC), errno.EACCES),
    "socketpair": (53, 199, (1,), 0),
    "a pair of other sockets": (53, 199, (30,), errno.EPERM),
    "socket": (41, 198, (2,), errno.EPERM),
    "thread": (56, 220, (0x3D0F00,), 0),
    "fork by clone": (56, 220, (17,), errno.EAGAIN),
    "thread in a new namespace": (56, 220, (0x10000 | 0x10000000,), errno.EPERM),
    "clone3": (435, 435, (), errno.ENOSYS),
    "signal to itself": (62, 129, (77, 9), 0),
    "signal to another": (62, 129, (78, 9), errno.EPERM),
    "signal to all": (62, 129, (2**64 - 1, 9), errno.EPERM),
    "signal to a thread": (234, 131, (77, 77, 10), 0),
    "continuing itself": (62, 129, (77, 18), errno.EPERM),
    "continuing a thread": (234, 131, (77, 77, 18), errno.EPERM),
    "sending": (44, 206, (3, 1, 1, 0, 0, 0), 0),
    "sending to an address": (44, 206, (3, 1, 1, 0, 77, 110), errno.EPERM),
    "fallocate": (285, 47, (), errno.EOPNOTSUPP),
    "limits of itself": (302, 261, (0,), 0),
    "limits of another": (302, 261, (78,), errno.EPERM),
    "the size of cores": (302, 261, (0, 4), errno.EPERM),
    "the size of the stack": (302, 261, (0, 3), 0),
    "a core for itself": (157, 167, (62, 1), errno.EPERM),
    "dumpable": (157, 167, (4, 1), errno.EPERM),
    "death signal": (157, 167, (1, 0), errno.EPERM),
    "thread name": (157, 167, (15, 0), 0),
    "flags": (72, 25, (3, 4, os.O_NONBLOCK), 0),
    "a lock": (72, 25, (3, 7), 0),
    "the size of a pipe": (72, 25, (3, 1032), 0),
    "a larger pipe": (72, 25, (3, 1031, 1 << 20), errno.EPERM),
    "an owner": (72, 25, (3, 8, 78), errno.EPERM),
    "a signal": (72, 25, (3, 10, 9), errno.EPERM),
    "an owner's kind": (72, 25, (3, 15), errno.EPERM),
    "a lease": (72, 25, (3, 1024, 1), errno.EPERM),
    "notices of a directory": (72, 25, (3, 1026, 1), errno.EPERM),
    "asynchronous": (72, 25, (3, 4, os.O_NONBLOCK | 0o20000), errno.EPERM),
    "an owner by ioctl": (16, 29, (3, 0x8901), errno.EPERM),
    "an owner of a socket": (16, 29, (3, 0x8902), errno.EPERM),
    "asynchronous by ioctl": (16, 29, (3, 0x5452), errno.EPERM),
    "terminal or not": (16, 29, (3, 0x5401), 0),
    "not blocking by ioctl": (16, 29, (3, 0x5421), 0),
    "thread with descriptors of its own": (56, 220, (0x3D0F00 & ~0x400,), errno.EAGAIN),
    "descriptors of its own": (436, 436, (3, 99, 2), errno.EPERM),
    "closing a range": (436, 436, (3, 99, 4), 0),
    "a call of the future": (471, 471, (), errno.ENOSYS),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", CALLS)
def test_the_filter_refuses_by_number_and_argument(machine, name):
    x86_64, aarch64, arguments, error = CALLS[name]
    program = build_filter(machine, own_pid=77, metadata=False)
    found = answer(program, MACHINES[machine], x86_64 if machine == "x86_64" else aarch64, *arguments)
    assert found == (ERROR | error if error else ALLOW)


def test_the_filter_of_a_file_system_of_its_own_leaves_modes_to_it():
    program = build_filter("x86_64", own_pid=1, metadata=True)
    for number, arguments in ((90, ()), (76, ()), (62, (1, 9))):
        assert answer(program, MACHINES["x86_64"], number, *arguments) == ALLOW
    assert answer(program, MACHINES["x86_64"], 56, 0x20000000 | 17) == ERROR | errno.EPERM
    assert answer(program, MACHINES["aarch64"], 63) == KILL  # a call by another machine's numbers
    assert answer(program, MACHINES["x86_64"], 0x40000000 | 41) == ERROR | errno.ENOSYS  # by 32-bit ones


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([1 << 9000, -(1 << 9000)])
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))
    | st.binary()
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates()
    | st.datetimes()
    | st.times()
    | st.timedeltas()
    | st.just(...)
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.binary().map(bytearray)
    ),
    max_leaves=12,
)


def passed_on(value):
    return decode(json.loads(json.dumps(encode(value))))


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value):
    arrived = passed_on(value)
    assert arrived == value
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | collections.deque)


def test_what_is_more_than_plain_loses_what_it_decides_by():
    class Always(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Text(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    class Items(list):
        def __eq__(self, other):
            return True

        def __iter__(self):
            return iter([9])

    Point = collections.namedtuple("Point", "x y")
    for value, plain in ((Always(3), 3), (Text("a"), "a"), (Items([1, Always(2)]), [1, 2]), (Point(1, 2), (1, 2))):
        arrived = passed_on(value)
        assert arrived == plain
        assert arrived != 99
    assert math.isnan(passed_on(math.nan))
    counter = passed_on(collections.Counter("aab"))
    assert (counter, type(counter)) == ({"a": 2, "b": 1}, collections.Counter)
    for value in (range(3, 9, 2), fractions.Fraction(1, 3), decimal.Decimal("1.50"), datetime.time(3, 4)):
        assert passed_on(value) == value


def test_what_runs_arrives_as_what_it_comes_to():
    assert list(passed_on(x * 2 for x in range(3))) == [0, 2, 4]
    assert next(passed_on(iter([5]))) == 5
    assert passed_on(iter([5])) != [5]
    endless = passed_on(itertools.count())
    assert list(itertools.islice(endless, 3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="more than 10000 items"):
        list(endless)

    async def three():
        return 3

    assert asyncio.run(passed_on(three())) == 3


def test_an_object_is_known_by_its_class_alone():
    class Always:
        def __eq__(self, other):
            return True

        __hash__ = None

    class Sized(Always):
        def __len__(self):
            return 4

    made = passed_on(Always())
    assert isinstance(made, Opaque)
    assert made == made
    assert made not in (3, passed_on(Always()))
    assert made
    for use in (bool, len, list, int, lambda of: of + 1, lambda of: of[0], lambda of: 4 in of, lambda of: of < 3):
        with pytest.raises(TypeError):
            use(passed_on(Sized()))
    for name in ("upper", "__class_getitem__", "append"):  # which a plain value in its place may have
        with pytest.raises(AttributeError):
            getattr(made, name)
    assert not callable(made)
    for use in (lambda: made.next, passed_on(lambda: 3)):  # which no plain value has
        with pytest.raises(NotJudged, match="which Code does not judge"):
            use()


BROKEN = [
    *([], ["nothing"], ["int", 3], ["bytes", 1, 2, 3], ["dict", 5], ["array", "O", [1], ""], [[]], [None], {"a": 1}),
    *(["Decimal", "x"], ["date", "x"], ["type", "eval"], ["type", "exec"], ["type", "os"]),
    *(["datetime", "03:04", 0, ["type", "time"]], ["list", [1], ["type", "int"]]),  # more parts, a program's own words
    *(["module", "os"], ["set", [["list", []]]], ["complex", "x"], ["opaque", 1, 2]),
]


@pytest.mark.parametrize("data", BROKEN)
def test_broken_data_is_refused(data):
    with pytest.raises(ValueError):
        decode(data)


@pytest.fixture
def remote():
    """A program behind a channel, and the list of answers that it gives, whatever it is asked."""
    there, back = os.pipe(), os.pipe()
    answers: list = []
    far = ValueChannel(there[0], back[1])

    def serve():
        while far.receive() is not None:
            far.send(answers.pop(0))

    thread = threading.Thread(target=serve)
    thread.start()
    yield Remote(ValueChannel(back[0], there[1])), answers
    os.close(there[1])
    thread.join(10)
    for end in (there[0], *back):
        os.close(end)


def names(**found):
    return {"names": found, "last": ""}


def test_a_program_is_called_with_plain_values_and_answers_with_them(remote):
    program, answers = remote
    answers += [names(f={"call": True}, K={"value": ["list", [1]]}), {"value": 5, "changed": [["list", [1, 2]]]}]
    found = program.names(["f", "K"])
    given = [2, 1]
    assert (found["f"](given), given, found["K"]) == (5, [1, 2], [1])
    with pytest.raises(NotJudged, match="give the program an object of class function"):
        found["f"](lambda: 1)
    with pytest.raises(TypeError):  # it came from the program itself
        found["f"](Opaque("T", True))


def test_errors_of_the_program_arrive_by_their_class(remote):
    program, answers = remote
    told = {"args": ["list", ["said"]], "limit": "ValueError: said"}
    own = ["Own", "Base", "ValueError"]
    answers += [names(f={"call": True}, Base={"raises": own[1:]}), {"error": {"classes": own, **told}}]
    answers += [{"error": {"classes": [one], **told}} for one in ("KeyError", "SystemExit", "StopIteration")]
    found = program.names(["f", "Base"])
    with pytest.raises(found["Base"], match="said"):
        found["f"]()
    assert program.error == "ValueError: said"
    for kind in (KeyError, RuntimeError, RuntimeError):  # no exit, and no end of a loop, of the tests' own
        with pytest.raises(kind):
            found["f"]()


FORGED = [
    *({"value": ["module", "os"]}, {"value": ["type", "exec"]}, {"value": {"a": 1}}, {"value": 1, "changed": [[]]}),
    *({"error": {"classes": [one], "args": [], "limit": ""}} for one in ("os", "object")),
    *({"error": []}, {"error": {"classes": [], "args": ["list", []], "limit": ""}}, {"changed": 5}),
]


@pytest.mark.parametrize("answer", FORGED)
def test_forged_answers_are_errors_or_values(remote, answer):
    program, answers = remote
    answers += [names(f={"call": True}), answer]
    function = program.names(["f"])["f"]
    with pytest.raises((ValueError, TypeError, KeyError)):
        assert function([1]) is not None


def test_names_that_were_not_asked_for_are_refused(remote):
    program, answers = remote
    answers += [names(f={"call": True}, abs={"call": True})]
    with pytest.raises(ValueError, match="abs was not asked for"):
        program.names(["f"])


def test_an_ended_program_is_told():
    there, back = os.pipe(), os.pipe()
    program = Remote(ValueChannel(back[0], there[1]))
    for end in (there[0], back[1]):
        os.close(end)
    with pytest.raises(ProgramEnded):
        program.names([])
    assert program.ended
    for end in (there[1], back[0]):
        os.close(end)
