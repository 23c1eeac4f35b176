"""Overlong: DAPO's soft punishment of responses that come near the limit, as a reward function."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.algorithms.overlong import overlong_penalty


class Overlong:
    """0 up to max_tokens - cache response tokens, then linearly down to -1 at `max_tokens` and beyond.

    Meant to be added to another reward: `function=[rewards.Math(), rewards.Overlong(1024, 256)]`. Reads response_ids.
    Errors: ConfigError unless 0 < cache <= max_tokens. Yu et al., "DAPO" (2025), equation 13.
    """

    reads = ("response_ids",)

    def __init__(self, max_tokens: int, cache: int) -> None:
        self.max_tokens, self.cache = max_tokens, cache
        _ = overlong_penalty(torch.zeros(0), max_tokens, cache)  # refuses what is out of range, on the driver

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], response_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        lengths = torch.tensor([len(ids) for ids in response_ids])
        return overlong_penalty(lengths, self.max_tokens, self.cache).tolist()
