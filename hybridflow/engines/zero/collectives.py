"""The two collectives of ZeRO, started and not waited for. Sums, not means.

Shapes: n elements of a unit's buffer, n/N of a rank's share of it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def start_reduce_scatter(share: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`share` [n/N] := this rank's part of the sum over ranks of `buffer` [n], of which it may itself be that part."""
    return _started(dist.reduce_scatter_single(share, buffer, group=group, async_op=True))


def start_all_gather(buffer: Tensor, share: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`buffer` [n] := the shares [n/N] of all ranks; `share` may be this rank's part of it."""
    return _started(dist.all_gather_single(buffer, share, group=group, async_op=True))


def _started(work: Any) -> dist.Work:
    assert isinstance(work, dist.Work), "this process is no member of the group"
    return work
