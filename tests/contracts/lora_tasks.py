"""What the processes of the LoRA suite do: each function runs on every rank of a model group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.writer import save_checkpoint, saved_dtypes
from hybridflow.models.hf_spec import read_spec
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World


def boxes(engine: Any, layout: Layout, tensors: Any) -> list[tuple[str, tuple, tuple, Tensor]]:
    """This rank's regions of `tensors` with the canonical boxes they hold."""
    found = []
    for region in layout.regions(engine.context.rank):
        value = region.view(tensors[region.storage]).detach().float().clone()
        found.append((region.box.tensor, region.box.start, region.box.stop, value))
    return found


def updates(
    world: World, name: str, strategy: Any, size: int, path: Path, head: str, optimizer: Any, steps: int, save: Path
) -> dict[str, Any]:
    """Updates of adapters: gradients of the first, norms, adapters and merged weights after them, bytes, and both kinds
    of saved directories."""
    spec = read_spec(path, head)  # type: ignore[arg-type]
    engine = tasks.build(world, name, strategy, size, path, head, optimizer, spec)
    adapters, loss = engine.adapters, loss_of(head)
    found: dict[str, Any] = {"norms": []}
    regions = engine.layout().regions(engine.context.rank)
    names = {region.storage for region in regions if region.box.tensor != "score.weight"}
    frozen = {key: engine.storage()[key].clone() for key in names}
    for step in range(steps):
        engine.forward_backward(tasks.share(make_batch(seed=step), engine.grid, world.rank), loss, loss.outputs)
        if step == 0:
            found["gradients"] = boxes(engine, adapters.layout, engine.gradients())
        found["gradient_bytes"] = sum(grad.nbytes for grad in engine.gradients().values())
        found["norms"].append(engine.step()["grad_norm"])
    found["adapters"] = boxes(engine, adapters.layout, adapters.storage)
    found["state_bytes"] = {k: sum(t.nbytes for t in kind.values()) for k, kind in engine.optimizer_storage().items()}
    assert all(engine.storage()[key].equal(frozen[key]) for key in names), "the frozen model was trained"
    adapters.merge()
    adapters.merge()  # does nothing
    found["merged"] = boxes(engine, engine.layout(), engine.storage())
    everyone = engine.context.groups.everyone()
    if save.name:
        (layout, storage), known = engine.exact_weights(), Checkpoint(path).dtypes(spec.tensors())
        who = {"group": everyone, "rank": world.rank}
        save_checkpoint(save / "whole", layout, storage, like=path, dtypes=saved_dtypes(known, None), **who)
    adapters.restore()
    assert all(engine.storage()[key].equal(frozen[key]) for key in names), "restored to other bits"
    adapters.save(save / "adapters", path)
    adapters.save(save / "adapters", path)  # in the place of what is there
    engine.context.groups.close()
    return found


def outputs(world: World, name: str, strategy: Any, size: int, path: Path, head: str, disabled: bool) -> Any:
    """Outputs of this rank's rows; with `disabled` those of the model without its adapters."""
    engine = tasks.build(world, name, strategy, size, path, head)
    rows, names = tasks.share(make_batch(), engine.grid, world.rank), ("values",) if head == "value" else ("log_probs",)
    if disabled:
        with engine.adapters.disabled():
            engine.forward(rows, names)
        adapted = engine.forward(rows, names)
        with engine.adapters.disabled():
            found = engine.forward(rows, names)
        if adapted is not None:
            values = adapted[names[0]].values
            assert not values.equal(found[names[0]].values) or not len(values)
    else:
        found = engine.forward(rows, names)
    engine.context.groups.close()
    return found


def in_parts(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> bool:
    """A step part by part updates what a step in one go does, bit for bit."""
    loss, found = loss_of("lm"), []
    for parts in (False, True):
        engine = tasks.build(world, f"{name}-{parts}", strategy, size, path, "lm", optimizer)
        for seed in range(2):
            engine.forward_backward(tasks.share(make_batch(seed=seed), engine.grid, world.rank), loss, loss.outputs)
            if parts:
                assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
            else:
                engine.step()
        found.append({key: tensor.clone() for key, tensor in engine.adapters.storage.items()})
        engine.context.groups.close()
    return all(found[0][key].equal(found[1][key]) for key in found[0])


def sixteen_bits(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> dict[str, Any]:
    """Dtypes of a model with adapters, and its first gradient norm under a loss without the jumps of clipping."""
    engine = tasks.build(world, name, strategy, size, path, "lm", optimizer)
    rows = tasks.share(make_batch(), engine.grid, world.rank)
    engine.forward_backward(rows, tasks._sum_of_log_probs, ("log_probs",))
    norm = engine.step()["grad_norm"]
    kinds = {tensor.dtype for tensor in engine.storage().values()}, {t.dtype for t in engine.adapters.storage.values()}
    before = {key: tensor.clone() for key, tensor in engine.storage().items()}
    engine.adapters.merge()
    changed = any(not torch.equal(before[key], tensor) for key, tensor in engine.storage().items())
    engine.adapters.restore()
    same = all(torch.equal(before[key], tensor) for key, tensor in engine.storage().items())
    engine.context.groups.close()
    return {"norm": norm, "kinds": kinds, "changed": changed, "same": same}


def dropped_out(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> list[float]:
    """Gradient norms of two passes over the same rows, with random numbers from one seed."""
    engine, norms = tasks.build(world, name, strategy, size, path, "lm", optimizer), []
    torch.manual_seed(5)
    for _ in range(2):
        engine.forward_backward(make_batch(), tasks._sum_of_log_probs, ("log_probs",))
        norms.append(sum(float(grad.square().sum()) for grad in engine.gradients().values()))
        engine._optimizer.zero_grad()
        engine._gradients = "zero"
    engine.context.groups.close()
    return norms
