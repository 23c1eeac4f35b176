"""What the processes of the optimizer and memory tests do: each function runs on every rank of a model group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.writer import save_checkpoint, saved_dtypes
from hybridflow.engines.contract import PARAMETERS, STATES, UNINITIALIZED
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.hf_spec import read_spec
from tests.contracts.engine_tasks import _sum_of_log_probs, boxes, broken_gradients, build, share
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World

ADAM = config.Adam(lr=0.02, eps=1e-3)
Boxes = list[tuple[str, tuple, tuple, Tensor]]


def update(engine: Any, world: World, seed: int, in_parts: bool = False, leaving: bool = False) -> dict[str, float]:
    """One update on the batch of `seed`: the loss (where it is known) and what the step returned."""
    loss = loss_of("lm")
    rows = share(make_batch(seed=seed), engine.grid, world.rank)
    metrics = engine.forward_backward(rows, loss, loss.outputs)
    if in_parts:
        assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
        return {**metrics, **engine.step_result}
    return {**metrics, **engine.step(leaving)}


def state_boxes(engine: Any) -> dict[str, Boxes]:
    """Every kind of optimizer state as canonical boxes."""
    layout = engine.optimizer_layout()
    return {kind: boxes(engine, held, layout) for kind, held in engine.optimizer_storage().items()}


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
            new = build(world, f"{name}-{seed}", strategy, 4, UNINITIALIZED, "lm", optimizer, spec=engine.spec)
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
        output = found["log_probs"].values
        return broken_gradients(output) if engine.context.coords.d == 0 else output.sum(), {}

    engine.forward_backward(share(make_batch(), engine.grid, world.rank), broken, ("log_probs",))
    assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
    assert engine.step_result["skipped"] == 1.0
    same = all(value.equal(before[key]) for key, value in engine.storage().items())
    steps = engine.optimizer_counters()["steps"]
    engine.context.groups.close()
    return same and steps == 1


def counters_follow(
    world: World, name: str, strategies: Sequence[Any], path: Path, optimizer: Any
) -> tuple[dict, dict, dict]:
    """Counters of a float16 engine before and after it lowered its loss scale, and of one that they were moved to."""
    first = build(world, f"{name}-first", strategies[0], 1, path, "lm", optimizer)
    fresh = first.optimizer_counters()

    def broken(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return broken_gradients(found["log_probs"].values), {}

    update(first, world, 0)
    for _ in range(2):
        first.forward_backward(make_batch(), broken, ("log_probs",))
        first.step()
    second = build(world, f"{name}-second", strategies[1], 1, UNINITIALIZED, "lm", optimizer, spec=first.spec)
    move(first, second, None, 0)
    one = torch.ones(())
    assert second._optimizer.scale_loss(one).item() == first._optimizer.scale_loss(one).item()
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
    plain.context.groups.close()
    other.context.groups.close()


def copied(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> None:
    """What has not changed since it came from host memory leaves without a copy; all else is copied once."""
    plain = build(world, f"{name}-plain", strategy, size, path, "lm", optimizer)
    other = build(world, f"{name}-other", strategy, size, path, "lm", optimizer)
    frozen = build(world, f"{name}-frozen", strategy, size, path, "lm", None)
    assert sum(frozen.resident_bytes().values()) == frozen.resident_bytes()["parameters"]
    weights = {each: each.resident_bytes()["parameters"] for each in (other, frozen)}  # 16 bits, where not trained
    state = weights[other] + other.resident_bytes()["optimizer"]
    for each in (other, frozen):
        each.offload(STATES)
    assert (other.copied_bytes(), frozen.copied_bytes()) == ((0, state), (0, weights[frozen]))
    images = addresses(other, frozen)
    for seed in range(3):
        rows = share(make_batch(seed=seed), other.grid, world.rank)
        expected = plain.forward(rows, ("log_probs",))
        for each in (other, frozen):
            before = each.copied_bytes()
            each.reload(PARAMETERS)
            found = each.forward(rows, ("log_probs",))
            assert (seed and each is frozen) or same(found, expected, 1e-5 * (each is frozen))  # CUDA rounds otherwise
            each.storage()  # reading is no change
            each.offload(STATES)
            assert moved(each, before) == (weights[each], 0)
        before = other.copied_bytes()
        other.reload(STATES)
        assert update(other, world, seed, leaving=True) == update(plain, world, seed)
        assert moved(other, before) == (state, state)  # each part behind its step
        other.offload(STATES)
        other.reload(STATES)
        assert {kind: len(held) for kind, held in other.optimizer_storage().items()}
        other.offload(STATES)
        assert moved(other, before) == (2 * state, state)
    assert addresses(other, frozen) == images  # nothing was allocated any more
    frozen.reload(STATES)
    for tensor in frozen.storage().values():
        tensor.fill_(2.0)
    frozen.weights_loaded()
    before = frozen.copied_bytes()
    frozen.offload(STATES)
    frozen.reload(STATES)
    assert moved(frozen, before) == (weights[frozen], weights[frozen])
    assert all((tensor == 2.0).all() for tensor in frozen.storage().values())
    other.reload(STATES)
    assert all(value.equal(plain.storage()[key]) for key, value in other.storage().items())
    for each in (plain, other, frozen):
        each.context.groups.close()


def addresses(*engines: Any) -> list[int]:
    """Of all images on the host."""
    owners = [owner for each in engines for owner in (*each._memories(), each._shards.gradients)]
    return [image.data_ptr() for owner in owners for image in owner.images._images.values()]


def copied_adapters(world: World, name: str, strategy: Any, size: int, path: Path, head: str) -> int:
    """Calls that compute copy the weights in, and updates of adapters (and of a value head) copy out what they have
    changed, also after adapters were merged; returns the bytes of that beside the optimizer's. Nothing is allocated
    after the first offload."""
    engine = build(world, name, strategy, size, path, head, ADAM)
    rows, loss = share(make_batch(), engine.grid, world.rank), loss_of(head)
    whole, left = engine.resident_bytes(), list[int]()
    engine.offload(STATES)
    images = addresses(engine)
    for _ in range(3):
        before = engine.copied_bytes()
        engine.reload(PARAMETERS)
        engine.forward(rows, ("log_probs",) if head == "lm" else ("values",))
        engine.offload(STATES)
        assert moved(engine, before) == (whole["parameters"], 0)
        before = engine.copied_bytes()
        engine.reload(STATES)
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step(leaving=True)
        engine.storage()
        engine.adapters.merge()
        engine.adapters.restore()
        engine.offload(STATES)
        came, gone = moved(engine, before)
        assert came == whole["parameters"] + whole["optimizer"]
        left.append(gone - whole["optimizer"])
    assert addresses(engine) == images
    engine.context.groups.close()
    assert len(set(left)) == 1
    assert 0 <= left[0] < whole["parameters"] / 2
    return left[0]


def moved(engine: Any, before: tuple[int, int]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(engine.copied_bytes(), before, strict=True))


def same(found: Any, expected: Any, atol: float) -> bool:
    """Of outputs, which are None except on the last stage."""
    return found is expected or torch.allclose(
        found["log_probs"].values, expected["log_probs"].values, rtol=0.0, atol=atol
    )


def _refused(call: Any, says: str) -> bool:
    try:
        call()
    except ConfigError as error:
        return says in str(error)
    return False


def filled_from_outside(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> None:
    """An engine built without weights goes on like one with them once they are written into its storage."""
    known = build(world, f"{name}-known", strategy, size, path, "lm", optimizer)
    empty = build(world, f"{name}-empty", strategy, size, UNINITIALIZED, "lm", optimizer, spec=known.spec)
    for region in known.layout().regions(known.context.rank):
        region.view(empty.storage()[region.storage]).copy_(region.view(known.storage()[region.storage]))
    empty.weights_loaded()
    for seed in range(2):
        assert update(empty, world, seed) == update(known, world, seed)
    assert all(value.equal(known.storage()[key]) for key, value in empty.storage().items())
    known.context.groups.close()
    empty.context.groups.close()


POISONS = (math.nan, math.inf)
LOSSES = {
    "lm": policy_loss("ppo", entropy_coef=0.1, kl_coef=0.1, kl="k3", rollout_correction="token"),
    "value": value_loss("value"),
}


def _finite_gradients(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss whose value is inf where `weight` is, and whose gradients are finite."""
    output = next(iter(found.values())).values
    return output.sum() + torch.as_tensor(rows["weight"]).sum(), {}


