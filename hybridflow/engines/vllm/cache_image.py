"""Cache images: keys and values of unfinished rows, outside of the KV cache while its memory is released.

    sleep    rows that wait keep their requests in vLLM's scheduler, and their blocks are copied; others are evicted
    wake     the blocks come back to their places

Only the blocks of these rows are copied, layer by layer. All ranks of a replica treat a row alike, each with its own
part of the blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hybridflow.batch.pinned import settle, to_device, to_host
from hybridflow.config import KV
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.vllm.engine_loop import EngineLoop
from hybridflow.engines.vllm.isolation import ReplicaGroups
from hybridflow.errors import ConfigError
from hybridflow.models.spec import Cost
from hybridflow.planner.cost.cache_places import CachedRow, CachePlace, CachePrices, cache_places
from hybridflow.planner.cost.hardware import DEFAULT
from hybridflow.planner.describe.cluster_spec import DEVICES, ClusterSpec, DeviceSpec, known_device

logger = logging.getLogger(__name__)
_MEMORY: dict[CachePlace, str] = {"keep": "device", "offload": "host"}
_LACKING = "%s memory lacks room for the KV cache of %d rows: it is computed again"


class CachePricing:
    """What it takes to compute keys and values again, and to copy them, by the planner's constants: equal on all ranks,
    and in every run. `ranks` share the arithmetic of a row, each has `weights` bytes of the parameters.

    Errors: ConfigError for a device that the planner does not know, or that lacks the dtype.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, cost: Cost, ranks: int, weights: int) -> None:
        spec, name = _device_spec(device), str(dtype).removeprefix("torch.")
        self.prices = CachePrices.of(spec.bandwidth * DEFAULT.memory, spec.host, weights)
        self._cost, self._rate = cost, spec.peak(name) * DEFAULT.compute * ranks  # type: ignore[arg-type]

    def rows(self, tokens: Collection[int], nbytes: Iterable[int]) -> list[CachedRow]:
        seconds = (self._cost(torch.tensor(list(tokens))) / self._rate).tolist()
        return [CachedRow(*row) for row in zip(nbytes, seconds, strict=True)]


def _device_spec(device: torch.device) -> DeviceSpec:
    if device.type != "cuda":
        return ClusterSpec.this_machine(1).node.device
    if (spec := DEVICES.get(known_device(name := torch.cuda.get_device_name(device)))) is None:
        raise ConfigError(
            f'VLLM(kv="auto"): the planner has no constants for the device {name!r}, only for {", ".join(DEVICES)}: it '
            'cannot say what is cheapest. Choose kv="keep", "offload" or "recompute".'
        )
    return spec


class CacheImage:
    """Of `caches` [blocks * k, ...], which have memory now, one for each layer and one for routed experts.

    `groups` are those of the replica, whose ranks choose alike, by the largest of their parts of a block and the least
    room of a device. Bytes from and to the host are counted.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        blocks: int,
        loop: EngineLoop,
        groups: ReplicaGroups,
        pricing: CachePricing | None,
    ) -> None:
        parts = {(cache.data_ptr(), cache.shape): cache for cache in caches if cache.numel()}  # layers may share one
        self._views = [part.unflatten(0, (blocks, -1)) for part in parts.values()]
        self._device = self._views[0].device
        self._block_bytes = max(groups.gather(sum(view[0].nbytes for view in self._views)))
        self._loop, self._groups, self._pricing = loop, groups, pricing
        self._saved: list[tuple[list[int], list[Tensor], bool]] = []  # blocks, of each layer, whether in host memory
        self._beside: int | None = None  # bytes that others have needed at once while the cache had no memory
        self.copied_in = self.copied_out = 0
        self.device_bytes = 0  # of blocks that wait there

    @property
    def waits(self) -> bool:
        """Whether rows wait; equal on all ranks."""
        return bool(self._saved)

    def put_away(self, kv: KV) -> None:
        """Copy the blocks of rows to where `kv` says, and evict the others. Collective if there are some, except with
        "recompute"."""
        self.drop()
        gone = dict.fromkeys(self._loop.admitted)
        if kv != "recompute" and gone:
            cached = self._loop.cached()
            told = self._groups.gather((cached, self._room(kv)))
            if all(other == cached for other, _ in told):
                away = self._places(kv, cached, min(room for _, room in told))
                gone = {name: None for name in cached if away.get(name) == "recompute"}
            else:
                logger.warning("ranks have computed other tokens of the unfinished rows: their KV caches are evicted")
        self._loop.rest(gone)

    def _places(self, kv: KV, cached: dict[str, int], room: float) -> dict[str, CachePlace]:
        """Of each row, once the blocks of all that wait are there."""
        nbytes = [len(self._loop.blocks([name])) * self._block_bytes for name in cached]
        if self._pricing is None:
            rows, prices = [CachedRow(size, 0.0) for size in nbytes], CachePrices(offload=0.0)
        else:
            rows, prices = self._pricing.rows(cached.values(), nbytes), self._pricing.prices
        places = dict(zip(cached, cache_places(kv, rows, prices, room), strict=True))
        if kv == "keep" and (left := list(places.values()).count("recompute")):
            logger.warning(_LACKING, "device", left)
        for place, memory in _MEMORY.items():
            names = [name for name, its in places.items() if its == place]
            if names and not self._save(self._loop.blocks(names), memory == "host"):
                logger.warning(_LACKING, memory, len(names))
                places.update((name, "recompute") for name in names)
        return places

    @torch.inference_mode()
    def _save(self, blocks: list[int], host: bool) -> bool:
        """False where a rank lacks memory: then none has saved them."""
        parts = list[Tensor]()

        def copy() -> None:
            (at,) = to_device([torch.tensor(blocks)], self._device)
            for view in self._views:
                part = view.index_select(0, at)
                parts.append(to_host(part) if host else part)
            if host:
                settle(self._device)

        if self._groups.attempt(copy) is not None:
            return False
        self._saved.append((blocks, parts, host))
        nbytes = sum(part.nbytes for part in parts)
        self.copied_out += nbytes if host else 0
        self.device_bytes += 0 if host else nbytes
        return True

    @torch.inference_mode()
    def bring_back(self) -> None:
        """Copy the blocks to their places in the cache, which has memory again."""
        for blocks, parts, host in self._saved:
            (at,) = to_device([torch.tensor(blocks)], self._device)
            for view, part in zip(self._views, parts, strict=True):
                view.index_copy_(0, at, part.to(self._device, non_blocking=True))
                self.copied_in += part.nbytes if host else 0

    def drop(self) -> None:
        """Free what waits."""
        self._saved.clear()
        self.device_bytes = 0

    def close(self) -> None:
        self.drop()
        self._views.clear()

    def falls_asleep(self) -> None:
        """The cache has just lost its memory."""
        if self._device.type == "cuda":
            _ = MAPPED.highest()

    def wakes_up(self) -> None:
        """The cache is about to have memory."""
        if self._device.type == "cuda":
            self._beside = MAPPED.highest() - self.device_bytes

    def _room(self, kv: KV) -> float:
        """Bytes of device memory that others are not known to need while the cache has none: before they have had the
        device, those that are free, none with "auto", which has other places."""
        if self._device.type != "cuda":
            return math.inf
        free, _ = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if self._beside is None:
            return 0.0 if kv == "auto" else free
        return min(free, DEFAULT.usable_memory * (free + MAPPED.now()) - self._beside)
