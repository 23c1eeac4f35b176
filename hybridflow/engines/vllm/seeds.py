"""Seeds: the stream of a row, and the seed of each draw from its stream and the position of the token. Pure.

Both are SplitMix64, a bijection of 64-bit integers that scatters neighbours, on counters instead of a state: a draw
does not depend on the draws before it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_STEP, _INDEX, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def derived_seed(seed: int, index: int) -> int:
    """A seed in 0..2^63-1 for the index-th draw under `seed`."""
    z = (seed * _STEP + (index + 1) * _INDEX) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return (z ^ (z >> 31)) >> 1


def draw_seeds(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`derived_seed` of each row [B]: in 0..2^63-1, for the token at a position of the row's response."""
    z = seeds * np.uint64(_STEP) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_INDEX)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
