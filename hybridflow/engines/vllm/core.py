"""vLLM's engine core, configured and built as one rank of a replica without vLLM's front end, and its memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.batch.pinned import settle
from hybridflow.config import VLLM
from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engine3d.offloadable import HostImages, Memory, Residency
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.vllm import isolation
from hybridflow.engines.vllm.discovery import LayoutProbe
from hybridflow.engines.vllm.eager import lighten, rotate_heads
from hybridflow.engines.vllm.requirements import (
    BUILT_IN,
    architecture,
    check_resolved,
    max_length,
    memory_error,
    on_transformers,
    resolved_dtype,
    runs_eagerly,
)
from hybridflow.engines.vllm.routed_experts import RoutedExperts
from hybridflow.engines.vllm.row_images import longest_image, settings, torchvision_names
from hybridflow.errors import PlacementError
from hybridflow.models.hf_spec import Decoder, latent_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

_STEP_TOKENS = 8192
_WRAPPERS: list[Any] = []
"""Of allocators that tensors of closed engines may still lie in."""
_POINTER = ctypes.c_void_p
_FREE = ctypes.CFUNCTYPE(None, _POINTER, ctypes.c_ssize_t, ctypes.c_int, _POINTER)
_CALLBACKS: list[Any] = []  # torch holds their addresses


def start_core(
    strategy: VLLM,
    spec: Decoder,
    checkpoint: Path,
    device: torch.device,
    groups: isolation.ReplicaGroups,
    probe: LayoutProbe | None = None,
    routing: RoutedExperts | None = None,
) -> EngineCore:
    """Build this rank's part, with random weights and our sampler. Collective over the replica.

    `probe`, when given, sees where vLLM's loader puts weights, `routing` which experts are chosen.
    """
    from vllm.v1.engine.core import EngineCore

    from hybridflow.engines.vllm.sampler import PolicySampler

    eager = runs_eagerly(strategy, device.type)
    free, total = _free_memory(strategy, device, groups)
    if not eager:
        _prepare_allocator()
    with ExitStack() as undo:
        undo.callback(_forget, groups)  # a failed start leaves nothing behind
        watching = [one.installed() for one in (probe, routing) if one is not None]
        with groups.installing(), ExitStack() as stack:
            for one in watching:
                stack.enter_context(one)
            model_class = _load_model_class(architecture(spec))
            if spec.images:
                stack.enter_context(longest_image(model_class, spec.images, strategy.image_tokens))
            if on_transformers(spec):
                stack.enter_context(isolation.uncompiled())
            config = _config(strategy, spec, checkpoint, device)
            try:
                core = EngineCore(config, _executor(groups.rank, device.index or 0), log_stats=False)
            except ValueError as error:
                length = config.model_config.max_model_len
                found = memory_error(strategy, length, free, total, str(error)) if total else None  # CUDA's only
                if found is None:
                    raise
                raise found from error
        runner = model_runner(core)
        check_resolved(config, runner.model, spec)
        runner.sampler = PolicySampler(runner, spec.images.special if spec.images else ())
        if eager:
            lighten(runner.model)
        if device.type == "cpu":
            rotate_heads(runner.model)
        if strategy.pp > 1 and runner.intermediate_tensors is None:  # made during warm-up, which CPU has none of
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        if routing is not None:
            routing.follow(core)
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
        return Residency(tensors, model_runner(core).device, kept=shared)
    model = model_runner(core).model
    buffers = dict(model.named_buffers()) if tag == "weights" else {}
    if tag == "weights":  # Qwen3-VL adds them to hidden states, also those of no image, which are zero
        levels = getattr(model, "deepstack_input_embeds", None) or ()
        buffers |= {f"deepstack_input_embeds.{at}": level for at, level in enumerate(levels)}
    return PooledMemory(tensors, buffers, lambda: _unmap(tag), lambda: _map_back(tag))


def _forget(groups: isolation.ReplicaGroups) -> None:
    """Empty the globals that hold what belongs to an engine, and thaw the heap, which vLLM freezes."""
    from torch._dynamo import convert_frame
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    from vllm.model_executor.layers import rotary_embedding
    from vllm.v1.worker.workspace import reset_workspace_manager

    rotary_embedding._ROPE_DICT.clear()
    reset_workspace_manager()
    for hook in list(convert_frame._bytecode_hooks.values()):  # a compiled model's own holds it with its weights
        if isinstance(owner := getattr(hook, "__self__", None), TorchCompileWithNoGuardsWrapper):
            owner.cleanup()
    groups.remove()
    gc.unfreeze()


def stop_core(core: EngineCore, groups: isolation.ReplicaGroups) -> None:
    """vLLM's own shutdown would destroy the process's torch.distributed, so its parts are called one by one.

    Once the caller has dropped `core`, `collect` frees what is left of it.
    """
    with isolation.uncollected(), ExitStack() as stack:
        if groups.context.device.type == "cuda":  # `collect` does it, when nothing uses them
            stack.enter_context(isolation.replaced(_allocator(), "release_pools", lambda: None))
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        core.structured_output_manager.clear_backend()
        _forget(groups)


def collect(device: torch.device) -> None:
    """Free the CUDA memory of a closed engine, which lies in reference cycles and in torch's cache."""
    if device.type == "cuda":
        gc.collect()
        entries = [entry for entries in _allocator().allocator_and_pools.values() for entry in entries]
        _WRAPPERS.extend(wrapper for _, wrapper in entries)
        entries.clear()
        with isolation.uncollected():
            _allocator().release_pools()
        torch.cuda.empty_cache()
        MAPPED.set_unmapped(0)


