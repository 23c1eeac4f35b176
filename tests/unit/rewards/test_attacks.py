"""Attacks on the judge, on other rows and on the machine fail, by each mechanism, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rewards import Code
from hybridflow.rewards.sandbox.containment import DIRECTORY
from hybridflow.rewards.sandbox.sandbox import Limits
from tests.example_attacks import LEAVING, REACHING, STOPPED, UNSOLVED

ROOT = Path(__file__).resolve().parents[3]
ORDINARY, NOBODY = 54321, 65534
KINDS = [("bubblewrap", None), ("landlock", None), ("landlock", 6), ("landlock", 5), ("landlock", 1)]
ON_X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are of x86_64")


@pytest.fixture
def outside() -> Iterator[tuple[dict[str, object], Path]]:
    """What attacks aim at: a process and files that any user may reach, and sockets that must get nothing."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-canary-") as name, socket.socket(socket.AF_UNIX, 2) as near:
        folder = Path(name)
        folder.chmod(0o777)
        secret, path = folder / "secret", folder / "socket"
        secret.write_text("SECRET")
        secret.chmod(0o666)
        with socket.socket(socket.AF_UNIX, 2) as abstract:
            near.bind(str(path))
            path.chmod(0o777)
            abstract.bind("\0hybridflow-canary")
            user = NOBODY if os.getuid() == 0 else os.getuid()
            with subprocess.Popen(["sleep", "600"], user=user) as canary:
                given = {"canary": canary.pid, "judge": os.getpid(), "folder": name, "path": str(path)}
                affinity, nice = os.sched_getaffinity(canary.pid), os.getpriority(os.PRIO_PROCESS, canary.pid)
                before = secret.stat()
                yield given | {"secret": str(secret)}, folder
                assert canary.poll() is None
                assert os.sched_getaffinity(canary.pid) == affinity
                assert os.getpriority(os.PRIO_PROCESS, canary.pid) == nice
                canary.send_signal(signal.SIGKILL)
            for one in (near, abstract):
                with pytest.raises(BlockingIOError):
                    one.recv(1, socket.MSG_DONTWAIT)
        after = secret.stat()
        assert (after.st_mode, after.st_mtime_ns, after.st_nlink, secret.read_text()) == (
            *(before.st_mode, before.st_mtime_ns, before.st_nlink, "SECRET"),
        )
        assert sorted(one.name for one in folder.iterdir()) == ["secret", "socket"]


def shared() -> list[str]:
    """What attacks have left in places that all processes of a machine share."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    made = [str(path) for top in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") for path in Path(top).glob("*evil*")]
    return made + [line for line in mounts if line.split()[4] == DIRECTORY]


def attacked(mechanism: str, version: int | None, given: dict[str, object], user: str, *, slow: bool) -> dict:
    """The verdicts of all attacks; those that are contained leave nothing in the directory for temporary files."""
    root = os.getuid() == 0
    if user == "root" and not root:
        pytest.skip("needs root")
    python = sys.executable if not (root and user == "ordinary") else "/usr/bin/python3"  # which any user may run
    with tempfile.TemporaryDirectory(prefix="hybridflow-attacks-") as scratch:
        os.chmod(scratch, 0o777)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"TMPDIR": scratch, "API_TOKEN": "SECRET", "SSH_AUTH_SOCK": str(given["path"])}
        as_another = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if root and user == "ordinary" else {}
        wanted = json.dumps([mechanism, version, given, slow])
        command = [python, "-m", "tests.example_attacks", wanted]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250, **as_another
        )
        if any(error in done.stderr for error in ("PermissionError", "ModuleNotFoundError", "SyntaxError")):
            pytest.skip(f"that user cannot run this checkout: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        if isinstance(found, str):
            pytest.skip(f"{mechanism}: {found}")
        assert os.listdir(scratch) == []
    return found


def check(mechanism: str, version: int | None, user: str, given: dict[str, object], *, slow: bool = False) -> None:
    found = attacked(mechanism, version, given, user, slow=slow)
    assert shared() == []
    wanted = dict.fromkeys(STOPPED, 0.0) if slow else dict.fromkeys(UNSOLVED, 0.0) | dict.fromkeys(REACHING, 1.0)
    wanted |= {name: 1.0 for name in found if name.startswith("honest")}
    assert {name: found[name] for name in wanted.keys() & found if found[name] != wanted[name]} == {}
    assert len(wanted.keys() - found) < 3  # those that need numpy, where that user has none
    assert slow or {found[name] for name in LEAVING} <= {0.0, 1.0}


@ON_X86_64
@pytest.mark.parametrize(("mechanism", "version"), KINDS[:2])
def test_no_attack_reaches_its_verdict_other_rows_or_the_machine(mechanism, version, outside):
    check(mechanism, version, "root" if os.getuid() == 0 else "ordinary", outside[0])


@ON_X86_64
@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "ordinary"])
@pytest.mark.parametrize(("mechanism", "version"), KINDS)
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "at a limit"])
def test_no_attack_succeeds_for_any_user(mechanism, version, user, slow, outside):
    check(mechanism, version, user, outside[0], slow=slow)


# By what programs send, raise and return: each scores 0, none makes its row a failure

LIMITS = Limits(seconds=20, memory_mb=256)
TESTS = ["assert f(2) == 4", "assert f(3) == 6"]
SENDING = """import os, struct, time
def send(data):
    os.write(4, struct.pack('!Q', len(data)))
    rest = memoryview(data)
    while rest: rest = rest[os.write(4, rest):]
