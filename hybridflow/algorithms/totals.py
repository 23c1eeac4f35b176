"""Totals: the denominators of a mini-batch, and what a loss function looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from hybridflow.ragged import Ragged

if TYPE_CHECKING:
    from hybridflow.batch import Batch


@dataclass(frozen=True)
class Totals:
    """What a mini-batch holds over *all* data parallel ranks: denominators that do not depend on how it was split.

    `tokens` counts True entries of response_mask, `rows` the rows (also those without a True entry),
    `sequence_tokens` all prompt + response tokens, `longest` the response tokens of the longest row, masked ones too.
    """

    tokens: float
    rows: float
    sequence_tokens: float = 0.0
    longest: float = 0.0


LossFunction = Callable[[Mapping[str, Ragged], "Batch", Totals], tuple[Tensor, dict[str, Tensor]]]
"""`loss(outputs, rows, totals) -> (scalar, metrics)`.

`outputs` are the engine's differentiable outputs for one micro-batch, `rows` the micro-batch's columns on the same
device. The scalar and every metric are this micro-batch's *share* of a global quantity (sums divided by `totals`), so
that adding over micro-batches and ranks gives the value of the whole mini-batch.
"""
