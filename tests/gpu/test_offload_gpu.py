"""Offloaded models on a device: what overlaps is ordered, nothing is allocated any more, and no host waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.expected_calls import ExpectedCalls
from hybridflow.config import FSDP, Adam, Megatron, ZeRO
from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engines.call_events import MAPPED
from hybridflow.engines.contract import PARAMETERS, STATES
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import loss_of, make_batch, make_model
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer
from tests.gpu.conftest import OneRank
from tests.gpu.test_host_syncs import host_syncs
from tests.gpu.test_removed_waits import Faults, races, remove

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"micro_tokens": 48, "dtype": "bfloat16"}
STRATEGIES: dict[str, Any] = {
    "fsdp": FSDP(**SMALL),
    "zero": ZeRO(stage=2, **SMALL),
    "megatron": Megatron(**SMALL),
}
OUTPUTS = ("log_probs",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen2", tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _latest_peak(world: OneRank) -> None:
    """Of this test, as a host's is of each call."""
    MAPPED.peak(restart=True)


class Worker:
    """Of an engine, as far as a host uses it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.reloads = engine, 0
        self.away_bytes: Callable[..., int] = engine.away_bytes

    def fetch(self, what: Any) -> None:
        self.reloads += 1
        self.engine.reload(what)

    def leave(self) -> None:
        self.engine.offload(STATES)


def call(seq: int, group: str) -> RankCall:
    return RankCall(seq, group, "compute", {}, ())


def allocations() -> tuple[int, int]:
    """From the device and of pinned memory, so far."""
    return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_models_take_turns_on_a_device(world: OneRank, model: Path, name: str):
    """A critic trains, and a reference computes behind each of its updates: both come back behind the other's call."""
    strategy, batch, loss = STRATEGIES[name], make_batch(), loss_of("lm")
    makes: list[Any] = [(strategy, 1, model, "lm", Adam(lr=1e-2)), (strategy, 1, model, "lm", None)]
    plain, plain_other = [tasks.build(world, f"plain-{name}-{i}", *args) for i, args in enumerate(makes)]
    critic, other = [tasks.build(world, f"away-{name}-{i}", *args) for i, args in enumerate(makes)]
    workers = {"critic": Worker(critic), "other": Worker(other)}
    expected = ExpectedCalls(workers.get, world.device)
    for worker in workers.values():
        worker.leave()
    seen, waits = list[tuple[int, int]](), []
    for step in range(5):
        seq = 2 * step + 1
        expected.add("other", seq + 1, seq, False)
        with expected.running(call(seq, "critic")):
            critic.reload(STATES)
            metrics = critic.forward_backward(batch, loss, loss.outputs)
            result = critic.step(leaving=True)
            with host_syncs() as found:
                critic.offload(STATES)
        waits.append(found)
        with expected.running(call(seq + 1, "other")):
            with host_syncs() as found:
                other.reload(PARAMETERS)
                add = threading.Thread(target=expected.add, args=("critic", seq + 2, seq + 1, True))
                add.start()  # while copies of the other one are under way
                add.join()
            waits.append(found)
            log_probs = other.forward(batch, OUTPUTS)
            other.offload(PARAMETERS)
        assert metrics == plain.forward_backward(batch, loss, loss.outputs)
        assert result == plain.step()
        assert log_probs["log_probs"].values.equal(plain_other.forward(batch, OUTPUTS)["log_probs"].values)
        seen.append(allocations())
    assert seen[2:] == seen[2:3] * 3
    assert {worker.reloads for worker in workers.values()} == {4}  # the first time what a call takes is not known
    assert not any(found.total for found in waits if found.counted), waits
    critic.reload(STATES)
    assert all(value.equal(plain.storage()[key]) for key, value in critic.storage().items())


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_layer_that_does_not_wait_is_a_race(
    world: OneRank, model: Path, expected_faults: Faults, monkeypatch, name: str
):
    removed = remove(monkeypatch, torch.cuda.Stream, "wait_event", CopyStream.wait)
    engine = tasks.build(world, f"removed-{name}", STRATEGIES[name], 1, model)
    engine.offload(PARAMETERS)
    engine.reload(PARAMETERS)
    engine.forward(make_batch(), OUTPUTS)
    assert removed
    assert races(expected_faults)


def test_a_model_comes_only_where_it_fits_beside_the_peak_of_the_call(world: OneRank, model: Path):
    engine = tasks.build(world, "fits", STRATEGIES["zero"], 1, model)
    worker = Worker(engine)
    worker.leave()
    expected = ExpectedCalls({"other": worker}.get, world.device)
    total, size = torch.cuda.mem_get_info()[1], engine.away_bytes(STATES)

    def running(seq: int, takes: int) -> int:
        """The bytes that have come behind a call that takes so many."""
        expected.add("other", seq + 1, seq, False)
        with expected.running(call(seq, "large")):
            buffer = torch.empty(takes, dtype=torch.uint8, device=world.device)
            del buffer
            return size - engine.away_bytes(STATES)

    half = total // 2
    assert running(1, half) == 0  # its peak is not known
    assert running(3, half) == size
    held = torch.empty(total - half - torch.cuda.memory_allocated(), dtype=torch.uint8, device=world.device)
    assert running(5, 1 << 10) == 0  # it may take as much as it did before
    del held
    assert running(7, 1 << 10) == size


SPEC = ModelSpec(
    family="llama", hidden=256, intermediate=512, layers=6, heads=8, kv_heads=4, head_dim=32, vocab=1000, tied=False
)


def holders(train_dtype: torch.dtype, dtype: torch.dtype, shares: bool, device: str = "cuda"):
    grid = RankGrid(p_g=1, t_g=1)
    trainer = PlainTrainer(SPEC, megatron_layout(SPEC, grid), grid, 0, train_dtype, device=device)
    return trainer, PlainGenerator(vllm_layout(SPEC, grid.generation()), 0, dtype, shares, device)


@pytest.mark.parametrize(
    ("train", "generate"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("shares", [True, False])
def test_cycles_move_the_weights_and_give_memory_back(train: str, generate: str, shares: bool):
    trainer, generator = holders(getattr(torch, train), getattr(torch, generate), shares)
    engine = HybridEngine(trainer, generator, None, 0)
    allocated = []
    for _ in range(5):
        trainer.train()
        engine.trained()
        engine.to_generation()
        assert not trainer.canon.wrong(generator.layout(), 0, generator.storage())
        assert engine.resident_bytes == engine.report.resident_bytes
        engine.to_training()
        assert not trainer.canon.wrong(trainer.layout(), 0, trainer.storage())
        allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    assert len(set(allocated[1:])) == 1


@pytest.mark.parametrize("offload", [(), ("generation",)])
def test_an_overlapped_step_is_a_step_and_a_move(offload: tuple[str, ...]):
    trainer, generator = holders(torch.bfloat16, torch.bfloat16, shares=False)
    engine = HybridEngine(trainer, generator, None, 0, overlap=True, offload=offload)  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
        engine.to_generation()
        assert not trainer.canon.wrong(generator.layout(), 0, generator.storage())
        engine.to_training()
        assert not trainer.canon.wrong(trainer.layout(), 0, trainer.storage())