def _config(strategy: VLLM, spec: Decoder, checkpoint: Path, device: torch.device) -> VllmConfig:
    from vllm.config import KernelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model_class = architecture(spec)
    cpu, length, eager = device.type == "cpu", max_length(spec, strategy), runs_eagerly(strategy, device.type)
    config = EngineArgs(
        model=str(checkpoint),
        hf_overrides={"architectures": [model_class], **BUILT_IN.get(spec.family, {})},  # whatever head it has
        skip_tokenizer_init=True,
        trust_remote_code=False,
        load_format="dummy",
        dtype=resolved_dtype(strategy, device.type),
        tensor_parallel_size=strategy.tp,
        pipeline_parallel_size=strategy.pp,
        enable_expert_parallel=strategy.expert_parallel,
        distributed_executor_backend="external_launcher",  # every rank schedules; pipeline outputs go to all
        disable_custom_all_reduce=True,  # it looks for its peers' devices, and a host sees its own only
        max_model_len=length,
        max_num_seqs=strategy.max_sequences,
        max_num_batched_tokens=max(_STEP_TOKENS, strategy.max_sequences),  # longer prompts take several steps
        gpu_memory_utilization=strategy.memory_fraction,
        kv_cache_memory_bytes=int(strategy.kv_cache_gb * 2**30) if cpu else None,
        enforce_eager=eager,
        enable_sleep_mode=not eager,  # see PooledMemory
        enable_prefix_caching=True,  # several responses per prompt share its cache
        disable_log_stats=True,
        # vLLM may choose, except for latent attention on CPU: on some CPUs it would pack `kv_b_proj` away
        attention_backend=AttentionBackendEnum.CPU_MLA if cpu and latent_size(spec) else None,
        kernel_config=KernelConfig(enable_jit_warmup=False),  # of kernels most of which vLLM's own sampler calls
        seed=0,
        **settings(spec, strategy.tp, cpu),
    ).create_engine_config()
    scheduling = config.scheduler_config
    images = min(scheduling.max_num_batched_tokens, strategy.image_tokens)  # in a step, and kept for later ones
    scheduling.max_num_encoder_input_tokens = scheduling.encoder_cache_size = images
    if strategy.pp == 1 and not scheduling.async_scheduling:  # where it is, it overlaps with the device
        from hybridflow.engines.vllm.scheduler import DecodeScheduler

        scheduling.scheduler_cls = DecodeScheduler
    return config


