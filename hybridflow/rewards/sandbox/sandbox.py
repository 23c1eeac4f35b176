"""Sandbox: runs untrusted programs without network, with resource limits, and leaves no process behind; how each run of
one ended, and the judgement of its tests."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from hybridflow.errors import ConfigError, RewardError, nearest
from hybridflow.processes.supervisor import ONE_THREAD, ServerProcess
from hybridflow.rewards.sandbox.containment import DIRECTORY, EMPTY, remove_tree
from hybridflow.settings import Check, Positive, Size, settings

Status = Literal["ok", "failed", "timeout", "memory", "output", "recursion", "forbidden", "killed", "unreadable"]
# Endings in which the program was stopped before it was found right or wrong.
CONTAINED: tuple[Status, ...] = ("timeout", "memory", "output", "recursion", "forbidden", "killed")
# How the last line of a traceback begins where a limit was behind the exception.
_BEHIND: dict[str, Status] = {
    "MemoryError": "memory",
    "RecursionError": "recursion",
    "PermissionError": "forbidden",
    "BlockingIOError: [Errno 11]": "forbidden",
    "RuntimeError: can't start new thread": "forbidden",
    "OSError: [Errno 30]": "forbidden",  # a read-only file system
    "OSError: [Errno 27]": "output",  # a file too large
    "OSError: [Errno 28]": "output",  # no space left
}
_VERDICT = {"passed": int, "total": int, "reason": str, "error": str, "ended": bool, "unreadable": str}
_GRACE = 120.0  # beyond a limit, until a supervisor on a busy machine has reported


_Whole = Annotated[Size, Check("below 2**31", lambda value: value < 2**31)]


@settings
class Limits:
    """Limits of one run of a contained program: one process with at most 32 threads.

    `seconds`: wall-clock time, and `cpu_seconds` of processor time (default: `seconds` rounded up, plus 1).
    `memory_mb`: address space. `output_kb`: of standard output and of standard error, each. `file_mb`: of all files it
    writes; by Landlock it is measured every 1 to 10 ms (see `Usage`), so more may be written by the rate of writing
    times that. Errors: ConfigError for values out of range.
    """

    seconds: Annotated[Positive, Check("less than a million", lambda value: value < 1e6)] = 5.0
    cpu_seconds: _Whole | None = None
    memory_mb: Annotated[_Whole, Check("at least 64", lambda value: value >= 64)] = 512
    output_kb: _Whole = 64
    file_mb: _Whole = 16

    @property
    def cpu(self) -> int:
        """Seconds of processor time that the program may take."""
        return self.cpu_seconds if self.cpu_seconds is not None else math.ceil(self.seconds) + 1


@dataclass(frozen=True, kw_only=True)
class ProgramEnd:
    """How a program ended, and why; `contained`: whether its containment has stopped it."""

    status: Status
    reason: str = ""

    @property
    def contained(self) -> bool:
        return self.status in CONTAINED


@dataclass(frozen=True, kw_only=True)
class Result(ProgramEnd):
    """How a run ended.

    `status`: "ok"; "failed" (it raised, or exited with another code than 0); or the limit that stopped it: "timeout",
    "memory", "output" (printed or wrote to files more than allowed), "recursion", "forbidden" (a file outside its
    directory, a socket, a process), "killed" (a crash, or a signal). `reason` says it in words, "" for "ok".
    `returncode` as of subprocess (negative: signal), None where the run was ended. `stdout`, `stderr`: what was
    printed within the limit. `seconds`: wall-clock time.
    """

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CodeResult(ProgramEnd):
    """Result of unit tests on a program: `passed` of `total` tests, and the `score` that `Code` gives it.

    `status` and `reason` as of `Result`: "ok" when all passed, "failed" with the first test that did not, or what
    stopped the program before the tests were through; "unreadable" where the tests cannot judge any program, or ended
    by themselves: the row is a RowFailure. After a stop, and after the first failure where the tests end there, `total`
    counts the tests that were begun.
    """

    passed: int = 0
    total: int = 0
    score: float = 0.0


class Execution:
    """One run of a program, seen by its caller; leaving it stops the program."""

    def __init__(
        self,
        launch: Callable[[Limits, list[int]], None],
        job: Mapping[str, Any],
        limits: Limits,
        *,
        stdin: str = "",
        channel: tuple[int, ...] = (),
    ) -> None:
        self.limits, self._facts = limits, {}
        self._control, theirs = socket.socketpair()
        given = [_in_memory(json.dumps(job)), _in_memory(stdin)]
        self._output = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("stdout", "stderr")]
        try:
            with theirs:
                launch(limits, [theirs.fileno(), *given, *self._output, *channel])
        except RewardError:
            self.__exit__()
            raise
        finally:
            for end in given:
                os.close(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        for end in self._output:
            os.close(end)

    def stop(self) -> None:
        """Have the supervisor kill the program now."""
        with suppress(OSError):  # it has stopped already
            self._control.shutdown(socket.SHUT_WR)

    def wait(self) -> dict[str, Any]:
        """The supervisor's report: `end` ("exit", "timeout", "files", ...), `exit`, `cpu`, `seconds`.

        Errors: RewardError when the program could not be started, or was lost.
        """
        said = b""
        self._control.settimeout(self.limits.seconds + _GRACE)
        try:
            while not self._facts and (piece := self._control.recv(1 << 16)):
                said += piece
        except OSError as error:
            raise RewardError(f"A contained program was lost: {error}.") from error
        for line in said.splitlines():
            self._facts.update(json.loads(line))
        if "error" in self._facts:
            raise RewardError(f"A contained program could not be started: {self._facts['error']}.")
        if not self._facts:
            raise RewardError("A contained program was lost: its supervisor ended without a report.")
        return self._facts

    def printed(self) -> list[str]:
        """Standard output and standard error, up to the limit."""
        most = self.limits.output_kb << 10
        return [os.pread(end, most, 0).decode("utf-8", "replace") for end in self._output]

    def result(self) -> Result:
        facts = self.wait()
        code = os.waitstatus_to_exitcode(facts["exit"]) if facts["end"] == "exit" else None
        stdout, stderr = self.printed()
        status, reason = self._ending(code, facts, stderr)
        ended: dict[str, Any] = {"status": status, "reason": _shown(reason), "returncode": code}
        return Result(**ended, stdout=stdout, stderr=stderr, seconds=facts["seconds"])

    def _ending(self, code: int | None, facts: dict[str, Any], stderr: str) -> tuple[Status, str]:
        limits = self.limits
        if any(os.fstat(end).st_size > limits.output_kb << 10 for end in self._output):
            return "output", f"printed more than {limits.output_kb} kB"
        if facts["end"] == "timeout":
            return "timeout", f"took longer than {limits.seconds:g} s"
        if facts["end"] == "threads":
            return "forbidden", "started more threads than allowed"
        if facts["end"] == "files" or code == -signal.SIGXFSZ:
            return "output", f"wrote more than {limits.file_mb} MB to files"
        if code == 0:
            return "ok", ""
        if code is None:
            return "killed", "was killed"
        if code in (-signal.SIGXCPU, -signal.SIGKILL) and facts["cpu"] > limits.cpu - 1:
            return "timeout", f"took longer than {limits.cpu} s of processor time"
        if code < 0:
            name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
            return "killed", f"died with {name}"
        last = stderr.strip().splitlines()[-1][:300] if stderr.strip() else ""
        return behind(last, limits) or ("failed", f"exited with code {code}" + (f": {last}" if last else ""))


def behind(line: str, limits: Limits) -> tuple[Status, str] | None:
    """Status and reason when an exception, told by the last line of its traceback, comes from a limit."""
    told = {
        "memory": f"needed more memory than its {limits.memory_mb} MB",
        "forbidden": f"did what is not allowed: {line}",
        "output": f"wrote more than {limits.file_mb} MB to files",
    }
    beginning = next((known for known in _BEHIND if line.startswith(known)), None)
    return None if beginning is None else (_BEHIND[beginning], told.get(_BEHIND[beginning], line))


def _shown(reason: str) -> str:
    """Without what a terminal obeys, or a file cannot hold."""
    return "".join(part if part.isprintable() or part == "\n" else "?" for part in reason)


def _in_memory(text: str) -> int:
    """A sealed file in memory, read from its beginning."""
    file = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(text.encode("utf-8", "replace"))
    os.lseek(file, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def _verdict(printed: str) -> dict[str, Any]:
    """What the tests found; empty where they ended early."""
    try:
        told = json.loads(printed)
        sound = {name: type(value) for name, value in told.items()} == _VERDICT and 0 <= told["passed"] <= told["total"]
    except (ValueError, AttributeError, RecursionError):
        return {}
    return {name: _shown(value) if isinstance(value, str) else value for name, value in told.items()} if sound else {}


def judgement(solving: Execution, judging: Execution) -> CodeResult:
    """The result that follows from how a program and its tests ended, and from the verdict of the tests."""
    program, tests, verdict = solving.result(), judging.result(), _verdict(judging.printed()[0])
    passed, total = verdict.get("passed", 0), verdict.get("total", 0)
    judged = tests.status == "ok" and total > 0
    if tests.status == "ok" and (unreadable := verdict.get("unreadable")):
        return CodeResult(status="unreadable", reason=unreadable)
    if judged and passed == total:
        return CodeResult(passed=passed, total=total, status="ok")
    through = solving.wait()["end"] == "stopped" and program.status == "killed"  # by us, when the tests were through
    if program.contained and not through:
        return CodeResult(passed=passed, total=total, status=program.status, reason=program.reason)
    if limited := behind(verdict.get("error", ""), solving.limits):
        return CodeResult(passed=passed, total=total, status=limited[0], reason=limited[1])
    if not judged:
        reason = f"its tests: {tests.reason or 'they ended without a verdict'}"
        # By what the program has answered, as far as is known.
        stopped = tests.contained and tests.status != "killed"
        return CodeResult(status=tests.status if stopped else "unreadable", reason=reason)
    reason = verdict.get("reason", "")
    if verdict.get("ended") and program.returncode is not None:
        reason = f"exited with code {program.returncode} before the tests were through"
    return CodeResult(passed=passed, total=total, status="failed", reason=reason)


_log = logging.getLogger(__name__)

Mechanism = Literal["bubblewrap", "landlock"]
_PACKAGE = Path(__file__).resolve().parents[2]
_MAIN = "import json, sys; c = json.loads(sys.argv[1]); sys.path.append(c['root']); "
_MAIN += "from hybridflow.rewards.sandbox.runner import main; main(c)"
_JUDGE_SECONDS = 5.0  # more than the program has, whose end is reported first
_SYSTEM = (
    *("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "USER": "program", "MALLOC_ARENA_MAX": "2"}


class Sandbox:
    """Runs contained programs, several at a time from several threads; nothing is left running when it is closed.

    A program reaches no network, no other process, and no file but Python's standard library and the packages installed
    beside hybridflow, read-only, and one empty directory to write to. It cannot start processes.
    `mechanism`: "bubblewrap" (the program `bwrap`: namespaces, in which no file of the user's exists) or "landlock"
    (the program sees that files exist, but cannot open them); default: the first that works on this machine. Both hold
    with resource limits and a seccomp filter.
    Errors: ConfigError where it does not work.
    """

    def __init__(self, mechanism: Mechanism | None = None, *, prelude: str = "") -> None:
        if mechanism is not None and mechanism not in get_args(Mechanism):
            raise ConfigError(f"Sandbox(mechanism={mechanism!r}).{nearest(str(mechanism), get_args(Mechanism))}")
        tried: dict[Mechanism, str] = {}
        for name in (mechanism,) if mechanism else get_args(Mechanism):
            if not (reason := unavailable(name)):
                break
            tried[name] = reason
        else:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in tried.items())
            raise ConfigError(
                f"Programs from a model are run only where they can be contained, by bubblewrap or by Landlock and "
                f"seccomp, and here {mechanism or 'neither'} works ({reasons}). Install bubblewrap and allow user "
                f"namespaces, or use a kernel with Landlock (5.13 or newer)."
            )
        if not mechanism and tried:
            _say_fallback(tried["bubblewrap"])
        self.mechanism: Mechanism = name
        self.prelude = prelude
        self._start()

    def run(self, program: str, *, stdin: str = "", limits: Limits | None = None) -> Result:
        """Run a Python program to its end or to its limit."""
        script = {"kind": "script", "program": program, "prelude": self.prelude}
        with Execution(self._launch, script, limits or Limits(), stdin=stdin) as running:
            return running.result()

    def judge(
        self,
        program: str,
        tests: Mapping[str, Any],
        *,
        limits: Limits,
        entry_point: str = "",
        stop: bool = True,
    ) -> CodeResult:
        """Run unit tests (as `judge.run` takes them) against a Python program, contained as well.

        The program lives in a process of its own: the tests call it, and see plain values.
        """
        job = {"kind": "judge", "tests": dict(tests), "entry_point": entry_point, "stop": stop, "prelude": self.prelude}
        patient = replace(limits, seconds=limits.seconds + _JUDGE_SECONDS, output_kb=max(limits.output_kb, 64))
        with ExitStack() as stack:
            there, back = os.pipe(), os.pipe()
            try:
                served = {"kind": "serve", "program": program, "prelude": self.prelude}
                solving = stack.enter_context(Execution(self._launch, served, limits, channel=(there[0], back[1])))
                judging = stack.enter_context(Execution(self._launch, job, patient, channel=(back[0], there[1])))
            finally:
                for end in (*there, *back):
                    os.close(end)
            judging.wait()
            solving.stop()
            return judgement(solving, judging)

    def close(self) -> None:
        """End the fork server, and with it whatever still runs."""
        self._server.close()
        if self._scratch is not None:
            remove_tree(self._scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._lock, self._scratch = threading.Lock(), None
        if self.mechanism == "landlock":
            self._scratch = tempfile.mkdtemp(prefix="hybridflow-program-")
            os.chmod(self._scratch, 0o711)
        python = getattr(sys, "_base_executable", None) or sys.executable  # it needs nothing but its own directory

        def command(end: int) -> list[str]:
            config = _configuration(end, self._scratch)
            inside = [python, "-I", "-S", "-B", "-c", _MAIN, json.dumps(config)]
            return inside if self._scratch else [*_bubblewrap(config), *inside]

        try:
            self._server = ServerProcess(command, environment=_ENVIRONMENT | ONE_THREAD, seconds=60.0, directory="/")
        except OSError as error:
            if self._scratch is not None:
                remove_tree(self._scratch)
            raise RewardError(f"The sandbox does not start: {error}") from None

    def _launch(self, limits: Limits, ends: list[int]) -> None:
        """Have the server run what the ends of a `Run` describe. Errors: RewardError where it is gone."""
        wanted = {name: getattr(limits, name) for name in ("seconds", "memory_mb", "file_mb", "cpu")}
        try:
            with self._lock:
                self._server.ask("fork", wanted, ends)
        except OSError as error:
            raise RewardError(
                f"A contained program could not be started: {error}. Its sandbox may be closed."
            ) from error


@cache
def _say_fallback(reason: str) -> None:
    _log.warning("Programs are contained by Landlock; bubblewrap does not work here: %s.", reason)


@cache
def unavailable(mechanism: Mechanism) -> str:
    """Why a mechanism does not work on this machine, "" where it does. Tried out once per process."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"it is there for x86_64 and aarch64, this machine is {os.uname().machine}"
    if mechanism == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    sandbox = Sandbox.__new__(Sandbox)
    sandbox.mechanism, sandbox.prelude = mechanism, ""
    try:
        sandbox._start()
        with sandbox:
            result = sandbox.run("import colorsys\nprint(6 * 7)", limits=Limits(seconds=30))
    except RewardError as error:
        return str(error)
    if result.stdout != "42\n":
        return f"a trial program ended so: {result.status} {result.reason}".strip()
    return ""


def _configuration(end: int, scratch: str | None) -> dict[str, Any]:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys(path for path in (paths["purelib"], paths["platlib"]) if os.path.isdir(path)))
    wanted = [*_SYSTEM, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix), *packages]
    readable: list[str] = []
    for path in map(os.path.abspath, wanted):
        if os.path.exists(path) and path != "/" and not any(Path(path).is_relative_to(other) for other in readable):
            readable.append(path)
    return {
        "caller": os.getpid(),  # so that its command line tells whose it is
        "socket": end,
        "root": str(_PACKAGE.parent),
        "packages": packages,
        "scratch": scratch,
        "readable": readable,
        "devices": [path for path in _DEVICES if os.path.exists(path)],
        # Whether not every user can reach what is readable.
        "search": not all(
            os.stat(part).st_mode & 0o001
            for path in readable
            for part in (*Path(path).parents, *([path] if os.path.isdir(path) else []))
        ),
    }


def _bubblewrap(config: Mapping[str, Any]) -> list[str]:
    """The command that runs the fork server where only what is readable exists, with the rights to make mounts."""
    unshared = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts"
    command = [shutil.which("bwrap") or "bwrap", *unshared.split(), "--cap-drop", "ALL"]
    rights = ("SYS_ADMIN",) if os.geteuid() else ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "KILL")
    command += ["--unshare-user"] if os.geteuid() else []
    command += [word for right in rights for word in ("--cap-add", f"CAP_{right}")]
    seen = (*config["readable"], str(_PACKAGE))
    # Else an unprivileged user cannot enter them.
    made = {str(above): None for path in seen for above in reversed(Path(path).parents)}
    for path in (*made, *EMPTY, DIRECTORY):
        command += ["--dir", path]
    for path in seen:
        command += ["--ro-bind", path, path]
    for path in config["devices"]:
        command += ["--dev-bind", path, path]
    return [*command, "--proc", "/proc", "--remount-ro", "/", "--"]
