"""LossScale: what float16 losses are multiplied by, so that small gradients do not vanish."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INITIAL, GROWTH, WINDOW, PATIENCE = 2.0**16, 2.0, 1000, 2


class LossScale:
    """Doubles after 1,000 updates without overflow, halves when two had one (Micikevicius et al. 2018, section 3.2).

    Its state has the names and values of Megatron's, so that training goes on in another backend.
    """

    def __init__(self) -> None:
        self.value, self._good, self._patience = INITIAL, 0, PATIENCE

    def update(self, overflow: bool) -> None:
        """Say how an update went; the same on all ranks."""
        if overflow:
            self._good, self._patience = 0, self._patience - 1
            if self._patience <= 0:
                self.value = max(1.0, self.value / GROWTH)
            return
        self._good += 1
        if self._good == WINDOW:
            self._good, self._patience, self.value = 0, PATIENCE, self.value * GROWTH

    def state(self) -> dict[str, Any]:
        return {"scale": [self.value], "growth_tracker": self._good, "hysteresis_tracker": self._patience}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["scale"][0])
        self._good, self._patience = state["growth_tracker"], state["hysteresis_tracker"]
