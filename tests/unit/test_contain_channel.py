"""What holds a program by itself: the filter of system calls, and the channel between the tests and the program."""

from __future__ import annotations

import collections
import datetime
import decimal
import errno
import fractions
import json
import math
import os
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.contain import seccomp
from hybridflow.rewards.contain.handles import Handle
from hybridflow.rewards.contain.peer import Peer, PeerEnded
from hybridflow.rewards.contain.values import decode, encode

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
            passed = {0x15: word == value, 0x25: word > value, 0x45: bool(word & value)}[code]
            at += if_true if passed else if_false


# Name: numbers on x86_64 and aarch64, arguments, the error expected (0: allowed).
CALLS = {
    "read": (0, 63, (), 0),
    "openat": (257, 56, (0, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 0),
    "openat that truncates by reading": (257, 56, (0, 0, os.O_RDONLY | os.O_TRUNC), errno.EACCES),
    "execve": (59, 221, (), 0),
    "socketpair": (53, 199, (1,), 0),
    "socket": (41, 198, (2,), errno.EPERM),
    "connect": (42, 203, (), errno.EPERM),
    "ptrace": (101, 117, (), errno.EPERM),
    "mount": (165, 40, (), errno.EPERM),
    "unshare": (272, 97, (), errno.EPERM),
    "bpf": (321, 280, (), errno.EPERM),
    "memfd_create": (319, 279, (), errno.EPERM),
    "chmod of a path": (268, 53, (), errno.EPERM),
    "thread": (56, 220, (0x3D0F00,), 0),
    "fork by clone": (56, 220, (17,), errno.EAGAIN),
    "thread in a new namespace": (56, 220, (0x10000 | 0x10000000,), errno.EPERM),
    "clone3": (435, 435, (), errno.ENOSYS),
    "io_uring_setup": (425, 425, (), errno.EPERM),
    "signal to itself": (62, 129, (77, 9), 0),
    "signal to another": (62, 129, (78, 9), errno.EPERM),
    "signal to all": (62, 129, (2**64 - 1, 9), errno.EPERM),
    "limits of itself": (302, 261, (0,), 0),
    "limits of another": (302, 261, (78,), errno.EPERM),
    "death signal": (157, 167, (1, 0), errno.EPERM),
    "thread name": (157, 167, (15, 0), 0),
    "a call of the future": (471, 471, (), errno.ENOSYS),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", CALLS)
def test_the_filter_refuses_by_number_and_argument(machine, name):
    x86_64, aarch64, arguments, error = CALLS[name]
    program = seccomp.build(machine, fork=False, metadata=False, own_pid=77)
    found = answer(program, MACHINES[machine], x86_64 if machine == "x86_64" else aarch64, *arguments)
    assert found == (ERROR | error if error else ALLOW)


def test_the_filter_of_a_namespace_leaves_more_to_it():
    program = seccomp.build("x86_64", fork=True, metadata=True, own_pid=None)
    for number, arguments in ((56, (17,)), (57, ()), (58, ()), (62, (78, 9)), (90, ()), (76, ())):
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
    | st.just(datetime.datetime(2000, 1, 1, fold=1))
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


def refuse(value: object) -> object:
    raise AssertionError(f"{value!r} is no plain data")


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value):
    arrived = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
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
        arrived = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
        assert arrived == plain
        assert arrived != 99
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan, refuse))), refuse))
    counter = decode(encode(collections.Counter("aab"), refuse), refuse)
    assert (counter, type(counter)) == ({"a": 2, "b": 1}, collections.Counter)
    for value in (range(3, 9, 2), fractions.Fraction(1, 3), decimal.Decimal("1.50"), datetime.time(3, 4)):
        assert decode(encode(value, refuse), refuse) == value


@pytest.mark.parametrize(
    "data",
    [
        *([], ["nothing"], ["int", 3], ["bytes", 1, 2, 3], ["dict", "dict", 5], ["array", "O", [1], ""], [[]], [None]),
        *(
            ["decimal", "x"],
            ["date", "os", "x"],
            ["function", "os", "system"],
            ["builtin", "eval"],
            ["set", [["list", []]]],
        ),
    ],
)
def test_broken_data_is_refused(data):
    def unknown(found):
        raise ValueError(found)

    with pytest.raises(ValueError):
        decode(data, unknown)


@pytest.fixture
def connected():
    """A peer, what is served to it, and the thread that serves."""
    there, back = os.pipe(), os.pipe()
    served: dict = {}
    here = Peer(back[0], there[1], open_to=lambda subject, name: not name.startswith("_"))
    thread = threading.Thread(target=Peer(there[0], back[1], operations={"served": lambda: dict(served)}).serve)
    thread.start()
    yield here, served
    os.close(there[1])
    thread.join(10)
    for end in (there[0], *back):
        os.close(end)


class Account:
    """Lives on the other side."""

    def __init__(self, amount):
        self.amount = amount

    def __eq__(self, other):
        return True

    __hash__ = None

    def add(self, amount):
        self.amount += amount
        return self

    def __sub__(self, other):
        return 0

    def __iter__(self):
        yield from range(self.amount)


def test_objects_are_used_where_they_live(connected):
    here, served = connected
    served.update(Account=Account, call=lambda f, x: f(x) + 1, fill=lambda of: of.extend([1, 2]), error=KeyError)
    names = here.ask("served")
    account = names["Account"](2)
    assert isinstance(account, Handle)
    assert isinstance(account, names["Account"])
    assert account.add(3).amount == 5
    account.amount = 2
    assert list(account) == [0, 1]
    assert account == names["Account"](7)  # two of theirs: their word counts
    assert account != 2  # next to a plain value it does not
    with pytest.raises(TypeError):
        account - 2
    assert names["call"](lambda x: x * 10, 4) == 41
    filled = [0]
    names["fill"](filled)
    assert filled == [0, 1, 2]
    assert names["error"] is KeyError
    assert not callable(account)
    with pytest.raises(AttributeError):
        account.missing  # noqa: B018


def test_errors_of_the_other_side_arrive_by_their_class(connected):
    class OwnError(ValueError):
        pass

    def fail(kind, *args):
        raise {"own": OwnError, "key": KeyError, "assert": AssertionError}[kind](*args)

    here, served = connected
    served.update(Own=OwnError, fail=fail)
    names = here.ask("served")
    with pytest.raises(KeyError, match="x"):
        names["fill" if "fill" in names else "fail"]("key", "x")
    with pytest.raises(names["Own"], match="said"):
        names["fail"]("own", "said")
    with pytest.raises(ValueError, match="said"):
        names["fail"]("own", "said")


def test_the_program_may_only_use_what_it_was_given(connected):
    class Node:
        def __init__(self):
            self.value, self._hidden = 3, 4

    def reach(node, name):
        return getattr(node, name)

    here, served = connected
    served.update(reach=reach, hidden=lambda node: node._ask("get", node, "_hidden"), ask=lambda f: f._ask("served"))
    names = here.ask("served")
    assert names["reach"](Node(), "value") == 3
    for name in ("__class__", "__dict__", "__init__"):
        with pytest.raises((PermissionError, AttributeError, AssertionError)):
            assert names["reach"](Node(), name) is None
    with pytest.raises(PermissionError):
        names["hidden"](Node())
    with pytest.raises(PermissionError):
        names["ask"](lambda: None)


def test_an_ended_peer_is_told():
    there, back = os.pipe(), os.pipe()
    here = Peer(back[0], there[1])
    for end in (there[0], back[1]):
        os.close(end)
    with pytest.raises(PeerEnded):
        here.ask("names", [])
    for end in (there[1], back[0]):
        os.close(end)
