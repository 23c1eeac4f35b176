"""vLLM's single-worker executor, told its place by us instead of by environment variables."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


def replica_executor(rank: int, local_rank: int) -> type[ExecutorWithExternalLauncher]:
    """The executor of rank `rank` of a replica on device `local_rank` of its node."""

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return "env://", rank, local_rank

    return ReplicaExecutor
