"""Sandbox: runs untrusted programs without network, with resource limits, and leaves no process behind."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from hybridflow.errors import ConfigError, RewardError, nearest
from hybridflow.processes.supervisor import ONE_THREAD, ServerProcess
from hybridflow.rewards.sandbox.containment import DIRECTORY, EMPTY, remove_tree
from hybridflow.rewards.sandbox.run import CodeResult, Execution, Limits, Result, judgement

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
        same_process: bool = False,
    ) -> CodeResult:
        """Run unit tests (as `judge.run` takes them) against a Python program, contained as well.

        The program lives in a process of its own: the tests call it, and see plain values. With `same_process` it
        shares the tests' process instead, where it can reach what decides.
        """
        common = {"entry_point": entry_point, "stop": stop, "prelude": self.prelude}
        job = {"kind": "judge", "tests": dict(tests), **common}
        if same_process:
            with Execution(self._launch, {**job, "program": program}, limits) as both:
                return judgement(both, both)
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
