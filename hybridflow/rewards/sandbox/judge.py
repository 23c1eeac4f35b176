"""The judge: runs unit tests against a program in another process.

The tests see the program's functions as local functions and its results as plain values, so the program cannot reach
the tests: it cannot patch `assert`, answer with an object that equals everything, or end the tests early.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import functools
import inspect
import math
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from hybridflow.rewards.sandbox import test_source
from hybridflow.rewards.sandbox.program import NotJudged, ProgramEnded, Remote

NAME = "tests"
_SHOWN = 300
_CLOSE = 1e-6
_ENDED = "the program ended before the tests did"
_NOT_CHECKED = "none of its checks was executed"


class _Unit(NamedTuple):
    """One test: what it is called, running it, and whether it has to check something."""

    name: str
    run: Callable[[], object]
    checks: bool = True


class _NotReadyError(Exception):
    """A prerequisite of the tests is missing."""


class _UnreadableError(Exception):
    """The tests cannot judge, whatever the program does."""


class _Seen:
    """Executed checks of the tests (number and marks), and exceptions in their threads."""

    def __init__(self) -> None:
        self.count, self.marks, self.lost = 0, set[str](), ""
        threading.excepthook = self._raised

    def __call__(self, mark: str = "") -> None:
        self.count += 1
        self.marks.add(mark)

    def _raised(self, what: threading.ExceptHookArgs) -> None:
        self.lost = self.lost or f"in a thread: {_told(what.exc_value or what.exc_type())}"


def run(job: dict[str, Any], program: Remote) -> dict[str, Any]:
    """Run the job's tests: {"passed", "total", "reason" of the first failure, "error", "ended", "unreadable"}.

    "error": what the program had told in the test that failed first, as the last line of a traceback; "ended": whether
    the program did; "unreadable": why the tests can judge no program at all, else "".
    The job has `tests`: {"source"}, {"asserts": list of sources, "setup"} or {"function", "arguments", "expected"};
    `entry_point`, a name or ""; `prelude`, a source; `stop`: whether to stop at the first failure.
    """
    verdict: dict[str, Any] = {"passed": 0, "total": 0, "reason": "", "error": "", "ended": False, "unreadable": ""}
    try:
        _run_units(program, job, verdict)
    except BaseException as error:  # of the program as it was loaded, or of the tests' preparations
        verdict["total"] += 1
        if isinstance(error, _UnreadableError | NotJudged):
            verdict["unreadable"] = _short(str(error))
        elif not verdict["reason"]:
            reason = str(error) if isinstance(error, _NotReadyError) else _told(error)
            verdict.update(reason=_short(reason), error=program.error)
        verdict["ended"] = program.ended
    return verdict


def _run_units(program: Remote, job: dict[str, Any], verdict: dict[str, Any]) -> None:
    seen, marker = _Seen(), test_source.Marker()
    for name, test, must_check in _units(program, job, seen, marker):  # what prepares a test runs as its turn comes
        before, asked = seen.count, program.asked
        reason, skipped = _failure(program, test)
        reason = reason or seen.lost
        checked = seen.count > before and not skipped
        if not (reason or checked or must_check):
            continue
        if not reason and not checked:
            reason = skipped or _NOT_CHECKED
            if program.asked == asked and not program.given:  # the program had no part in it
                raise _UnreadableError(f"{name}: {reason}")
        verdict["total"] += 1
        verdict["passed"] += not reason
        if reason and not verdict["reason"]:
            verdict.update(reason=_short(f"{name}: {reason}"), error=program.error, ended=program.ended)
        if reason and job["stop"]:
            return
        program.error = ""
    if not verdict["total"]:
        raise _UnreadableError("the tests check nothing")
    executed = {marker.scopes[mark] for mark in seen.marks if mark}
    tests = [scope for scope in marker.scopes.values() if scope[1] == "check" or scope[1].startswith("test")]
    unseen = [name for number, name in tests if (number, name) not in executed]
    if unseen and not verdict["reason"]:
        raise _NotReadyError(f"{unseen[0]}: {_NOT_CHECKED}")
    if not program.asked:
        raise _UnreadableError("the tests use nothing of the program")


def _failure(program: Remote, test: Callable[[], object]) -> tuple[str, str]:
    """A test's exception and its skip reason, each "" if none."""
    try:
        _finish(test())
    except (_UnreadableError, NotJudged):
        raise
    except BaseException as error:  # whatever a test raises, it has failed
        if program.ended:
            return _ENDED, ""
        by_pytest = type(error).__name__ in ("Skipped", "XFailed") and not isinstance(error, Exception)
        if isinstance(error, unittest.SkipTest) or by_pytest:  # a program raises neither: its errors have other classes
            return "", f"it was skipped: {error}"
        return _told(error), ""
    return _ENDED if program.ended else "", ""


