"""Children: processes that run a function and can be killed when it takes too long, too much, or everything down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from hybridflow.rewards.outcome import Outcome

Call = tuple[Sequence[Any], Mapping[str, Any]]


class Children:
    """Up to `count` child processes that run `function` (sync or async), each call with a limit of `seconds`.

    They start with the first calls. Pickling takes the settings only: a copy starts children of its own. `memory_mb`
    is what a call may allocate beyond what the loaded function occupies. Errors: ConfigError for settings out of
    range; RewardError when the function cannot be loaded in a child.
    """

    def __init__(
        self, function: Callable[..., Any], count: int, *, seconds: float, memory_mb: float | None = None
    ) -> None:
        self.function, self.count, self.seconds, self.memory_mb = function, count, seconds, memory_mb

    def map(self, calls: Sequence[Call], *, seconds: float | None = None) -> list[Outcome]:
        """Run `function(*args, **kwargs)` for every (args, kwargs) and return one Outcome per call, in order.

        The limit (`seconds` here replaces the one of the constructor) counts from the moment a child gets the call.
        A child that is late or dead is killed with everything it started, and replaced.
        """
        raise RuntimeError("Children.map is being written")

    def close(self) -> None:
        """Kill the children and everything that they started; the next `map` starts new ones."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
