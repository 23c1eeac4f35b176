"""The fork server: a small process that forks every contained program; and the program's own process.

It loads no user site packages, inherits only one socket, and has an empty environment. Per program it forks a
supervisor, which forks the program, kills it at the time limit or when the other end of `control` is closed, and
reports when it has ended:

    caller  ->  fork server  ->  supervisor  ->  program, which is one process and remains it
"""

from __future__ import annotations

import atexit
import builtins
import gc
import json
import linecache
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from hybridflow.processes.fork_server import die_with_parent, serve
from hybridflow.rewards.sandbox import containment, judge
from hybridflow.rewards.sandbox.program import NAME, Remote, ValueChannel, decode, encode, take_objects
from hybridflow.rewards.sandbox.test_source import prelude_names

CHANNEL = (3, 4)
FILE = "main.py"  # what tracebacks call the program
_MUTABLE = (list, dict, set, bytearray)


def main(config: dict[str, Any]) -> NoReturn:
    """Serve until the other end of the socket is closed; never returns."""
    owner = socket.socket(fileno=config["socket"])
    try:
        if config["scratch"] is not None:
            containment.landlock_version()
    except OSError as error:
        owner.send(json.dumps(str(error)).encode())
        os._exit(1)
    # Programs may import what is installed beside hybridflow, but not from the directory of its sources.
    sys.path[:] = [*(path for path in sys.path if path != config["root"]), *config["packages"]]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors report by themselves; the kernel buries them
    gc.collect()
    gc.freeze()
    owner.send(json.dumps("").encode())
    me = os.getpid()

    def run(limits: dict[str, Any], ends: list[int]) -> None:
        with _never_back(ends[0]):
            _supervise(config, limits, ends, me)

    serve(owner, run, answers=False)
    scratch, due = config["scratch"], time.monotonic() + 5.0
    while scratch is not None and os.path.exists(scratch) and time.monotonic() < due:
        with suppress(OSError):  # supervisors end when the caller does, and one is not done yet
            os.rmdir(scratch)
        time.sleep(0.01)
    os._exit(0)


def _supervise(config: dict[str, Any], limits: dict[str, Any], ends: list[int], parent: int) -> None:
    """`ends`: for control, of the job, and those of the program: 0, 1, 2, and its channel."""
    control, *others = ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    scratch = None if config["scratch"] is None else os.path.join(config["scratch"], str(os.getpid()))
    if scratch is not None:
        os.mkdir(scratch, 0o700)
        if os.getuid() == 0:
            os.chown(scratch, containment.NOBODY, containment.NOBODY)
    try:
        start, me = time.monotonic(), os.getpid()
        child = os.fork()
        if child == 0:
            with _never_back(control):
                _become_program(config, limits, others, scratch, me)
        counted = containment.Usage(child, scratch, limits["file_mb"] << 20, others[1:4])
        for end in others:
            os.close(end)
        end = _wait(child, control, limits["seconds"], counted, parent)
        _, status, used = os.wait4(child, 0)
        cpu, seconds = used.ru_utime + used.ru_stime, time.monotonic() - start
    finally:
        if scratch is not None:
            containment.remove_tree(scratch)
    _tell(control, end=end, exit=status, cpu=cpu, seconds=seconds)


