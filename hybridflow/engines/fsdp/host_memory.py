"""Whether a node's host memory takes what its ranks want to keep there."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridflow import config
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import ConfigError

_GIB = 1 << 30


def require_host_memory(
    context: RankContext,
    strategy: config.FSDP | config.ZeRO,
    layout: Layout,
    dtype: torch.dtype,
    optimizer: config.Optimizer | None,
    free: int | None = None,
) -> None:
    """Refuse `offload=True`, before anything is allocated, where the ranks of this rank's node do not fit.

    `layout` are the parameters, which compute in `dtype`; `free` bytes are what the node has (default: what the system
    calls available; where it says nothing, nothing is refused).

    Errors: ConfigError.
    """
    free = available() if free is None else free
    if not strategy.offload or free is None:
        return
    nodes = context.nodes or (0,) * context.grid.size
    neighbours = nodes.count(nodes[context.rank])
    width = bytes_kept(strategy, dtype, optimizer, context.grid.d)
    needed = neighbours * width * sum(region.box.numel for region in layout.regions(context.rank))
    if needed > free:
        raise ConfigError(
            f"{context.role}: offload=True keeps {needed / _GIB:.3g} GiB of {neighbours} ranks in host memory, this "
            f"node has {free / _GIB:.3g} GiB free. Use more devices on more nodes, or offload=False."
        )


def bytes_kept(
    strategy: config.FSDP | config.ZeRO, dtype: torch.dtype, optimizer: config.Optimizer | None, ranks: int
) -> float:
    """Bytes in host memory for each parameter that a rank holds."""
    stage, lora = getattr(strategy, "stage", 3), getattr(strategy, "lora", None)
    partly, frozen = stage < 3, optimizer is None or lora is not None
    if frozen:
        return 0.0 if partly else float(dtype.itemsize)
    momentum = optimizer.momentum if isinstance(optimizer, config.SGD) else 0.0
    moments = 2 if isinstance(optimizer, config.Adam) else int(momentum > 0)
    if partly:  # main parameters, moments and, with stage 2, gradients are cut over the ranks
        return 4.0 * (1 + moments + (stage == 2)) / ranks
    return 4.0 * (2 + moments)


def available(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a process can still have here: of the machine, or of the container that it runs in if that is less."""
    found = [size for size in (_of_machine(meminfo), _of_container(group)) if size is not None]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(lines[0][1]) * 1024 if lines else None


def _of_container(group: Path) -> int | None:
    """Bytes that control group v2 leaves; pages of unused files are given back when they are needed."""
    try:
        limit, used = ((group / f"memory.{what}").read_text().strip() for what in ("max", "current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used) + int(pages.get("inactive_file", 0)))
