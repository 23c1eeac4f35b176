"""What the processes of the tests of failures do: operations of an engine raise on some ranks, at some place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines import agreement
from hybridflow.engines.train_backends import build_engine
from hybridflow.models.hf_spec import read_spec
from tests.contracts.engine_tasks import saved, share
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World

PASSES = ("forward", "backward", "outputs", "loss", "loss backward")
"""Places in an update at which a pass can fail; the first three run out of memory."""


class Injected(torch.OutOfMemoryError):
    """Raised by these tests."""


class FailingBackward(torch.autograd.Function):
    """An identity whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ArithmeticError("the gradient of this loss")


def layer_of(engine: Any) -> torch.nn.Module:
    model = engine._shards.model
    return model.decoder.layers[0] if hasattr(model, "decoder") and hasattr(model, "vocab_size") else model.layers[0]


@contextmanager
def failing(engine: Any, place: str, after: int = 1) -> Iterator[None]:
    """Inside, the computation of `place` raises, after so many micro-batches without an error."""
    seen = 0

    def raises(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            raise Injected(f"out of memory at {place}")

    def watched(_: Any, __: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        if found.requires_grad:
            found.register_hook(raises)

    if place in ("forward", "backward"):
        layer = layer_of(engine)
        handle = layer.register_forward_pre_hook(raises) if place == "forward" else layer.register_forward_hook(watched)
        try:
            yield
        finally:
            handle.remove()
    elif place in ("outputs", "read"):
        name = "ragged" if place == "outputs" else "read"
        real = getattr(engine.tokens, name)
        with mock.patch.object(engine.tokens, name, lambda *args, **more: (raises(), real(*args, **more))[1]):
            yield
    else:
        yield


def failing_loss(place: str) -> Any:
    """The loss of language models, which raises itself or has no gradient; after one micro-batch."""
    loss, seen = loss_of("lm"), 0

    def compute(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal seen
        seen += 1
        scalar, metrics = loss(found, rows, totals)
        if seen > 1 and place == "loss":
            raise LookupError("the reward of this row is gone")
        return (FailingBackward.apply(scalar) if seen > 1 and place == "loss backward" else scalar), metrics

    return compute


def build(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, timeout: float | None = None
) -> Any:
    context = world.context(name, strategy.grid(size), kept=False)
    context.groups.timeout = timeout or context.groups.timeout
    world.engines.append(build_engine(context, strategy, read_spec(path, "lm"), path, optimizer))
    return world.engines[-1]


def rows_of(engine: Any, world: World, seed: int) -> Batch:
    """Several micro-batches on every rank."""
    return share(make_batch(16, seed), engine.grid, world.rank)


def update(engine: Any, world: World, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(seed)  # of dropout: it is drawn as if nothing had failed before
    rows, loss = rows_of(engine, world, seed), loss_of("lm")
    return engine.forward_backward(rows, loss, loss.outputs), engine.step()


def failed_pass(engine: Any, world: World, place: str, ranks: Sequence[int] | None) -> str:
    """The error of a pass that fails at `place` on these ranks (None: on all)."""
    rows, own = rows_of(engine, world, 9), ranks is None or world.rank in ranks
    loss: Any = failing_loss(place) if own else loss_of("lm")
    with failing(engine, place) if own else nullcontext():
        return error_of(partial(engine.forward_backward, rows, loss, loss_of("lm").outputs))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _uneven_messages(world: World, engine: Any) -> None:
    """As a transition sends them: ranks have begun different numbers of operations before the pass."""
    if engine.context.grid.size > 1 and world.rank < 2:
        group, number = engine.context.groups.everyone("gloo"), torch.zeros(1)
        dist.send(number, group=group, group_dst=1) if world.rank == 0 else dist.recv(number, group=group, group_src=0)


def differences(one: Any, other: Any) -> list[str]:
    """What differs between the states of two engines."""
    first, second = saved(one), saved(other)
    found = [] if first["counters"] == second["counters"] else ["counters"]
    for kind, tensors in first["tensors"].items():
        found += [f"{kind}/{n}" for n, tensor in tensors.items() if not tensor.equal(second["tensors"][kind][n])]
    return found


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Of the generators of the host and of a CUDA device."""
    on_device = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def survives(
    world: World,
    name: str,
    strategy: Any,
    size: int,
    path: Path,
    optimizer: Any,
    places: Sequence[str],
    ranks: Sequence[int] | None,
) -> dict[str, Any]:
    """An engine whose passes fail now and then, and one on which nothing fails: the errors by place, and what differs
    between them after an update that follows each."""
    unlucky, other = (build(world, f"{name}-{i}", strategy, size, path, optimizer) for i in range(2))
    found: dict[str, Any] = {"errors": {}, "differs": []}
    for seed, place in enumerate(places):
        before, generators = saved(unlucky), random_states(world.device)
        _uneven_messages(world, unlucky)
        found["errors"][place] = failed_pass(unlucky, world, place, ranks)
        now = random_states(world.device)
        drawn = [f"{place}: generator of {kind}" for kind, state in generators.items() if not now[kind].equal(state)]
        same = all(t.equal(saved(unlucky)["tensors"][k][n]) for k, v in before["tensors"].items() for n, t in v.items())
        results = [update(engine, world, seed) for engine in (unlucky, other)]
        found["differs"] += drawn + ([] if same else [f"{place}: changed"])
        found["differs"] += [] if results[0] == results[1] else [f"{place}: {results}"]
        found["differs"] += [f"{place}: {what}" for what in differences(unlucky, other)]
        assert results[0][1]["grad_norm"] > 0
    return found


def breaks(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, place: str, ranks: Sequence[int]
) -> list[str]:
    """The errors of a pass that fails on these ranks alone, and of every operation that follows it."""
    with mock.patch.object(agreement, "FAIL_SECONDS", 0.5):
        engine = build(world, name, strategy, size, path, optimizer, timeout=4.0)
        update(engine, world, 0)
        first = failed_pass(engine, world, place, ranks)
    return [first, *refusals(engine, world)]


def refusals(engine: Any, world: World) -> list[str]:
    rows, loss = rows_of(engine, world, 0), loss_of("lm")
    calls: list[Callable[[], Any]] = [
        partial(engine.check, rows, ("log_probs",)),
        partial(engine.forward, rows, ("log_probs",)),
        partial(engine.forward_backward, rows, loss, loss.outputs),
        engine.step,
        lambda: [*engine.step_parts()],
        engine.gradients,
        engine.storage,
        engine.optimizer_storage,
        partial(engine.offload, ("optimizer",)),
        partial(engine.reload, ("optimizer",)),
    ]
    return [error_of(call) for call in calls]


def keeps_gradients(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, place: str
) -> dict[str, Any]:
    """`forward` fails on all ranks between a pass and its step: its error, and what differs after the step."""
    unlucky, other = (build(world, f"{name}-{i}", strategy, size, path, optimizer) for i in range(2))
    found: dict[str, Any] = {}
    for engine in (unlucky, other):
        rows, loss = rows_of(engine, world, 0), loss_of("lm")
        metrics = engine.forward_backward(rows, loss, loss.outputs)
        if engine is unlucky:
            with failing(engine, place):
                found["error"] = error_of(partial(engine.forward, rows, ("log_probs",)))
        found.setdefault("results", []).append((metrics, engine.step()))
        outputs = engine.forward(rows, ("log_probs",))
        found.setdefault("outputs", []).append(None if outputs is None else outputs["log_probs"].values)
    return found | {"differs": differences(unlucky, other)}


def stepping(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, place: str, ranks: Sequence[int]
) -> dict[str, Any]:
    """A step fails before it changes anything (`norm`, `gradients`) or while it does (`update`)."""
    timeout = 4.0 if place == "update" else None  # with ZeRO, peers wait for parameters of this rank
    unlucky, other = (build(world, f"{name}-{i}", strategy, size, path, optimizer, timeout) for i in range(2))
    for engine in (unlucky, other):
        update(engine, world, 0)
    rows, loss = rows_of(unlucky, world, 5), loss_of("lm")
    unlucky.forward_backward(rows, loss, loss.outputs)
    where = {"norm": (unlucky._shards, "square_sum"), "gradients": (unlucky._shards, "main_gradients")}
    target, method = where.get(place, (unlucky._optimizer.torch, "step"))
    with ExitStack() as stack:
        if place == "update":
            stack.enter_context(mock.patch.object(agreement, "FAIL_SECONDS", 0.5))
        if world.rank in ranks:
            stack.enter_context(mock.patch.object(target, method, side_effect=Injected(place)))
        found: dict[str, Any] = {"error": error_of(unlucky.step)}
    if place == "update":
        return found | {"refused": refusals(unlucky, world)}
    found["refused"] = [error_of(unlucky.step), error_of(partial(unlucky.forward_backward, rows, loss, loss.outputs))]
    unlucky.zero_grad()
    results = [update(engine, world, 1) for engine in (unlucky, other)]
    return found | {"same": results[0] == results[1], "differs": differences(unlucky, other)}


def accumulating(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> dict[str, Any]:
    """The second of two passes of a step fails, so that the first one's gradients are lost, too."""
    unlucky, other = (build(world, f"{name}-{i}", strategy, size, path, optimizer) for i in range(2))
    rows, loss = rows_of(unlucky, world, 5), loss_of("lm")
    unlucky.forward_backward(rows, loss, loss.outputs)
    error = failed_pass(unlucky, world, "loss", None)
    refused = [error_of(unlucky.step), error_of(unlucky.gradients)]
    unlucky.zero_grad()
    results = [update(engine, world, 1) for engine in (unlucky, other)]
    return {
        "error": error,
        "refused": refused,
        "same": results[0] == results[1],
        "differs": differences(unlucky, other),
    }


def first_step_without_memory(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any
) -> dict[str, Any]:
    """A first step in which no tensor of the state can be made; bytes of the state before and after it."""
    engine = build(world, name, strategy, size, path, optimizer)
    rows, loss = rows_of(engine, world, 0), loss_of("lm")
    before = engine.resident_bytes()["optimizer"]
    engine.forward_backward(rows, loss, loss.outputs)
    with (
        mock.patch.object(torch, "zeros_like", side_effect=Injected("moments")),
        mock.patch.object(torch, "clone", side_effect=Injected("momentum")),
    ):
        error = error_of(engine.step)
    return {"error": error, "bytes": (before, engine.resident_bytes()["optimizer"]), "next": error_of(engine.step)}


def memory_that_does_not_come(
    world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any
) -> dict[str, Any]:
    """State that cannot be offloaded, or not brought back, for want of memory stays as it was."""
    engine = build(world, name, strategy, size, path, optimizer)
    update(engine, world, 0)
    before, everything = saved(engine), ("parameters", "optimizer", "gradients")
    found = {}
    for what, call in (("offload", engine.offload), ("reload", engine.reload)):
        resident = engine.resident_bytes()
        with scarce(3):
            found[what] = error_of(partial(call, everything))
        assert engine.resident_bytes() == resident
        call(everything)
    after = saved(engine)
    same = all(t.equal(after["tensors"][k][n]) for k, v in before["tensors"].items() for n, t in v.items())
    return found | {"same": same}


@contextmanager
def scarce(requests: int) -> Iterator[None]:
    """Inside, host memory (`torch.empty`) and storages run out after so many requests."""
    left, empty = requests, torch.empty
    resize = torch.UntypedStorage.resize_

    def take(size: int) -> None:
        nonlocal left
        left -= size > 0
        if left < 0:
            raise Injected("no memory")

    def made(size: Any, **more: Any) -> Tensor:
        take(size if more.get("dtype") == torch.uint8 else 0)
        return empty(size, **more)

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        take(size)
        return resize(storage, size)

    with mock.patch.object(torch, "empty", made), mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield


def runs_out(
    world: World, name: str, strategy: Any, path: Path, optimizer: Any, rooms: Sequence[int]
) -> dict[str, Any]:
    """Passes on a CUDA device with so many free bytes, and an update with all memory after each: the errors, what
    differs from an engine that had enough, and the bytes on the device after each pass that failed and each update."""
    unlucky, other = (build(world, f"{name}-{i}", strategy, 1, path, optimizer) for i in range(2))
    rows, loss = rows_of(unlucky, world, 9), loss_of("lm")
    for engine in (unlucky, other):
        update(engine, world, 0)  # makes what libraries keep
    found: dict[str, Any] = {"errors": [], "differs": [], "left": [], "settled": []}
    for room in rooms:
        with nearly_full(room):
            found["errors"].append(error_of(partial(unlucky.forward_backward, rows, loss, loss.outputs)))
        unlucky.zero_grad()
        gc.collect()
        if found["errors"][-1]:
            found["left"].append(torch.cuda.memory_allocated())
        results = [update(engine, world, 0) for engine in (unlucky, other)]
        found["differs"] += [] if results[0] == results[1] else [f"{room}: {results}"]
        found["differs"] += [f"{room}: {what}" for what in differences(unlucky, other)]
        gc.collect()
        found["settled"].append(torch.cuda.memory_allocated())
    return found


@contextmanager
def nearly_full(room: int) -> Iterator[None]:
    """Inside, allocations of a CUDA device succeed until about `room` more bytes are taken."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken: list[Tensor] = []
    try:
        for size in (1 << exponent for exponent in range(24, 8, -1)):
            with suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        while room > 0 and taken:
            room -= taken.pop().nbytes
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
