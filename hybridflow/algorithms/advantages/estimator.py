"""Estimator: the base of advantage estimators, and the wrapper of a user's function.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged

Advantages = tuple[Ragged, Ragged] | Mapping[str, Ragged | Tensor]
"""(advantages, returns), ragged [B, R] like the response, or a mapping of columns with these two."""


class Estimator:
    """Base of the advantage estimators: frozen dataclasses of their options that are called with the rewards.

    `reads` names the columns besides rewards and mask (None: every column), `writes` those besides advantages and
    returns. `kl` says where a KL penalty goes: into the token rewards; to "split" estimators as a third argument, the
    reward -kl_coef * kl_t of every token, ragged [B, R]; nowhere, where the token rewards are "unused". The token
    rewards are float64, and so are the results: `compute_advantage` rounds them."""

    reads: tuple[str, ...] | None = ()
    writes: tuple[str, ...] = ()
    kl: Literal["rewards", "split", "unused"] = "rewards"

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def options(self) -> Mapping[str, Any]:
        return vars(self)

    def __call__(self, rewards: Ragged, batch: Batch, /) -> Advantages:
        raise NotImplementedError


class UserEstimator(Estimator):
    """`function(token_rewards, batch, **options)` of a user, whose attributes `reads` (default: every column; may be a
    function of the options) and `writes` name its columns. Its token rewards are float32."""

    def __init__(self, function: Callable[..., Advantages], options: Mapping[str, Any]) -> None:
        self.function, self._options = function, options
        reads: Any = getattr(function, "reads", None)
        reads = reads(options) if callable(reads) else reads
        self.reads = None if reads is None else tuple(reads)
        self.writes = tuple(getattr(function, "writes", ()))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    def __call__(self, rewards: Ragged, batch: Batch, /) -> Advantages:
        return self.function(rewards.to(torch.float32), batch, **self.options)
