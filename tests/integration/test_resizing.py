"""Sizes: a group whose data parallel size changes between mini-batches trains as one whose size is constant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.distributed_c10d as c10d

import hybridflow as hf
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.errors import ConfigError, ModelError, PlacementError, WorkerError
from hybridflow.resizing import Sizes
from tests import tiny_models
from tests.tiny_models import make_rows

TOLERANCE = 1e-5  # relative, of losses and gradient norms; absolute, of weights
ADAM = hf.Adam(lr=1e-3, schedule="linear", warmup_steps=3, total_steps=50)
STRATEGIES = {
    "megatron": (hf.Megatron(), (1, 2, 4)),
    "tensor parallel": (hf.Megatron(tp=2), (1, 2)),
    "fsdp": (hf.FSDP(), (1, 2, 4)),
    "zero1": (hf.ZeRO(stage=1), (1, 2, 4)),
    "zero3": (hf.ZeRO(stage=3), (1, 2, 4)),
    "bf16": (hf.Megatron(dtype="bfloat16"), (1, 2)),
}
Tensors = dict[str, dict[str, torch.Tensor]]


class Shown(hf.ActorWorker):
    """An actor that shows what it has, and can fail once while state arrives."""

    fails = ""

    @hf.register(hf.ONE_TO_ALL)
    def whole_state(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Kind -> canonical tensors, whole, and the counters; on rank 0."""
        engine, rank = self.engine, self.context.rank
        layout = engine.optimizer_layout()
        group = self.context.groups.everyone() if self.context.grid.size > 1 else None
        kinds = {}
        with self.resident():
            sources = [(kind, layout, held) for kind, held in engine.optimizer_storage().items()]
            for kind, lies, held in [*sources, ("weights", engine.layout(), engine.storage())]:
                shapes = lies.tensors.items()
                kinds[kind] = {name: torch.empty(shape) for name, shape in shapes} if rank == 0 else {}
                execute(plan(lies, gathered(lies)), held, kinds[kind], group, rank)
        return (kinds, engine.optimizer_counters()) if rank == 0 else None

    @hf.register(hf.ONE_TO_ALL)
    def process_groups(self) -> int:
        """Of this process."""
        return len(c10d._world.pg_map)

    def training_state_arrived(self, counters: dict[str, Any]) -> None:
        self.fail("arrived")
        super().training_state_arrived(counters)

    def wake_up(self) -> None:
        self.fail("wake_up")
        super().wake_up()

    def optimizing_engine(self) -> Any:
        if self.context.method != "whole_state":
            self.fail("storage")
        return super().optimizing_engine()

    def fail(self, at: str) -> None:
        mark = self.checkpoint / f"fail-{at}-{self.context.rank}-of-{self.context.grid.size}"
        if mark.exists():
            mark.unlink()
            raise RuntimeError(f"no {at} here")


def gathered(layout: Layout) -> Layout:
    """Every tensor whole on rank 0."""

    def regions(rank: int) -> list[Region]:
        everything = layout.tensors.items() if rank == 0 else ()
        return [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in everything]

    return Layout(layout.tensors, layout.ranks, regions)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def actors(pool, policy) -> Iterator[Any]:
    """Actors of a strategy on the first devices of the pool, closed after the test."""
    made = []

    def actor(strategy: Any, devices: int = 1, **settings: Any) -> hf.WorkerGroup:
        made.append(Shown.on(pool[:devices], model=policy, train=strategy, optim=ADAM, **settings))
        return made[-1]

    yield actor
    for group in made:
        group.close()


def same(one: Tensors, other: Tensors) -> bool:
    pairs = [(value, other[kind][name]) for kind, tensors in one.items() for name, value in tensors.items()]
    return set(one) == set(other) and all(torch.equal(*pair) for pair in pairs)


def batches(number: int) -> list[hf.BatchRef]:
    return [hf.BatchRef.from_batch(make_rows(8, seed=seed)) for seed in range(number)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_in_changing_sizes_is_training(name, actors, pool):
    """1 -> 2 -> 4 -> 1 between mini-batches; then sizes that were visited before build nothing."""
    strategy, known = STRATEGIES[name]
    stays, moves = (actors(strategy, getattr(strategy, "tp", 1), name=f"{name} {who}") for who in ("stays", "moves"))
    alone = moves.memory()[0]
    sizes = Sizes(moves, pool, known)
    groups = []
    try:
        for step, batch in enumerate(batches(8)):
            expected, got = (group.update_actor(batch).get() for group in (stays, moves))
            assert {"actor/loss", "actor/grad_norm"} <= set(expected)
            assert got == pytest.approx(expected, rel=TOLERANCE if name != "bf16" else 1e-2), f"update {step}"
            before, counters = moves.whole_state().get()[0]
            done = sizes.resize(known[(step + 1) % len(known)])
            assert (done.to_size, moves.grid.d) == (sizes.size, sizes.size) == (known[(step + 1) % len(known)],) * 2
            after, counters_after = moves.whole_state().get()[0]
            assert {"main", "exp_avg", "exp_avg_sq"} < set(after)
            assert same(before, after)
            assert counters == counters_after
            assert any(value.any() for value in before["exp_avg"].values())
            groups.append((sizes.size, tuple(moves.process_groups().get())))
        cycle = len(known)
        assert groups[2 * cycle - 1] == groups[cycle - 1]  # from the second round on, nothing is built
        assert groups[cycle : 2 * cycle] == groups[2 * cycle :] + groups[cycle : 2 * cycle][len(groups) - 2 * cycle :]
        mine, theirs = (group.whole_state().get()[0][0] for group in (stays, moves))
        for kind, tensors in mine.items():
            for tensor, value in tensors.items():
                bound = TOLERANCE if name != "bf16" else 1e-2
                torch.testing.assert_close(theirs[kind][tensor], value, rtol=0, atol=bound, msg=f"{kind} {tensor}")
        assert alone["memory/parameters"] > 0
    finally:
        sizes.close()
    assert len(moves.all_ranks) == 1
