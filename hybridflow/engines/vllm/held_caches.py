"""Held caches: the KV cache of a row that has ended stays for the row of the same name that continues it.

vLLM's prefix cache knows whole blocks (128 tokens on CPU). A request that waits for more input, as of its streaming
sessions, keeps all of its blocks, so the next turn of a conversation computes its new tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hybridflow.engines.contract import Row

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class HeldCaches:
    """Requests of `core` that have ended and wait for a next turn, the oldest first. All ranks of a replica make the
    same calls.

    Where steps overlap (pipelines, and asynchronous scheduling on CUDA) none is held: the prefix cache remains.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._scheduler = core, core.scheduler
        self.possible = core.batch_queue is None
        self._ids: dict[str, list[int]] = {}  # prompt and response

    def hold(self, row: Row, running: bool) -> bool:
        """Keep the cache of a row that has ended: vLLM's request waits already, or is `running` and is made to.

        False if it must be aborted.
        """
        from vllm.v1.request import RequestStatus

        if not self.possible:
            return False
        if running:
            scheduler: Any = self._scheduler
            request = scheduler.requests[row.name]
            if request.status != RequestStatus.RUNNING:
                return False
            scheduler.running.remove(request)
            request.status = RequestStatus.FINISHED_STOPPED
            scheduler._handle_stopped_request(request)
        self._ids[row.name] = row.prompt_ids + row.token_ids
        return True

    def cached(self, row: Row) -> int:
        """Tokens of the row's prompt that its name's cache has, which is used with this; otherwise it is freed: 0."""
        if (ids := self._ids.get(row.name)) is None:
            return 0
        if row.token_ids or row.images or row.prompt_ids[: len(ids)] != ids:
            self.release([row.name])
            return 0
        del self._ids[row.name]
        return self._scheduler.requests[row.name].num_computed_tokens  # type: ignore[attr-defined]

    def release(self, names: Iterable[str] | None = None) -> None:
        """Free the caches of these names, or all; their whole blocks stay in the prefix cache while there is room."""
        gone = [name for name in (list(self._ids) if names is None else names) if self._ids.pop(name, None) is not None]
        if gone:
            self._core.abort_requests(gone)

    def make_room(self) -> None:
        """Free the oldest while rows have less than half of the cache to themselves, or wait for a place."""
        scheduler: Any = self._scheduler
        while self._ids:
            pool, places = scheduler.kv_cache_manager.block_pool, scheduler.max_num_active_reqs
            full = len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= places
            if 2 * pool.get_num_free_blocks() >= pool.num_gpu_blocks and not (full and scheduler.waiting):
                return
            self.release([next(iter(self._ids))])
