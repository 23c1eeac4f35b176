"""The code verifier: programs in responses against unit tests, honest and dishonest ones."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time

import numpy as np
import pytest

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import PRELUDE, Code, Functions, RowFailure
from hybridflow.rewards.code import extract_program, read_tests, same_output
from hybridflow.rewards.sandbox.sandbox import Limits, Sandbox, unavailable

LIMITS = Limits(seconds=20, memory_mb=256)
ADD = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
RIGHT = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def code(request):
    if reason := unavailable(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return Code(limits=LIMITS, mechanism=request.param)


def graded(code, cases):
    """Results of (program, tests, entry point, setup) rows, all in one call as in a batch."""
    rows = [(*case, *("",) * (4 - len(case))) for case in cases]
    programs, tests, entry_points, setups = zip(*rows)
    return code.results(list(programs), list(tests), entry_points=list(entry_points), setups=list(setups))


CHECK = (
    "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(1.5) - 3) < 1e-6\n"
)
CASES = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 1)\n"
    "    def test_b(self):\n        with self.assertRaises(ValueError): f(2)\n"
)
RIGHT_CASES = {
    "asserts": (RIGHT, ADD),
    "fenced": (f"Sure:\n```python\n{RIGHT}\n```\nIt adds.\n```bash\nls\n```", ADD),
    "array of asserts": (RIGHT, np.array(ADD, dtype=object)),
    "HumanEval": ("def twice(x): return x * 2\ndef other(x): return x", CHECK, "twice"),
    "HumanEval without a name": ("def help(x): return x\ndef twice(x): return help(x) * 2", CHECK),
    "unittest": ("def f(x):\n    if x == 2: raise ValueError('no')\n    return x", CASES),
    "pytest": ("def f(x): return x", "def test_one():\n    assert f(1) == 1\n"),
    "statements in order": ("def f(x): return x", "y = f(1)\nassert y == 1\ny = f(2)\nassert y == 2\n"),
    "setup": ("def f(x): return x", ["assert f(TWO) == 2"], "", "TWO = 2"),
    "imports of the program": ("import math\ndef f(x): return math.floor(x)", ["assert f(2.5) == math.floor(2.9)"]),
    "a name of a builtin": ("def sum(a, b): return a * b", ["assert sum(2, 3) == 6"]),
    "own exception": (
        "class E(Exception): pass\ndef f(x): raise E('hello')",
        ["try:\n    f(1)\n    assert False\nexcept E as e:\n    assert str(e) == 'hello'"],
    ),
    "in place": ("def f(x): x.sort()", ["x = [3, 1, 2]\nf(x)\nassert x == [1, 2, 3]"]),
    "generator": ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert next(f(3)) == 0"]),
    "coroutine": ("async def f(n): return n", ["import asyncio\nassert asyncio.run(f(3)) == 3"]),
    "numpy": (
        "import numpy as np\ndef f(n): return np.arange(n)",
        ["import numpy\nassert numpy.allclose(f(3), [0, 1, 2])", "assert f(3).tolist() == [0, 1, 2]"],
    ),
    "main part is not run": (f"{RIGHT}\nif __name__ == '__main__':\n    input()", ADD),
    "stdin": ("print(int(input()) * 2)", {"inputs": ["2\n", ["3"]], "outputs": ["4\n", ["6"]]}),
    "stdin as JSON": ("print(sum(map(int, input().split())) / 3)", '{"inputs": ["2 2"], "outputs": ["1.3333333"]}'),
    "stdin, with a main part": (
        "def main():\n    print(input())\nif __name__ == '__main__':\n    main()",
        json.dumps([{"input": "a\n", "output": "a", "testtype": "stdin"}]),
    ),
    "function by pairs": (RIGHT, {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}),
    "results in lists": (RIGHT, {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}),
    "Solution": (
        "class Solution:\n    def add(self, a, b): return [a + b]",
        *([{"input": "1\n2", "output": "[3]", "testtype": "functional"}], "add"),
    ),
}


def test_right_programs_pass_in_every_form(code):
    found = dict(zip(RIGHT_CASES, graded(code, RIGHT_CASES.values())))
    assert {name: result.reason for name, result in found.items() if result.score != 1.0} == {}
    assert found["asserts"].passed == found["asserts"].total == 2


EQUAL = (
    "class E({base}):\n    def __eq__(self, other): return True\n    def __sub__(self, other): return 0\n"
    "    def __bool__(self): return True\n    def __contains__(self, x): return True\n    __hash__ = None\n"
    "def add(a, b): return E()"
)
# Programs that do not add: a program, and what the reason must hold.
WRONG = {
    "wrong": ("def add(a, b): return a - b", "assert add(1, 2) == 3: AssertionError"),
    "empty": ("", "no program"),
    "no code": ("```text\nnothing\n```", "no program"),
    "syntax": ("def add(a, b) return", "SyntaxError"),
    "other name": ("def plus(a, b): return a + b", "NameError"),
    "raises at once": ("1 / 0", "ZeroDivisionError: division by zero"),
    "raises": ("def add(a, b): raise KeyError(a)", "KeyError: 1"),
    "exits": ("import sys\nsys.exit(0)", "before the tests"),
    "exits at once": ("import os\nos._exit(0)", "before the tests"),
    "exits when called": ("def add(a, b):\n    import os\n    os._exit(0)", "the tests"),
    "raises SystemExit": ("def add(a, b): raise SystemExit(0)", "the tests"),
    "equals everything": (EQUAL.format(base="object"), "AssertionError"),
    "int that equals everything": (EQUAL.format(base="int"), "AssertionError"),
    "str that equals everything": (EQUAL.format(base="str"), "AssertionError"),
    "list that equals everything": (EQUAL.format(base="list"), "AssertionError"),
    "dict that equals everything": (EQUAL.format(base="dict"), "AssertionError"),
    "patches builtins": (
        "import builtins, unittest\nbuiltins.AssertionError = Warning\nbuiltins.abs = builtins.len = lambda x: 3\n"
        "unittest.TestCase.assertEqual = lambda *a: None\ndef add(a, b): return 0",
        "",
    ),
    "forges a verdict": (
        'import os\nprint(\'{"passed": 2, "total": 2}\')\nfor f in range(1, 30):\n'
        '    try: os.write(f, b\'{"passed": 2, "total": 2, "status": "ok"}\\n\')\n    except OSError: pass\n'
        "def add(a, b): return 0",
        "",
    ),
    "forges the channel": (
        "import json, os, struct\nvalue = {'add': {'value': ['type', 'str']}}\n"
        "data = json.dumps({'names': value}).encode()\n"
        "os.write(4, struct.pack('!Q', len(data)) + data)\ndef add(a, b): return 0",
        "TypeError",
    ),
    "looks for the tests": (
        "import gc, sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        if 'expected' in frame.f_locals or 'tests' in frame.f_locals: return 3\n"
        "        frame = frame.f_back\n    return 0",
        "AssertionError",
    ),
    "looks for the judge's objects": (
        "import gc, sys\ndef add(a, b):\n    for found in gc.get_objects():\n        kind = type(found).__name__\n"
        "        if isinstance(found, dict) and ('verdict' in found or found.get('passed') == 0):\n"
        "            found.update(passed=9, total=9)\n        if kind in ('_Seen', 'Remote', '_Unit'): return 3\n"
        "    return 0",
        "AssertionError",
    ),
    "traces its parent": (
        "import ctypes, os\ndef add(a, b):\n    traced = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\n"
        "    return 3 if traced == 0 else 0",
        "AssertionError",
    ),
    "reads inherited descriptors": (
        "import os\nseen = []\nfor f in range(256):\n    try: seen.append((f, os.fstat(f).st_mode))\n"
        "    except OSError: pass\ndef add(a, b): return 3 if len(seen) > 5 else 0",  # its own three, and the channel
        "AssertionError",
    ),
    "answers with a giant": ("def add(a, b): return 'x' * (80 << 20)", ""),
    "answers with itself": ("x = []\nx.append(x)\ndef add(a, b): return x", "contains itself"),
}


def test_wrong_and_dishonest_programs_score_0_with_a_reason(code):
    found = dict(zip(WRONG, graded(code, [(program, ADD) for program, _ in WRONG.values()])))
    passed = {name for name, result in found.items() if result.score != 0.0 or not result.reason}
    assert passed == set()
    told = {name: result.reason for name, result in found.items() if WRONG[name][1] not in result.reason}
    assert told == {}
    assert {result.status for result in found.values()} <= {"failed", "memory"}


# Programs that a limit stops: the status, and a piece of the reason.
ATTACKS = {
    "infinite loop": ("def add(a, b):\n    while True: pass", "timeout", "longer than 1.5 s"),
    "infinite loop at once": ("while True: pass", "timeout", "longer than 1.5 s"),
    "fork bomb": ("import os\nwhile True: os.fork()", "forbidden", "BlockingIOError"),
    "10 GB": ("def add(a, b): return bytearray(10 * 2**30)", "memory", "more memory than its 256 MB"),
    "writes outside": ("open('/tmp/evil', 'w').write('x')", "forbidden", "/tmp/evil"),
    "socket": ("import socket\nsocket.socket()", "forbidden", "PermissionError"),
    "prints": ("def add(a, b):\n    while True: print('x' * 1000)", "output", "printed more than 64 kB"),
    "recursion": ("def add(a, b): return add(a, b)", "recursion", "maximum recursion depth"),
    "crash": ("import ctypes\ndef add(a, b): return ctypes.string_at(0)", "killed", "SIGSEGV"),
}


def test_attacks_score_0_with_a_reason(code):
    attacked = Code(limits=Limits(seconds=1.5, memory_mb=256), mechanism=code.mechanism, workers=2)
    programs = [program for program, _, _ in ATTACKS.values()]
    for (name, (_, status, reason)), result in zip(ATTACKS.items(), graded(attacked, [(p, ADD) for p in programs])):
        assert (result.score, result.status, result.contained) == (0.0, status, True), name
        assert reason in result.reason, name
    results = graded(attacked, [(programs[0], ADD), (ATTACKS["socket"][0], {"inputs": [""], "outputs": [""]})])
    assert [(result.status, result.contained, result.score) for result in results] == [
        *(("timeout", True, 0.0), ("forbidden", True, 0.0))
    ]


def test_no_program_stops_a_run_by_default():
    attacks = [program for program, _, _ in ATTACKS.values()]
    programs = [RIGHT, *attacks, "print('x' * 10**6)", "def add(a, b): return 0"]
    code = Functions(Code(limits=Limits(seconds=1.5, memory_mb=256)))
    scores = code(["p"] * len(programs), programs, {"tests": [ADD] * len(programs)})
    assert scores.rewards.tolist() == [1.0] + [0.0] * (len(programs) - 1)
    assert not any(scores.failures)


def test_in_a_batch_only_the_row_that_cannot_be_judged_fails():
    programs, columns = [RIGHT, RIGHT, "def add(a, b): return 0"], {"tests": [ADD, ["add(1, 2) == 3"], ADD]}
    masked = Functions(Code(limits=LIMITS), on_failure="mask")(["p"] * 3, programs, columns)
    assert masked.rewards.tolist() == [1.0, 0.0, 0.0]
    assert [bool(failure) for failure in masked.failures] == [False, True, False]
    assert "the tests check nothing" in masked.failures[1]
    with pytest.raises(RewardError, match="row 41: could not read its tests: the tests check nothing"):
        Functions(Code(limits=LIMITS))(["p"] * 3, programs, columns, row_ids=[40, 41, 42])


def test_the_share_of_tests_when_asked(code):
    share = Code(limits=LIMITS, mechanism=code.mechanism, all_or_nothing=False)
    partly = "def f(x): return x if x < 3 else 0"
    cases = [
        (partly, [f"assert f({i}) == {i}" for i in (1, 2, 3, 0)]),
        ("x = int(input())\nprint(x * 2 if x < 3 else 0)", {"inputs": ["2", "3"], "outputs": ["4", "6"]}),
        (partly, "assert f(1) == 1\nassert f(5) == 5\n"),
        (partly, {"inputs": [[1], [7], [2]], "outputs": [1, 7, 2], "fn_name": "f"}),
        ("import os\ndef f(x): return os._exit(0) if x == 2 else x", ["assert f(1) == 1", "assert f(2) == 2"]),
    ]
    results = graded(share, cases)
    assert [result.score for result in results] == [0.75, 0.5, 0.5, pytest.approx(2 / 3), 0.5]
    assert all(result.reason for result in results)


@pytest.mark.parametrize(
    "tests",
    [
        *([], None, "", "assert (", 3, {"inputs": ["1"], "outputs": []}, ["assert x", 3], [{"input": "1"}]),
        *("import math\nx = 3\n", "def helper():\n    assert False\n"),  # which check nothing
    ],
)
def test_tests_that_cannot_be_read_are_refused_by_row(tests):
    code = Code(limits=LIMITS)
    with pytest.raises(RewardError, match=r"Code.results, row 1: "):
        code.results([RIGHT, RIGHT], [ADD, tests])
    good, bad = code(["p", "p"], [RIGHT, RIGHT], tests=[ADD, tests])
    assert good == 1.0
    assert bad.reason.startswith("could not read its tests")


def test_a_sandbox_that_is_lost_is_a_row_failure(monkeypatch):
    """Its server ends while programs run: the rows that it held were not judged, the run goes on."""
    seen = []

    def watched(self, *args, **named):
        seen.append(self)
        os.killpg(self._server._process.pid, signal.SIGKILL)
        self._server._process.wait()
        return judge(self, *args, **named)

    judge = Sandbox.judge
    monkeypatch.setattr(Sandbox, "judge", watched)
    (answer,) = Code(limits=LIMITS)(["p"], [RIGHT], tests=[ADD])
    assert isinstance(answer, RowFailure)
    assert seen
    assert "A contained program" in answer.reason


def test_tests_that_end_or_hang_by_themselves_do_not_pass():
    code = Code(limits=Limits(seconds=1, memory_mb=256), workers=2)
    for tests, status, reason in (
        ("import os\nassert add(1, 2) == 3\nos._exit(0)", "unreadable", "its tests: they ended without a verdict"),
        ("import sys\nassert add(1, 2) == 3\nsys.exit(0)", "failed", "SystemExit"),
        ("assert add(1, 2) == 3\nwhile True: pass", "timeout", "longer than"),
        ("assert add(1, 2) == 3\nx = bytearray(10 * 2**30)", "failed", "MemoryError"),
    ):
        (result,) = code.results([RIGHT], [tests])
        assert (result.score, result.status) == (0.0, status), tests
        assert reason in result.reason


QUOTING = 'def f():\n    """Call it:\n    ```\n    f()\n    ```\n    """\n    return "```"\n'
FENCES = {
    "no fence": ("use `x`", "use `x`"),
    "another language behind it": ("a\n```\nx = 1\n```\nb\n```\nx = 2\n```\n```json\n{}\n```", "x = 2\n"),
    "another language alone": ("```bash\nls\n```", ""),
    "another kind of fence": ("```python\nx = 1\n```\n~~~Python3\nx = 3\n~~~", "x = 3\n"),
    "cut off": ("cut off:\n```python\nx = 1\ny =", "x = 1\ny ="),
    "empty": ("1. so\n   ```python\n   ```\n", ""),
    "output behind it in a plain fence": ("```python\nx = 1\n```\nIt prints\n```\n5\n```", "x = 1\n"),
    "output behind it, both plain": ("```\nx = 1\n```\nIt prints\n```\n5\n```", "x = 1\n"),
    "output in words behind it, both plain": ("```\nx = 1\n```\n```\nYES\n```\n```\nnot so\n```", "x = 1\n"),
    "nothing but outputs": ("```\n3\n```\n```\n5\n```", "5\n"),
    "a plain fence before it": ("```\ny = 2\n```\n```python\nx = 1\n```", "x = 1\n"),
    "CRLF": ("So:\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2\n"),
    "indented in a list": ("1. so\n   ```python\n   if x:\n       y = 1\n   ```\n2. done", "if x:\n    y = 1\n"),
    "behind the mark of a list": ("- ```python\n  if x:\n      y = 1\n  ```", "if x:\n    y = 1\n"),
    "indented more than its fence": ("```python\n    if x:\n        y = 1\n```", "if x:\n    y = 1\n"),
    "less indented in a text": ('  ```python\n  x = """a\nb"""\n  ```', 'x = """a\nb"""\n'),
    "closed on its last line": ("```python\nx = 1\nprint(x)```\nIt prints 1.", "x = 1\nprint(x)"),
    "fences in a docstring": (f"```python\n{QUOTING}```\nDone.", QUOTING),
    "fences in a docstring, not closed": (f"```python\n{QUOTING}", QUOTING),
    "not Python": ("```python\nx = = 1\n```\nor so\n```\n5\n```", "x = = 1\n"),
    "closed by a longer fence": ("```python\nx = 1\n`````\nIt is `1`.", "x = 1\n"),
    "closed by a longer fence on its last line": ("~~~python\nx = 1~~~~\nIt is 1.", "x = 1"),
    "not closed by a shorter fence": ('````python\nx = """\n```\n"""\n````\n', 'x = """\n```\n"""\n'),
    "two programs": ("```python\nx = 1\n```\nbetter:\n```python\nx = 2\n```", "x = 2\n"),
}


@pytest.mark.parametrize(("response", "program"), FENCES.values(), ids=FENCES)
def test_fences_of_all_kinds(response, program):
    assert extract_program(response) == program


def test_many_fences_are_read_in_a_moment():
    began = time.thread_time()
    for text in ("```python\nx = = 1\n```\n" * 3000, "```python\n" * 9000, "```\n" * 16_000, "x ```\n" * 16_000):
        assert isinstance(extract_program(text), str)
    for lines, blocks in ((10, 1500), (800, 20)):
        text = "```python\n" + "x = [1, 2]\n" * lines + "(\n```\n"
        assert extract_program(text * blocks).endswith("]\n(\n")
    assert time.thread_time() - began < 3.0


def test_a_program_that_stands_only_in_thoughts_is_none(code):
    thought = f"<think>\n```python\n{RIGHT}\n```\n</think>\n"
    open_fence = f"<think>\n```python\nno\n</think>\n```python\n{RIGHT}\n```"
    rows = [thought, f"{thought}I am done.", f"{thought}{RIGHT}", open_fence, f"```\n{RIGHT}\n```\n{thought}"]
    found = graded(code, [(row, ADD) for row in rows])
    assert [result.score for result in found] == [0.0, 0.0, 1.0, 1.0, 1.0]


LEETCODE = """class Solution:
    def kth(self, rows: List[int], k: int) -> int:
        heap = [(-x, x) for x in rows]
        heapify(heap)
        return sum(heappop(heap)[1] for _ in range(k)) + math.floor(0.5) + inf - inf if k > 9 else heappop(heap)[1]
