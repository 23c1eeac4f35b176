"""Isolation of vLLM in a training process: environment variables before its import, a fence around its start, and
groups of its own. vLLM expects to own its process.

Starting it seeds the global random generators, replaces `torch.set_num_threads`, binds all memory of the process to one
NUMA node, collects garbage five times over, and on CPU prepacks linear weights so that they cannot be written any more.
The fence shields the training side from all of this.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from traceback import clear_frames
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, silu

from hybridflow.engines.agreement import error_of
from hybridflow.engines.process_groups import RankContext, gather
from hybridflow.errors import ConfigError
from hybridflow.topology import GenerationGrid

_EVERYWHERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # we sample ourselves: its kernels would be compiled for nothing
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second model runner cannot broadcast pipeline outputs to all ranks
}
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # hosts of one machine would all bind to the same cores
    "VLLM_TARGET_DEVICE": "cpu",
}


def prepare(device_type: str) -> None:
    """Set the variables that vLLM reads while it is imported; what the user has set stays, where it can work.

    Errors: ConfigError for a variable that changes where weights lie, or what training in this process computes.
    """
    if partition := os.environ.get("VLLM_PP_LAYER_PARTITION"):
        raise ConfigError(
            f"VLLM_PP_LAYER_PARTITION={partition!r} is set, and weights are moved by vLLM's own division of layers "
            "into stages. Unset it."
        )
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0" and not is_invariant(device_type):
        raise ConfigError(
            "VLLM_BATCH_INVARIANT is set, which replaces torch's operators in the whole process by some without "
            "gradients, and models train there. Unset it, and call hf.init(deterministic=True)."
        )
    os.environ.update(_EVERYWHERE)
    for name, value in (_DEFAULTS | (_CPU_DEFAULTS if device_type == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its import speaks before it has set this
    warnings.filterwarnings("ignore", message="The given buffer is not writable", module="vllm")


def is_invariant(device_type: str) -> bool:
    """Whether vLLM generates in its batch-invariant mode in this process."""
    return device_type == "cuda" and torch.are_deterministic_algorithms_enabled()


@contextmanager
def batch_invariant(device: torch.device) -> Iterator[None]:
    """Where this process is deterministic, vLLM's kernels stand in for torch's inside the block: models do not train
    with them."""
    if not is_invariant(device.type):
        yield
        return
    from vllm.model_executor.determinism import batch_invariant as mode

    mode.override_envs_for_invariance = lambda: None  # NCCL would have one channel of one thread, in training, too
    mode.enable_batch_invariant_mode()
    try:
        yield
    finally:
        assert mode._batch_invariant_LIB is not None
        mode._batch_invariant_LIB._destroy()
        mode._batch_invariant_LIB, mode._batch_invariant_MODE = None, False


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fence(device: torch.device) -> Iterator[None]:
    """Import and build vLLM inside this block and the training side does not notice."""
    random_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", category=FutureWarning)  # of attributes that vLLM looks at in every module
        stack.enter_context(replaced(torch, "set_num_threads", torch.set_num_threads))
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        stack.enter_context(uncollected())
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_import).result()
        try:
            if device.type == "cpu":
                _fence_cpu(stack)
            yield
        finally:
            random.setstate(random_state)
            np.random.set_state(numpy_state)


def _import() -> None:
    """Import what vLLM imports while it builds an engine: a constant of the last module would lie in its pool for good.

    In a thread of its own: vLLM keeps the error of importing a package that is missing, and with its traceback all
    frames below, which would keep the engine.
    """
    for name in ("v1.engine.core", "multimodal", "model_executor.layers.quantization.online.base"):
        import_module(f"vllm.{name}")


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection inside: with a training process's heap each takes half a second, and vLLM makes several."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with replaced(gc, "collect", lambda generation=2: 0):
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, vLLM's models on transformers' modules do not make a transformers class one that compiles: it would be
    another for the training side. All else that vLLM changes there belongs to its own modules."""
    from vllm.model_executor.models.transformers import base

    with replaced(base, "support_torch_compile", lambda **options: lambda model_class: model_class):
        yield


