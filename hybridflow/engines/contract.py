"""The two seams behind which any training framework and any generation engine fits.

A `TrainEngine` holds one rank's part of one model. Its inputs are the rows of this rank's data parallel replica as
`prompt_ids` and `response_ids` (ragged); its outputs are ragged over response tokens. A loss sees flat token values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from hybridflow.algorithms.losses.aggregation import LossFunction
from hybridflow.algorithms.losses.aggregation import Totals as Totals
from hybridflow.batch.ragged import Ragged
from hybridflow.config import Sampling
from hybridflow.engine3d.interfaces import Generator, Trainer
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Memory, Residency
from hybridflow.topology import GenerationGrid

if TYPE_CHECKING:
    from hybridflow.batch.batch import Batch
    from hybridflow.engines.lora.adapters import Adapters

Output = Literal["log_probs", "entropy", "values"]
TrainState = Literal["parameters", "optimizer", "gradients"]
"""What a train engine keeps in device memory and can move to host memory."""


class Unset:
    """In the place of a checkpoint: weights are neither read nor drawn, because they will be written from outside."""


UNSET = Unset()


class TrainEngine(Trainer, Protocol):
    """One rank of a sharded model that computes and trains.

    With `adapters` the weights of `layout()` are frozen: to read `storage()` as the weights that the model computes
    with, merge them first (`adapters.merge()`), and restore them before it computes again.
    """

    @property
    def adapters(self) -> Adapters | None: ...

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Raise what can be said against these rows without any collective, so that ranks can agree to go on.

        Errors: BatchError naming the row, ModelError for an output that the model's head does not give.
        """
        ...

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> dict[str, Ragged] | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU, rows in order; None off the last stage.

        `log_probs` are of `response_ids` after dividing logits by `temperature`; `values` [B, R] are at the positions
        that predict each response token. Also accepts an empty batch (all ranks take part in collectives).
        """
        ...

    def score(self, batch: Batch, tokens: bool = False) -> Tensor | Ragged | None:
        """[B] float32: the value head at the last token of prompt + response; None off the last stage.

        With `tokens` ragged [B, R] float32, a score for each response token: the head at the token's own position,
        where the model has read it (one behind those of `values`, which are what is expected before it).
        """
        ...

    def forward_backward(
        self, batch: Batch, loss: LossFunction, outputs: Sequence[Output], temperature: float = 1.0
    ) -> dict[str, float]:
        """Add this rank's gradients of one mini-batch, reduced over data parallel ranks; metrics summed likewise.

        When `loss` raises on a rank, every rank raises and no gradient of the mini-batch is kept. When a column that it
        reads (its attribute `reads`; without one, any), an output or its value is not finite where it counts, on any
        rank, the step that follows is skipped on all ranks.
        """
        ...

    def step(self) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped, over all ranks), `lr`, `skipped`.

        `skipped` is 1.0 when gradients, or what they were computed from, were not finite: then nothing has changed,
        moments and counters included (but the loss scale, by gradients that were too large for float16).
        """
        ...

    @property
    def skip_reason(self) -> str:
        """Why the last step was skipped, the same on all ranks; "" when it was made."""
        ...

    def memory(self) -> Residency:
        """The memory behind `storage()`, at least every decoder layer on its own; made once.

        While names are released the engine does not compute. What `acquire` leaves undefined is every element that
        has a box in `layout()`; all others (padding) are as the engine needs them.
        """
        ...

    def weights_loaded(self) -> None:
        """Parameters were written from outside: refresh the optimizer's main parameters from them."""
        ...

    def optimizer_layout(self) -> Layout | None:
        """Boxes of the canonical tensors in every rank's optimizer state, the same for each kind; None without one."""
        ...

    def optimizer_storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind -> this rank's float32 state by the names of `optimizer_layout().regions(rank)`.

        Kinds are "main" (main parameters; without separate ones, views of the parameters), and "exp_avg",
        "exp_avg_sq" of Adam or "momentum_buffer" of SGD with momentum. State that does not exist yet is made, zero.
        """
        ...

    def optimizer_counters(self) -> dict[str, Any]:
        """What of the optimizer's state is one number: steps made, loss scale; equal on all ranks."""
        ...

    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """`optimizer_storage()` was written from outside: take the counters, and the parameters from `main`.

        Collective over the data parallel ranks.
        """
        ...

    def offload(self, what: Collection[TrainState]) -> None:
        """Move these to host memory. The engine does not compute until they are back."""
        ...

    def close(self) -> None:
        """Free the model, gradients and optimizer. May be called twice."""
        ...


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

    def storage(self) -> Mapping[str, Tensor]:
        """This rank's weights by the names that `layout().regions(rank)` uses: written in place from outside."""
        ...

    def memory(self) -> Memory:
        """Memory of the weights in `storage()`; without it `generate` refuses."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory that the KV cache has now."""
        ...

    def close(self) -> None:
        """Shut the engine down. May be called twice."""
        ...
