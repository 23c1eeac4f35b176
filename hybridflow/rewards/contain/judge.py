"""The tests' side of a judgement: runs unit tests against a program that lives in another process.

The tests see the program's names as handles and its results as plain values, so what decides is out of its reach: it
cannot patch `assert`, answer with an object that equals everything, or end the tests early.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hybridflow.rewards.contain.handles import Handle
from hybridflow.rewards.contain.peer import Peer, PeerEnded

NAME = "tests"
_SHOWN = 300
_CLOSE = 1e-6
_ENDED = "the program ended before the tests did"
Unit = tuple[str, Callable[[], object]]  # what it is called, and running it


class _NotReadyError(Exception):
    """What the tests need before they can count is not there."""


def run(job: dict[str, Any], reading: int, writing: int) -> dict[str, Any]:
    """Run the job's tests: {"passed", "total", "reason" of the first failure, "ended": whether the program did}.

    The job has `tests`: {"source"}, {"asserts": list of sources, "setup"} or {"function", "arguments", "expected"};
    `entry_point`, a name or ""; `stop`: whether to stop at the first failure.
    """
    peer = Peer(reading, writing, open_to=_open_to)
    verdict: dict[str, Any] = {"passed": 0, "total": 0, "reason": "", "ended": False}
    units = _units(peer, job)
    try:
        for name, test in units:  # what prepares a test runs as the loop comes to it
            verdict["total"] += 1
            reason = _failure(test)
            verdict["passed"] += not reason
            if reason:
                verdict["reason"] = verdict["reason"] or _short(f"{name}: {reason}")
                verdict["ended"] = verdict["ended"] or reason == _ENDED
                if job["stop"]:
                    break
    except PeerEnded:
        verdict.update(total=verdict["total"] + 1, ended=True, reason=verdict["reason"] or _ENDED)
    except (Exception, SystemExit) as error:  # of the program as it was loaded, or of the tests' preparations
        text = _short(str(error) if isinstance(error, _NotReadyError) else f"{type(error).__name__}: {error}")
        verdict.update(total=verdict["total"] + 1, reason=verdict["reason"] or text)
    return verdict


def _failure(test: Callable[[], object]) -> str:
    """What a test raised, "" for nothing."""
    try:
        test()
    except PeerEnded:
        return _ENDED
    except (Exception, SystemExit) as error:  # whatever a test raises, it has failed
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def _units(peer: Peer, job: dict[str, Any]) -> Iterator[Unit]:
    tests, entry_point = job["tests"], job["entry_point"]
    if "function" in tests:
        yield from _pairs(peer, tests)
    elif "asserts" in tests:
        sources = [tests["setup"], *tests["asserts"]]
        names = _module(peer, [_parsed(source) for source in sources], entry_point)
        _execute(_parsed(tests["setup"]), names)
        for source in tests["asserts"]:
            yield source.strip(), partial(_execute, _parsed(source), names)
    else:
        tree = _parsed(tests["source"])
        setup = _parsed(tests["setup"])
        names = _module(peer, [setup, tree], entry_point)
        _execute(setup, names)
        yield from _of_source(tree, names, lambda: _candidate(peer, entry_point))


def _parsed(source: str) -> ast.Module:
    return ast.parse(source, "tests.py")


def _execute(tree: ast.Module, names: dict[str, Any]) -> None:
    exec(compile(tree, "tests.py", "exec"), names)


def _module(peer: Peer, trees: list[ast.Module], entry_point: str) -> dict[str, Any]:
    """The tests' namespace, with what the program defines of the names that they use.

    A builtin stays what it is although the program defines it, unless that is the one thing that the tests call.
    """
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found = peer.ask("names", sorted(used | ({entry_point} if entry_point else set())))
    own = {name: value for name, value in found.items() if not hasattr(builtins, name) or name == entry_point}
    kept = own if any(isinstance(value, Handle) for value in own.values()) else found
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    module.__dict__.update(kept, __name__=NAME, __builtins__=builtins)
    return module.__dict__


def _of_source(tree: ast.Module, names: dict[str, Any], candidate: Callable[[], Any]) -> Iterator[Unit]:
    """The tests of a module: its statements in order, then check(candidate), test functions and TestCases."""
    counted = 0
    for statement in tree.body:
        lines = ast.unparse(statement)
        one = ast.Module([statement], [])
        if _prepares(statement):
            _execute(one, names)
        else:
            counted += 1
            yield lines, partial(_execute, one, names)
    for name, value in [(name, value) for name, value in names.items() if getattr(value, "__module__", "") == NAME]:
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(value):
                counted += 1
                yield f"{name}.{method}", partial(_run_case, value(method))
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            if not [p for p in inspect.signature(value).parameters.values() if p.default is p.empty]:
                counted += 1
                yield name, value
        elif isinstance(value, types.FunctionType) and name == "check" and not _calls(tree, name):
            counted += 1
            yield name, lambda check=value: check(candidate())
    if not counted:
        raise _NotReadyError("the tests check nothing")


def _prepares(statement: ast.stmt) -> bool:
    """Whether a statement of the tests' module checks nothing itself."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    main = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    return isinstance(statement, (*kinds, ast.AugAssign, ast.Pass)) or text or main


