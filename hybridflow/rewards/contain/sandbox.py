"""Sandbox: runs programs that nobody has read, where they can neither reach out, take too much, nor stay behind."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hybridflow.errors import ConfigError, RewardError, nearest
from hybridflow.rewards.contain.limits import ContainedResult, Judgement, Limits
from hybridflow.rewards.contain.running import Running, watch

Mechanism = Literal["namespaces", "landlock"]
_ROOT = str(Path(__file__).resolve().parents[3])
_MAIN = "import json, sys; c = json.loads(sys.argv[1]); sys.path.append(c['root']); "
_MAIN += "from hybridflow.rewards.contain.zygote import main; main(c)"
_START_SECONDS = 60.0
_JUDGE_SECONDS = 5.0  # more than the program has: its end is told first
_SYSTEM = (
    *("/usr", "/bin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/alternatives"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FIRST_UID, _UIDS, _SLOTS = 1 << 30, 1 << 20, 250
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "program",
    "LOGNAME": "program",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Sandbox:
    """Runs contained programs, several at a time from several threads; nothing is left running when it is closed.

    `mechanism`: "namespaces" (user, mount, process id and network namespaces; the program sees no file of the user's)
    or "landlock" (Landlock and a seccomp filter; the program sees that files exist, but cannot open them); default:
    the first that this machine offers. Both hold with resource limits and a seccomp filter. A program finds Python's
    standard library and the packages installed beside hybridflow, read-only, and one empty directory to write to.
    Errors: ConfigError where the machine does not offer it.
    """

    def __init__(self, mechanism: Mechanism | None = None) -> None:
        if mechanism is not None and mechanism not in get_args(Mechanism):
            raise ConfigError(f"Sandbox(mechanism={mechanism!r}).{nearest(str(mechanism), get_args(Mechanism))}")
        offered = containment()
        chosen = mechanism or next((name for name in get_args(Mechanism) if not offered[name]), None)
        if chosen is None or offered[chosen]:
            reasons = "; ".join(f"{name}: {offered[name]}" for name in get_args(Mechanism) if offered[name])
            raise ConfigError(
                f"Programs from a model are run only where they can be contained, by user namespaces or by Landlock "
                f"and seccomp, and this machine does not offer {mechanism or 'either'} ({reasons}). Allow "
                f"unprivileged user namespaces, or use a kernel with Landlock (5.13 or newer)."
            )
        self.mechanism: Mechanism = chosen
        self._start(chosen)

    def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ContainedResult:
        """Run a Python program (its source), or a command, to its end or to its limit.

        `files`: relative path -> text, put in its directory first. Errors: ConfigError for a path that leads out.
        """
        for name in files or {}:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ConfigError(f"files={{{name!r}: ...}}: give paths inside the program's directory.")
        job = {"kind": "script", "source": program} if isinstance(program, str) else {"command": list(program)}
        running = self._launch({"kind": "command", **job, "files": dict(files or {})}, limits or Limits(), stdin)
        watch([running])
        return running.result()

    def judge(
        self, program: str, tests: Mapping[str, Any], *, entry_point: str = "", stop: bool = True, limits: Limits
    ) -> Judgement:
        """Run unit tests (as `judge.run` takes them) against a Python program that lives in a process of its own.

        Both are contained, apart from each other: the tests call the program, and see plain values.
        """
        there, back = os.pipe(), os.pipe()
        job = {"kind": "judge", "tests": dict(tests), "entry_point": entry_point, "stop": stop}
        patient = replace(limits, seconds=limits.seconds + _JUDGE_SECONDS)
        try:
            solving = self._launch({"kind": "serve", "source": program}, limits, "", (there[0], back[1]))
            try:
                judging = self._launch(job, patient, "", (back[0], there[1]))
            except BaseException:
                solving.close()
                raise
        finally:
            for end in (*there, *back):
                os.close(end)
        watch([judging, solving], together=True)
        return _judgement(solving, judging)

    def close(self) -> None:
        """End the zygote, and with it whatever still runs."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, mechanism: Mechanism) -> None:
        self._lock = threading.Lock()
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(_SLOTS):
            self._slots.put(slot)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._scratch = None
        if mechanism == "landlock":
            self._scratch = tempfile.mkdtemp(prefix="hybridflow-program-")
            os.chmod(self._scratch, 0o711)
        config = _configuration(mechanism, theirs.fileno(), self._scratch)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [_python(), "-I", "-S", "-B", "-c", _MAIN, json.dumps(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
            self._socket.settimeout(_START_SECONDS)
            answer = json.loads(self._socket.recv(1 << 16) or b'{"error": "its zygote ended"}')
        except OSError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            self.close()
            raise _UnavailableError(answer["error"])

    def _launch(self, job: Mapping[str, Any], limits: Limits, stdin: str, channel: tuple[int, ...] = ()) -> Running:
        slot = self._slots.get()
        running = Running(limits, stdin, lambda: self._slots.put(slot))
        try:
            ends = running.open(json.dumps(job).encode())
            settings = {name: getattr(limits, name) for name in ("seconds", "memory_mb", "processes", "file_mb", "cpu")}
            request = json.dumps({"slot": slot, "limits": settings}).encode()
            with self._lock:
                socket.send_fds(self._socket, [request], [*ends, *channel])
        except OSError as error:
            running.close()
            raise RewardError(
                f"A contained program could not be started: {error}. Its sandbox may be closed."
            ) from error
        running.started()
        return running


def _judgement(solving: Running, judging: Running) -> Judgement:
    """What the ends of a program and of its tests, and the verdict of the latter, come to."""
    program, tests, verdict = solving.result(), judging.result(), judging.report
    passed, total = int(verdict.get("passed", 0)), int(verdict.get("total", 0))
    judged = tests.status == "ok" and total > 0
    if judged and passed == total:
        return Judgement(passed=passed, total=total, status="ok", reason="")
    through = solving.facts["end"] == "stopped" and program.status == "killed"  # by us, when the tests were through
    if program.contained and not through:
        return Judgement(passed=passed, total=total, status=program.status, reason=program.reason)
    if not judged:
        reason = f"its tests: {tests.reason or 'they ended without a verdict'}"
        return Judgement(passed=0, total=0, status=tests.status if tests.contained else "failed", reason=reason)
    reason = str(verdict.get("reason", ""))
    if verdict.get("ended") and program.returncode is not None:
        reason = f"exited with code {program.returncode} before the tests were through"
    return Judgement(passed=passed, total=total, status="failed", reason=reason)


class _UnavailableError(Exception):
    """This machine does not allow a mechanism; the message is the reason."""


def run_contained(
    program: str | Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    mechanism: Mechanism | None = None,
) -> ContainedResult:
    """Run one program in a Sandbox of its own; see `Sandbox.run`."""
    with Sandbox(mechanism) as sandbox:
        return sandbox.run(program, stdin=stdin, files=files, limits=limits)


@cache
def containment() -> dict[str, str]:
    """Mechanism -> "" where this machine offers it, else why not. Tried out once per process."""
    return {name: _unavailable(name) for name in get_args(Mechanism)}


def _unavailable(mechanism: Mechanism) -> str:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if os.uname().machine not in ("x86_64", "aarch64"):
        return f"it is there for x86_64 and aarch64, this machine is {os.uname().machine}"
    sandbox = Sandbox.__new__(Sandbox)
    try:
        sandbox._start(mechanism)
    except _UnavailableError as error:
        return str(error)
    with sandbox:
        try:
            result = sandbox.run("import colorsys\nprint(6 * 7)", limits=Limits(seconds=30))
        except ConfigError as error:
            return str(error)
    return "" if result.stdout == "42\n" else f"a trial program ended so: {result.status} {result.reason}".strip()


def _python() -> str:
    """The interpreter behind the virtual environment: it needs nothing but its own directory."""
    return getattr(sys, "_base_executable", None) or sys.executable


def _configuration(mechanism: Mechanism, end: int, scratch: str | None) -> dict[str, Any]:
    paths = sysconfig.get_paths()
    packages = list(dict.fromkeys(path for path in (paths["purelib"], paths["platlib"]) if os.path.isdir(path)))
    wanted = [*_SYSTEM, sys.base_prefix, sys.base_exec_prefix, os.path.realpath(sys.base_prefix), *packages]
    readable: list[str] = []
    for path in dict.fromkeys(map(os.path.abspath, wanted)):
        if os.path.exists(path) and path != "/" and not any(Path(path).is_relative_to(other) for other in readable):
            readable.append(path)
    root = os.geteuid() == 0
    return {
        "mechanism": mechanism,
        "caller": os.getpid(),
        "socket": end,
        "root": _ROOT,
        "packages": packages,
        "scratch": scratch,
        "readable": readable,
        "devices": [path for path in _DEVICES if os.path.exists(path)],
        # One range per process that asks, so that no two programs run under the same user id.
        "first_uid": _FIRST_UID + os.getpid() % _UIDS * 256 if root else None,
        "search": not all(map(_open_to_all, readable)),
    }


def _open_to_all(path: str) -> bool:
    """Whether any user can reach this path."""
    return all(
        os.stat(part).st_mode & 0o001 for part in [*Path(path).parents, *([path] if os.path.isdir(path) else [])]
    )
