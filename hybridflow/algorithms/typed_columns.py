"""Columns of a batch as the type that an algorithm needs, read without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.errors import BatchError
from hybridflow.ragged import Ragged


def token_column(batch: Batch, name: str, like: Ragged | None = None) -> Ragged:
    """A ragged column, one value per response token. Errors: BatchError when it is not, or not as long as `like`."""
    column = batch.peek(name)
    if not isinstance(column, Ragged):
        raise BatchError(
            f"column {name!r} is a {type(column).__name__}, it must be ragged: one value per response token."
        )
    if like is not None and not column.offsets.equal(like.offsets):
        raise BatchError(f"column {name!r} is {column}, the response is {like}: every row needs the same length.")
    return column


def response_mask(batch: Batch) -> Ragged:
    """Ragged [B, R] bool: which response tokens count; without the column, every one. Errors: BatchError."""
    responses = token_column(batch, "response_ids") if "response_ids" in batch else None
    if "response_mask" in batch:
        return token_column(batch, "response_mask", responses)
    if responses is None:
        raise BatchError("the batch has neither 'response_mask' nor 'response_ids': it is not known what counts.")
    return responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))


def row_column(batch: Batch, name: str) -> Tensor:
    """A dense column [B]. Errors: BatchError when it is not."""
    column = batch.peek(name)
    if not isinstance(column, Tensor) or column.ndim != 1:
        raise BatchError(
            f"column {name!r} is a {type(column).__name__}, it must be a tensor [rows]: one number per row."
        )
    return column
