"""Deadline: the moment at which a search ends, made once where planning begins and handed to all that takes time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hybridflow.settings import require


class TimeUpError(Exception):
    """Ends a search whose time is up. Never leaves `planner.plan`."""


@dataclass(frozen=True)
class Deadline:
    """Searches end `at` this time of the `clock`, in seconds; without one, when they have seen everything."""

    at: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def of(cls, budget_s: float | Deadline) -> Deadline:
        """`budget_s` seconds from now. Errors: ConfigError unless they are positive."""
        if isinstance(budget_s, Deadline):
            return budget_s
        require(budget_s > 0, f"budget_s={budget_s!r}: give a positive number of seconds.")
        return cls(time.monotonic() + budget_s)

    @property
    def over(self) -> bool:
        return self.at < math.inf and self.clock() >= self.at

    def check(self) -> None:
        """Errors: TimeUpError when it is over."""
        if self.over:
            raise TimeUpError

    def part(self, share: float) -> Deadline:
        """The deadline when this `share` of the time until this one has passed."""
        now = self.clock()
        return replace(self, at=now + share * (self.at - now)) if self.at < math.inf else self

    def at_least(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now if that is later."""
        return replace(self, at=max(self.at, self.clock() + seconds))


NEVER = Deadline()