def _told(error: BaseException) -> str:
    if isinstance(error, ProgramEnded):
        return _ENDED
    try:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception as second:  # it holds what has no text, such as a number of too many digits
        return f"{type(error).__name__}, not shown: {type(second).__name__}"


def _finish(result: object) -> None:
    """Run a coroutine that a test has answered, which has not run so far, to its end."""

    async def finish() -> None:
        await result  # type: ignore[misc]

    if inspect.isawaitable(result):
        asyncio.run(finish())
    elif inspect.isasyncgen(result) or (inspect.isgenerator(result) and result.gi_code.co_filename == test_source.FILE):
        raise _UnreadableError("a test is a generator, which no test runner runs")


def _units(program: Remote, job: dict[str, Any], seen: _Seen, marker: test_source.Marker) -> Iterator[_Unit]:
    tests, entry_point = job["tests"], job["entry_point"]
    if "function" in tests:
        yield from _pairs(program, tests, seen)
        return
    sources = [tests["setup"], *(tests["asserts"] if "asserts" in tests else [tests["source"]])]
    trees = [test_source.parse(source) for source in sources]
    names = _module(program, sources, trees, job, seen)
    given = functools.partial(_candidate, program, entry_point)
    setup, *bodies = [marker.visit(tree) for tree in trees]
    for unit in _statements(setup, names):
        unit.run()
    if "asserts" not in tests:
        yield from _of_source(bodies[0], trees, names, given, {})
        return
    for source, body in zip(tests["asserts"], bodies, strict=True):

        def whole(body: ast.Module = body) -> None:
            for unit in _of_source(body, trees, names, given, dict(names)):
                _finish(unit.run())

        yield _Unit(source.strip(), whole, any(map(test_source.holds_marks, body.body)))


def _module(
    program: Remote, sources: list[str], trees: list[ast.Module], job: dict[str, Any], seen: _Seen
) -> dict[str, Any]:
    """The tests' namespace, with what they need from the program."""
    wanted = test_source.Names(sources, trees, job["entry_point"], test_source.prelude_names(job["prelude"]))
    if wanted.doubt:
        raise _UnreadableError(f"which of {', '.join(wanted.doubt)} is tested? Name it in the column of entry points")
    found = program.names([*wanted.program, *([wanted.tested] if wanted.tested else [])])
    if wanted.tested:
        for tree in trees:
            test_source.Aliased(wanted.tested, trees).visit(tree)
        if wanted.tested in found:
            found[test_source.ALIAS + wanted.tested] = found.pop(wanted.tested)
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    module.__dict__.update({**found, **wanted.library, "__builtins__": builtins, test_source.MARK: seen})
    return module.__dict__


def _statements(tree: ast.Module, names: dict[str, Any]) -> Iterator[_Unit]:
    for statement, mark in zip(tree.body, [*tree.body[1:], None]):
        if not test_source.is_mark(statement):
            parts = [statement, mark] if mark is not None and test_source.is_mark(mark) else [statement]
            checking = any(map(test_source.holds_marks, parts))
            yield _Unit(ast.unparse(statement), functools.partial(_execute, parts, names), checking)


