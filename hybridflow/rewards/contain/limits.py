"""What a contained program may use, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridflow.errors import ConfigError

Status = Literal["ok", "failed", "timeout", "memory", "output", "recursion", "forbidden", "killed"]
# Endings in which the program was stopped, rather than found wrong.
CONTAINED: tuple[Status, ...] = ("timeout", "memory", "output", "recursion", "forbidden", "killed")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one run of a contained program.

    `seconds`: wall-clock time, and `cpu_seconds` of each process (default: `seconds` rounded up, plus 1). `memory_mb`:
    address space of each process. `output_kb`: of standard output and of standard error, each. `processes`: alive at
    the same time; 1 (the default) means that the program cannot start any, so `memory_mb` is all that it can take;
    with 1 it may still run up to 32 threads, with more they count as processes. `file_mb`: of all files it writes.
    Errors: ConfigError for values out of range.
    """

    seconds: float = 5.0
    cpu_seconds: int | None = None
    memory_mb: int = 512
    output_kb: int = 64
    processes: int = 1
    file_mb: int = 16

    def __post_init__(self) -> None:
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, int | float) or not 0 < self.seconds < 1e6:
            raise ConfigError(f"Limits(seconds={self.seconds!r}): give a number above 0.")
        least = {"memory_mb": 64, "output_kb": 1, "processes": 1, "file_mb": 1, "cpu_seconds": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not (name == "cpu_seconds" and value is None) and (type(value) is not int or not low <= value < 2**31):
                raise ConfigError(f"Limits({name}={value!r}): give a whole number of at least {low}.")

    @property
    def cpu(self) -> int:
        """Seconds of processor time that each process may take."""
        return self.cpu_seconds if self.cpu_seconds is not None else math.ceil(self.seconds) + 1


@dataclass(frozen=True, kw_only=True)
class ContainedResult:
    """How a run ended.

    `status`: "ok"; "failed" (it raised, or exited with another code than 0); or the limit that stopped it: "timeout",
    "memory", "output" (printed or wrote to files more than allowed), "recursion", "forbidden" (a file outside its
    directory, a socket, a process), "killed" (a crash, or a signal). `reason` says it in words, "" for "ok".
    `returncode` as of subprocess (negative: signal), None where the run was ended. `stdout`, `stderr`: what was
    printed within the limit. `seconds`: wall-clock time.
    """

    status: Status
    reason: str
    returncode: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def contained(self) -> bool:
        """Whether it was stopped by its containment."""
        return self.status in CONTAINED


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What unit tests say of a program: `passed` of `total` tests.

    `status` and `reason` as of `ContainedResult`: "ok" when all passed, "failed" with the first test that did not, or
    what stopped the program before the tests were through. After a stop, and after the first failure where the tests
    end there, `total` counts the tests that were begun.
    """

    passed: int
    total: int
    status: Status
    reason: str
