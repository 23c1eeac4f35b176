"""What the processes of the optimizer and memory tests do: each function runs on every rank of a model group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_tasks import boxes, build, share
from example_models import loss_of, make_batch
from rank_processes import World
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer import execute
from hybridflow.engines.contract import UNSET
from hybridflow.errors import ConfigError
from hybridflow.ragged import Ragged

Boxes = list[tuple[str, tuple, tuple, Tensor]]


def update(engine: Any, world: World, seed: int, in_parts: bool = False) -> dict[str, float]:
    """One update on the batch of `seed`: the loss (where it is known) and what the step returned."""
    loss = loss_of("lm")
    rows = share(make_batch(seed=seed), engine.grid, world.rank)
    metrics = engine.forward_backward(rows, loss, loss.outputs)
    if in_parts:
        assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
        return {**metrics, **engine.step_result}
    return {**metrics, **engine.step()}


def state_boxes(engine: Any) -> dict[str, Boxes]:
    """Every kind of optimizer state as canonical boxes."""
    regions = engine.optimizer_layout().regions(engine.context.rank)
    return {
        kind: [(r.box.tensor, r.box.start, r.box.stop, r.view(held[r.storage]).clone()) for r in regions]
        for kind, held in engine.optimizer_storage().items()
    }


def move(source: Any, destination: Any, group: Any, rank: int) -> None:
    """Optimizer state and counters from one engine to another on the same ranks; parameters follow."""
    planned = plan(source.optimizer_layout(), destination.optimizer_layout())
    from_, to = source.optimizer_storage(), destination.optimizer_storage()
    assert from_.keys() == to.keys()
    for kind in from_:
        execute(planned, from_[kind], to[kind], group, rank)
    destination.optimizer_moved(source.optimizer_counters())


def moving(world: World, name: str, strategies: Sequence[Any], path: Path, optimizer: Any) -> dict[str, Any]:
    """One update under each strategy in turn, moving in between; and as many under the first one alone.

    Returns what each update measured, the state before and after each move, and parameters with their main ones.
    """
    found: dict[str, Any] = {"moved": [], "straight": [], "before": [], "after": [], "parameters": []}
    engine = build(world, f"{name}-0", strategies[0], 4, path, "lm", optimizer)
    for seed, strategy in enumerate(strategies):
        if seed:
            new = build(world, f"{name}-{seed}", strategy, 4, UNSET, "lm", optimizer, spec=engine.spec)
            found["before"].append(state_boxes(engine))
            move(engine, new, engine.context.groups.everyone(), world.rank)
            found["after"].append(state_boxes(new))
            found["parameters"].append(boxes(new, new.storage()))
            engine.close()
            engine.context.groups.close()
            engine = new
        found["moved"].append(update(engine, world, seed))
    engine.context.groups.close()
    straight = build(world, f"{name}-straight", strategies[0], 4, path, "lm", optimizer)
    found["straight"] = [update(straight, world, seed) for seed in range(len(strategies))]
    straight.context.groups.close()
    return found


def owned_ranges(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> bool:
    """The pure ranges of every unit are those that Megatron's distributed optimizer made."""
    from hybridflow.engines.megatron.units import units

    engine = build(world, name, strategy, size, path, "lm", optimizer)
    at, megatron = engine.context.coords, engine._optimizer.megatron
    pure: dict[str, tuple[int, int]] = {}
    for unit in units(engine.spec, engine.grid, at, strategy.stage_layers):
        pure |= unit.owned(engine.grid.d, at.d)
    real = {}
    for parameter_name, parameter in engine._gpt.named_parameters():
        if parameter in megatron.model_param_gbuf_map:
            owned = megatron._get_model_param_range_map(parameter)["param"]
            real[parameter_name] = (owned.start, owned.end)
    engine.context.groups.close()
    return pure == real


