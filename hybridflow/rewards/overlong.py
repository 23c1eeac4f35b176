"""Overlong: DAPO's soft punishment of responses that come near the limit, as a reward function."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.errors import ConfigError
from hybridflow.settings import is_whole


class Overlong:
    """0 up to max_tokens - cache response tokens, then linearly down to -1 at `max_tokens` and beyond.

        ((max_tokens - cache) - length) / cache        clipped to [-1, 0]

    Meant to be added to another reward: `function=[rewards.Math(), rewards.Overlong(1024, 256)]`.
    Errors: ConfigError unless 0 < cache <= max_tokens. Yu et al., "DAPO" (2025), section 3.4, equation 13.
    """

    def __init__(self, max_tokens: int, cache: int) -> None:
        for name, value in (("max_tokens", max_tokens), ("cache", cache)):
            if not is_whole(value) or value < 1:
                raise ConfigError(f"Overlong({name}={value!r}): must be a whole number of at least 1.")
        if cache > max_tokens:
            raise ConfigError(
                f"Overlong(max_tokens={max_tokens}, cache={cache}): the penalty grows over the last `cache` of "
                f"max_tokens, which are fewer."
            )
        self.max_tokens, self.cache = max_tokens, cache

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = self.max_tokens - self.cache
        return [min(0.0, max(-1.0, (free - len(ids)) / self.cache)) for ids in completion_ids]