def _wait(child: int, control: int, seconds: float, used: containment.Usage, parent: int) -> str:
    """Wait for its end, or kill it: "exit", "timeout", "files", "threads" or "stopped"."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)  # and hang-ups, when the caller is gone
    due, end = time.monotonic() + seconds, "timeout"
    while (left := due - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(left, used.pause))]
        if ended in ready or control in ready or os.getppid() != parent:
            end = used.exceeded() or ("exit" if ended in ready else "stopped")  # after the last write, too
            break
        if over := used.exceeded():
            end = over
            break
    if end != "exit":
        os.kill(child, signal.SIGKILL)
    return end


def _become_program(
    config: dict[str, Any], limits: dict[str, Any], ends: list[int], scratch: str | None, parent: int
) -> None:
    """In the process of the program: give everything up, and run it."""
    with os.fdopen(os.dup(ends[0]), "rb") as file:
        job = json.loads(file.read())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    high = [os.dup2(end, 100 + index, inheritable=True) for index, end in enumerate(ends[1:])]
    for index, end in enumerate(high):  # the descriptors 0, 1, 2, ..., without any other
        os.dup2(end, index, inheritable=True)
    os.closerange(len(high), 1 << 16)
    if scratch is None:
        directory = containment.mount_directory(limits["file_mb"])
    else:
        directory = scratch
        readable = (*config["readable"], directory)
        containment.restrict_files(readable=readable, devices=config["devices"], writable=directory)
    os.chdir(directory)
    containment.give_up_rights(keep_search=scratch is not None and config["search"])
    die_with_parent(parent)
    containment.limit(limits)
    containment.filter_calls(metadata=scratch is None)
    _run(job, directory)


@contextmanager
def _never_back(control: int) -> Iterator[None]:
    """For all that a forked process does: tell what went wrong, and never come back into the code of its parent."""
    try:
        yield
        os._exit(0)
    except BaseException as error:  # told to the caller, who raises
        try:
            _tell(control, error=f"{type(error).__name__}: {error}")
        except OSError:  # the program has lost this end before it runs
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(1)


def _tell(control: int, **facts: Any) -> None:
    os.write(control, json.dumps(facts).encode() + b"\n")


def _run(job: dict[str, Any], directory: str) -> NoReturn:
    """Run the job as this process, to its end.

    The kernel holds the program; it may tamper with everything from here on, and gains nothing but a wrong reason.
    """
    os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
    if job["kind"] == "judge":
        verdict = os.dup(1)
        os.dup2(2, 1)  # what the tests print is no verdict
    # A lone surrogate that a program prints is its own business; it must not become an exception here.
    as_text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin, sys.stdout = os.fdopen(0, **as_text), os.fdopen(1, "w", **as_text)
    sys.stderr = os.fdopen(2, "w", buffering=1, **as_text)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = [FILE]
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridflow"]:
        del sys.modules[name]
    sys.path.insert(0, directory)
    if job["kind"] == "judge":
        program = Remote(ValueChannel(*CHANNEL))
        _end(lambda: os.write(verdict, json.dumps(judge.run(job, program)).encode()))
    if job["kind"] == "serve":
        _end(lambda: _serve(job, ValueChannel(*CHANNEL)))
    _end(lambda: _load(job, "__main__"))


MISSING = object()


def find(names: Mapping[str, Any], name: str) -> Any:
    """The program's value of a name, or a method of its class Solution; MISSING for neither."""
    solution = names.get("Solution")
    if name in names or not isinstance(solution, type) or not hasattr(solution, name):
        return names.get(name, MISSING)
    return lambda *args, **kwargs: getattr(solution(), name)(*args, **kwargs)


def last_function(names: Mapping[str, Any]) -> str:
    """Name of the function that the program defines last, "" if it defines none."""
    found = [name for name, value in names.items() if isinstance(value, types.FunctionType)]
    own = [name for name in found if names[name].__module__ == NAME]
    return own[-1] if own else ""


def _load(job: dict[str, Any], name: str) -> types.ModuleType:
    """Run the program, which has the names of the prelude as it has builtins: it does not define them."""
    source, names = job["program"], prelude_names(job["prelude"])
    module = types.ModuleType(name)
    sys.modules[name] = module
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)  # for tracebacks
    module.__dict__.update(__file__=FILE, __builtins__={**vars(builtins), **names} if names else __builtins__)
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def _serve(job: dict[str, Any], channel: ValueChannel) -> None:
    """Load the program, and call its functions as the tests ask until they are through."""
    names, failure = {}, None
    take_objects(lambda name: find(names, name))
    try:
        names = vars(_load(job, NAME))
    except Exception as error:  # the program's, told to the tests when they ask for its names
        failure = error
    while (request := channel.receive()) is not None:
        try:
            if failure is not None:
                raise failure
            answer = _called(names, request) if "call" in request else _described(names, request["names"])
        except Exception as error:  # of the program: it belongs to the tests
            try:
                arguments = json.loads(json.dumps(encode(list(error.args))))
            except Exception as second:  # a value that cannot be sent; the class is what counts
                arguments = encode([type(second).__name__])
            answer = {"error": {"classes": _lineage(type(error)), "args": arguments, "limit": _line(error)}}
        channel.send(answer)


def _described(names: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """The program's values of the names: a function to call, the classes of an exception, or a value."""
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
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        try:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        except BaseException as second:  # an excepthook or a __str__ of the program's own
            _print_error(type(second).__name__)
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException as error:  # of the program's own making: its exit handlers, its sys.stdout
            _print_error(_line(error))
            code = code or 1
        finally:
            os._exit(code & 0xFF)


def _print_error(value: object) -> None:
    try:
        os.write(2, f"{value}\n".encode("utf-8", "replace"))
    except BaseException as error:  # a __str__ of the program's own
        os.write(2, f"{type(error).__name__}\n".encode())
