"""Capture of routing: the experts that every token was computed with (R3, rollout routing replay; arXiv 2510.11370).

vLLM's own option needs its second model runner, a GPU and one pipeline stage. Here routers write their choice into the
slot of the KV cache that their token has, and a row's slots are read when it ends. So tokens whose keys and values come
from the prefix cache or from an earlier turn have the choices that these were computed with. They die with the cache.

Shapes: T tokens of a step, N tokens of a row that were computed, L layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.errors import ModelError

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

_SMALL = 256  # experts that uint8 can number


class RoutedExperts:
    """The choices of one rank's layers. All ranks of a replica make the same calls.

    `gather` gives the values of all ranks of the replica, in (p, t) order; each of its `stages` has layers of its own.
    """

    def __init__(self, family: str, experts: int, stages: int, gather: Callable[[Any], list[Any]]) -> None:
        self._family, self._stages, self._gather = family, stages, gather
        self._dtype = torch.uint8 if experts <= _SMALL else torch.int16
        self._group = 0
        self._scheduler: Any = None
        self._ended: dict[str, Tensor] = {}  # of requests that vLLM has freed
        self.buffer = torch.empty(0)
        self.nothing = torch.empty(0)
        """[0, L, K] of the whole model."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A model runner that allocates its KV cache inside this block writes choices beside it, in captured graphs,
        too."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        allocate = GPUModelRunner.initialize_kv_cache

        def allocated(runner: Any, config: Any, is_profiling: bool = False, **options: Any) -> None:
            allocate(runner, config, is_profiling, **options)
            if not is_profiling:
                self._install(runner)

        with replaced(GPUModelRunner, "initialize_kv_cache", allocated):
            yield

    def _install(self, runner: Any) -> None:
        from vllm.forward_context import get_forward_context
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        layers: list[Any] = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        if any(one._quant_method.is_monolithic or not isinstance(one.router, BaseRouter) for one in layers):
            raise self._refused("computes experts with a kernel that chooses them itself")
        groups = runner.kv_cache_config.kv_cache_groups
        self._group = next((i for i, one in enumerate(groups) if isinstance(one.kv_cache_spec, FullAttentionSpec)), -1)
        if self._group < 0:
            raise self._refused("keeps no cache of all tokens")
        attention, size = groups[self._group].layer_names[0], groups[self._group].kv_cache_spec.block_size
        slots, choices = runner.kv_cache_config.num_blocks * size, layers[0].router.top_k if layers else 0
        # of padding, whose slot is -1, the last
        self.buffer = torch.empty((slots + 1, len(layers), choices), dtype=self._dtype, device=runner.device)

        def captured(layer: int) -> Callable[[Tensor], None]:
            def capture(experts_TK: Tensor) -> None:
                slot_T = get_forward_context().slot_mapping[attention][: len(experts_TK)]
                self.buffer[slot_T, layer] = experts_TK.to(self._dtype)

            return capture

        for at, one in enumerate(layers):
            one.router.set_capture_fn(captured(at))

    def _refused(self, why: str) -> ModelError:
        return ModelError(
            f"VLLM(return_routed_experts=True): vLLM {why} for this {self._family} model. Leave return_routed_experts "
            "out."
        )

    def follow(self, core: EngineCore) -> None:
        """Read the choices of `core`'s requests from now on, before their slots become another's. Collective."""
        scheduler: Any = core.scheduler
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[self._group]
        if manager.block_size != scheduler.hash_block_size:
            raise self._refused("copies parts of cached blocks")
        self._scheduler, free = scheduler, scheduler._free_request

        def freeing(request: Any, *more: Any, **options: Any) -> Any:
            from vllm.v1.request import RequestStatus

            if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
                self._ended[request.request_id] = self._read(request)
            return free(request, *more, **options)

        scheduler._free_request = freeing
        shapes = self._by_stage(self.buffer.shape[1:])
        self.nothing = torch.empty(
            (0, sum(layers for layers, _ in shapes), max(choices for _, choices in shapes)), dtype=self._dtype
        )

    def _by_stage(self, mine: Any) -> list[Any]:
        if self._stages == 1:
            return [mine]
        found = self._gather(mine)
        return found[:: len(found) // self._stages]

    def _read(self, request: Any) -> Tensor:
        """[N, L, K] of this stage, on the host. The last token of a request was never computed."""
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        size = self._scheduler.kv_cache_manager.coordinator.single_type_managers[self._group].block_size
        slots = torch.tensor(blocks, dtype=torch.int64)[:, None] * size + torch.arange(size)
        return self.buffer[slots.flatten()[: request.num_tokens - 1].to(self.buffer.device)].cpu()

    def finish(self, rows: Sequence[Row]) -> None:
        """Give rows that have just ended their choices. Collective over pipeline stages, if there are rows."""
        own = [self._ended.pop(row.name, None) for row in rows]
        for at, row in enumerate(rows):
            if own[at] is None:  # its request is held, or not aborted yet
                own[at] = self._read(self._scheduler.requests[row.name])
        for row, *parts in zip(rows, *(self._by_stage(own) if rows else ([],)), strict=True):
            row.routed_experts = torch.cat([part for part in parts if part.shape[1]], 1)

    def forget(self, names: Sequence[str]) -> None:
        """These requests have left vLLM's scheduler."""
        for name in names:
            self._ended.pop(name, None)
