"""Running: one contained program seen from outside; what it printed, and how it ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hybridflow.errors import RewardError
from hybridflow.rewards.contain.limits import CONTAINED, ContainedResult, Limits, Status

_GRACE = 60.0  # beyond the limit, until a zygote on a busy machine has reported
_REPORT_BYTES = 1 << 16
_SHOWN = 300


class Running:
    """The ends of one run that its caller holds. `release` is called once it is over."""

    def __init__(self, limits: Limits, stdin: str, release: Callable[[], None]) -> None:
        self.limits, self.stdin, self._release = limits, memoryview(stdin.encode("utf-8", "replace")), release
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.overflow = False
        self._texts = {"status": bytearray(), "report": bytearray()}
        self._ours: dict[str, int] = {}
        self._theirs: list[int] = []
        self._started = time.monotonic()

    def open(self, job: bytes) -> list[int]:
        """Make the pipes of the run; returns the zygote's ends, in the order of its `Ends`."""
        theirs: dict[str, int] = {}
        theirs["job"] = os.memfd_create("job", os.MFD_CLOEXEC)
        self._theirs.append(theirs["job"])
        with os.fdopen(os.dup(theirs["job"]), "wb") as file:
            file.write(job)
        os.lseek(theirs["job"], 0, os.SEEK_SET)
        for name in ("status", "control", "stdin", "stdout", "stderr", "report"):
            reading, writing = os.pipe()
            incoming = name in ("control", "stdin")
            theirs[name], self._ours[name] = (reading, writing) if incoming else (writing, reading)
            self._theirs.append(theirs[name])
            os.set_blocking(self._ours[name], False)
        return list(theirs.values())

    def started(self) -> None:
        """The zygote has its ends: drop ours of them."""
        for end in self._theirs:
            os.close(end)
        self._theirs = []

    def register(self, selector: selectors.BaseSelector) -> None:
        for name in ("status", "stdout", "stderr", "report"):
            selector.register(self._ours[name], selectors.EVENT_READ, (self, name))
        if self.stdin:
            selector.register(self._ours["stdin"], selectors.EVENT_WRITE, (self, "stdin"))
        else:
            self._close("stdin")

    def handle(self, name: str, selector: selectors.BaseSelector) -> None:
        """Move what can be moved on one of the ends."""
        done = self._write() if name == "stdin" else self._read(name)
        if done and name in self._ours:
            selector.unregister(self._ours[name])
            self._close(name)

    def stop(self) -> None:
        """Have the supervisor kill everything now."""
        if "control" in self._ours:
            with suppress(BrokenPipeError):  # it has stopped already
                os.write(self._ours["control"], b".")
            self._close("control")

    @property
    def over(self) -> bool:
        return "status" not in self._ours

    def check(self, selector: selectors.BaseSelector) -> None:
        """Long after the limit the supervisor is told to stop, and in the end no longer waited for."""
        late = time.monotonic() - self._started - self.limits.seconds
        if late > _GRACE:
            self.stop()
        if late > 2 * _GRACE and not self.over:
            selector.unregister(self._ours["status"])
            self._close("status")

    def drain(self, selector: selectors.BaseSelector) -> None:
        """Everything is over: read what is left in the pipes."""
        for name in [name for name in ("report", "stdout", "stderr") if name in self._ours]:
            self.handle(name, selector)

    def close(self) -> None:
        self.started()
        for name in list(self._ours):
            self._close(name)
        self._release()
        self._release = _nothing

    @property
    def report(self) -> dict[str, Any]:
        """What the program, or what runs it, reported; it may be of any form."""
        try:
            found = json.loads(bytes(self._texts["report"]).partition(b"\n")[0])
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def facts(self) -> dict[str, Any]:
        """What the supervisor and init have told: `end` ("exit", "timeout", "files", "stopped"), `exit`, `seconds`."""
        found: dict[str, Any] = {"end": ""}
        for line in bytes(self._texts["status"]).splitlines():
            found.update(json.loads(line))
        return found

    def result(self) -> ContainedResult:
        """How the run ended. Errors: RewardError when it could not be started."""
        facts = self.facts
        if "error" in facts:
            raise RewardError(f"A contained program could not be started: {facts['error']}.")
        code = os.waitstatus_to_exitcode(facts["exit"]) if "exit" in facts and facts["end"] == "exit" else None
        status, reason = self._ending(code, facts)
        texts = {name: bytes(data).decode("utf-8", "replace") for name, data in self.output.items()}
        if status == "failed":
            reason = f"exited with code {code}" + (
                f": {_last_line(texts['stderr'])}" if texts["stderr"].strip() else ""
            )
        seconds = facts.get("seconds", time.monotonic() - self._started)
        return ContainedResult(status=status, reason=reason, returncode=code, **texts, seconds=seconds)

    def _ending(self, code: int | None, facts: dict[str, Any]) -> tuple[Status, str]:
        limits, report, end = self.limits, self.report, facts["end"]
        if self.overflow:
            return "output", f"printed more than {limits.output_kb} kB"
        if end == "timeout":
            return "timeout", f"took longer than {limits.seconds:g} s"
        if end == "files":
            return "output", f"wrote more than {limits.file_mb} MB to files"
        told = report.get("status")
        if told in CONTAINED:
            return _told(told, str(report.get("reason", "")), limits)
        if code == 0:
            return "ok", ""
        if code is None:
            return "killed", "was killed" if end else "was lost: its supervisor ended without a report"
        if code in (-signal.SIGXCPU, -signal.SIGKILL) and facts.get("cpu", 0.0) > limits.cpu - 1:
            return "timeout", f"took longer than {limits.cpu} s of processor time"
        if code == -signal.SIGXFSZ:
            return "output", f"wrote more than {limits.file_mb} MB to files"
        if code < 0:
            return "killed", f"died with {_signal(-code)}"
        return "failed", ""

    def _read(self, name: str) -> bool:
        """Take what has arrived; True at the end, or when enough has."""
        sink = self._texts[name] if name in self._texts else self.output[name]
        most = _REPORT_BYTES if name in self._texts else self.limits.output_kb << 10
        while True:
            try:
                piece = os.read(self._ours[name], 1 << 16)
            except BlockingIOError:
                return False
            if not piece:
                return True
            over = len(sink) + len(piece) > most
            sink += piece[: most - len(sink)]
            if over:
                if name in self.output:
                    self.overflow = True
                    self.stop()
                return True

    def _write(self) -> bool:
        try:
            self.stdin = self.stdin[os.write(self._ours["stdin"], self.stdin[: 1 << 16]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # the program does not want it
            return True
        return not self.stdin

    def _close(self, name: str) -> None:
        end = self._ours.pop(name, None)
        if end is not None:
            os.close(end)


def watch(runs: Sequence[Running], *, together: bool = False) -> None:
    """Feed and read the runs until all are over; `together`: once the first is over, the others are stopped."""
    with selectors.DefaultSelector() as selector:
        try:
            for run in runs:
                run.register(selector)
            while waiting := [run for run in runs if not run.over]:
                for key, _ in selector.select(1.0):
                    run, name = key.data
                    run.handle(name, selector)
                for run in runs[1:] if together and runs[0].over else ():
                    run.stop()
                for run in waiting:
                    run.check(selector)
            for run in runs:
                run.drain(selector)
        finally:
            for run in runs:
                run.close()


def _told(status: Status, reason: str, limits: Limits) -> tuple[Status, str]:
    if status == "memory":
        return status, f"needed more memory than its {limits.memory_mb} MB"
    if status == "output":
        return status, f"wrote more than {limits.file_mb} MB to files"
    return status, reason[:_SHOWN] or "was stopped"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1][:_SHOWN]


def _nothing() -> None:
    pass
