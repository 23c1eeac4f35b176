"""How values travel between ranks: the dtypes that the ranks of a group agree on, and the device of the group."""

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


def agree_dtypes(
    keys: Sequence[Key],
    mine: Mapping[Key, torch.dtype],
    group: dist.ProcessGroup | None,
    failure: LayoutError | None = None,
) -> dict[Key, torch.dtype]:
    """The widest dtype that any rank of `group` reports for each key. Collective: all ranks pass the same `keys`.

    Errors: LayoutError for a dtype that cannot travel, a key that no rank knows, and on all ranks when one comes with
    a `failure` of its own.
    """
    if strange := {dtype for dtype in mine.values() if dtype not in DTYPES}:
        known = ", ".join(map(str, DTYPES))
        failure = failure or LayoutError(f"weights of dtype {strange.pop()} cannot be moved. Known: {known}.")
    codes = [0 if failure or key not in mine else len(DTYPES) - DTYPES.index(mine[key]) for key in keys]
    told = torch.tensor([bool(failure), *codes], dtype=torch.uint8, device=wire_device(group))
    if group is not None:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    if failure:
        raise failure
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