"""


def test_programs_and_tests_have_the_names_of_the_prelude(code):
    functional = [{"input": "[3, 9, 4]\n1", "output": "9", "testtype": "functional"}]
    rows = [
        (LEETCODE, functional, "kth"),
        ("from __future__ import annotations\ndef f(x): return gcd(x, 6)", ["assert f(4) == gcd(4, 6)"]),
        ("print(gcd(*map(int, input().split())))", {"inputs": ["4 6"], "outputs": ["2"]}),
        ("def f(x): return x", ["assert f(bisect_left(ROWS, 3)) == 1"], "", "ROWS = nsmallest(2, [4, 3, 1, 5])"),
        ("def merge(a, b): return sorted(a + b)", ["assert merge([1, 3], [2]) == [1, 2, 3]"]),
        # what a program does not define, the prelude does not define for it
        ("def f(x): return x", ["assert gcd(4, 6) == 2"]),
        ("def f(x): return x", ["assert list(merge([1, 3], [2])) == [1, 2, 3]"], "merge"),
    ]
    plain = graded(code, rows)
    assert [result.score for result in plain[:4]] == [0.0] * 4
    helped = graded(Code(limits=LIMITS, mechanism=code.mechanism, prelude=PRELUDE), rows)
    assert [result.score for result in helped] == [1.0] * 5 + [0.0] * 2, [result.reason for result in helped]


def test_a_prelude_that_does_not_run_is_refused():
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        Code(prelude="import no_such_module")


@pytest.mark.parametrize("tag", ["think", "Reasoning"])
def test_thoughts_that_never_end_have_no_program(tag):
    def program(response: str) -> str:
        return extract_program(response.replace("T>", f"{tag}>"))

    assert program("<T> perhaps\n```python\nx = 1\n```\n") == ""
    assert program("```python\nx = 1\n```\n<T> or\n```python\nx = 2\n```\n") == "x = 1\n"
    assert program("<T> a </T>\n```python\nx = 1\n```\n<T>\n```python\nx = 2") == "x = 1\n"
    assert program("<T>\n```python\nx = 1\n```\n</T>\n```python\nx = 2\n```") == "x = 2\n"
    assert program("```python\nx = '<T>'\n```\nand then\n```python\nx = 2\n```") == "x = 2\n"


def test_chat_completions_are_read(code):
    message = [{"role": "assistant", "content": f"```python\n{RIGHT}\n```"}]
    assert code(["p"], [message], tests=[ADD]) == [1.0]
    with pytest.raises(RewardError, match="must be a text or a list of chat messages"):
        code(["p"], [3], tests=[ADD])


def test_what_is_printed_is_compared_by_lines_and_words():
    for printed, wanted in (("1 \n2\n\n", "1\n2"), ("0.3333333333", "0.333333"), ("a\r\nb", "a\nb"), ("", "")):
        assert same_output(printed, wanted)
    for printed, wanted in (("1\n2", "1 2"), ("3.0", "3"), ("0.34", "0.333333"), ("a b", "a c"), ("1\n\n2", "1\n2")):
        assert not same_output(printed, wanted)
    assert same_output("1  2", "1 2")
    assert not same_output("nan", "1.0")


def test_pairs_are_read_in_the_forms_of_the_field():
    assert read_tests({"inputs": ["1"], "outputs": ["2"]}) == {"pairs": [("1", "2")]}
    calls = read_tests([{"input": '"a"\n[1]', "output": "1", "testtype": "functional"}], entry_point="f")
    assert calls == {"function": "f", "arguments": [["a", [1]]], "expected": [1], "wrapped": False}
    with pytest.raises(RewardError, match="name of the function"):
        read_tests([{"input": "1", "output": "1", "testtype": "functional"}])


def test_settings_are_checked_and_survive_pickling():
    for wrong in ({"workers": 0}, {"seconds": 0}, {"mechanism": "jail"}):
        with pytest.raises(ConfigError):
            Code(**wrong)
    code = pickle.loads(pickle.dumps(Code("cases", limits=LIMITS, entry_point="name")))
    assert code.reads == ("cases", "name?", "test_setup_code?")
    assert code(["p"], [RIGHT], cases=[ADD]) == [1.0]
    assert code([], [], cases=[]) == []
    with pytest.raises(RewardError, match="1 completions and 2 rows"):
        code.results(["x"], [ADD, ADD])
