"""Types shared by engines: outputs and states of a train engine, and the interface of a generation engine.

A training framework implements `sharded_model.ShardedModel`. A loss sees flat token values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hybridflow.config import Sampling
from hybridflow.engine3d.interfaces import Generator
from hybridflow.topology import GenerationGrid

Output = Literal["log_probs", "entropy", "values"]
TrainState = Literal["parameters", "optimizer", "gradients"]
"""State of a train engine that can move between device and host memory."""


class Uninitialized:
    """Replaces a checkpoint: weights stay undefined, because a transfer will write them."""


UNINITIALIZED = Uninitialized()


@dataclass(frozen=True)
class Completion:
    """One response: token ids and the sampling policy's log-probabilities of them, of equal length."""

    token_ids: list[int]
    log_probs: list[float]
    finished: bool  # ended by a stop token or stop string rather than by max_tokens


class GenerateEngine(Generator, Protocol):
    """One rank of a sharded model that generates."""

    grid: GenerationGrid

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        names: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each prompt; `seeds` one per prompt, so results do not depend on the split.

        `names`, one per prompt, are what error messages call them (default: their positions).

        All ranks of one generation replica are called with the same prompts and return the same completions.
        """
        ...

    @property
    def cache_bytes(self) -> int:
        """Current bytes of the KV cache."""
        ...

    def close(self) -> None:
        """Shut the engine down. May be called twice."""
        ...
