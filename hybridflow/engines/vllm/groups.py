"""vLLM's world, tensor and pipeline groups, taken from the generation grid on our own process groups.

One generation replica (p_g * t_g ranks) is one vLLM world: no data parallelism inside vLLM. The ranks of a replica lie
at intervals in the training grid, and the training group may be a slice of the host processes' torch world, so vLLM
must not count ranks itself. Its worker asks for its groups in exactly one place, `init_distributed_environment`; we
answer there with groups that only their members take part in, and vLLM finds them made when it looks for them.

vLLM keeps its groups in globals of `vllm.distributed.parallel_state`: one live engine per process is its limit, and
those globals are our only book-keeping of it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.vllm.isolation import replaced
from hybridflow.topology import GenerationGrid

_GLOBALS = ("_WORLD", "_TP", "_ETP", "_PP", "_DCP", "_PCP", "_DP", "_EP", "_INNER_DP_WORLD", "_NODE_COUNT")


class ReplicaGroups:
    """The process groups of this rank's generation replica, as vLLM coordinators while it is installed.

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
        everyone: list[Any] = [None] * len(self.members)
        dist.all_gather_object(everyone, mine, group=self.context.groups.new("generate/replica", self.members, "gloo"))
        return everyone

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
    from vllm.distributed import parallel_state as vllm_state

    return vllm_state._WORLD is not None or vllm_state._TP is not None
