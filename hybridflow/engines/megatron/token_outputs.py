"""TokenOutputs: rows become micro-batches, and what the output layer gives becomes log-probabilities, entropy, values.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.batch import Batch
from hybridflow.engines.contract import Output
from hybridflow.engines.log_probs import vocab_parallel_log_probs
from hybridflow.engines.megatron.micro_batches import MicroBatch, Split
from hybridflow.engines.megatron.model import sequence_parallel
from hybridflow.engines.megatron.units import vocabulary_rows
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import BatchError, ModelError
from hybridflow.model_spec import ModelSpec

Positions = Literal["before", "own", "last"]
"""Where a row is read: before each response token (what predicts it), at each of them, or at its last token only."""


class TokenOutputs:
    """What one rank reads from its model; `group` are the ranks that share the vocabulary."""

    def __init__(self, context: RankContext, strategy: config.Megatron, spec: ModelSpec, group) -> None:
        grid, self.context, self.spec, self.group = context.grid, context, spec, group
        multiple = grid.t if sequence_parallel(strategy, grid) else 1
        self.split = Split(strategy.micro_tokens, multiple, 2 * grid.p if grid.p > 1 else 1, spec.vocab)
        self.vocabulary = vocabulary_rows(spec.vocab, grid.t, context.coords.t)

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Without any collective. Errors: ModelError for an output that the model's head does not give, BatchError for
        a temperature of 0, a row without a prompt, an unknown token id, or a mask that does not fit the response."""
        given = ("values",) if self.spec.head == "value" else ("log_probs", "entropy")
        if not outputs or (wrong := [name for name in outputs if name not in given]):
            asked = ", ".join(map(repr, wrong if outputs else outputs)) or "no output"
            raise ModelError(
                f"{self.context.role} was asked for {asked}; a model with head={self.spec.head!r} gives "
                f"{' and '.join(map(repr, given))}."
            )
        if not (temperature > 0 and math.isfinite(temperature)):
            raise BatchError(f"temperature={temperature!r} must be above 0: log-probabilities are divided by it.")
        self.split.check(token_column(batch, "prompt_ids"), token_column(batch, "response_ids"))
        _ = response_mask(batch)

    def micro_batches(self, batch: Batch, at: Positions = "before") -> list[MicroBatch]:
        """The batch as micro-batches that say which positions are read."""
        prompts, responses = token_column(batch, "prompt_ids"), token_column(batch, "response_ids")
        if at == "last":
            return self.split.last_tokens(prompts, responses)
        return self.split.responses(prompts, responses, own=at == "own")

    def read(self, micro: MicroBatch, out: Tensor, names: Sequence[Output], temperature: float) -> dict[str, Tensor]:
        """Each asked output [N] float32 of a micro-batch from the output layer's [1, N, columns]."""
        rows = out[0, : micro.selected]
        if self.spec.head == "value":
            return {"values": rows[:, 0]}
        first, last = self.vocabulary
        log_probs, entropy = vocab_parallel_log_probs(
            rows[:, : last - first], micro.targets, first, self.group, temperature, "entropy" in names
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return {name: found[name] for name in names}  # type: ignore[misc]
