"""Types shared by engines: outputs and states of a train engine, and the rows of a generation engine with their seeds.

A training framework implements `sharded_model.ShardedModel`. A loss sees flat token values. Loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from hybridflow.config import Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from hybridflow.engines.vllm.row_images import RowImages

Output = Literal["log_probs", "entropy", "values", "logits", "ref_logits"]
"""Outputs that a loss can ask for; `logits` and `ref_logits` (the teacher's) are `algorithms.logits.Logits`."""
TrainState = Literal["parameters", "optimizer", "gradients"]
"""State of a train engine that can move between device and host memory."""
STATES: tuple[TrainState, ...] = get_args(TrainState)
PARAMETERS: tuple[TrainState, ...] = ("parameters",)


class Uninitialized:
    """Replaces a checkpoint: weights stay undefined, because a transfer will write them."""


UNINITIALIZED = Uninitialized()


@dataclass(slots=True)
class Row:
    """One response, unfinished or finished: the `index`-th of the prompt `row_id`.

    Plain values: `Row(**json.loads(json.dumps(dataclasses.asdict(row))))` equals the row. An unfinished row can be
    continued by any engine of the model. The draw of a token depends on `seed` and its position in the response only.
    `log_probs` are those of the sampling policy, and `policy_version` its version, token by token.
    `spans` counts the times that an engine took the row up, `recomputed` the tokens that it computed again for that
    (fewer where its prefix cache has them), `prefilled` those that it computed before it sampled. The KV cache of a row
    that is `kept` stays when it ends, if there is room: a row of its name whose prompt begins with its tokens uses it.
    `routed_experts` [tokens, layers, k] are the experts that the layers with some have computed its first tokens with
    (of prompt and response, all but the last), of a finished row of an engine that captures them. A row with `images`
    stays in its engine.
    """

    row_id: int
    index: int
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_version: list[int] = field(default_factory=list)
    end: Literal["", "stop", "length"] = ""  # "stop": by a stop token or stop string
    spans: int = 0
    recomputed: int = 0
    prefilled: int = 0
    kept: bool = False
    routed_experts: Tensor | None = field(default=None, compare=False)
    images: RowImages | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(given := cast("object", self.sampling), Mapping):
            self.sampling = Sampling(**given)

    @property
    def name(self) -> str:
        """Unique in an engine."""
        return f"{self.row_id}.{self.index}"

    @property
    def finished(self) -> bool:
        """Whether the model ended the response, rather than its length."""
        return self.end == "stop"


class RowSource(Protocol):
    """Gives rows to an engine as they come up, such as the turns of conversations."""

    @property
    def under_way(self) -> int:
        """How many things are not done that rows may still come from."""
        ...

    def poll(self, seconds: float) -> list[Row] | None:
        """Further rows without tokens, with ids below 0, waiting up to `seconds` for the first; None: there will be no
        more, or not now."""
        ...

    def finished(self, row: Row) -> None:
        """The row has been sampled."""
        ...

    def refused(self, row: Row, why: str, full: bool) -> None:
        """The row cannot be sampled; `full`: its prompt leaves no room for a response."""
        ...

    def done(self) -> list[str]:
        """The names, since the last call, of rows that are `kept` and that no further row will continue."""
        ...


# The stream of a row, and the seed of each draw from its stream and the position of the token. Both are SplitMix64, a
# bijection of 64-bit integers that scatters neighbours, on counters instead of a state: a draw does not depend on the
# draws before it.

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