def _execute(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    for statement in statements:
        try:
            if isinstance(statement, ast.Expr):  # it may be a call that answers with a coroutine
                _finish(eval(compile(ast.Expression(statement.value), test_source.FILE, "eval"), names))
            else:
                exec(compile(ast.Module([statement], []), test_source.FILE, "exec"), names)
        except ImportError as error:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                raise _UnreadableError(f"{ast.unparse(statement)}: {error}") from error
            raise


def _of_source(
    tree: ast.Module, trees: list[ast.Module], names: dict[str, Any], given: Callable[[], Any], old: dict[str, Any]
) -> Iterator[_Unit]:
    """The tests of a module: its statements in order, then what it defines anew: check, test functions and classes."""
    yield from _statements(tree, names)
    for name, value in list(names.items()):
        if old.get(name) is value or getattr(value, "__module__", "") != NAME:
            continue
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                yield _Unit(f"{name}.{method}", functools.partial(_run_case, value(method), method))
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [method for method in dir(value) if method.startswith("test")]:
                yield _Unit(f"{name}.{method}", functools.partial(_run_method, value, method))
        elif isinstance(value, types.FunctionType) and name == "check" and not test_source.calls(trees, name):
            yield _Unit(name, lambda check=value: check(given()))
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            with suppress(TypeError):  # it takes arguments
                inspect.signature(value).bind()
                yield _Unit(name, value)


def _run_case(case: unittest.TestCase, name: str) -> None:
    method = getattr(case, name)
    if inspect.isgeneratorfunction(method):
        _finish(method())  # refused here, since unittest would take the refusal for a failure
    if not (isinstance(case, unittest.IsolatedAsyncioTestCase) and inspect.iscoroutinefunction(method)):
        setattr(case, name, functools.wraps(method)(lambda: _finish(method())))
    unittest.TestSuite([case]).debug()  # raises what a test raises


def _run_method(kind: type, name: str) -> None:
    """A test in a class, as pytest runs it."""
    instance = kind()
    for prepare in ("setup_class", "setup_method"):
        if prepares := getattr(instance, prepare, None):
            _finish(prepares())
    _finish(getattr(instance, name)())


def _candidate(program: Remote, entry_point: str) -> Any:
    name = entry_point or program.last_function()
    found = program.names([name])
    if name not in found:
        raise _NotReadyError(f"the program does not define {name or 'a function'}")
    return found[name]


def _pairs(program: Remote, tests: dict[str, Any], seen: _Seen) -> Iterator[_Unit]:
    name, as_they_are = tests["function"], set[bool]()
    function = program.names([name]).get(name)
    if not callable(function):
        raise _NotReadyError(f"the program defines neither {name} nor a class Solution with it")

    def one(arguments: list[Any], expected: Any) -> None:
        result = function(*arguments)
        as_it_is = _same(result, expected)
        right = as_it_is or (tests["wrapped"] and _same(result, expected[0]))
        if not right or {as_it_is} | as_they_are != {as_it_is}:  # the results of a row are all wrapped, or none
            raise AssertionError(f"gave {_short(repr(result), 100)}, expected {_short(repr(expected), 100)}")
        as_they_are.add(as_it_is)
        seen()

    for arguments, expected in zip(tests["arguments"], tests["expected"], strict=True):
        call = _short(", ".join(map(repr, arguments)), 100)
        yield _Unit(f"{name}({call})", functools.partial(one, arguments, expected))


def _same(result: Any, expected: Any) -> bool:
    """Equal as JSON has it: tuples are lists, keys are texts, 2.0 is 2; a number with a fraction may differ by 1e-6."""
    if isinstance(expected, list):
        return isinstance(result, list | tuple) and len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(expected, dict):
        if not isinstance(result, dict) or len(result) != len(expected):
            return False
        found = {str(key): value for key, value in result.items() if type(key) in (str, int)}
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in expected)
    if type(expected) in (int, float) and type(result) in (int, float):
        close = isinstance(expected, float) and math.isclose(result, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
        return result == expected or close or (result != result and expected != expected)
    return type(result) is type(expected) and bool(result == expected)


def _short(text: str, length: int = _SHOWN) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