def _load_model_class(name: str) -> Any:
    """Register the class itself: for a mere name vLLM starts a process that imports vLLM again to look at it."""
    from vllm.model_executor.models import ModelRegistry

    if load := getattr(ModelRegistry.models[name], "load_model_cls", None):
        with torchvision_names():
            ModelRegistry.register_model(name, load())
    return ModelRegistry.models[name].model_cls  # type: ignore[attr-defined]


def _executor(rank: int, local_rank: int) -> type[ExecutorWithExternalLauncher]:
    """vLLM's one-worker executor, told its place by us instead of by environment variables."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", rank, local_rank

    return ReplicaExecutor


# Memory


def _free_memory(strategy: VLLM, device: torch.device, groups: isolation.ReplicaGroups) -> tuple[int, int]:
    """Bytes free and in all on the replica's fullest device, before the start. Errors: DeviceMemoryError on all ranks
    where that is less than the strategy asks for: a single rank's error would let its peers wait."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    free, total = min(groups.gather(torch.cuda.mem_get_info(device)))
    if (error := memory_error(strategy, 0, free, total)) is not None:
        raise error
    return free, total


def _allocator() -> Any:
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def _prepare_allocator() -> None:
    """Let vLLM's allocator free memory that is unmapped: its own `my_free` would unmap it once more, print the driver's
    error and raise it at its next use. Errors: PlacementError."""
    from vllm.device_allocator import cumem

    allocator: Any = _allocator()
    if allocator.get_current_usage():
        gc.collect()  # what failed to start may lie in reference cycles of its error, or wait for a stream
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if used := allocator.get_current_usage():
        raise PlacementError(
            f"tensors of a closed vLLM engine still have {used} bytes in this process, and a second engine cannot "
            "share its allocator. Drop all tensors of its storage() first."
        )
    if _CALLBACKS:
        return
    library, driver = ctypes.CDLL(cumem.lib_name), ctypes.CDLL("libcuda.so.1")
    library.my_free.argtypes = _POINTER, ctypes.c_ssize_t, ctypes.c_int, _POINTER
    driver.cuMemAddressFree.argtypes = _POINTER, ctypes.c_size_t

    def free(address: int, size: int, device: int, stream: int | None) -> None:
        data = allocator.pointer_to_data.get(address)
        if data is None:  # vLLM trims segments of a pool that torch keeps until the pool goes
            return
        if not data.is_asleep:
            library.my_free(address, size, device, stream)
        else:
            allocator.python_free_callback(address)
            driver.cuMemAddressFree(address, size)

    def pluggable_allocator(malloc: Any, free: Any) -> Any:
        cumem.init_module(malloc, free)
        pair = (ctypes.cast(function, _POINTER).value or 0 for function in (library.my_malloc, _CALLBACKS[0]))
        return torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(*pair))

    _CALLBACKS.append(_FREE(free))
    cumem.get_pluggable_allocator = pluggable_allocator


def _unmap(tag: str) -> None:
    _allocator().discard(tag)
    _count_unmapped()


def _map_back(tag: str) -> None:
    """Errors: OutOfMemoryError, and all of the tag is unmapped as before."""
    allocator = _allocator()
    try:
        with isolation.uncollected():
            allocator.wake_up([tag])
    except RuntimeError as error:  # of any kind
        allocator.discard(tag)
        needed = sum(data.handle[1] for data in allocator.pointer_to_data.values() if data.tag == tag)
        free, _ = torch.cuda.mem_get_info()
        if free >= needed:
            raise
        raise torch.OutOfMemoryError(f"vLLM's {tag} need {needed} bytes, {free} are free") from error
    _count_unmapped()


def _count_unmapped() -> None:
    allocator, size = _allocator(), 0
    for pool, _ in (entry for entries in allocator.allocator_and_pools.values() for entry in entries):
        for segment in pool.snapshot():
            data = allocator.pointer_to_data.get(segment["address"])
            size += segment["allocated_size"] if data is not None and data.is_asleep else 0
    MAPPED.set_unmapped(size)


