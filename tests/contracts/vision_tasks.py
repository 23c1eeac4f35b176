"""What the ranks of a vision-language model do in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.config import SGD, Adam
from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engines.checkpoint.writer import save_checkpoint
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import loss_of
from tests.contracts.rank_processes import World
from tests.vision_models import make_rows

LR = 0.05


def trained(
    world: World, name: str, strategy: Any, path: Path, kind: str, target: Path, size: int, counts: Any = None
) -> dict[str, Any]:
    """Log-probabilities, gradients of a PPO update, and what is saved after it."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss, rows = loss_of("lm"), share(make_rows(kind), engine.grid, world.rank, counts)
    found: dict[str, Any] = {"log_probs": engine.forward(rows, ("log_probs",))}
    engine.forward_backward(rows, loss, loss.outputs)
    found["gradients"] = boxes(engine, engine.gradients())
    engine.step()
    save_checkpoint(
        target, engine.layout(), engine.storage(), like=path, group=engine.context.groups.everyone(), rank=world.rank
    )
    found["after"] = engine.forward(rows, ("log_probs",))
    engine.context.groups.close()
    engine.close()
    return found


def encoded(world: World, name: str, strategy: Any, path: Path, rows: Batch, size: int) -> dict[str, Any]:
    """Gradients of a PPO update, how many bytes the image encoder keeps for its backward pass, and its patches."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss, rows = loss_of("lm"), share(rows, engine.grid, world.rank)
    kept, patches = list[int](), list[int]()
    tower = engine._shards.model.decoder.visual
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one)
    tower.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    tower.register_forward_pre_hook(lambda *_: hooks.__enter__())
    tower.register_forward_hook(lambda *_: hooks.__exit__(None, None, None), always_call=True)
    engine.forward_backward(rows, loss, loss.outputs)
    found: dict[str, Any] = {"kept": sum(kept), "patches": patches, "gradients": boxes(engine, engine.gradients())}
    engine.context.groups.close()
    engine.close()
    return found


def arriving(world: World, name: str, strategy: Any, path: Path, kind: str, size: int) -> list[Tensor]:
    """Log-probabilities before the parameters left, and with parameters that are copied in as late as they may be: in
    a stream that does nothing until it is waited for."""
    engine = build(world, name, strategy, size, path, "lm")
    rows, queue = share(make_rows(kind), engine.grid, world.rank), list[tuple[Tensor, Tensor]]()
    found = [engine.forward(rows, ("log_probs",))["log_probs"].values]
    engine.offload(("parameters",))

    def copy(self: CopyStream, destination: Tensor, source: Tensor) -> None:
        destination.fill_(0xFF if destination.dtype == torch.uint8 else torch.nan)
        queue.append((destination, source))

    def run(self: CopyStream, until: int | None = None) -> None:
        for at in range(len(queue) if until is None else until):
            destination, source = queue[at]
            destination.copy_(source)

    late = {"copy": copy, "wait": run, "join": run, "mark": lambda self: len(queue)}
    with patch.multiple(CopyStream, **late):
        engine.reload(("parameters",))
        assert queue
        found.append(engine.forward(rows, ("log_probs",))["log_probs"].values)
    engine.context.groups.close()
    engine.close()
    return found


def values(world: World, name: str, strategy: Any, path: Path, kind: str, size: int) -> Any:
    engine = build(world, name, strategy, size, path, "value")
    torch.nn.init.constant_(engine.storage()["score.weight"], 0.1)
    engine.weights_loaded()
    rows = share(make_rows(kind), engine.grid, world.rank)
    found = engine.forward(rows, ("values",))
    engine.context.groups.close()
    engine.close()
    return found


def frozen(
    world: World,
    name: str,
    strategy: Any,
    path: Path,
    kind: str,
    target: Path,
    size: int,
    groups: Any = (),
    clip: float = 1.0,
) -> dict[str, Any]:
    """Two updates with Adam, and what is saved after them: names of gradients, moments and exact weights here."""
    engine = build(world, name, strategy, size, path, "lm", Adam(lr=0.01, groups=groups, clip_grad=clip))
    loss, rows = loss_of("lm"), share(make_rows(kind), engine.grid, world.rank)
    found: dict[str, Any] = {}
    for _ in range(2):
        engine.forward_backward(rows, loss, loss.outputs)
        found["trained"] = {name for name, grad in engine.gradients().items() if grad.abs().max() > 0}
        engine.step()
    layout: Any = engine.optimizer_layout()
    regions = {region.storage: region.box.tensor for region in layout.regions(world.rank)}
    moments = engine.optimizer_storage()["exp_avg"]
    assert moments.keys() == regions.keys()
    found["moments"] = {regions[name] for name, moment in moments.items() if moment.abs().max() > 0}
    exact, storage = engine.exact_weights()
    found["exact"] = {region.box.tensor for region in exact.regions(world.rank)}
    save_checkpoint(target, exact, storage, like=path, group=engine.context.groups.everyone(), rank=world.rank)
    engine.context.groups.close()
    engine.close()
    return found
