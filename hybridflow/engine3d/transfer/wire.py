"""How values travel between ranks: dtypes and their conversions, and the device of a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from hybridflow.errors import LayoutError

Key = TypeVar("Key")

# widest first; ranks tell each other positions in this list
DTYPES = (
    *(torch.float64, torch.int64, torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool),
)
CONVERTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # into each other; the rest need equal dtypes


def check_dtype(dtype: torch.dtype) -> None:
    """Errors: LayoutError for a dtype that cannot travel."""
    if dtype not in DTYPES:
        raise LayoutError(f"weights of dtype {dtype} cannot be moved. Known: {', '.join(map(str, DTYPES))}.")


def converts(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether values are converted on the way. Quantised and integer values mean nothing in another dtype."""
    return source == destination or (source in CONVERTED and destination in CONVERTED)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` can represent every value of `other`."""
    wider = dtype in CONVERTED and other in CONVERTED and dtype.itemsize > other.itemsize
    return dtype == other or wider


def wire_dtype(source: torch.dtype, destination: torch.dtype) -> torch.dtype:
    """The dtype in which values travel: the narrower one, the destination's where both are as wide."""
    return source if source.itemsize < destination.itemsize else destination


def agree_dtypes(
    keys: Sequence[Key], mine: Mapping[Key, torch.dtype], group: dist.ProcessGroup | None
) -> dict[Key, torch.dtype]:
    """The widest dtype that any rank of `group` reports for each key. Collective: all ranks pass the same `keys`.

    Errors: LayoutError on all ranks for a dtype that cannot travel or a key that no rank knows.
    """
    strange = next((dtype for dtype in mine.values() if dtype not in DTYPES), None)
    codes = [0 if strange or key not in mine else len(DTYPES) - DTYPES.index(mine[key]) for key in keys]
    told = torch.tensor([strange is not None, *codes], dtype=torch.uint8, device=wire_device(group))
    if group is not None:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    if strange is not None:
        check_dtype(strange)
    failed, *codes = told.tolist()
    if failed:
        raise LayoutError("another rank cannot take part in moving these weights; its error says why.")
    out = {}
    for key, code in zip(keys, codes, strict=True):
        if not code:
            raise LayoutError(f"no rank stores {key}. The layout and the storages do not belong together.")
        out[key] = DTYPES[len(DTYPES) - code]
    return out


def wire_device(group: dist.ProcessGroup | None) -> torch.device:
    """The device on which `group` sends and receives."""
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
