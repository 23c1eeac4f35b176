"""Each wait of the library between streams, and for the device, is needed: without it emulated CUDA finds a fault."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.config import SGD, Megatron, ZeRO
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import CopyStream, Transfer
from hybridflow.engines import flat_shards
from hybridflow.engines.megatron import engine as megatron
from tests.contracts.engine_tasks import build
from tests.contracts.example_models import loss_of, make_batch, make_model
from tests.contracts.rank_processes import World
from tests.example_layouts import SPEC, whole
from tests.gpu.conftest import DEVICE, OneRank
from tests.gpu.test_nccl_order import run
from tests.integration.transfer_pairs import values_of

pytestmark = pytest.mark.gpu
Faults = Callable[[], list[str]]


def remove(patch: pytest.MonkeyPatch, owner: Any, name: str, caller: Callable) -> list[str]:
    """`owner.name` does nothing where `caller` calls it; returns a list that grows with each such call."""
    original, removed = getattr(owner, name), []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code is caller.__code__:
            removed.append(name)
            return None
        return original(*args, **kwargs)

    patch.setattr(owner, name, replaced)
    return removed


def races(faults: Faults) -> list[str]:
    return [fault for fault in faults() if fault.startswith("race")]


def check(faults: Faults, removes: bool) -> None:
    """A race where a wait was removed, else no fault of any kind."""
    found = races(faults) if removes else faults()
    assert bool(found) == removes, found


def move_weights() -> Tensor:
    """The caller's stream writes the sources, and reads the destinations."""
    source = whole(SPEC)
    held = {name: tensor.to(DEVICE) for name, tensor in values_of(source, 1).items()}
    got = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    transfer = Transfer(plan(source, source), held, got)
    torch.cuda.synchronize()
    for tensor in held.values():
        tensor.mul_(2)
    transfer.run()
    found = torch.stack([tensor.sum() for tensor in got.values()])
    torch.cuda.synchronize()
    return found


def test_a_transfer_without_races(expected_faults: Faults):
    move_weights()
    check(expected_faults, removes=False)


def test_a_transfer_waits_for_the_callers_stream(expected_faults: Faults, monkeypatch):
    removed = remove(monkeypatch, torch.cuda.Stream, "wait_stream", CopyStream.follow)
    move_weights()
    assert removed
    assert races(expected_faults)


@pytest.mark.parametrize("removes", [False, True])
def test_memory_is_given_back_when_it_was_read(expected_faults: Faults, monkeypatch, removes: bool):
    """A destination with padding, which the caller's stream fills, may lie where a source was."""
    source = whole(SPEC)
    held = {name: tensor.to(DEVICE) for name, tensor in values_of(source, 1).items()}
    got = {name: torch.zeros(len(x) + 2, *x.shape[1:], device=DEVICE) for name, x in held.items()}
    before, after = Residency(held, DEVICE), Residency(got, DEVICE)
    transfer = Transfer(plan(source, source), held, got, release=before, acquire=after)
    after.release()
    torch.cuda.synchronize()
    if removes:
        monkeypatch.setattr(CopyStream, "reached", lambda self, mark, timeout=None: None)
    transfer.run()
    torch.cuda.synchronize()
    check(expected_faults, removes)


class Short(Residency):
    """Memory that a device has not enough of: the third tensor gets none."""

    given = 0

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        self.given += 1
        if self.given == 3:
            raise torch.OutOfMemoryError("too little memory")
        return super().acquire(names)


@pytest.mark.parametrize("removes", [False, True])
def test_the_callers_stream_waits_for_a_transfer_that_failed(expected_faults: Faults, monkeypatch, removes: bool):
    """Recovery writes the tensors again that it had begun to write."""
    source = whole(SPEC)
    held = {name: tensor.to(DEVICE) for name, tensor in values_of(source, 1).items()}
    got = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    memory = Short(got, DEVICE)
    transfer = Transfer(plan(source, source), held, got, acquire=memory)
    memory.release()
    torch.cuda.synchronize()
    removed = remove(monkeypatch, torch.cuda.Stream, "wait_stream", CopyStream.join) if removes else [""]
    with pytest.raises(torch.OutOfMemoryError):
        transfer.run()
    for name, tensor in got.items():
        if memory.resident(name):
            tensor.zero_()
    torch.cuda.synchronize()
    assert removed
    check(expected_faults, removes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("models"))


def update(world: World, name: str, strategy: Any, size: int, path: Path) -> float:
    """The gradient norm of two passes."""
    engine = build(world, name, strategy, size, path, optimizer=SGD(lr=0.1))
    batch, loss = make_batch(), loss_of("lm")
    for _ in range(2):
        engine.forward_backward(batch, loss, loss.outputs)
    norm = float(engine.step()["grad_norm"])
    torch.cuda.synchronize()
    return norm


OFFLOADED = ZeRO(stage=2, offload=True, micro_tokens=48, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "caller"),
    [("wait_stream", CopyStream.follow), ("wait_event", CopyStream.wait)],
    ids=["before adding", "after adding"],
)
def test_gradients_are_added_on_a_stream_beside(
    world: OneRank, model: Path, expected_faults: Faults, monkeypatch, name: str, caller: Callable
):
    update(world, "kept", OFFLOADED, 1, model)
    check(expected_faults, removes=False)
    removed = remove(monkeypatch, torch.cuda.Stream, name, caller)
    update(world, "removed", OFFLOADED, 1, model)
    assert removed
    assert races(expected_faults)


def host_gradients(shards: Any) -> Mapping[str, Tensor]:
    gradients = shards.gradients
    gradients._add(0, torch.ones_like(gradients._shares[0], device=DEVICE))
    gradients.finish()
    return gradients.own


def host_weights(shards: Any) -> Mapping[str, Tensor]:
    shards.parameters_changed()
    return shards.main


@pytest.mark.parametrize("read", [host_gradients, host_weights], ids=["gradients", "weights"])
def test_the_host_reads_what_has_arrived(world: OneRank, model: Path, expected_faults: Faults, monkeypatch, read):
    """Host memory that a copy has not reached is not a number."""

    def finite() -> bool:
        return all(bool(tensor.isfinite().all()) for tensor in read(engine._shards).values())

    engine = build(world, "offloaded", OFFLOADED, 1, model, optimizer=SGD(lr=0.1))
    assert finite()
    monkeypatch.setattr(flat_shards, "settle", lambda device: None)
    assert not finite()


def pipeline(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    folder = Path(store.get("folder").decode())
    world = World(rank, store, torch.device("cuda", rank))
    found = update(world, "pipeline", Megatron(pp=2, micro_tokens=48), 2, folder)
    world.close()
    return found


def pipeline_without_waits(rank: int, store: dist.Store, groups: list[dist.ProcessGroup]) -> object:
    megatron.wait = lambda work: None
    return pipeline(rank, store, groups)


@pytest.mark.parametrize("task", [pipeline, pipeline_without_waits])
def test_stages_wait_for_their_messages(world: OneRank, expected_faults: Faults, model: Path, task):
    """And for no more than these: each rank ends, with the norm of a model of one stage."""
    found = run(task, values={"folder": str(model)})
    check(expected_faults, removes=task is pipeline_without_waits)
    if task is pipeline_without_waits:
        return
    norm = update(world, "one stage", Megatron(micro_tokens=48), 1, model)
    assert found == [(0, [pytest.approx(norm, rel=0.02)])] * 2
