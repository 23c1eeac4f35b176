"""Soft overlong punishment: a response is told that it is about to run out of room. Shapes: B rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.algorithms.options import is_whole
from hybridflow.errors import ConfigError


def overlong_penalty(lengths: Tensor, max_tokens: int, cache: int) -> Tensor:
    """[B] float32, a reward to be added: 0 up to max_tokens - cache tokens, then linearly down to -1 at max_tokens.

        ((max_tokens - cache) - length) / cache        clipped to [-1, 0]

    `lengths` [B] tokens of each response. Errors: ConfigError unless 0 < cache <= max_tokens.
    Yu et al., "DAPO" (2025), section 3.4, equation 13.
    """
    for name, value in (("max_tokens", max_tokens), ("cache", cache)):
        if not is_whole(value) or value < 1:
            raise ConfigError(f"overlong penalty: {name}={value!r} must be a whole number of at least 1.")
    if cache > max_tokens:
        raise ConfigError(
            f"overlong penalty: cache={cache} is more than max_tokens={max_tokens}: it is the last part of them, over "
            f"which the penalty grows."
        )
    return ((max_tokens - cache - lengths.to(torch.float32)) / cache).clamp(min=-1.0, max=0.0)
