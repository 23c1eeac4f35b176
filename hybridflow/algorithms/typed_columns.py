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


def mask_column(batch: Batch, like: Ragged | None = None) -> Ragged:
    """`response_mask`, ragged [B, R] bool: which response tokens count. Numbers 0 and 1 are taken for False and True.

    Errors: MissingColumnError, BatchError when it is not ragged, not as long as `like`, or holds another number.
    """
    mask = token_column(batch, "response_mask", like)
    if mask.dtype == torch.bool:
        return mask
    flat = mask.values
    odd = (flat != 0) & (flat != 1) if flat.ndim == 1 else torch.ones(len(flat), dtype=torch.bool)
    if bool(odd.any()):
        at = int(odd.nonzero()[0, 0])
        raise BatchError(
            f"response_mask: row {int(mask.row_index()[at])} has {flat[at].tolist()}; a token counts or does not: give "
            f"True and False, or 1 and 0."
        )
    return mask.to(torch.bool)


def with_mask_of_bools(batch: Batch) -> Batch:
    """The batch for a user's function, which then need not ask what its mask is made of. Errors: those of
    `mask_column`, where there is a mask."""
    if "response_mask" not in batch or token_column(batch, "response_mask").dtype == torch.bool:
        return batch
    return batch.with_columns(response_mask=mask_column(batch))


def response_mask(batch: Batch) -> Ragged:
    """`mask_column`, or without that column a mask in which every response token counts. Errors: BatchError."""
    responses = token_column(batch, "response_ids") if "response_ids" in batch else None
    if "response_mask" in batch:
        return mask_column(batch, responses)
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


def check_finite(name: str, column: Tensor | Ragged, counts: Tensor, *, nan: bool = False) -> None:
    """Errors: BatchError, with the row, for a number of the column that counts and is not finite as float32.

    `counts` bool has one entry per row of a column [B], or per token of a ragged one; `nan=True` lets nan pass.
    """
    flat = column.values if isinstance(column, Ragged) else column
    bad = ~torch.isfinite(flat.to(torch.float32)) & counts
    if nan:
        bad &= ~torch.isnan(flat)
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        row = int(column.row_index()[at]) if isinstance(column, Ragged) else at
        raise BatchError(f"{name}: row {row} is {float(flat[at])}; {name} must be finite numbers.")
