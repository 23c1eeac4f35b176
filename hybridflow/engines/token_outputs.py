"""TokenOutputs: rows become micro-batches, and what the output layer gives becomes log-probabilities, entropy, values.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read, V this rank's columns of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.typed_columns import response_mask, token_column
from hybridflow.batch import Batch
from hybridflow.engines.contract import Output
from hybridflow.engines.log_probs import vocab_parallel_log_probs
from hybridflow.engines.micro_batches import MicroBatch, Split
from hybridflow.errors import BatchError, ModelError
from hybridflow.model_spec import Decoder

Positions = Literal["before", "own", "last"]
"""Where a row is read: before each response token (what predicts it), at each of them, or at its last token only."""


class TokenOutputs:
    """What one rank of `role` reads from its model: `vocabulary` is the range of token ids whose columns it has, and
    `group` the ranks that share the vocabulary."""

    def __init__(
        self, role: str, spec: Decoder, split: Split, vocabulary: tuple[int, int], group: dist.ProcessGroup
    ) -> None:
        self.role, self.spec, self.split, self.vocabulary, self.group = role, spec, split, vocabulary, group

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Without any collective. Errors: ModelError for an output that the model's head does not give, BatchError for
        a temperature of 0, a row without a prompt, an unknown token id, or a mask that does not fit the response."""
        given = ("values",) if self.spec.head == "value" else ("log_probs", "entropy")
        if not outputs or (wrong := [name for name in outputs if name not in given]):
            asked = ", ".join(map(repr, wrong if outputs else outputs)) or "no output"
            raise ModelError(
                f"{self.role} was asked for {asked}; a model with head={self.spec.head!r} gives "
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

    def read(self, micro: MicroBatch, rows: Tensor, names: Sequence[Output], temperature: float) -> dict[str, Tensor]:
        """Each asked output [N] float32 of a micro-batch from the output layer's [N or more, V or more]."""
        rows = rows[: micro.selected]
        if self.spec.head == "value":
            return {"values": rows[:, 0].float()}
        first, last = self.vocabulary
        log_probs, entropy = vocab_parallel_log_probs(
            rows[:, : last - first], micro.targets, first, self.group, temperature, "entropy" in names
        )
        found = {"log_probs": log_probs, "entropy": entropy}
        return {name: found[name] for name in names}  # type: ignore[misc]