def steps_in_parts(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> list[Boxes]:
    """Two updates in one go and in parts, bitwise equal, and every part final when it is yielded.

    Returns the parameters after the first update.
    """
    whole = build(world, f"{name}-whole", strategy, size, path, "lm", optimizer)
    parts = build(world, f"{name}-parts", strategy, size, path, "lm", optimizer)
    loss, first = loss_of("lm"), []
    for seed in range(2):
        expected = update(whole, world, seed)
        parts.forward_backward(share(make_batch(seed=seed), parts.grid, world.rank), loss, loss.outputs)
        final = {box[:3]: box[3] for box in boxes(whole, whole.storage())}
        groups, yielded = parts.step_groups(), []
        for part in parts.step_parts():
            yielded.append(part)
            for tensor, start, stop, value in boxes(parts, parts.storage()):
                if tensor in groups[part]:
                    assert value.equal(final[tensor, start, stop]), f"{tensor} is not final in part {part}"
        assert yielded == list(range(len(groups)))
        assert parts.step_result == {key: expected[key] for key in ("grad_norm", "lr", "skipped")}
        for (kind, one), other in zip(state_boxes(whole).items(), state_boxes(parts).values(), strict=True):
            assert all(a[3].equal(b[3]) for a, b in zip(one, other, strict=True)), kind
        assert all(float(gradient.abs().max()) == 0 for gradient in parts.gradients().values())
        first = first or boxes(whole, whole.storage())
    whole.context.groups.close()
    parts.context.groups.close()
    return first


def skipped_in_parts(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> bool:
    """Gradients that are not finite on one rank: all parts are yielded everywhere, and nothing changes."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    update(engine, world, 0)
    before = {key: value.clone() for key, value in engine.storage().items()}

    def broken(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return found["log_probs"].values.sum() * (torch.inf if engine.context.coords.d == 0 else 1.0), {}

    engine.forward_backward(share(make_batch(), engine.grid, world.rank), broken, ("log_probs",))
    assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
    assert engine.step_result["skipped"] == 1.0
    same = all(value.equal(before[key]) for key, value in engine.storage().items())
    steps = engine.optimizer_counters()["steps"]
    engine.context.groups.close()
    return same and steps == 1


def counters_follow(world: World, name: str, strategy: Any, path: Path, optimizer: Any) -> tuple[dict, dict, dict]:
    """Counters of a float16 engine before and after it lowered its loss scale, and of one that they were moved to."""
    first = build(world, f"{name}-first", strategy, 1, path, "lm", optimizer)
    fresh = first.optimizer_counters()

    def broken(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return found["log_probs"].values.sum() * torch.inf, {}

    update(first, world, 0)
    for _ in range(2):
        first.forward_backward(make_batch(), broken, ("log_probs",))
        first.step()
    second = build(world, f"{name}-second", strategy, 1, UNSET, "lm", optimizer, spec=first.spec)
    move(first, second, None, 0)
    assert second._optimizer.scale_loss(1.0).item() == first._optimizer.scale_loss(1.0).item()
    assert update(second, world, 1)["skipped"] == 0.0
    moved = second.optimizer_counters()
    first.context.groups.close()
    second.context.groups.close()
    return fresh, first.optimizer_counters(), moved


def released_and_restored(
    world: World, name: str, strategy: Any, size: int, path: Path | None, optimizer: Any, spec: Any = None
) -> int:
    """Layers free their memory one by one; what comes back from main parameters, or from a copy, is what was there.

    Returns how many tensors this rank has optimizer state for.
    """
    engine = build(world, name, strategy, size, path, "lm", optimizer, spec=spec)
    update(engine, world, 0)
    memory, storage = engine.memory(), engine.storage()
    before = {key: value.clone() for key, value in storage.items()}
    whole, held = memory.total_bytes, memory.resident_bytes
    assert whole == held >= sum(value.nbytes for value in storage.values())
    for layer in {key.rsplit(".layers.", 1)[1].split(".")[0] for key in storage if ".layers." in key}:
        names = [key for key in storage if f".layers.{layer}." in key]
        memory.release(names)
        assert held - memory.resident_bytes >= sum(before[key].nbytes for key in names)
        held = memory.resident_bytes
    memory.release()
    assert memory.resident_bytes == 0
    assert all(value.untyped_storage().nbytes() == 0 for value in storage.values())
    assert _refused(lambda: engine.forward(make_batch(2), ("log_probs",)), "reload(['parameters'])")
    if engine.restorable:
        engine.restore()
    else:
        assert _refused(engine.restore, "no main parameters apart from")
        memory.acquire()
        for key in storage:
            if key.startswith("decoder."):
                storage[key].copy_(before[key])
        layout = engine.layout().regions(engine.context.rank)
        for region in layout:  # as a transfer would: what has no box is not written
            region.view(storage[region.storage]).copy_(region.view(before[region.storage]))
    assert all(value.equal(before[key]) for key, value in storage.items())
    engine.context.groups.close()
    return len(engine.optimizer_storage()["main"])


def offloaded(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> None:
    """Updates with everything away in between are bitwise those of an engine that kept it, gradients included."""
    plain = build(world, f"{name}-plain", strategy, size, path, "lm", optimizer)
    other = build(world, f"{name}-other", strategy, size, path, "lm", optimizer)
    everything, loss = ("parameters", "optimizer", "gradients"), loss_of("lm")
    for seed in range(3):
        expected = update(plain, world, seed)
        rows = share(make_batch(seed=seed), other.grid, world.rank)
        other.offload(everything)
        assert other.memory().resident_bytes == 0
        assert _refused(lambda rows=rows: other.forward_backward(rows, loss, loss.outputs), "parameters and gradients")
        other.reload(everything)
        other.forward_backward(rows, loss, loss.outputs)
        other.offload(("gradients", "optimizer"))  # in the middle of an update gradients are not zero: they are kept
        assert _refused(other.step, "gradients and optimizer") or _refused(other.step, "optimizer and gradients")
        other.reload(everything)
        assert other.step() == {key: expected[key] for key in ("grad_norm", "lr", "skipped")}
        assert all(value.equal(plain.storage()[key]) for key, value in other.storage().items())
    assert _refused(lambda: other.offload(("weights",)), "holds no 'weights'")
    plain.context.groups.close()
    other.context.groups.close()


def _refused(call: Any, says: str) -> bool:
    try:
        call()
    except ConfigError as error:
        return says in str(error)
    return False


def filled_from_outside(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> None:
    """An engine built without weights goes on like one with them once they are written into its storage."""
    known = build(world, f"{name}-known", strategy, size, path, "lm", optimizer)
    empty = build(world, f"{name}-empty", strategy, size, UNSET, "lm", optimizer, spec=known.spec)
    for region in known.layout().regions(known.context.rank):
        region.view(empty.storage()[region.storage]).copy_(region.view(known.storage()[region.storage]))
    empty.weights_loaded()
    for seed in range(2):
        assert update(empty, world, seed) == update(known, world, seed)
    assert all(value.equal(known.storage()[key]) for key, value in empty.storage().items())
    known.context.groups.close()
    empty.context.groups.close()