class PooledMemory:
    """The `Memory` of `tensors` under one tag of vLLM's allocator: all of them, or none.

    It keeps its addresses, because captured CUDA graphs hold them. vLLM's sleep-mode allocator
    (`vllm/device_allocator/cumem.py`, switched on by `enable_sleep_mode`) frees the physical memory of a tag and later
    maps new memory there. Its worker allocates the model under "weights" (`Worker.load_model`: parameters, and buffers
    such as rotary caches) and the KV cache under "kv_cache" (`Worker.initialize_from_config`); graphs and run-time
    state lie under tags of their own that we never touch.

    It is released with the last name and acquired with the first, like one shared storage. `buffers` under the same tag
    are kept on the host meanwhile. Images on the host are as in `Residency`: code that writes into a tensor calls
    `changed`. `unmap` frees the physical memory once the device is idle, `map_back` allocates it
    again with undefined content.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        unmap: Callable[[], None],
        map_back: Callable[[], None],
    ) -> None:
        self._tensors, self._buffers = dict(tensors), dict(buffers)
        self._unmap, self._map_back = unmap, map_back
        self._users = set(tensors)  # the names that are not released
        self._away: set[str] = set()  # the names that were offloaded
        stream = CopyStream(next(iter(tensors.values())).device)
        self.images, self._host_buffers = HostImages(stream), HostImages(stream)
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self.losses = 0

    @property
    def resident_bytes(self) -> int:
        return self.total_bytes if self._users else 0

    def resident(self, name: str) -> bool:
        return bool(self._users) or name not in self._tensors

    def release(self, names: Iterable[str] | None = None) -> None:
        gone, self.losses = self._found(names), self.losses + 1
        self._away -= gone
        self._drop(gone)

    def offload(self, names: Iterable[str] | None = None) -> None:
        """Copies to pinned host memory when the last name is released."""
        gone = self._found(names) & self._users
        self._away |= gone
        self._drop(gone)

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        wanted, fresh = self._found(names), set[str]()
        if wanted and not self._users:
            self._map_back()
            self.images.stream.follow()
            for name, buffer in self._buffers.items():
                self._host_buffers.restore(name, buffer)
            for name in self._away:
                self.images.restore(name, self._tensors[name])
            self.images.stream.join()  # of buffers, too
            fresh = self._tensors.keys() - self._away
        self._users |= wanted
        self._away -= wanted
        return fresh

    def _found(self, names: Iterable[str] | None) -> set[str]:
        return set(self._tensors) if names is None else self._tensors.keys() & set(names)

    def _drop(self, gone: set[str]) -> None:
        before, self._users = self._users, self._users - gone
        if before and not self._users:
            self._host_buffers.changed()  # caches among them
            self._host_buffers.save(self._buffers)
            self.images.save({name: self._tensors[name] for name in self._away})
            self.images.stream.join()
            settle(next(iter(self._tensors.values())).device)
            self._unmap()
        if not self._users:
            self.images.drop(self._tensors.keys() - self._away)

    def changed(self) -> None:
        """The tensors may have been written into."""
        self.images.changed()


_SMALLEST = 1 << 20  # bytes: below it writing zeros is as fast


def zero_pages(storage: torch.UntypedStorage) -> None:
    """Make all bytes of `storage` zero. On Linux's CPU, whole pages take no memory until they are used."""
    size, bytes_ = storage.nbytes(), torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if storage.device.type != "cpu" or sys.platform != "linux" or size < _SMALLEST:
        bytes_.zero_()
        return
    first = -storage.data_ptr() % mmap.PAGESIZE
    last = size - (storage.data_ptr() + size) % mmap.PAGESIZE
    address, length = ctypes.c_void_p(storage.data_ptr() + first), ctypes.c_size_t(last - first)
    # torch's CPU memory is private and anonymous, for which this advice means zeros on the next access
    if ctypes.CDLL(None).madvise(address, length, mmap.MADV_DONTNEED):
        bytes_.zero_()
        return
    bytes_[:first].zero_()
    bytes_[last:].zero_()
