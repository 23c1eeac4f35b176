"""What the processes of the time sharing tests do: updates of an actor and a critic, in turns or serial."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow import config
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines import time_sharing
from hybridflow.engines.time_sharing import SharedStages
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.planner.pipeline.schedule import Instruction
from hybridflow.planner.pipeline.shared_schedule import together
from tests.contracts.engine_tasks import build, share
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World

MINIBATCHES = {"lm": (12, 9), "value": (5, 8, 6), "lm2": (7, 10)}
"""Rows of each mini-batch, of all replicas, by the model's head; there may be a second one."""


def update(
    engine: TrainEngine, minibatches: Sequence[Batch], losses: Sequence[Any], announces: bool = True
) -> list[Any]:
    """Metrics, gradients and norm of each mini-batch and then the parameters, or the error that ended the update."""
    found: list[Any] = []
    if announces:
        engine.announce(minibatches, losses[0])
    try:
        for minibatch, loss in zip(minibatches, losses, strict=True):
            metrics = engine.forward_backward(minibatch, loss, loss.outputs)
            gradients = {name: value.clone() for name, value in engine.gradients().items()}
            found.append((metrics, gradients, engine.step()))
    except Exception as error:
        found.append(error)
    return [*found, trained(engine)]


def trained(engine: TrainEngine) -> dict[str, Tensor]:
    tensors = engine.storage() if engine.adapters is None else engine.adapters.storage
    return {name: value.clone() for name, value in tensors.items()}