def _calls(tree: ast.Module, name: str) -> bool:
    """Whether the tests' module calls a function itself."""
    calls = [node for statement in tree.body if isinstance(statement, ast.Expr) for node in ast.walk(statement)]
    return any(isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id == name for c in calls)


def _run_case(case: unittest.TestCase) -> None:
    result = case.run()
    wrong = [*result.failures, *result.errors] if result is not None else []
    if wrong:
        raise AssertionError(wrong[0][1].strip().splitlines()[-1])


def _candidate(peer: Peer, entry_point: str) -> Any:
    name = entry_point or peer.ask("last_function")
    found = peer.ask("names", [name])
    if name not in found:
        raise _NotReadyError(f"the program does not define {name or 'a function'}")
    return found[name]


def _pairs(peer: Peer, tests: dict[str, Any]) -> Iterator[Unit]:
    name = tests["function"]
    found = peer.ask("names", [name, "Solution"])
    if name not in found and "Solution" not in found:
        raise _NotReadyError(f"the program defines neither {name} nor a class Solution")

    def one(arguments: list[Any], expected: Any) -> None:
        function = found[name] if name in found else getattr(found["Solution"](), name)
        result = function(*arguments)
        # In part of the field's data sets the expected result stands in a list of its own.
        if not _same(result, expected) and not (isinstance(expected, list) and expected and _same(result, expected[0])):
            raise AssertionError(f"gave {_short(repr(result), 100)}, expected {_short(repr(expected), 100)}")

    for arguments, expected in zip(tests["arguments"], tests["expected"], strict=True):
        call = _short(", ".join(map(repr, arguments)), 100)
        yield f"{name}({call})", lambda a=arguments, e=expected: one(a, e)


def _same(result: Any, expected: Any) -> bool:
    """Equal as JSON would have it: tuples are lists, numbers with a fraction may differ by 1e-6."""
    if isinstance(result, list | tuple) and isinstance(expected, list | tuple):
        return len(result) == len(expected) and all(map(_same, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        found = {str(key): value for key, value in result.items()}
        wanted = {str(key): value for key, value in expected.items()}
        return found.keys() == wanted.keys() and all(_same(found[key], wanted[key]) for key in wanted)
    if isinstance(expected, float) and isinstance(result, int | float) and not isinstance(result, bool):
        return math.isclose(result, expected, rel_tol=_CLOSE, abs_tol=_CLOSE) or (
            result != result and expected != expected
        )
    return not isinstance(result, Handle) and bool(result == expected)


def _open_to(subject: Any, name: str) -> bool:
    """The program may use public attributes of objects whose class the tests define (a list node, a tree)."""
    return type(name) is str and not name.startswith("_") and type(subject).__module__ == NAME


def _short(text: str, length: int = _SHOWN) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."
