"""Columns of a batch under its response mask: typed and without a copy, their lengths, means, and whitening.

Shapes: B rows, R response tokens, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, at_row

_SHOWN = 8  # numbers of a row in a message


def or_sampled(names: Iterable[str]) -> tuple[str, ...]:
    """Columns that a call reads: without `old_log_probs`, `log_probs` of the sampling engine take their place."""
    return tuple("old_log_probs|log_probs" if name == "old_log_probs" else name for name in names)


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
    Errors: MissingColumnError, BatchError when it is not ragged, not as long as `like`, or holds another number."""
    mask = token_column(batch, "response_mask", like)
    if mask.dtype == torch.bool:
        return mask
    flat = mask.values
    odd = (flat != 0) & (flat != 1) if flat.ndim == 1 else torch.ones(len(flat), dtype=torch.bool)
    if bool(odd.any()):
        at = int(odd.nonzero()[0, 0])
        row = int(mask.row_index()[at])
        text = f"response_mask: row {row} has {flat[at].tolist()}; a token counts or does not: give True and False, or"
        raise at_row(row, BatchError(f"{text} 1 and 0."))
    return mask.to(torch.bool)


def with_bool_mask(batch: Batch) -> Batch:
    """The batch with a mask of bools, where it has one, for a user's function. Errors: those of `mask_column`."""
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


def finite_column(batch: Batch, name: str, mask: Ragged) -> Ragged:
    """A column of one value per response token. Errors: BatchError, with the row, for one that is not finite."""
    column = token_column(batch, name, mask)
    check_finite(name, column, mask.values)
    return column


def check_finite(name: str, column: Tensor | Ragged, counts: Tensor, *, nan: bool = False) -> None:
    """Errors: BatchError, with the row, for a number of the column that counts and is not finite as float32.

    `counts` bool has one entry per row of a column [B], or per token of a ragged one; `nan=True` lets nan pass."""
    flat = column.values if isinstance(column, Ragged) else column
    bad = ~torch.isfinite(flat.to(torch.float32)) & counts
    if nan:
        bad &= ~torch.isnan(flat)
    if bool(bad.any()):
        at = int(bad.nonzero()[0, 0])
        row = int(column.row_index()[at]) if isinstance(column, Ragged) else at
        raise at_row(row, BatchError(f"{name}: row {row} is {float(flat[at])}; {name} must be finite numbers."))


def not_finite(batch: Batch, names: Iterable[str] | None = None) -> str:
    """Names the first number that is not finite in each of the columns `names` (None: all; "name?" is optional).

    Returns "" when all are finite. In a column with one value per response token only valid tokens count, in any other
    column only rows with a valid token. A nan in `rewards/<name>` or `costs/<name>` is allowed: it means that a reward
    function does not apply to the row.
    Errors: those of `response_mask`."""
    mask, found = response_mask(batch), []
    for name in batch.columns if names is None else [name.removesuffix("?") for name in names]:
        column = batch.peek(name) if name in batch else None
        flat = column.values if isinstance(column, Ragged) else column
        if not isinstance(flat, Tensor) or not flat.is_floating_point():
            continue
        flat32 = flat.to(torch.float32)
        if not flat.numel() or all(end.isfinite() for end in flat32.aminmax()):  # the common case, without a copy
            continue
        bad = ~torch.isfinite(flat32)
        if name.startswith(("rewards/", "costs/")):
            bad &= ~torch.isnan(flat)
        rows = column.row_index() if isinstance(column, Ragged) else torch.arange(len(flat))
        per_token = isinstance(column, Ragged) and column.offsets.equal(mask.offsets)
        bad = bad.flatten(1).any(1) if bad.ndim > 1 else bad
        bad &= mask.values if per_token else valid_lengths(mask)[rows] > 0
        if count := int(bad.sum()):
            at = int(bad.nonzero()[0, 0])
            more = f" ({count} of {len(flat)} are not finite)" if count > 1 else ""
            value = flat[at] if flat[at].numel() <= _SHOWN else flat[at][~torch.isfinite(flat[at])][0]
            found.append(f"{name}: row {int(rows[at])} is {value.tolist()}{more}")
    return "; ".join(found)


def valid_lengths(mask: Ragged) -> Tensor:
    """[B] int64: valid tokens of each row of `mask` ragged [B, R] bool."""
    return mask.with_values(mask.values.to(torch.int64)).row_sum()


def sequence_mean(token_values: Tensor, mask: Ragged) -> Tensor:
    """[B], differentiable: the mean of `token_values` [N] over the valid tokens of each row, 0 for an empty row."""
    kept = mask.with_values(torch.where(mask.values, token_values, 0.0))
    return kept.row_sum() / valid_lengths(mask).to(kept.dtype).clamp(min=1.0)


def masked_moments(values_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (divisor n - 1, Bessel's correction) of the valid values, float64 scalars.

    The variance of a single value is 0; without valid values both are."""
    valid = values_N[mask_N].to(torch.float64)
    if len(valid) == 0:
        return valid.new_zeros(()), valid.new_zeros(())
    mean = valid.mean()
    return mean, (valid - mean).square().sum() / max(len(valid) - 1, 1)


def whiten(values: Ragged, mask: Ragged, *, eps: float = 1e-8) -> Ragged:
    """Ragged [B, R] float64: (x - mean) / sqrt(var + eps) over all valid tokens; exactly 0 at masked ones.

    `mask` ragged [B, R] bool. The variance has Bessel's correction, so this is `masked_whiten` of TRL and verl, which
    however refuse a single token, that is 0 here, and leave values at masked ones; `whiten` of Ziegler et al. (2019)
    has the population variance."""
    mean, variance = masked_moments(values.values, mask.values)
    white = (values.values.to(torch.float64) - mean) * torch.rsqrt(variance + eps)
    return values.with_values(torch.where(mask.values, white, 0.0))


def batch_temperature(batch: Batch) -> float | None:
    """The sampling temperature that `generate_sequences` wrote; None without the column or without rows. Errors:
    BatchError for a number that is not finite, and when rows with a token that counts differ: logits are divided by one
    temperature per call."""
    if "temperature" not in batch or not len(batch):
        return None
    column = row_column(batch, "temperature")
    check_finite("temperature", column, torch.ones_like(column, dtype=torch.bool))
    low, high = (float(end) for end in column.aminmax())
    if low != high and "response_mask" in batch:
        counted = column[mask_column(batch).map(Tensor.long).row_sum() > 0]
        low, high = (float(end) for end in (counted if len(counted) else column[:1]).aminmax())
    if low != high:
        raise BatchError(
            f"the rows of this batch were drawn at temperatures from {low:g} to {high:g}; a call computes at one. "
            f"Call it once for the rows of each temperature, and give all turns of an agent the same one."
        )
    return high