_finite_gradients.reads = ("row_id",)  # type: ignore[attr-defined]  the value of the loss alone gives it away


def _swallows(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one's own, finite whatever `weight` is, which says nothing of what it reads."""
    weight = torch.as_tensor(rows["weight"]).nan_to_num(0.0, 1.0, -1.0)
    return (next(iter(found.values())).row_sum() * weight).sum(), {}


def _vanishing(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is finite, and whose gradients are not where `weight` is not."""
    output = next(iter(found.values())).values
    return output.sum() if torch.as_tensor(rows["weight"]).isfinite().all() else broken_gradients(output), {}


_vanishing.reads = ("row_id",)  # type: ignore[attr-defined]


def poisoned(
    world: World, name: str, strategy: Any, size: int, path: Path, head: str, optimizer: Any
) -> list[tuple[str, dict[str, float], str]]:
    """Updates with one number of one column that is not finite, on one rank, change nothing of what an engine has, and
    the next good one is that of an engine which never saw them. Returns (column, what the step returned, why)."""
    spec = read_spec(path, head)  # type: ignore[arg-type]
    poisoned, twin = (build(world, f"{name}-{i}", strategy, size, path, head, optimizer, spec) for i in range(2))
    batch = make_batch(seed=3)
    numbers = batch.peek("old_log_probs")
    batch = batch.with_columns(
        response_mask=numbers.map(lambda flat: torch.arange(len(flat)) % 3 != 1),
        ref_log_probs=numbers.map(lambda flat: flat + 0.1),
        log_probs=numbers.map(lambda flat: flat - 0.1),
        weight=torch.ones(batch.rows),
    )
    rows, loss = share(batch, twin.grid, world.rank), LOSSES[head]
    for engine in (poisoned, twin):
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step()
    before, found = _everything(poisoned), []
    columns = [column for column in loss.reads or () if column != "response_mask"]
    cases = [*[(column, loss, value) for column in columns for value in POISONS], ("weight", _swallows, math.nan)]
    cases += [("weight", _finite_gradients, math.inf), ("weight", _vanishing, math.nan)]
    for i, (column, by, value) in enumerate(cases):
        where = i % size if by is loss else size - 1  # of a pipeline, only the last stage has the loss
        bad = _with(rows, column, value) if world.rank == where else rows
        if not i:
            poisoned.forward_backward(rows, loss, loss.outputs)  # what was added up before goes with it
        poisoned.forward_backward(bad, by, loss.outputs)
        result = poisoned.step() if i % 2 else [*poisoned.step_parts()] and poisoned.step_result
        after = _everything(poisoned)
        assert after.keys() == before.keys()
        if by is not _vanishing:  # an overflow of gradients lowers the loss scale
            assert poisoned.optimizer_counters() == twin.optimizer_counters(), column
        changed = [key for key in before if not after[key].equal(before[key])]
        assert not changed, (column, by, value, result, changed)
        found.append((column, result, poisoned.skip_reason))
    garbage = {c: rows.peek(c).with_values(_at_masked(rows, rows.peek(c).values)) for c in columns}
    known = [poisoned.forward_backward(rows.with_columns(**garbage), loss, loss.outputs)]
    assert known == [twin.forward_backward(rows, loss, loss.outputs)]
    if not strategy.dtype:
        assert poisoned.step() == twin.step()
        assert not poisoned.skip_reason
        after, same = _everything(poisoned), _everything(twin)
        assert all(after[key].equal(same[key]) for key in same)
        assert any(not after[key].equal(before[key]) for key in before)
    return found


def _everything(engine: Any) -> dict[str, Tensor]:
    """Copies of parameters and optimizer state."""
    state = {f"{kind}/{key}": t for kind, held in engine.optimizer_storage().items() for key, t in held.items()}
    adapters = {} if engine.adapters is None else engine.adapters.storage
    return {key: tensor.detach().clone() for key, tensor in ({**engine.storage(), **adapters} | state).items()}


def _with(rows: Batch, column: str, value: float) -> Batch:
    """The rows with `value` at the first number of the column that counts, where there is one."""
    found = rows.peek(column)
    flat = (found.values if isinstance(found, Ragged) else found).clone()
    valid = rows.peek("response_mask")
    at = valid.values.nonzero()[0, 0]
    flat[at if isinstance(found, Ragged) else valid.row_index()[at]] = value
    return rows.with_columns(**{column: found.with_values(flat) if isinstance(found, Ragged) else flat})


def _at_masked(rows: Batch, flat: Tensor) -> Tensor:
    return torch.where(rows.peek("response_mask").values, flat, math.nan)


def saved_with_nan(world: World, name: str, strategy: Any, size: int, path: Path, target: Path) -> tuple[str, bool]:
    """Two tensors with a nan on the last rank are saved to different files: this rank's error, and whether a file is
    left."""
    engine = build(world, name, strategy, size, path)
    for region in engine.layout().regions(world.rank):
        if region.box.tensor in ("lm_head.weight", "model.norm.weight") and world.rank == size - 1:
            region.view(engine.storage()[region.storage]).view(-1)[-1] = math.nan
    group = engine.context.groups.everyone()
    try:
        save_checkpoint(
            target, engine.layout(), engine.storage(), like=path, group=group, rank=world.rank, max_file_bytes=10_000
        )
    except CheckpointError as error:
        return str(error), target.exists()
    return "", True


def saved(world: World, name: str, strategy: Any, size: int, path: Path, targets: Mapping[str | None, Path]) -> None:
    """Save a model before and after a step in each dtype, as `save` of a worker does."""
    engine = build(world, name, strategy, size, path, optimizer=config.SGD(lr=0.1, clip_grad=1.0))
    group, known = engine.context.groups.everyone(), Checkpoint(path).dtypes(engine.spec.tensors())
    for moment in ("before", "after"):
        for dtype, target in targets.items():
            layout, storage = engine.exact_weights()
            dtypes = saved_dtypes(known, dtype)
            save_checkpoint(target / moment, layout, storage, like=path, group=group, rank=world.rank, dtypes=dtypes)
        engine.forward_backward(share(make_batch(), engine.grid, world.rank), _sum_of_log_probs, ("log_probs",))
        engine.step()
    engine.close()