def _fence_cpu(stack: ExitStack) -> None:
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)
    from vllm.model_executor.layers import utils as linear_layers
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.triton_utils import dispatcher

    name = "process_weights_after_loading"
    stack.enter_context(replaced(CPUUnquantizedExperts, name, keeping_plain(getattr(CPUUnquantizedExperts, name))))
    stack.enter_context(replaced(linear_layers, "dispatch_cpu_unquantized_gemm", _plain_linear))
    stack.enter_context(replaced(torch.ops._C, "init_cpu_memory_env", lambda nodes: None))
    if dispatcher._registry:  # vLLM would register its kernels anew with each engine, and search all modules for them
        stack.enter_context(replaced(dispatcher, "register_kernels", lambda kernels: None))


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Instead of oneDNN's prepacking: keep `layer.weight` [out, in], which can be written in place."""
    layer.cpu_linear = torch.nn.functional.linear  # pyright: ignore[reportArgumentType]


Process = Callable[[Any, torch.nn.Module], None]


def keeping_plain(packed: Process) -> Process:
    """What stands in for `packed`, vLLM's processing of loaded experts: it leaves them as they are.

    Experts that are not computed here (with biases, or gates that are no SiLU) are packed after all.
    """

    def process(experts: Any, layer: torch.nn.Module) -> None:
        if experts.moe_config.activation.value != "silu" or experts.w1_bias is not None:
            packed(experts, layer)
        else:
            experts.apply = _apply

    return process


def _apply(
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    apply_router_weight_on_input: bool,
    expert_map: Tensor | None = None,
    **_: object,
) -> None:
    """`output` [N, H] := of `hidden_states` [N, H] what the experts `topk_ids` [N, K] make of it, weighed by
    `topk_weights` [N, K]; `w1` [E, 2 * I, H] gates and rows up, `w2` [E, H, I] rows down. `expert_map` gives the place
    of each expert in them, -1 where it is another rank's, whose output is added to this one's."""
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()]
    total = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, choice = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, -1)
        made = linear(silu(gate) * up, w2[expert]).to(total.dtype)
        if not apply_router_weight_on_input:  # else the inputs have been weighed
            made = made * topk_weights[token, choice, None]
        total.index_add_(0, token, made)
    output.copy_(total)


# Process groups

_GLOBALS = ("_WORLD", "_TP", "_ETP", "_PP", "_DCP", "_PCP", "_DP", "_EP", "_INNER_DP_WORLD", "_NODE_COUNT")
# What the allocators of a device and of the host say, and the errors that are named so.
_LACKING = re.compile("out of memory|(can't|not enough|not able to) (allocate )?memory|MemoryError", re.IGNORECASE)


