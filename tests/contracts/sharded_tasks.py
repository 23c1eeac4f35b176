"""What the processes of the sharded engine tests do: what a rank holds, and what it never does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.engines.router_replay import ROUTING
from tests.contracts.engine_tasks import build, share
from tests.contracts.example_models import loss_of, make_batch
from tests.contracts.rank_processes import World, threads
from tests.contracts.state_tasks import update


def shapes_of_experts(world: World, name: str, strategy: Any, size: int, path: Path) -> list[tuple[int, ...]]:
    """Of the parameters of experts, as the engine gathers them."""
    engine = build(world, name, strategy, size, path)
    named = engine._shards.model.named_parameters()
    return [tuple(parameter.shape) for name, parameter in named if ".experts." in name]


def bytes_held(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> dict[str, int]:
    """Bytes of memory that this rank has between a backward pass and its step, and after the step."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    rows, loss = share(make_batch(), engine.grid, world.rank), loss_of("lm")
    for _ in range(2):
        engine.forward_backward(rows, loss, loss.outputs)
        found = {"gradients": _held_gradients(engine)}
        engine.step()
    kinds = engine.optimizer_storage()
    found["parameters"] = engine.memory().total_bytes
    found["moments"] = sum(_bytes(kinds[kind]) for kind in kinds if kind != "main")
    found["main"] = _bytes(kinds["main"]) if engine.restorable else 0
    engine.context.groups.close()
    engine.close()
    return found


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors.values()]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _held_gradients(engine: Any) -> int:
    gradients = engine._shards.gradients
    return gradients.memory.total_bytes if hasattr(gradients, "memory") else _bytes(gradients.tensors)


def peak_bytes(world: World, name: str, strategy: Any, size: int, path: Path, spec: Any) -> dict[str, int]:
    """The most memory that the allocator gave at a time: while an engine is built from a checkpoint, and while it
    computes after that, beside what was there."""
    found = {}
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine = build(world, name, strategy, size, path, spec.head, spec=spec)
    found["build"] = _peak(seen, {file.stat().st_size for file in path.glob("*.safetensors")})
    rows = Batch({"prompt_ids": Ragged.from_rows([[1, 2]]), "response_ids": Ragged.from_rows([[3, 4]])})
    engine.forward(rows, ("log_probs",))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.forward(rows, ("log_probs",))
    found["forward"] = _peak(seen)
    engine.context.groups.close()
    engine.close()
    return found


class Storages(TorchDispatchMode):
    """Bytes of all tensors that operations make, `held` now and at their `peak` since `restart`. (The allocator's own
    count has gloo's copies, too, which stay for as long as a message waits for the other rank.)"""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is Tensor and not tensor.is_meta:  # subclasses wrap others
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._sizes:
                    self._sizes[key] = 0
                    weakref.finalize(storage, self._forget, key)
                    self._note(key, storage.nbytes())
        return out

    def _note(self, key: int, size: int) -> None:
        self.held += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        self._note(key, 0)
        del self._sizes[key]

    def restart(self) -> None:
        gc.collect()
        self.peak = self.held

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Storages change their sizes beside operations."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage._cdata, storage.nbytes())

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield


def call_peaks(
    world: World, name: str, strategy: Any, size: int, spec: Any, rows: Batch, optimizer: Any
) -> dict[str, int]:
    """The most bytes that tensors of this rank have at a time while it trains, and while it computes; the least of
    three calls, since a thread of gloo may keep what it has sent for a moment longer."""
    with (seen := Storages()).counting():
        engine = build(world, name, strategy, size, None, spec.head, optimizer, spec=spec)
        if ROUTING in rows:
            engine.replay_routing()
        loss: Any = policy_loss() if spec.head == "lm" else value_loss()
        found = dict[str, int]()
        for _ in range(3):
            seen.restart()
            engine.forward(rows, ("log_probs",) if spec.head == "lm" else ("values",))
            found["infer"] = min(seen.peak, found.get("infer", seen.peak))
            seen.restart()
            engine.forward_backward(rows, loss, loss.outputs)
            engine.step()
            found["update"] = min(seen.peak, found.get("update", seen.peak))
        engine.context.groups.close()
        engine.close()
    return found


def _peak(seen: Any, mapped: Collection[int] = ()) -> int:
    """Without files `mapped` as a whole, of these sizes: pages that are read belong to the system
    (`test_reading_takes_the_pages_of_one_tensor_at_a_time` measures them)."""
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e for e in events if abs(e.nbytes()) not in mapped]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return peak


def closed(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any, away: Sequence[str]) -> int:
    """Bytes behind tensors that a closed engine held, whoever still refers to them. `away` is in host memory when it
    closes."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    held = [engine.storage()]
    if optimizer:
        loss, rows = loss_of("lm"), share(make_batch(), engine.grid, world.rank)
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step()
        held += engine.optimizer_storage().values()
    tensors = [tensor.detach() for kind in held for tensor in kind.values() if tensor.numel()]
    assert all(tensor.untyped_storage().nbytes() for tensor in tensors)
    engine.offload(away)
    engine.close()
    engine.close()
    engine.context.groups.close()
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def threads_left(world: World, name: str, strategies: Sequence[Any], path: Path, optimizer: Any) -> list[int]:
    """Threads more than before each engine was built on groups of its own, trained, and forgotten without `close`."""
    found = []
    for i, strategy in enumerate(strategies):
        gc.collect()
        before = threads()
        engine = build(world, f"{name}-{i}", strategy, 4, path, "lm", optimizer, kept=False)
        update(engine, world, 0)
        engine.context.groups.close()
        world.engines.clear()
        del engine
        gc.collect()
        found.append(threads() - before)
    return found
