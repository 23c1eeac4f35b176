"""Programs that attack the judge by what they send, raise and return: each scores 0, none makes its row a failure."""

from __future__ import annotations

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rewards import Code
from hybridflow.rewards.sandbox.sandbox import Limits

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
KINDS = {
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
PROGRAMS = {name: f"{SENDING}send({data})\nwhile True: time.sleep(1)" for name, data in FORGED.items()} | KINDS


@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock"])
def test_no_attack_passes_or_fails_the_judge(mechanism):
    try:
        code = Code(limits=Limits(seconds=20, memory_mb=256), mechanism=mechanism)
    except ConfigError as error:
        pytest.skip(str(error))
    answers = code([""] * len(PROGRAMS), list(PROGRAMS.values()), tests=[TESTS] * len(PROGRAMS))
    assert {name: one for name, one in zip(PROGRAMS, answers, strict=True) if one != 0.0} == {}


def test_a_reason_holds_only_what_can_be_shown():
    program = "class M(type):\n    __name__ = property(lambda c: '\\ud800\\x1b[2J')\n"
    program += "class A(metaclass=M): pass\ndef f(x): return A()"
    (told,) = Code(limits=Limits(seconds=20, memory_mb=256))([""], [program], tests=[["assert f(2).v == 4"]])
    assert "the program's class ??[2J" in told.reason


def test_a_test_case_of_objects_is_not_judged():
    case = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2)(2), 4)\n"
    (told,) = Code(limits=Limits(seconds=20, memory_mb=256))([""], ["def f(x): return lambda y: x + y"], tests=[case])
    assert "the tests call an object" in told.reason