class ReplicaGroups:
    """The process groups of this rank's generation replica, as vLLM coordinators while it is installed.

    A replica (p_g * t_g ranks) is one vLLM world, without data parallelism inside vLLM. Its ranks lie at intervals in
    the training grid, and the training group may be a slice of the host processes' torch world, so vLLM must not count
    ranks itself. Its worker asks for its groups in one place, `init_distributed_environment`; we answer there with
    groups that only their members take part in. vLLM keeps them in globals of `vllm.distributed.parallel_state`: one
    live engine per process is its limit, and those globals are our only book-keeping of it.

    `members` are the replica's ranks of the model group in (p, t) order, which is vLLM's order; `rank` is this rank's
    index in it. `ident` is one word per replica and run: vLLM's shared memory segments carry it in their names. It
    holds the session's name, by which what a killed process left is found, and `seed`, a random number.
    """

    def __init__(self, context: RankContext, grid: GenerationGrid) -> None:
        self.context, self.grid = context, grid
        self.members = grid.group(context.rank, "p", "t")
        self.rank = self.members.index(context.rank)
        word = self.gather(uuid.uuid4().hex[:16])[0]
        self.seed = int(word, 16)
        self.ident = f"hf{os.environ.get('HYBRIDFLOW_SESSION', '')}{word}"  # the host processes of a session have it

    def gather(self, mine: Any) -> list[Any]:
        """The values of all members, in their order; collective."""
        if len(self.members) == 1:
            return [mine]
        return gather(mine, self.context.groups.new("generate/replica", self.members, "gloo"))

    def attempt(self, take: Callable[[], object]) -> Exception | None:
        """Run `take` on all members; where memory is lacking, the error, on the others that of the first member that
        lacks it. Collective.

        Errors: any other likewise.
        """
        failed = None
        try:
            take()
        except Exception as error:  # of any kind: the others wait below
            failed = error
            clear_frames(error.__traceback__)  # which hold what was allocated
        found = [one for one in self.gather(failed and error_of(self.context, failed)) if one is not None]
        if not found:
            return None
        error = failed or found[0]
        if all(_LACKING.search(str(one)) for one in found):
            return error
        raise error

    def of_first(self, number: int) -> int:
        """The first member's number; collective."""
        if len(self.members) == 1:
            return number
        found, group = torch.tensor(number), self.context.groups.new("generate/replica", self.members, "gloo")
        dist.broadcast(found, group=group, group_src=0)
        return int(found)

    def object_of_first(self, value: Any) -> Any:
        """The first member's value, which can be pickled; collective."""
        return self.gather(value if self.rank == 0 else None)[0]

    @contextmanager
    def installing(self) -> Iterator[None]:
        """vLLM's worker, when built inside this block, gets the groups of this replica."""
        from vllm.v1.worker import gpu_worker

        with replaced(gpu_worker, "init_distributed_environment", self._install):
            yield

    def _install(
        self, world_size: int, rank: int, init_method: str, local_rank: int, backend: str, timeout: object
    ) -> None:
        """Stands in for vLLM's `init_distributed_environment`."""
        from vllm.config import get_current_vllm_config
        from vllm.distributed import parallel_state as vllm_state

        del world_size, rank, init_method, timeout
        os.environ["VLLM_DIST_IDENT"] = self.ident  # read when a shared-memory communicator is made
        me = self.context.rank
        axes: dict[str, tuple[Literal["p", "t"], ...]] = {"_TP": ("t",), "_PP": ("p",), "_EP": ("t",)}
        with ExitStack() as stack:
            stack.enter_context(replaced(dist, "new_group", self._new_group))
            # the shared-memory names hold a counter of groups made so far, which differs between processes with
            # another past
            stack.enter_context(replaced(vllm_state, "_group_name_counter", {}))
            vllm_state._WORLD = vllm_state.init_world_group(self._world_ranks(self.members), local_rank, backend)
            experts = get_current_vllm_config().model_config.is_moe
            for name in ("_TP", "_PP", "_DCP", "_PCP", "_DP", *(("_EP",) if experts else ())):
                members = self.grid.group(me, *axes[name]) if name in axes else [me]
                group = vllm_state.init_model_parallel_group(
                    [self._world_ranks(members)], local_rank, backend, group_name=name.lower().strip("_")
                )
                setattr(vllm_state, name, group)
            vllm_state._ETP = vllm_state._TP
        vllm_state._NODE_COUNT = vllm_state._node_count(vllm_state._WORLD.cpu_group)
        # that was a barrier of the replica: everybody has mapped the segments, so their names may go, and not even a
        # killed process leaves one behind
        self._unlink_segments()

    def _world_ranks(self, members: Sequence[int]) -> list[int]:
        return [self.context.groups.ranks[member] for member in members]

    def _new_group(self, ranks: Sequence[int], backend: str | None = None, **_: object) -> dist.ProcessGroup:
        """Stands in for `torch.distributed.new_group`: formed by its members only, with our timeout."""
        member = {world_rank: i for i, world_rank in enumerate(self.context.groups.ranks)}
        return self.context.groups.new("generate", [member[rank] for rank in ranks], backend)

    def remove(self) -> None:
        """Take the groups out of vLLM; the process groups stay with the context."""
        from vllm.distributed import parallel_state as vllm_state

        for name in _GLOBALS:
            group = getattr(vllm_state, name)
            if getattr(group, "device_communicator", None) is not None:
                group.device_communicator.destroy()
            setattr(vllm_state, name, None)
        self._unlink_segments()

    def _unlink_segments(self) -> None:
        for segment in Path("/dev/shm").glob(f"*{self.ident}*"):
            segment.unlink(missing_ok=True)


def in_use() -> bool:
    """Whether a vLLM engine lives in this process."""
    vllm_state: Any = sys.modules.get("vllm.distributed.parallel_state")
    return vllm_state is not None and (vllm_state._WORLD is not None or vllm_state._TP is not None)
