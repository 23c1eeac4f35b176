"""UnitTests: what a program must do, read from the forms in which the field's data sets write it down."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.sandbox import test_source

_FORMS = (
    'a list of assert statements, {"inputs": [...], "outputs": [...]} (with "fn_name" for a function), a list of '
    '{"input": ..., "output": ...}, or the source of a test module'
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CLOSE = 1e-6


@dataclass(frozen=True)
class UnitTests:
    """Tests of one program: `calls` are run against its functions, `pairs` are (input, output) of whole runs."""

    calls: Mapping[str, Any] | None = None
    pairs: tuple[tuple[str, str], ...] = ()


def read_tests(tests: Any, *, entry_point: str = "", setup: str = "", objects: bool = False) -> UnitTests:
    """Read one row's tests.

    - a list of sources ("assert f(2) == 4", as in MBPP): each is one test; `setup` runs before them;
    - {"inputs", "outputs"} (APPS): what the program reads and must print; with "fn_name", lists of arguments and what
      that function (or that method of a class Solution) must return; where every output is a list of one, that one may
      be what is meant. Inputs that are texts hold one argument in JSON per line, their outputs JSON;
    - a list of {"input", "output", "testtype"} (LiveCodeBench): the same; "functional" ones call `entry_point`, with
      one argument in JSON per line;
    - a text: one of the above as JSON, or the source of a test module: asserts, `check(candidate)` (HumanEval), test
      functions, unittest.TestCase.

    `objects`: whether the tests may use objects of the program.
    Errors: RewardError when it is not one of these, holds no test, or a test that cannot judge: nothing calls it, it is
    skipped, its failure is expected, its assertions cannot be reached.
    """
    known = {"entry_point": entry_point, "objects": objects}
    if hasattr(tests, "tolist"):
        tests = tests.tolist()
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):  # then it is the source of a module
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return UnitTests({"source": tests, "setup": _parsed([setup, tests], **known)})
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        return _paired(tests["inputs"], tests["outputs"], tests.get("fn_name") or "")
    if isinstance(tests, Sequence) and not isinstance(tests, str | bytes) and len(tests):
        if all(isinstance(test, str) for test in tests):
            return UnitTests({"asserts": list(tests), "setup": _parsed([setup, *tests], **known)})
        if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in tests):
            functional = any(test.get("testtype") == "functional" for test in tests)
            if functional and not entry_point:
                raise RewardError("functional tests need the name of the function, in the column of entry points.")
            inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
            return _paired(inputs, outputs, entry_point if functional else "", encoded=True)
    raise RewardError(f"tests are {_show(tests)}; give {_FORMS}.")


def _parsed(sources: list[str], **known: Any) -> str:
    """The first of the sources, the tests' setup, when all can be read and judge something."""
    for source in sources:
        try:
            compile(source, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            raise RewardError(f"a test is not valid Python: {error}: {_show(source)}.") from error
    if reason := test_source.problem(sources, **known):
        raise RewardError(f"{reason}: {_show(sources[1])}.")
    return sources[0]


def _paired(inputs: Any, outputs: Any, function: str, *, encoded: bool = False) -> UnitTests:
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or not len(inputs) == len(outputs) > 0:
        raise RewardError(f"tests have inputs {_show(inputs)} and outputs {_show(outputs)}; give as many of both.")
    if not function:
        return UnitTests(None, tuple((_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs)))
    if wrong := [given for given in inputs if not isinstance(given, str | list | tuple)]:
        raise RewardError(f"tests of {function} have an input {_show(wrong[0])}; give a list of its arguments.")
    encoded = encoded or all(isinstance(given, str) for given in inputs)
    expected = [_value(wanted) if encoded and isinstance(wanted, str) else wanted for wanted in outputs]
    return UnitTests(
        {
            "function": function,
            "arguments": [_values(given) if isinstance(given, str) else list(given) for given in inputs],
            "expected": expected,
            # APPS writes most results in a list of their own, and says nowhere which.
            "wrapped": not encoded
            and all(isinstance(wanted, list | tuple) and len(wanted) == 1 for wanted in expected),
        }
    )


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _values(lines: str) -> list[Any]:
    return [_value(line) for line in lines.splitlines() if line.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def same_output(printed: str, wanted: str) -> bool:
    """Whether a program printed what it should.

    Blanks at the ends of lines and empty lines at the end do not count; where a line differs its words are compared,
    and one that is wanted with a decimal point may differ by 1e-6.
    """
    found, expected = _lines(printed), _lines(wanted)
    return len(found) == len(expected) and all(map(_same_line, found, expected))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected) and re.search(r"[.eE]", expected)):
        return False
    wanted = float(expected)
    return abs(float(found) - wanted) <= _CLOSE * max(1.0, abs(wanted))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