class FailsBackward(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise LookupError("the reward of this row is gone")


@contextmanager
def breaking(engine: TrainEngine, part: str, ranks: Collection[int], micro: int) -> Iterator[None]:
    """Inside, the "forward" or "backward" of this rank's part of the model raises, in its `micro`-th micro-batch."""
    count = itertools.count()

    def hook(module: Any, inputs: Any, out: Any) -> Any:
        if not torch.is_grad_enabled() or next(count) != micro:
            return None
        if part == "forward":
            raise LookupError("the reward of this row is gone")
        hidden = out[0] if isinstance(out, tuple) else out
        found = FailsBackward.apply(hidden)
        return (found, *out[1:]) if isinstance(out, tuple) else found

    if engine.context.rank not in ranks:
        yield
        return
    handle = engine._model.loop.model.decoder.layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


class Raises:
    """A loss that raises in a micro-batch of a mini-batch."""

    outputs, reads = ("log_probs",), None

    def __init__(self, outputs: tuple[str, ...]) -> None:
        self.outputs = outputs

    def __call__(self, found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        raise LookupError("the reward of this row is gone")


def both(
    world: World,
    name: str,
    strategies: Mapping[str, Any],
    paths: Mapping[str, Path],
    size: int,
    fails: str = "",
    most: int = 3,
    silent: str = "",
    breaks: tuple[str, tuple[int, ...], int] | None = None,
    absent: int = -1,
) -> dict[str, Any]:
    """Serial and shared updates of both models, and what this rank ran of which schedule. Each model trains `most`
    mini-batches at most; in the model `fails` the loss of the last one raises, or what `breaks` names (`breaking`), and
    `silent` announces none. On the rank `absent` the shared update of `fails` ends before it begins."""
    out: dict[str, Any] = {}
    for way in ("serial", "shared"):
        engines: dict[str, TrainEngine] = {}
        calls: list[Callable[[], list[Any]]] = []
        for head, path in paths.items():
            engine = build(
                *(world, f"{name}-{way}-{head}", strategies[head], size, path, head.removesuffix("2")),
                *(config.Adam(lr=1e-3), None, False),
            )
            engines[head] = engine
            rows = [share(make_batch(n, seed=n), engine.grid, world.rank) for n in MINIBATCHES[head][:most]]
            losses = [loss_of(head.removesuffix("2"))] * len(rows)
            if head == fails and breaks is None and absent < 0:
                losses[-1] = Raises(losses[-1].outputs)  # type: ignore[call-overload]
            calls.append(partial(update, engine, rows, losses, head != silent))
        before = {head: trained(engine) for head, engine in engines.items()}
        with breaking(engines[fails], *breaks) if breaks else nullcontext():
            if way == "serial":
                found = [call() for call in calls]
            else:
                there = [None if head == fails and world.rank == absent else each for head, each in engines.items()]
                updates = [list if each is None else call for each, call in zip(there, calls, strict=True)]
                shared = SharedStages(there, engine.context)
                found = shared.run(updates)
        if way == "shared":
            assert shared.schedule is not None
            at = engine.context.coords.p
            out |= {"ran": shared.ran, "planned": list(shared.schedule.stages[at]), "works": shared.schedule.works}
        out[way] = dict(zip(engines, found, strict=True))
        out["before"] = before
        for engine in engines.values():
            engine.context.groups.close()
            engine.close()
    return out


def searches(world: World, name: str, strategies: Mapping[str, Any], paths: Mapping[str, Path]) -> list[int]:
    """How often this rank has searched a schedule after each of three shared updates, the last with other rows."""
    together.cache_clear()
    engines = {
        head: build(world, f"{name}-{head}", strategies[head], 4, path, head, config.Adam(lr=1e-3), None, False)
        for head, path in paths.items()
    }
    found = []
    for rows in (12, 12, 20):
        shared = SharedStages(list(engines.values()), next(iter(engines.values())).context)
        batches = {h: [share(make_batch(rows, seed=1), each.grid, world.rank)] for h, each in engines.items()}
        updates = [partial(update, each, batches[head], [loss_of(head)]) for head, each in engines.items()]
        for result in shared.run(updates):
            assert not any(isinstance(each, Exception) for each in result), result
        found.append(together.cache_info().misses)
    for engine in engines.values():
        engine.context.groups.close()
        engine.close()
    return found


def search_that_fails(world: World, name: str, strategies: Mapping[str, Any], paths: Mapping[str, Path]) -> list[str]:
    """What the two updates return when the first rank cannot search."""
    engines = {
        head: build(world, f"{name}-{head}", strategies[head], 4, path, head, config.Adam(lr=1e-3), None, False)
        for head, path in paths.items()
    }
    shared = SharedStages(list(engines.values()), next(iter(engines.values())).context)
    batches = {h: [share(make_batch(12, seed=1), each.grid, world.rank)] for h, each in engines.items()}
    updates = [partial(update, each, batches[head], [loss_of(head)]) for head, each in engines.items()]
    with mock.patch.object(time_sharing, "together", side_effect=MemoryError("no room for the search")):
        found = [str(result[-2] if isinstance(result, list) else result) for result in shared.run(updates)]
    world.engines += engines.values()
    return found


def forwards(world: World, name: str, strategies: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """What models compute of unlike numbers of rows, one after the other and together, twice in each call."""
    engines = {
        head: build(world, f"{name}-{head}", strategies[head], 4, path, head.removesuffix("2"), None, None, False)
        for head, path in paths.items()
    }
    batches = {
        head: share(make_batch(sum(MINIBATCHES[head]), seed=2), engine.grid, world.rank)
        for head, engine in engines.items()
    }

    def call(head: str) -> list[Any]:
        outputs: Any = ("values",) if head == "value" else ("log_probs", "entropy")
        found = [engines[head].forward(batches[head], outputs) for _ in range(2)]
        return [{name: value.values.clone() for name, value in (each or {}).items()} for each in found]

    out: dict[str, Any] = {"serial": [call(head) for head in engines]}
    shared = SharedStages(list(engines.values()), next(iter(engines.values())).context, trains=False)
    out["shared"] = shared.run([partial(call, head) for head in engines])
    assert shared.schedule is not None
    out |= {"ran": shared.ran, "works": shared.schedule.works}
    for engine in engines.values():
        engine.context.groups.close()
        engine.close()
    return out


def micro_batches(ran: Sequence[Instruction]) -> int:
    return sum(each.kind == "forward" for each in ran)


def one_model(world: World, name: str, strategy: Any, path: Path, size: int, repeats: int = 1) -> dict[str, Any]:
    """Gradients by our instructions and by Megatron's own schedule, and the seconds of each pass, in turns."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    from hybridflow.engines.megatron import engine as backend
    from hybridflow.engines.megatron import model

    engine = build(world, name, strategy, size, path, "lm", config.SGD(lr=0.0), None, False)
    rows, loss = share(make_batch(24, seed=1), engine.grid, world.rank), loss_of("lm")
    loop, ways = engine._model.loop, ("ours", "megatron")
    ours = loop.train

    groups = backend.process_group_collection(engine.context)
    if loop.device.type == "cpu":
        for module in (schedules, p2p_communication):
            module.torch = model._CpuTorch()  # type: ignore[attr-defined]

    def megatron(micro_batches: Any, share_of: Any, failed: Any) -> None:
        def forward_step(batches: Any, model: Any) -> Any:
            micro = next(batches).to(loop.device)
            return loop._forward(micro), lambda out, **_: (share_of(micro, out[0]), 0, {})

        loop.model.train()
        talk = (
            {"p2p_communicator": p2p_communication.P2PCommunicator(groups.pp, loop.model.config)}
            if loop.stages > 1
            else {}
        )
        rows, length = micro_batches[0].ids.shape
        schedules.get_forward_backward_func(pp_size=loop.stages, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[loop.model],
            num_microbatches=len(micro_batches),
            seq_length=length,  # of the first: stages exchange the shapes
            micro_batch_size=rows,
            forward_only=False,
            pg_collection=groups,
            **talk,
        )

    found: dict[str, Any] = {"seconds": {way: [] for way in ways}}
    for _ in range(repeats):
        for way in ways:
            loop.train = ours if way == "ours" else megatron
            dist.barrier(engine.context.groups.everyone())
            start = time.perf_counter()
            engine.forward_backward(rows, loss, loss.outputs)
            found["seconds"][way].append(time.perf_counter() - start)
            found[way] = {name: value.clone() for name, value in engine.gradients().items()}
            engine.step()
    return found
