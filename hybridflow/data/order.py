"""Order: which row is drawn when, epoch after epoch; the seed decides it. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Draw(NamedTuple):
    """Row `index` of the source, drawn as `number` in the whole run, in epoch `epoch`."""

    number: int
    epoch: int
    index: int


class Order:
    """Draws of `rows` rows without end: each epoch is a permutation of all of them (their own order if not `shuffle`).

    Any draw is found from its number alone, without what came before it.
    """

    def __init__(self, rows: int, seed: int, shuffle: bool) -> None:
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def draw(self, number: int) -> Draw:
        epoch, at = divmod(number, self.rows)
        if not self.shuffle:
            return Draw(number, epoch, at)
        if epoch != self._epoch:
            # a generator per epoch, so that any point of the run is found without drawing what came before it
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._permutation = epoch, torch.randperm(self.rows, generator=generator)
        return Draw(number, epoch, int(self._permutation[at]))
