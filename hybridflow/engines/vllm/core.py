"""vLLM's engine core: configured and built as one rank of a replica, without vLLM's front end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.config import VLLM
from hybridflow.engine3d.offloadable import Memory, Residency
from hybridflow.engines.vllm import isolation
from hybridflow.engines.vllm.discovery import LayoutProbe
from hybridflow.engines.vllm.groups import ReplicaGroups
from hybridflow.engines.vllm.requirements import architecture, max_length, resolved_dtype, runs_eagerly
from hybridflow.engines.vllm.sleep_mode import PooledMemory
from hybridflow.models.spec import Decoder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_STEP_TOKENS = 8192


def start_core(
    strategy: VLLM,
    spec: Decoder,
    checkpoint: Path,
    device: torch.device,
    groups: ReplicaGroups,
    probe: LayoutProbe | None = None,
) -> EngineCore:
    """Build this rank's part, with random weights and our sampler. Collective over the replica.

    `probe`, when given, sees where vLLM's loader puts weights.
    """
    from vllm.v1.engine.core import EngineCore

    from hybridflow.engines.vllm.sampler import PolicySampler

    with ExitStack() as undo:
        undo.callback(groups.remove)  # a failed start leaves nothing behind
        with groups.installing(), nullcontext() if probe is None else probe.installed():
            config = _config(strategy, spec, checkpoint, device)
            core = EngineCore(config, _executor(groups.rank, device.index or 0), log_stats=False)
        runner = model_runner(core)
        runner.sampler = PolicySampler()
        if strategy.pp > 1 and runner.intermediate_tensors is None:  # made during warm-up, which CPU has none of
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        undo.pop_all()
    return core


def model_runner(core: EngineCore) -> Any:
    """vLLM's `GPUModelRunner` (of which the CPU one is a kind); it holds the model, the cache and the sampler."""
    return core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]


def memory(
    core: EngineCore, tag: str, tensors: Mapping[str, Tensor], *, eager: bool, shared: Collection[str] = ()
) -> Memory:
    """The memory of `tensors`, all that vLLM's allocator knows as `tag`; `shared` ones belong to somebody else too.

    Running eagerly vLLM reads addresses from its tensors at every step, so their storages may come and go one by one.
    """
    if eager:
        return Residency(tensors, kept=shared)
    executor, buffers = core.model_executor, {}
    if tag == "weights":
        buffers = dict(model_runner(core).model.named_buffers())

    def map_back() -> None:
        with isolation.uncollected():
            executor.wake_up([tag])

    return PooledMemory(tensors, buffers, lambda: executor.discard((tag,)), map_back)


def _config(strategy: VLLM, spec: Decoder, checkpoint: Path, device: torch.device) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs

    model_class = architecture(spec)
    _load_model_class(model_class)
    cpu, length, eager = device.type == "cpu", max_length(spec, strategy), runs_eagerly(strategy, device.type)
    return EngineArgs(
        model=str(checkpoint),
        hf_overrides={"architectures": [model_class]},  # whatever head the checkpoint has
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=resolved_dtype(strategy, device.type),
        tensor_parallel_size=strategy.tp,
        pipeline_parallel_size=strategy.pp,
        distributed_executor_backend="external_launcher",  # every rank schedules; pipeline outputs go to all
        max_model_len=length,
        max_num_seqs=strategy.max_sequences,
        max_num_batched_tokens=max(_STEP_TOKENS, length),
        gpu_memory_utilization=strategy.memory_fraction,
        kv_cache_memory_bytes=int(strategy.kv_cache_gb * 2**30) if cpu else None,
        enforce_eager=eager,
        enable_sleep_mode=not eager,  # see sleep_mode.py
        enable_prefix_caching=True,  # several responses per prompt share its cache
        disable_log_stats=True,
        seed=0,
    ).create_engine_config()


def _load_model_class(name: str) -> None:
    """Register the class itself: for a mere name vLLM starts a process that imports vLLM again to look at it."""
    from vllm.model_executor.models import ModelRegistry

    if load := getattr(ModelRegistry.models[name], "load_model_cls", None):
        ModelRegistry.register_model(name, load())


def _executor(rank: int, local_rank: int) -> type[ExecutorWithExternalLauncher]:
    """vLLM's one-worker executor, told its place by us instead of by environment variables."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", rank, local_rank

    return ReplicaExecutor
