"""Shown: an actor of which tests see the whole optimizer state, and whose ranks fail or die where they say."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

import hybridflow as hf
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute

ADAM = hf.Adam(lr=1e-3, schedule="linear", warmup_steps=3, total_steps=50)
Tensors = dict[str, dict[str, torch.Tensor]]


class Shown(hf.ActorWorker):
    """An actor that shows what it has, and fails or dies once where a file in its checkpoint says so."""

    @hf.register(hf.ONE_TO_ALL)
    def whole_state(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Kind of optimizer state, and weights -> canonical tensors, whole; the counters; on rank 0."""
        engine, rank = self.engine, self.context.rank
        layout = engine.optimizer_layout()
        group = self.context.groups.everyone() if self.context.grid.size > 1 else None
        kinds = {}
        with self.resident():
            found = [(kind, layout, held) for kind, held in engine.optimizer_storage().items()]
            for kind, lies, held in [*found, ("weights", engine.layout(), engine.storage())]:
                shapes = lies.tensors.items()
                kinds[kind] = {name: torch.empty(shape) for name, shape in shapes} if rank == 0 else {}
                execute(plan(lies, gathered(lies)), held, kinds[kind], group, rank)
        return (kinds, engine.optimizer_counters()) if rank == 0 else None

    @hf.register(hf.ONE_TO_ALL)
    def process_groups(self) -> int:
        """Of this process."""
        return len(c10d._world.pg_map)

    def state_bytes(self) -> int:
        """What the storages behind parameters, gradients and optimizer state have."""
        engine: Any = self.engine
        gradients = getattr(engine._shards.gradients, "_kept", ())
        states = [value for state in engine._optimizer.torch.state.values() for value in state.values() if value.ndim]
        tensors = [*engine.storage().values(), *engine._shards.main.values(), *gradients, *states]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def wake_up(self) -> None:
        self.fault("wake_up")
        super().wake_up()

    def sleep(self) -> None:
        self.fault("sleep")
        super().sleep()

    def optimizing_engine(self) -> Any:
        self.fault("storage")
        return super().optimizing_engine()

    def training_state_arrived(self, counters: dict[str, Any]) -> None:
        self.fault("arrived")
        super().training_state_arrived(counters)

    def fault(self, at: str) -> None:
        """The file has the number of times to pass, and what follows."""
        mark = self.checkpoint / f"{at}-{self.context.rank}-of-{self.context.grid.size}"
        if not mark.exists():
            return
        passes, then = mark.read_text().split()
        if int(passes):
            mark.write_text(f"{int(passes) - 1} {then}")
            return
        mark.unlink()
        if then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"no {at} here")


def gathered(layout: Layout) -> Layout:
    """Every tensor whole on rank 0."""

    def regions(rank: int) -> list[Region]:
        everything = layout.tensors.items() if rank == 0 else ()
        return [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in everything]

    return Layout(layout.tensors, layout.ranks, regions)
