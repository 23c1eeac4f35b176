"""What decides over a program: the tests' own builtins and libraries, tests that ran, values of the right shape."""

from __future__ import annotations

import json

import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards import Code, RowFailure
from hybridflow.rewards.code import read_tests
from hybridflow.rewards.sandbox.sandbox import Limits


@pytest.fixture(scope="module")
def score():
    """Scores of (program, tests, entry point) rows, all in one call; a RowFailure is its reason."""
    code = Code(limits=Limits(seconds=20, memory_mb=256))

    def scores(cases):
        rows = [(*case, *("",) * (4 - len(case))) for case in cases]
        programs, tests, entry_points, setups = map(list, zip(*rows))
        columns = {"tests": tests, "entry_point": entry_points, "test_setup_code": setups}
        found = code(["p"] * len(rows), programs, **columns)
        return [answer.reason if isinstance(answer, RowFailure) else answer for answer in found]

    return scores


@pytest.fixture(scope="module")
def share():
    """Results of (program, tests, entry point) rows of which every test is judged, the last ones too."""
    code = Code(limits=Limits(seconds=20, memory_mb=256), all_or_nothing=False)
    return lambda rows: code.results(*map(list, list(zip(*rows))[:2]), entry_points=[row[2] for row in rows])


# Builtin: an assertion that a function equal to `float` fails, and the answer of the builtin that would make it pass.
REBOUND = {
    "abs": ("abs(f(3) - 5) < 1e-6", "0.0"),
    "len": ("len(f(3)) == 4", "4"),
    "sum": ("sum(f(3)) == 4", "4"),
    "max": ("max(f(3), 0) == 4", "4"),
    "min": ("min(f(3), 9) == 4", "4"),
    "sorted": ("sorted(f(3)) == [1]", "[1]"),
    "list": ("list(f(3)) == [1]", "[1]"),
    "tuple": ("tuple(f(3)) == (1,)", "(1,)"),
    "set": ("set(f(3)) == {1}", "{1}"),
    "dict": ("dict(f(3)) == {1: 2}", "{1: 2}"),
    "frozenset": ("frozenset(f(3)) == {1}", "{1}"),
    "str": ("str(f(3)) == '4'", "'4'"),
    "repr": ("repr(f(3)) == '4'", "'4'"),
    "int": ("int(f(3)) == 4", "4"),
    "bool": ("bool(f(0))", "True"),
    "round": ("round(f(3), 2) == 4", "4"),
    "any": ("any([f(3) == 4])", "True"),
    "all": ("all([f(3) == 4])", "True"),
    "map": ("list(map(f, [3])) == [4]", "[4]"),
    "zip": ("list(zip([f(3)], [1])) == [(4, 1)]", "[(4, 1)]"),
    "range": ("f(3) in range(4, 9)", "[3]"),
    "enumerate": ("list(enumerate([f(3)])) == [(0, 4)]", "[(0, 4)]"),
    "reversed": ("list(reversed([f(3)])) == [4]", "[4]"),
    "isinstance": ("isinstance(f(3), str)", "True"),
    "type": ("type(f(3)) == str", "str"),
    "pow": ("pow(f(3), 2) == 16", "16"),
    "divmod": ("divmod(f(3), 2) == (2, 0)", "(2, 0)"),
    "hash": ("hash(f(3)) == 4", "4"),
    "print": ("print(f(3)) or f(3) == 4", "True"),
    "getattr": ("getattr(f(3), 'real') == 4", "4"),
}
ALIASES = "f = float\n" + "".join(f"{name} = lambda *a, **k: {answer}\n" for name, (_, answer) in REBOUND.items())
DEFINED = "def f(x): return g(x)\ng = float\n" + "".join(
    f"def {name}(*a, **k): return {answer}\n" for name, (_, answer) in REBOUND.items()
)
FORMS = {
    "asserts": [f"assert {check}" for check, _ in REBOUND.values()],
    "functions": "".join(f"def test_{name}():\n    assert {check}\n" for name, (check, _) in REBOUND.items()),
    "unittest": "import unittest\nclass T(unittest.TestCase):\n"
    + "".join(f"    def test_{name}(self): self.assertTrue({check})\n" for name, (check, _) in REBOUND.items()),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_builtin_of_the_program_judges(share, form):
    found = share([(program, FORMS[form], entry) for program in (ALIASES, DEFINED) for entry in ("", "f")])
    assert [(result.passed, result.total) for result in found] == [(0, len(REBOUND))] * 4, [r.reason for r in found]


def test_no_builtin_of_the_program_judges_a_candidate(score):
    cases = {}
    for name, (check, answer) in REBOUND.items():
        given, inner = f"f = float\n{name} = lambda *a, **k: {answer}", check.replace("f(", "candidate(")
        cases[name] = (given, f"def check(candidate):\n    assert {inner}\n", "f")
    cases["called"] = (ALIASES, "def check(f):\n    assert abs(f(3) - 5) < 1e-6\ncheck(f)\n")
    found = dict(zip(cases, score(cases.values())))
    assert {name: answer for name, answer in found.items() if answer != 0.0} == {}


def test_no_library_of_the_program_judges(score):
    fake = "\nclass math:\n    pi = 3.0\n    isclose = staticmethod(lambda *a, **k: True)\n"
    fake += "class np:\n    allclose = staticmethod(lambda *a: True)\n    array_equal = allclose\n"
    fake += "isclose = lambda *a: True\nCounter = deque = Decimal = sqrt = ceil = lambda *a: 3.0\npi = 3.0\n"
    fake += "def assert_equal(*a): pass\n"
    checks = ["math.isclose(f(3), 4)", "np.allclose(f(3), [4])", "isclose(f(3), 4)", "f(3) == Counter([3])"]
    checks += [
        f"f(3) == {other}" for other in ("sqrt(9.1)", "ceil(3.5)", "deque([3])", "Decimal('4')", "math.pi", "pi")
    ]
    tests = [[f"assert {check}"] for check in checks] + ["def test():\n    assert_equal(f(3), 4)\n"]
    assert score([("f = float" + fake, test) for test in tests]) == [0.0] * len(tests)
    setups = ["from math import isclose", "def isclose(a, b): return abs(a - b) < 1e-9"]
    setups.append("import cmath\nisclose = cmath.isclose")
    assert score([("f = float" + fake, ["assert isclose(f(3), 4)"], "", setup) for setup in setups]) == [0.0] * 3
    right = "import numpy as np, math\nfrom collections import Counter\ndef f(x): return x + 1"
    checks = ["math.isclose(f(3), 4)", "np.allclose(f(3), 4)", "Counter([f(3)]) == Counter([4])", "f(2) < math.pi"]
    assert score([(right, [f"assert {check}"]) for check in checks]) == [1.0] * 4


def test_a_tested_function_may_have_the_name_of_a_builtin(score):
    right, wrong = "def sum(xs):\n    t = 0\n    for x in xs: t += x\n    return t", "def sum(xs): return 0"
    near = "\ndef abs(x): return 0.0\ndef len(x): return 1"
    candidate = "def check(candidate):\n    assert candidate([1, 2]) == sum([1, 2])\n"
    candidate += "    assert abs(candidate([4]) - 4) < 1e-6\n"
    forms = [
        (["assert sum([1, 2]) == 3"], ""),
        (["assert abs(sum([1, 2]) - 3) < 1e-6"], "sum"),
        (candidate, "sum"),
        (candidate + "check(sum)\n", "sum"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(sum([1, 2]), 3)\n", "sum"),
    ]
    assert score([(right, *form) for form in forms]) == [1.0] * len(forms)
    assert score([(wrong + near, *form) for form in forms]) == [0.0] * len(forms)
    own = "def filter(xs): return [x for x in xs if x]"
    common = ["assert filter([0, 1]) == [1]", "assert set(filter([0, 2])) == set([2])"]
    assert score([(own, common), ("def filter(xs): return xs\ndef set(x): return 1", common)]) == [1.0, 0.0]
    gcd = ["assert gcd(12, 18) == abs(-6)"]  # of two names, the one that is no builtin's is tested
    assert score([("def gcd(a, b): return 6", gcd), ("def gcd(a, b): return 5\nabs = lambda x: 5", gcd)]) == [1.0, 0.0]
    (doubt,) = score([(right, ["assert abs(sum([1, 2]) - 3) < 1e-6"])])
    assert "which of abs, sum is tested" in doubt


RIGHT, WRONG = "def f(x): return x * 2", "def f(x): return 0"
UNITTEST = "import unittest\nclass T(unittest.TestCase):\n"
# Tests that have to be run to their end: the right program passes, the wrong one does not.
RUN = {
    "async function": "async def test():\n    assert f(2) == 4\n",
    "async check": "async def check(candidate):\n    assert candidate(2) == 4\n",
    "async check, called": "async def check(candidate):\n    assert candidate(2) == 4\ncheck(f)\n",
    "coroutine returned": "async def inner():\n    assert f(2) == 4\ndef test():\n    return inner()\n",
    "helper on another branch": "def close(a, b):\n    assert abs(a - b) < 1e-6\n"
    "def check(candidate):\n    r = candidate(2)\n"
    "    if isinstance(r, float):\n        close(r, 4.0)\n    else:\n        assert r == 4\n",
    "main part": "if __name__ == '__main__':\n    assert f(2) == 4\n",
    "unittest.main": UNITTEST
    + "    def test(self): self.assertEqual(f(2), 4)\nif __name__ == '__main__':\n    unittest.main()\n",
    "async TestCase": "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test(self): self.assertEqual(f(2), 4)\n",
    "coroutine in a TestCase": UNITTEST + "    async def test(self): self.assertEqual(f(2), 4)\n",
    "sub tests": UNITTEST + "    def test(self):\n        for x in (0, 2):\n"
    "            with self.subTest(x=x): self.assertEqual(f(x), 2 * x)\n",
    "cleanup": UNITTEST
    + "    def test(self): self.addCleanup(lambda: self.assertEqual(f(2), 4)); self.assertEqual(f(0), 0)\n",
    "class fixtures": UNITTEST
    + "    @classmethod\n    def setUpClass(cls): cls.x = 2\n    def test(self): self.assertEqual(f(self.x), 4)\n",
    "a class without a base": "class TestF:\n    def setup_method(self): self.x = 2\n"
    "    def test(self): assert f(self.x) == 4\n",
    "functions in a list": [
        "def test_a():\n    assert f(2) == 4",
        "import math",
        "def test_b():\n    assert f(3) == 6",
    ],
    "a thread": "import threading\ndef test():\n    def run():\n        assert f(0) == 0\n        assert f(2) == 4\n"
    "    t = threading.Thread(target=run)\n    t.start()\n    t.join()\n",
    "raises": "def test():\n    try:\n        len(f(2))\n        assert False\n    except TypeError:\n"
    "        pass\n    assert f(2) == 4\n",
    "raise": "if f(2) != 4:\n    raise ValueError('wrong')\n",
    "helper": "def same(a, b):\n    assert a == b\ndef test():\n    same(f(2), 4)\n",
    "numpy": "import numpy as np\ndef test():\n    np.testing.assert_allclose(f(2), 4)\n",
}
# Tests of which a part never runs, or that check nothing: no program passes them.
NOT_RUN = {
    "nothing": "def test(): pass\n",
    "a call": "f(2)\n",
    "no check": "def check(candidate):\n    candidate(2) == 4\n",
    "assert of a constant": "def check(candidate):\n    candidate(2)\n    assert True\n",
    "assert of a tuple": "assert (f(2) == 4, 'wrong')\n",
    "without the program": "assert 1 + 1 == 2\n",
    "without a call": "def check(candidate):\n    assert candidate is not None\n",
    "a helper that nothing calls": "assert f(2) == 4\ndef helper():\n    assert f(3) == 6\n",
    "a nested test": "def test():\n    assert f(2) == 4\n    def test_inner():\n        assert f(3) == 6\n",
    "behind a return": "def test():\n    assert f(2) == 4\n    return\n    assert f(3) == 6\n",
    "behind if False": "assert f(2) == 4\nif False:\n    assert f(3) == 6\n",
    "an empty loop": "assert f(2) == 4\nfor x in []:\n    assert f(x) == 2 * x\n",
    "an empty loop by name": "assert f(2) == 4\nCASES = []\nfor x in CASES:\n    assert f(x) == 2 * x\n",
    "a condition": "import sys\nassert f(2) == 4\nif sys.platform == 'win32':\n    assert f(3) == 6\n",
    "not the main part": "assert f(2) == 4\nif __name__ == 'other':\n    assert f(3) == 6\n",
    "expectedFailure": UNITTEST + "    @unittest.expectedFailure\n    def test(self): self.assertEqual(f(2), 4)\n",
    "skip": UNITTEST
    + "    def test_a(self): self.assertEqual(f(2), 4)\n    @unittest.skip('x')\n    def test_b(self): self.fail()\n",
    "skipIf": UNITTEST + "    def test_a(self): self.assertEqual(f(2), 4)\n"
    "    @unittest.skipIf(True, 'x')\n    def test_b(self): self.assertEqual(f(3), 6)\n",
    "a skipped class": "import unittest\n@unittest.skip('x')\nclass T(unittest.TestCase):\n"
    "    def test(self): self.assertEqual(f(2), 4)\n",
    "skipTest": UNITTEST + "    def test(self):\n        self.assertEqual(f(2), 4)\n        self.skipTest('x')\n",
    "skip in setUp": UNITTEST
    + "    def setUp(self): raise unittest.SkipTest('x')\n    def test(self): self.assertEqual(f(2), 4)\n",
    "skip in setUpClass": UNITTEST + "    @classmethod\n    def setUpClass(cls): raise unittest.SkipTest('x')\n"
    "    def test(self): self.assertEqual(f(2), 4)\n",
    "pytest.skip": "import pytest\ndef test_a():\n    assert f(2) == 4\ndef test_b():\n    pytest.skip('x')\n"
    "    assert f(3) == 6\n",
    "pytest.mark.skip": "import pytest\ndef test_a():\n    assert f(2) == 4\n@pytest.mark.skip\ndef test_b():\n"
    "    assert f(3) == 6\n",
    "SkipTest": "import unittest\ndef test():\n    assert f(2) == 4\n    raise unittest.SkipTest('x')\n",
    "load_tests": UNITTEST
    + "    def test(self): self.assertEqual(f(2), 4)\ndef load_tests(*a): return unittest.TestSuite()\n",
    "arguments": "def test_a():\n    assert f(2) == 4\ndef test_b(case):\n    assert f(case) == 6\n",
    "swallowed": "def test():\n    try:\n        assert f(2) == 5\n    except AssertionError:\n        pass\n",
    "swallowed exception": "def test():\n    try:\n        f(2)\n        assert False\n    except Exception:\n"
    "        pass\n",
    "suppressed": "import contextlib\ndef test():\n    with contextlib.suppress(AssertionError):\n"
    "        assert f(2) == 5\n",
    "sys.exit": "import sys\nassert f(2) == 4\nsys.exit(0)\n",
    "os._exit": "import os\nassert f(2) == 4\nos._exit(0)\n",
    "unknown import": "import no_such_module\nassert f(2) == 4\n",
    "list of nothing": ["f(2)", "x = 3"],
    "generator": "def test():\n    assert f(2) == 4\n    yield\n    assert f(3) == 6\n",
    "generator check": "def check(candidate):\n    yield\n    assert candidate(2) == 4\n",
    "generator of tests": "def test():\n    def one():\n        assert f(2) == 4\n    yield one\n",
    "async generator": "async def test():\n    yield\n    assert f(2) == 4\n",
    "generator in a TestCase": UNITTEST + "    def test(self):\n        yield\n        self.assertEqual(f(2), 4)\n",
}


def test_tests_of_every_kind_are_run_to_their_end(score):
    entry = {name: "f" if "check(candidate)" in tests else "" for name, tests in RUN.items()}
    for program, wanted in ((RIGHT, 1.0), (WRONG, 0.0)):
        found = dict(zip(RUN, score([(program, tests, entry[name]) for name, tests in RUN.items()])))
        assert {name: answer for name, answer in found.items() if answer != wanted} == {}


def test_tests_that_do_not_run_pass_no_program(score):
    found = dict(zip(NOT_RUN, score([(RIGHT, tests, "f") for tests in NOT_RUN.values()])))
    assert {name for name, answer in found.items() if answer == 1.0} == set()
    scored_0 = {name for name, answer in found.items() if answer == 0.0}
    # Here the program may be why nothing was checked: its row must not stop a run.
    assert scored_0 == {"skipTest", "SkipTest", "swallowed", "suppressed", "sys.exit"}
    assert "could not judge" in found["skip in setUp"]
    with pytest.raises(RewardError, match="nothing calls helper"):
        read_tests(NOT_RUN["a helper that nothing calls"])


# Programs that try not to be judged: the tests call f(2), want 4, and some of them accept any exception.
EVADING = {
    "exits in a call that may raise": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit in a call that may raise": "def f(x): raise SystemExit(0)",
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest('x')",
    "answers with a coroutine": "async def f(x): return 0",
    "answers with a generator": "def f(x): yield 0",
    "answers with nothing to loop over": "def f(x): return []",
    "answers with what has no truth": "class T:\n    def __bool__(self): return True\n"
    "    def __len__(self): return 4\ndef f(x): return T()",
    "answers with what equals": "class T:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def f(x): return T()\ndef g(x): return T()",
    "answers with what is an instance": "class M(type):\n    def __instancecheck__(self, other): return True\n"
    "class T(metaclass=M): pass\ndef f(x): return 0",
    "answers with an empty array": "import numpy\ndef f(x): return numpy.array([])",
    "answers with a function": "import operator\ndef f(x): return operator.eq",
    "answers with NaN": "def f(x): return float('nan')",
    "answers with True": "def f(x): return True",
    "raises StopIteration": "def f(x): raise StopIteration",
}
EVADED = {
    "raises StopIteration": ["assert all(map(f, [2, 3]))", "assert f(2) == 4"],
    "exits in a call that may raise": ["try:\n    f(1)\nexcept Exception:\n    pass\nassert 2 + 2 == 4"],
    "raises SystemExit in a call that may raise": "import unittest\nclass T(unittest.TestCase):\n"
    "    def test(self):\n        with self.assertRaises(Exception): f(2)\n",
    "answers with nothing to loop over": "def test():\n    for x in f(2):\n        assert x == 4\n",
    "answers with what has no truth": ["assert f(2)", "assert len(f(2)) == 4"],
    "answers with what equals": ["assert f(2) == g(2)"],
    "answers with what is an instance": ["assert isinstance(f(2), T)"],
}


def test_programs_that_evade_judgement_score_0(score):
    cases = [(program, EVADED.get(name, ["assert f(2) == 4", "assert f(2)"])) for name, program in EVADING.items()]
    found = dict(zip(EVADING, score(cases)))
    assert {name: answer for name, answer in found.items() if answer != 0.0} == {}


# What a function must answer, as JSON; answers in Python that are right, and that are wrong.
ANSWERS = {
    "[1, 2, 3]": (["[1, 2, 3]", "(1, 2, 3)", "[1, 2.0, 3]"],
                  ["1", "[1]", "[1, 2]", "[1, 2, 3, 4]", "[3, 2, 1]", "[[1, 2, 3]]", "[[1], [2], [3]]", "{1, 2, 3}",
                   "'[1, 2, 3]'", "'123'", "[1, 2, '3']", "[True, 2, 3]", "[1, 2, None]", "None", "[]", "range(1, 4)",
                   "iter([1, 2, 3])", "{0: 1, 1: 2, 2: 3}", "{1: 1, 2: 2, 3: 3}.keys()", "[1, 2, 3.0000001]"]),
    "[[1, 2], [3]]": (["[[1, 2], [3]]", "([1, 2], (3,))"], ["[1, 2]", "[[1, 2], 3]", "[1, 2, 3]", "[[3], [1, 2]]"]),
    "1": (["1", "1.0"], ["'1'", "True", "[1]", "(1,)", "1.0000001", "None", "{}", "1 + 0j"]),
    "true": (["True"], ["1", "1.0", "'True'", "[True]", "None"]),
    "0": (["0", "-0.0"], ["False", "None", "''", "[]", "1e-9"]),
    "null": (["None"], ["0", "False", "[]", "''", "'None'"]),
    '"1"': (["'1'"], ["1", "b'1'", "['1']", "' 1'"]),
    '""': (["''"], ["None", "[]", "0", "' '"]),
    "[]": (["[]", "()"], ["None", "[[]]", "{}", "''", "0", "[None]", "set()"]),
    "0.5": (["0.5", "0.5000001"], ["0", "0.51", "'0.5'", "[0.5]", "float('nan')", "None"]),
    "2.0": (["2.0", "2"], ["True", "'2.0'", "3"]),
    '{"1": [2]}': (["{'1': [2]}", "{1: [2]}", "{1: (2,)}"],
                   ["{1: 2}", "{'1': [2], 1: [2]}", "{1: [2], 2: [2]}", "{}", "[['1', [2]]]", "{True: [2]}",
                    "{1.0: [2]}"]),
    '["a", "b"]': (["['a', 'b']"], ["'a'", "'ab'", "['a']", "['b', 'a']", "{'a', 'b'}"]),
}  # fmt: skip


def test_answers_of_every_wrong_shape_do_not_pass(share):
    rows, passing = [], []
    for wanted, (right, wrong) in ANSWERS.items():
        value, count = json.loads(wanted), len(right) + len(wrong)
        program = f"answers = [{', '.join((*right, *wrong))}]\ndef f(i): return answers[i]"
        inputs = [[i] for i in range(count)]
        rows.append((program, {"inputs": inputs, "outputs": [value] * count, "fn_name": "f"}, ""))
        rows.append((program, [{"input": f"{i}", "output": wanted, "testtype": "functional"} for [i] in inputs], "f"))
        rows.append((program, {"inputs": inputs, "outputs": [[value]] * count, "fn_name": "f"}, ""))
        passing += [len(right)] * 3
    found = share(rows)
    told = {(row[0], str(row[1])[:60]): (result.passed, result.reason) for row, result in zip(rows, found)}
    assert [result.passed for result in found] == passing, told
    assert {result.status for result in found} == {"failed"}


def test_results_in_lists_of_their_own_are_a_convention_of_the_row(score):
    wrapped = {"inputs": [[1], [2]], "outputs": [[2], [4]], "fn_name": "f"}
    mixed = {"inputs": [[1], [2]], "outputs": [[2], [4, 5]], "fn_name": "f"}
    texts = {"inputs": ["1", "2"], "outputs": ["[2]", "[4]"], "fn_name": "f"}
    strings = {"inputs": [["1"]], "outputs": ["1"], "fn_name": "f"}
    twice, listed = "def f(x): return x * 2", "def f(x): return [x * 2]"
    either = "def f(x): return x * 2 if x == 1 else [x * 2]"
    assert score([(twice, wrapped), (listed, wrapped), (either, wrapped)]) == [1.0, 1.0, 0.0]
    assert score([(either.replace("[x * 2]", "[4, 5]"), mixed), (twice, texts), (listed, texts)]) == [0.0, 0.0, 1.0]
    assert score([("def f(x): return x", strings), ("def f(x): return int(x)", strings)]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "given", [{"inputs": [5], "outputs": [1], "fn_name": "f"}, {"inputs": [{"a": 1}], "outputs": [1], "fn_name": "f"}]
)
def test_arguments_that_are_no_list_are_refused(given):
    with pytest.raises(RewardError, match="give a list of its arguments"):
        read_tests(given)


# Programs, tests, entry point and setup; with the reason why the tests need more than plain values.
PAIR = "class Pair(object):\n    def __init__(self, a, b): self.a, self.b = a, b\n"
PAIR += "def longest(arr, n): return max(p.b - p.a for p in arr)"
LINKED = "class L:\n    def __init__(self, v): self.v, self.next = v, None\ndef f(n):\n    a = b = None\n"
LINKED += "    for i in range(n, 0, -1): a = L(i); a.next = b; b = a\n    return a"
LOOP = "n, seen = f(3), []\nwhile n:\n    seen.append(n.v)\n    n = n.next\nassert seen == [1, 2, 3]"
TREE = "class Node:\n    def __init__(self, data): self.data, self.left, self.right = data, None, None\n"
TREE += "def height(n): return 1 + max(height(n.left), height(n.right)) if n else 0"
NODE = "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
WALK = "def f(node):\n    total = 0\n    while node: total += node.value; node = node.next\n    return total"
OBJECTS = {
    "a class of the program": (PAIR, ["assert longest([Pair(5, 24), Pair(15, 25)], 2) == 19"], "", "", "class Pair"),
    "its object": (LINKED, LOOP, "", "", "use .v of an object of the program's class L"),
    "a class in the setup": (TREE, ["assert height(r) == 2"], "", "r = Node(1)\nr.left = Node(2)", "class Node"),
    "an object of the tests": (WALK, NODE + "assert f(Node(1, Node(2))) == 3", "", "", "give the program an object"),
    "a callback": ("def f(g, x): return g(x) + 1", ["assert f(lambda v: v * 2, 3) == 7"], "", "", "class function"),
    "a closure": ("def f(x): return lambda y: x + y", ["assert f(1)(2) == 3"], "", "", "call an object"),
}


def test_tests_that_need_objects_are_not_judged(score):
    found = dict(zip(OBJECTS, score([case[:4] for case in OBJECTS.values()])))
    assert {name: answer for name, answer in found.items() if OBJECTS[name][4] not in str(answer)} == {}


def test_an_object_in_place_of_a_plain_value_is_a_wrong_answer(score):
    """A program must not get out of a 0 by answering with an object."""
    program = "class T:\n    def upper(self): return 'A'\n    def __call__(self, *a): return 4\ndef f(x): return T()"
    tests = [["assert f('a').upper() == 'A'"], ["assert f(2) == 4"], ["assert f(f(2)) == 4"], ["assert 4 in f(2)"]]
    assert score([(program, test) for test in tests]) == [0.0] * len(tests)
    assert score([("class f:\n    def __init__(self, x): pass", ["assert f(2) == 4"])]) == [0.0]


def test_forms_of_the_field_keep_their_score(score):
    decode = "def encode_cyclic(s): return s[::-1]\ndef decode_cyclic(s): return s[::-1]"
    candidate = "def check(candidate):\n    from random import randint\n    for _ in range(9):\n"
    candidate += "        s = str(randint(0, 99))\n"
    candidate += "        assert candidate(encode_cyclic(s)) == s\n    assert True, 'This prints if this fails'\n"
    plus = (
        "import numpy as np\ndef assertion(out, exp, atol):\n    exact = out == exp\n    if not exact and atol != 0:\n"
    )
    plus += "        assert np.allclose(out, exp, rtol=1e-07, atol=atol)\n    else:\n        assert exact, f'{out}'\n"
    plus += "def check(candidate):\n    for x in [1.0, 2.0]:\n        assertion(candidate(x), x * 2, 1e-6)\n"
    regex = "import re\ndef f(s): return re.match('a', s)"
    cases = [
        (decode, candidate, "decode_cyclic"),
        (RIGHT, plus, "f"),
        (regex, ["assert f('ab')", "assert not f('b')"]),
        ("f = len", ["assert f([1, 2]) == 2"]),
        ("def Extract(lst): return [x[0] for x in lst]", ["assert Extract([[1, 2], [3]]) == [1, 3]"]),
        ("import operator\nf = operator.add", ["assert f(1, 2) == 3"]),
        (
            "def remove(t, kind): return [x for x in t if not isinstance(x, kind)]",
            ["assert remove((4, 'a'), int) == ['a']"],
        ),
    ]
    assert score(cases) == [1.0] * len(cases)


# Programs whose names, classes and objects are not what the tests expect: wrong, and no failure of the judge.
ROUND = ["assert decode(encode('ab')) == 'ab'"]
STRANGE = {
    "an exception": "class encode(ValueError): pass\ndef decode(s): return s",
    "a true exception": "class encode(ValueError): pass\ndef decode(s): return 'ab' if s else s",
    "a builtin exception": "encode = ValueError\ndef decode(s): return s",
    "a class": "class encode:\n    def __init__(self, s): pass\ndef decode(s): return s",
    "a type": "def encode(s): return object\ndef decode(s): return s",
    "a function": "def encode(s): return lambda: s\ndef decode(s): return s()",
    "an error": "class encode(BaseException): pass\ndef decode(s): raise encode(s)",
    "a metaclass": "class M(type):\n    def __instancecheck__(c, o): return True\n"
    "    __class__ = property(lambda c: str)\n"
    "class encode(ValueError, metaclass=M): pass\ndef decode(s): return s",
    "a name of the judge": "class NotJudged(BaseException): pass\ndef encode(s): raise NotJudged(s)\ndecode = encode",
    "a class of str": "class S(str):\n    __class__ = property(lambda s: exit)\n    def __eq__(s, o): return True\n"
    "def encode(s): return s\ndef decode(s): return S('no')",
    "a name that is missing": "class decode(KeyError): pass",
}


def test_no_program_makes_its_row_a_failure_of_the_judge(score):
    found = dict(zip(STRANGE, score([(program, ROUND) for program in STRANGE.values()])))
    assert {name: answer for name, answer in found.items() if answer != 0.0} == {}
    tests = ["assert is_even(2)", "assert limit == 3"]
    assert score([("class is_even(ValueError): pass\nlimit = 4", tests)]) == [0.0]
    kinds = [["assert g(type(f(1))) == 1"], ["import json\nassert json.load(f(1)) == 1"]]
    own = "def f(x): return (lambda: x) if x else x\ndef g(x): return 1"
    assert score([(own, test) for test in kinds]) == [0.0] * len(kinds)


def test_tests_may_give_a_program_its_own_functions_and_exceptions(score):
    cases = [
        ("def apply(f, x): return f(x)\ndef inc(x): return x + 1", ["assert apply(inc, 3) == 4"]),
        ("def apply(f, x): return f(x)\ndef inc(x): return x + 1", ["assert apply(inc, 3) == 5"]),
        ("def told(error): return str(error)", ["assert told(ValueError('late')) == 'late'"]),
        ("encode = ValueError\ndef decode(e): return e.args[0]", ROUND),
    ]
    assert score(cases) == [1.0, 0.0, 1.0, 1.0]
