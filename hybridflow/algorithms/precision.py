"""The type of a result: sums over a batch run in float64, and are rounded once, to what the inputs can tell."""

from __future__ import annotations

import functools

import torch


def result_dtype(*given: torch.dtype) -> torch.dtype:
    """float64 where one of the given types is, else float32: integers and half precision are no type for a result."""
    return functools.reduce(torch.promote_types, given, torch.float32)
