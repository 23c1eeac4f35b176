"""Code: runs the programs of responses against unit tests in a sandbox; reads the test formats of data sets."""

from __future__ import annotations

import ast
import json
import os
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.answer_extraction import outside_thoughts
from hybridflow.rewards.function_adapters import RowFailure
from hybridflow.rewards.match import completion_text
from hybridflow.rewards.sandbox import test_source
from hybridflow.rewards.sandbox.sandbox import CodeResult, Limits, Mechanism, Sandbox

_FENCE = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[\w+-]*+)[^\n`]*+\n",
    re.MULTILINE,
)
_PYTHON = ("python", "python3", "py", "py3")
_CLOSINGS = 5  # fences behind an opened one that are tried as its end
# Only at the last fences it is asked what is valid Python; and beyond each first end, for this many characters.
_FENCES, _CHARACTERS = 20, 100_000
PRELUDE = """\
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from typing import *
from builtins import *
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, statistics
import string, sys, typing
"""
"""What programs in LeetCode's form expect, as in LiveCodeBench's grader: `Code(prelude=rewards.PRELUDE)`."""
_FORMS = (
    'a list of assert statements, {"inputs": [...], "outputs": [...]} (with "fn_name" for a function), a list of '
    '{"input": ..., "output": ...}, or the source of a test module'
)
_NUMBER = re.compile(r"[+-]?(\d++(?:\.\d*+)?+|\.\d++)([eE][+-]?\d++)?")
_CLOSE = 1e-6


class Code:
    """A verifier: 1 for a response whose program passes the unit tests of its row, else 0.

    The program is the last fenced block of Python in the response, or the whole response (see `extract_program`). It
    runs contained (see `Sandbox`), apart from the tests: they call its functions with plain values (numbers, texts,
    containers, arrays) and see plain values. Column `tests` holds one of the forms of `read_tests`; `entry_point` and
    `setup` name columns that may be missing: the function that is tested, and source that runs before the tests.

    A wrong program scores 0, or with `all_or_nothing=False` the share of tests that it passes. One that a limit stopped
    (time, memory, output, recursion, files outside its directory, processes, sockets) scores 0 as well: on a machine
    that is merely slow, too, so leave room in `seconds`. Failures of other causes are RowFailures: tests that cannot be
    read or judge nothing, or that need objects of the program; a sandbox that does not start or is lost. `results`
    tells the reason for every response. Limits hold for each run: `seconds` for all tests of a row, or for each of its
    inputs; `limits` sets the others. `workers` programs run at the same time (default: the processors of this process).

    `prelude` is source whose names programs and tests have as they have builtins (`PRELUDE`: the imports that programs
    in LeetCode's form leave out).

    Tests get the names that they neither define nor import from the program, except those of builtins and of common
    libraries (`math`, `np`, `Counter`, ...): these mean what they always do, unless one is the entry point, or the only
    name that can be the tested one. An object of the program that is not a plain value equals only itself, and has no
    attributes, length or order. Helpers that the tests take from the program are not verified. A test counts when at
    least one of its assertions was executed.
    Errors: ConfigError for settings, and where this machine cannot contain a program.
    """

    limits_itself = True

    def __init__(
        self,
        tests: str = "tests",
        *,
        seconds: float = 5.0,
        memory_mb: int = 512,
        workers: int | None = None,
        all_or_nothing: bool = True,
        entry_point: str = "entry_point",
        setup: str = "test_setup_code",
        limits: Limits | None = None,
        mechanism: Mechanism | None = None,
        prelude: str = "",
    ) -> None:
        if workers is not None and (type(workers) is not int or workers < 1):
            raise ConfigError(f"Code(workers={workers!r}): give a whole number of at least 1.")
        self.limits = limits if limits is not None else Limits(seconds=seconds, memory_mb=memory_mb)
        self.tests, self.entry_point, self.setup = tests, entry_point, setup
        self.workers, self.all_or_nothing = workers, all_or_nothing
        self.mechanism: Mechanism | None = mechanism
        try:
            self.prelude, self._known = prelude, frozenset(test_source.prelude_names(prelude))
        except Exception as error:  # the user's source
            raise ConfigError(
                f"Code(prelude={prelude!r:.60}) does not run: {type(error).__name__}: {error}."
            ) from error
        Sandbox(mechanism).close()

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that it reads; "name?" for optional ones."""
        return (self.tests, f"{self.entry_point}?", f"{self.setup}?")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | RowFailure]:
        """A score per row, or a RowFailure with the reason where the row could not be judged."""
        own = columns.get(self.entry_point), columns.get(self.setup)
        scores = list[float | RowFailure]()
        for found in self._judged(completions, columns[self.tests], *own):
            if isinstance(found, RewardError):
                scores.append(RowFailure(str(found), found))
            else:
                unreadable = RowFailure(f"could not judge: {found.reason}")
                scores.append(unreadable if found.status == "unreadable" else found.score)
        return scores

    def results(
        self,
        completions: Sequence[Any],
        tests: Sequence[Any],
        *,
        entry_points: Sequence[str | None] | None = None,
        setups: Sequence[str | None] | None = None,
    ) -> list[CodeResult]:
        """One CodeResult per response, with the reason where it did not pass.

        Errors: RewardError for tests that cannot be read or a sandbox that is lost, ConfigError where this machine
        cannot contain a program.
        """
        found = self._judged(completions, tests, entry_points, setups)
        for row, result in enumerate(found):
            if isinstance(result, RewardError):
                raise RewardError(f"Code.results, row {row}: {result}") from result
        return [result for result in found if isinstance(result, CodeResult)]

    def _judged(
        self, completions: Sequence[Any], tests: Sequence[Any], entry_points: Any, setups: Any
    ) -> list[CodeResult | RewardError]:
        """Every row's result, or the error of its tests."""
        rows = len(completions)
        given = [tests, *(column if column is not None else [None] * rows for column in (entry_points, setups))]
        if any(len(column) != rows for column in given):
            raise RewardError(f"Code got {rows} completions and {len(tests)} rows of tests; give one per completion.")
        programs = [extract_program(completion_text(completion)) for completion in completions]
        if not rows:
            return []
        workers = min(rows, self.workers or len(os.sched_getaffinity(0)))
        with (
            Sandbox(self.mechanism, prelude=self.prelude) as sandbox,
            ThreadPoolExecutor(workers, "contained") as threads,
        ):
            try:
                return list(threads.map(self._row, [sandbox] * rows, programs, *given))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _row(
        self, sandbox: Sandbox, program: str, tests: Any, entry_point: str | None, setup: str | None
    ) -> CodeResult | RewardError:
        try:
            read = read_tests(tests, entry_point=entry_point or "", setup=setup or "", prelude=self._known)
        except RewardError as error:
            return RewardError(f"could not read its tests: {error}".rstrip("."))
        if not program.strip():
            return CodeResult(status="failed", reason="there is no program in the response")
        try:
            if "pairs" in read:
                found = self._run_pairs(sandbox, program, read["pairs"])
            else:
                found = sandbox.judge(
                    program, read, entry_point=entry_point or "", limits=self.limits, stop=self.all_or_nothing
                )
        except RewardError as error:  # the sandbox did not start, or was lost
            return error
        partly = found.status == "failed" and found.total and not self.all_or_nothing
        return replace(found, score=float(found.status == "ok") if not partly else found.passed / found.total)

    def _run_pairs(self, sandbox: Sandbox, program: str, pairs: Sequence[tuple[str, str]]) -> CodeResult:
        passed, reason = 0, ""
        for number, (given, wanted) in enumerate(pairs, 1):
            result = sandbox.run(program, stdin=given, limits=self.limits)
            if result.contained:
                return CodeResult(passed=passed, total=len(pairs), status=result.status, reason=result.reason)
            right = result.status == "ok" and same_output(result.stdout, wanted)
            passed += right
            if not right:
                what = result.reason or f"printed {result.stdout!r:.80}, expected {wanted!r:.80}"
                reason = reason or f"input {number} of {len(pairs)}: {what}"
                if self.all_or_nothing:
                    break
        return CodeResult(passed=passed, total=len(pairs), status="failed" if reason else "ok", reason=reason)


class _Block(NamedTuple):
    """A fenced block of a response: where it stands, and whether its source is Python without an error of syntax."""

    start: int
    stop: int
    language: str
    source: str
    valid: bool


def extract_program(response: str) -> str:
    """The last fenced block of Python in a response, or the last one that names no language; without any fence, all.

    Among those that name none, what is no valid Python or only values (an output) counts if there is nothing else.
    Thoughts are left out, with the programs in them. A block ends at the first fence up to which it is
    valid Python, which may be behind its last line of code, but not in a docstring; without one, at the first fence.
    One that the response does not close reaches to its end. Indentation that its fence has as well is removed.
    """
    text = response.replace("\r\n", "\n").replace("\r", "\n")
    said = text
    for block in _blocks(text):
        if block.valid:  # tags inside of a program are code
            said = said[: block.start] + "." * (block.stop - block.start) + said[block.stop :]
    blocks = list(_blocks(own := text[outside_thoughts(said)]))
    if found := [block.source for block in blocks if block.language in _PYTHON]:
        return found[-1]
    bare = [block for block in blocks if not block.language]
    for block in reversed(bare):  # that does anything: not `3`, `[1, 2]` or `YES`
        for line in ast.parse(block.source).body if block.valid else ():
            if not isinstance(line, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(line)):
                return block.source
    return bare[-1].source if bare else "" if blocks else own


def _blocks(text: str) -> Iterator[_Block]:
    end, left = 0, _CHARACTERS
    judged = [fence.start() for fence in _FENCE.finditer(text)][-2 * _FENCES :]  # opening and closing ones
    while opening := _FENCE.search(text, end):
        begin, width, language = opening.end(), len(opening["indent"]), opening["language"].lower()
        fence = opening["fence"]
        closing = re.compile(rf"(?:^[ \t]*+)?(?<!{fence[0]}){fence}{fence[0]}*+[ \t]*+$", re.MULTILINE)
        ends = [found.span() for found in islice(closing.finditer(text, begin), _CLOSINGS)]
        ends.append((len(text), len(text)))
        late = opening.start() >= judged[0]
        block = None
        for at, stop in ends if late and language in (*_PYTHON, "") else ends[:1]:
            if block is not None and (left := left - (at - begin)) < 0:
                break
            source, valid = _source(text[begin:at], width, late)
            if block is None or valid:
                block = _Block(opening.start(), stop, language, source, valid)
            if valid:
                break
        assert block is not None
        yield block
        end = block.stop


def _source(lines: str, width: int, judged: bool = True) -> tuple[str, bool]:
    source = re.sub(rf"^[ \t]{{1,{width}}}", "", lines, flags=re.MULTILINE) if width else lines
    source = textwrap.dedent(source) if source[:1] in (" ", "\t") else source
    try:
        _ = judged and ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source, False
    return source, judged and bool(source.strip())


def read_tests(tests: Any, *, entry_point: str = "", setup: str = "", prelude: Collection[str] = ()) -> dict[str, Any]:
    """Read one row's tests: {"pairs": (input, output) of whole runs}, or calls of functions as `judge.run` takes them.

    - a list of sources ("assert f(2) == 4", as in MBPP): each is one test; `setup` runs before them;
    - {"inputs", "outputs"} (APPS): what the program reads and must print; with "fn_name", lists of arguments and what
      that function (or that method of a class Solution) must return; where every output is a list of one, that one may
      be what is meant. Inputs that are texts hold one argument in JSON per line, their outputs JSON;
    - a list of {"input", "output", "testtype"} (LiveCodeBench): the same; "functional" ones call `entry_point`, with
      one argument in JSON per line;
    - a text: one of the above as JSON, or the source of a test module: asserts, `check(candidate)` (HumanEval), test
      functions, unittest.TestCase.

    `prelude`: names that the tests have.
    Errors: RewardError when it is not one of these, holds no test, or a test that cannot judge: nothing calls it, it is
    skipped, its failure is expected, its assertions cannot be reached.
    """
    known = {"entry_point": entry_point, "prelude": prelude}
    if hasattr(tests, "tolist"):
        tests = tests.tolist()
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        with suppress(ValueError):  # then it is the source of a module
            tests = json.loads(tests)
    if isinstance(tests, str) and tests.strip():
        return {"source": tests, "setup": _parsed([setup, tests], **known)}
    if isinstance(tests, Mapping) and "inputs" in tests and "outputs" in tests:
        return _paired(tests["inputs"], tests["outputs"], tests.get("fn_name") or "")
    if isinstance(tests, Sequence) and not isinstance(tests, str | bytes) and len(tests):
        if all(isinstance(test, str) for test in tests):
            return {"asserts": list(tests), "setup": _parsed([setup, *tests], **known)}
        if all(isinstance(test, Mapping) and "input" in test and "output" in test for test in tests):
            functional = any(test.get("testtype") == "functional" for test in tests)
            if functional and not entry_point:
                raise RewardError("functional tests need the name of the function, in the column of entry points.")
            inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
            return _paired(inputs, outputs, entry_point if functional else "", encoded=True)
    raise RewardError(f"tests are {tests!r:.80}; give {_FORMS}.")


def _parsed(sources: list[str], **known: Any) -> str:
    """The first of the sources, the tests' setup, when all can be read and judge something."""
    for source in sources:
        try:
            compile(source, "tests", "exec")
        except (SyntaxError, ValueError) as error:
            raise RewardError(f"a test is not valid Python: {error}: {source!r:.80}.") from error
    if reason := test_source.problem(sources, **known):
        raise RewardError(f"{reason}: {sources[1]!r:.80}.")
    return sources[0]


def _paired(inputs: Any, outputs: Any, function: str, *, encoded: bool = False) -> dict[str, Any]:
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or not len(inputs) == len(outputs) > 0:
        raise RewardError(f"tests have inputs {inputs!r:.80} and outputs {outputs!r:.80}; give as many of both.")
    if not function:
        return {"pairs": [(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs)]}
    if wrong := [given for given in inputs if not isinstance(given, str | list | tuple)]:
        raise RewardError(f"tests of {function} have an input {wrong[0]!r:.80}; give a list of its arguments.")
    encoded = encoded or all(isinstance(given, str) for given in inputs)
    expected = [_value(wanted) if encoded and isinstance(wanted, str) else wanted for wanted in outputs]
    return {
        "function": function,
        "arguments": [
            [_value(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)
            for given in inputs
        ],
        "expected": expected,
        # APPS writes most results in a list of their own, and says nowhere which.
        "wrapped": not encoded and all(isinstance(wanted, list | tuple) and len(wanted) == 1 for wanted in expected),
    }


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else str(lines)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def same_output(printed: str, wanted: str) -> bool:
    """Whether a program printed the wanted output.

    Blanks between words and empty lines at the end do not count, and a word that is wanted with a decimal point may
    differ by 1e-6.
    """
    found, right = ([line.split() for line in text.rstrip().split("\n")] for text in (printed, wanted))
    same = len(found) == len(right) and all(len(a) == len(b) for a, b in zip(found, right))
    return same and all(_same_word(a, b) for pair in zip(found, right) for a, b in zip(*pair))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected) and re.search(r"[.eE]", expected)):
        return False
    wanted = float(expected)
    return abs(float(found) - wanted) <= _CLOSE * max(1.0, abs(wanted))
