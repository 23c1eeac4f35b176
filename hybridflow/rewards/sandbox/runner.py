"""The runner: what the process of a program does, from its first line to its end.

The kernel holds the program; the program may tamper with everything here, and gains nothing but a wrong reason.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

from hybridflow.rewards.sandbox import judge
from hybridflow.rewards.sandbox.program import MISSING, NAME, Channel, Local, Remote, find, last_function
from hybridflow.rewards.sandbox.values import decode, encode

CHANNEL = (3, 4)
FILE = "main.py"  # what tracebacks call the program
_MUTABLE = (list, dict, set, bytearray)


def run(job: dict[str, Any], directory: str) -> NoReturn:
    """Run the job as this process, to its end."""
    os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
    if job["kind"] == "judge":
        verdict = os.dup(1)
        os.dup2(2, 1)  # what the tests print is no verdict
    # A lone surrogate that a program prints is its own business; it must not become an exception here.
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = [FILE]
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridflow"]:
        del sys.modules[name]
    sys.path.insert(0, directory)
    if job["kind"] == "judge":
        _end(lambda: os.write(verdict, json.dumps(_judge(job)).encode()))
    if job["kind"] == "serve":
        _end(lambda: _serve(job["program"], Channel(*CHANNEL)))
    _end(lambda: _load(job["program"], "__main__"))


def _judge(job: dict[str, Any]) -> dict[str, Any]:
    beside = job.get("program")
    if beside is None:
        return judge.run(job, Remote(Channel(*CHANNEL)))
    return judge.run(job, Local(lambda: vars(_load(beside, NAME))))


def _load(source: str, name: str) -> types.ModuleType:
    """Run `source` as the module `name`."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)  # for tracebacks
    module.__dict__.update(__file__=FILE, __builtins__=__builtins__)
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def _serve(source: str, channel: Channel) -> None:
    """Load the program, and call its functions as the tests ask until they are through."""
    names, failure = {}, None
    try:
        names = vars(_load(source, NAME))
    except Exception as error:  # the program's, told to the tests when they ask for its names
        failure = error
    while (request := channel.receive()) is not None:
        try:
            if failure is not None:
                raise failure
            answer = _called(names, request) if "call" in request else _described(names, request["names"])
        except Exception as error:  # of the program: it belongs to the tests
            answer = {"error": _told(error)}
        channel.send(answer)


def _described(names: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """What the program has under the names: a function to call, the classes of an exception, or a value."""
    found = {}
    for name in wanted:
        value = find(names, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            found[name] = {"raises": _lineage(value)}
        elif callable(value):
            found[name] = {"call": True}
        elif value is not MISSING:
            found[name] = {"value": encode(value)}
    return {"names": found, "last": last_function(names)}


def _called(names: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    function = find(names, request["call"])
    arguments, named = decode(request["args"]), decode(request["kwargs"])
    before = [json.dumps(argument) for argument in request["args"][1]]
    value = encode(function(*arguments, **named))
    after = [encode(argument) if isinstance(argument, _MUTABLE) else None for argument in arguments]
    changed = [state if state and json.dumps(state) != old else None for state, old in zip(after, before)]
    return {"value": value, "changed": changed}


def _lineage(kind: type[BaseException]) -> list[str]:
    """Names of an exception's own classes, and last the builtin one that they come from."""
    own = [base for base in kind.__mro__ if issubclass(base, BaseException)]
    count = next(index for index, base in enumerate(own) if base.__module__ == "builtins")
    return [base.__name__ for base in own[: count + 1]]


def _told(error: BaseException) -> dict[str, Any]:
    try:
        arguments = json.loads(json.dumps(encode(list(error.args))))
    except Exception as second:  # a value that cannot be sent; the class is what counts
        arguments = encode([type(second).__name__])
    return {"classes": _lineage(type(error)), "args": arguments, "limit": _line(error)}


def _line(error: BaseException) -> str:
    """The last line that a traceback has of it."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    try:
        return f"{kind.__name__}: {error}"[:300]
    except Exception as second:  # a __str__ of the program's own
        return f"{kind.__name__}: {type(second).__name__}"


def _end(main: Callable[[], object]) -> NoReturn:
    """Run and exit as the interpreter does."""
    code = 1
    try:
        main()
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if code and not isinstance(stop.code, int):
            _print_error(stop.code)
    except MemoryError:
        os.write(2, b"MemoryError\n")  # nothing is allocated that might fail again
    except BaseException as error:  # the program's: shown as the interpreter would
        _show(error)
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException as error:  # of the program's own making: its exit handlers, its sys.stdout
            _print_error(_line(error))
            code = code or 1
        finally:
            os._exit(code & 0xFF)


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException as second:  # an excepthook or a __str__ of the program's own
        _print_error(type(second).__name__)


def _print_error(value: object) -> None:
    try:
        os.write(2, f"{value}\n".encode("utf-8", "replace"))
    except BaseException as error:  # a __str__ of the program's own
        os.write(2, f"{type(error).__name__}\n".encode())