send(b'{"names": {"f": {"call": true}}, "last": "f"}')
nested = lambda before, after: before * 300 + b'1' + after * 300
"""
# What a program sends in place of the answer to a call.
FORGED = {
    "many values": """b'{"value": ["list", [' + b'["list",[]],' * (5 << 20) + b'1]]}'""",
    "many lists": """b'{"value": 1, "changed": [' + b'[],' * (20 << 20) + b'1]}'""",
    "open brackets": """b'{"value": ' + b'[' * (30 << 20)""",
    "brackets": """b'{"value": ' + b'[' * (20 << 20) + b']' * (20 << 20) + b'}'""",
    "nested deques": """b'{"value": ' + nested(b'["deque", ["list", [', b']], null]') + b'}'""",
    "nested iterators": """b'{"value": ' + nested(b'["iterator", [', b'], false]') + b'}'""",
    "a huge number": """b'{"value": ["int", "' + b'f' * (50 << 20) + b'"]}'""",
    "a huge error": """b'{"error": {"classes": ["OSError"], "args": ["list", []], '
        b'"limit": "' + b'y' * (50 << 20) + b'"}}'""",
    "a broken error": """b'{"error": {"classes": ["UnicodeDecodeError"], "limit": "x", "args": ["list", '
        b'["utf8", ["bytes", ""], 5, 900000000, "r"]]}}'""",
    "a long range": """b'{"value": ["range", 0, 1000000000000, 1]}'""",
    "an array of dates": """b'{"value": ["array", "<M8[s]", [1], "AAAAAAAAAAA="]}'""",
    "a wide array": """b'{"value": ["array", "S1000000000", [0], ""]}'""",
    "a broken deque": """b'{"value": ["deque", ["list", []], "x"]}'""",
    "an object of the program": """b'{"value": ["program", "f"]}'""",
    "an exception": """b'{"value": ["raised", "SystemExit", ["list", [0]]]}'""",
    "an answer without an end": """os.write(4, struct.pack('!Q', 100)) and os.close(4) or b''""",
}
RAISING = {
    "fraction": "import fractions\nclass F(fractions.Fraction):\n    @property\n"
    "    def numerator(self): raise SystemExit\ndef f(x): return F(4)",
    "decimal": "def f(x): return __import__('decimal').Decimal('sNaN')",
    "a name that raises": "class M(type):\n    __name__ = property(lambda s: 1/0)\n"
    "class A(metaclass=M): pass\ndef f(x): return A()",
    "an error that exits": "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(x): raise E",
    "arguments that raise": "class E(Exception):\n    args = property(lambda s: 1/0)\ndef f(x): raise E",
    "a group": "def f(x): raise ExceptionGroup('a', [ValueError(1)])",
    "no builtin base": "class M(type):\n    def mro(c): return [c, Exception, BaseException, object]\n"
    "class E(Exception, metaclass=M): pass\ndef f(x): raise E",
    "a skip": "import unittest\ndef f(x): raise unittest.SkipTest('x')",
    "its own skip": "class Skipped(BaseException): pass\ndef f(x): raise Skipped('x')",
    "an import": "def f(x): raise ImportError('x')",
    "an interrupt": "def f(x): raise KeyboardInterrupt",
    "an end of a loop": "def f(x): raise StopIteration",
    "other processes": "import os\ndef f(x):\n    for p in range(1, 300):\n        try: os.kill(p, 9)\n"
    "        except OSError: pass\n    return 0",
    "its first thread": "import ctypes\ndef f(x): ctypes.CDLL(None).syscall(60, 0)",
    "its own len": "import builtins\nbuiltins.len = lambda x: 3\ndef f(x): return 0",
}
PROGRAMS = {name: f"{SENDING}send({data})\nwhile True: time.sleep(1)" for name, data in FORGED.items()} | RAISING


@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock"])
def test_no_attack_passes_or_fails_the_judge(mechanism):
    try:
        code = Code(limits=LIMITS, mechanism=mechanism)
    except ConfigError as error:
        pytest.skip(str(error))
    answers = code([""] * len(PROGRAMS), [*PROGRAMS.values()], tests=[TESTS] * len(PROGRAMS))
    assert {name: one for name, one in zip(PROGRAMS, answers, strict=True) if one != 0.0} == {}


def test_a_reason_holds_only_what_can_be_shown():
    program = "class M(type):\n    __name__ = property(lambda c: '\\ud800\\x1b[2J')\n"
    program += "class A(metaclass=M): pass\ndef f(x): return A()"
    (told,) = Code(limits=LIMITS)([""], [program], tests=[["assert f(2).v == 4"]])
    assert "the program's class ??[2J" in told.reason


def test_a_test_case_of_objects_is_not_judged():
    case = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2)(2), 4)\n"
    (told,) = Code(limits=LIMITS)([""], ["def f(x): return lambda y: x + y"], tests=[case])
    assert "the tests call an object" in told.reason
