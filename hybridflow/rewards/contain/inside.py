"""Inside the containment: runs the program, and says why it ended where that can be told from inside.

The kernel contains; what is here explains. A program may tamper with it and gains a less precise reason.
"""

from __future__ import annotations

import _thread
import atexit
import errno
import json
import linecache
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hybridflow.rewards.contain import judge, solution

REPORT = 3
CHANNEL = (4, 5)
FILE = "main.py"  # what tracebacks call the program
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MEMORY = b'{"status": "memory", "reason": ""}\n'
_NETWORK = ("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo")
_NEW_PROCESS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn")
# Audit events of calls that change files: where among their arguments the paths are that they change.
_CHANGING = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    **dict.fromkeys(("os.setxattr", "os.removexattr"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}


def write_files(files: dict[str, str], owner: int | None) -> None:
    """Put the job's files in the working directory."""
    for name, text in files.items():
        folders = [str(folder) for folder in Path(name).parents][:-1]  # the last one is the directory itself
        if folders:
            os.makedirs(folders[0], exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
        if owner is not None:
            for path in (name, *folders):
                os.chown(path, owner, owner)


def run(job: dict[str, Any], directory: str, limits: dict[str, Any]) -> NoReturn:
    """Run the job as this process, to its end."""
    os.environ.update(HOME=directory, TMPDIR=directory, PWD=directory)
    if job["kind"] == "command":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(job["command"][0], job["command"], os.environ)
    # A lone surrogate that a program prints is its own business; it must not become an exception here.
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv = [FILE]
    for name in [name for name in sys.modules if name.partition(".")[0] == "hybridflow"]:
        del sys.modules[name]
    if job["kind"] == "judge":
        _end(lambda: _write_report(judge.run(job, *CHANNEL)))
    sys.path.insert(0, directory)
    sys.addaudithook(_explain(directory, limits["processes"]))
    if job["kind"] == "serve":
        _end(lambda: solution.serve(job["source"], *CHANNEL, load=load, told=told))
    _end(lambda: load(job["source"], "__main__"))


def load(source: str, name: str) -> types.ModuleType:
    """Run `source` as the module `name`."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)  # for tracebacks
    module.__dict__.update(__file__=FILE, __builtins__=__builtins__)
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def told(error: BaseException) -> bool:
    """Report an exception that a limit has caused; False for one that is the program's own."""
    found = _limit_behind(error)
    if found is not None:
        _report(*found)
    return found is not None


def _end(main: Callable[[], object]) -> NoReturn:
    """Run and exit as the interpreter does, telling what limit was behind an exception."""
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
        os.write(REPORT, _MEMORY)  # nothing is allocated that might fail again
    except BaseException as error:  # the program's: shown as the interpreter would
        _show(error)
        told(error)
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
        except BaseException as error:  # of the program's own making: its exit handlers, its sys.stdout
            told(error)
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


def _limit_behind(error: BaseException) -> tuple[str, str] | None:
    """Status and reason when an exception comes from a limit."""
    if isinstance(error, MemoryError):
        return "memory", ""
    if isinstance(error, RecursionError):
        return "recursion", f"recursed deeper than {sys.getrecursionlimit()} calls"
    if isinstance(error, OSError):
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            return "output", ""
        if error.errno in (errno.EROFS, errno.EPERM, errno.EACCES):
            return "forbidden", f"did what is not allowed: {error.strerror}" + (
                f": {error.filename}" if error.filename else ""
            )
        if error.errno == errno.EAGAIN:
            return "forbidden", "started more processes than allowed"
    if type(error) is SystemError:
        return "killed", f"broke the interpreter ({error})"
    if type(error) is RuntimeError and "can't start new thread" in str(error):
        return "forbidden", "started more threads than allowed"
    return None


def _report(status: str, reason: str) -> None:
    _write_report({"status": status, "reason": reason[:300]})


def _write_report(report: dict[str, Any]) -> None:
    rest = memoryview(json.dumps(report).encode() + b"\n")
    while rest:
        rest = rest[os.write(REPORT, rest) :]


def _explain(directory: str, processes: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that ends the program, with the reason, when it is about to do what it could not do anyway."""
    real, fspath, realpath, ids = os.path.realpath(directory), os.fspath, os.path.realpath, os.getpid
    devices = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    busy = _thread.RLock()

    def outside(path: Any) -> str | None:
        if path is None or isinstance(path, int):
            return None
        text = os.fsdecode(fspath(path))
        where = realpath(text)
        return None if where == real or where.startswith(real + "/") or where in devices else text

    def found(event: str, arguments: tuple[Any, ...]) -> str | None:
        if event == "open":
            place = outside(arguments[0]) if isinstance(arguments[2], int) and arguments[2] & _WRITING else None
            return place and f"opened {place} for writing, outside its directory"
        if event in _CHANGING:
            places = [outside(arguments[index]) for index in _CHANGING[event] if index < len(arguments)]
            return next((f"called {event} on {place}, outside its directory" for place in places if place), None)
        if event == "socket.__new__" and (arguments[1] != socket.AF_UNIX or not _from_socketpair()):
            return f"opened a socket ({_family(arguments[1])})"
        if event in network:
            return f"used the network ({event})"
        if event in ("os.kill", "os.killpg") and arguments[0] not in (0, ids()) and processes == 1:
            return f"sent signal {arguments[1]} to process {arguments[0]}"
        if event in _NEW_PROCESS and processes == 1:
            return f"started a process ({event}); it may have 1, itself"
        return None

    network = {f"socket.{name}" for name in _NETWORK}
    watched = {*network, "open", "socket.__new__", "os.kill", "os.killpg", *_NEW_PROCESS, *_CHANGING}

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in watched:
            return
        if not busy.acquire(blocking=False):
            return
        try:
            reason = found(event, arguments)
        except (ValueError, OSError, TypeError):  # the call itself will fail on such a path
            return
        finally:
            busy.release()
        if reason:
            _report("forbidden", reason)
            os._exit(1)

    return hook


def _from_socketpair() -> bool:
    frame = sys._getframe(4)  # found, hook, socket.__init__
    names = set()
    for _ in range(4):
        if frame is None:
            break
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "socketpair" in names


def _family(number: int) -> str:
    try:
        return socket.AddressFamily(number).name
    except ValueError:
        return str(number)
