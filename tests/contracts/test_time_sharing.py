"""Updates of an actor and a critic in turns give, bit by bit, what they give one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow import config
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import LoRA, Megatron
from hybridflow.engines import time_sharing
from hybridflow.engines.time_sharing import SharedStages
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import WorkerError
from hybridflow.planner.pipeline.schedule import Instruction
from hybridflow.planner.pipeline.shared_schedule import together
from tests.contracts.engine_tasks import build, share
from tests.contracts.example_models import VOCABULARY, loss_of, make_batch
from tests.contracts.rank_processes import RankProcesses, World
from tests.tiny_models import make_classifier, make_policy

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


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STRATEGIES = {
    "4-1-1": {"lm": Megatron(pp=4, micro_tokens=24), "value": Megatron(pp=4, micro_tokens=48)},
    "2-1-2": {"lm": Megatron(pp=2, dp=2, micro_tokens=24), "value": Megatron(pp=2, dp=2, micro_tokens=16)},
    "2-2-1": {"lm": Megatron(pp=2, tp=2, micro_tokens=48), "value": Megatron(pp=2, tp=2, micro_tokens=24)},
    "2-2-1-lora": {
        "lm": Megatron(pp=2, tp=2, micro_tokens=48, sequence_parallel=True, lora=LoRA(rank=2)),
        "value": Megatron(pp=2, tp=2, micro_tokens=24, recompute=True, lora=LoRA(rank=4)),
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    policy = make_policy(directory / "policy", tokenizer=False, num_hidden_layers=4, **SIZES)
    large = SIZES | {"hidden_size": 64, "num_attention_heads": 4}
    return {"lm": policy, "value": make_classifier(directory / "critic", num_hidden_layers=8, **large)}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list | tuple) else a == b


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", STRATEGIES)
def test_shared_updates_equal_serial_ones(processes: RankProcesses, paths: dict[str, Path], layout: str):
    found = processes.run(4, both, processes.name(), STRATEGIES[layout], paths, 4)
    for rank in found:
        for head in paths:
            assert not equal(rank["before"][head], rank["shared"][head][-1]), "the updates must change the weights"
            assert equal(rank["serial"][head], rank["shared"][head])
        own = [each for each in rank["planned"] if each in set(rank["ran"])]
        assert rank["ran"] == own  # in the planned order, without micro-batches that only other replicas have
        if layout != "2-1-2":
            assert rank["ran"] == rank["planned"]
    counts = [micro_batches(rank["ran"]) for rank in found]
    assert len(set(counts)) == (2 if layout == "2-1-2" else 1), "replicas have unlike micro-batches"
    of_models = [work.micro_batches for work in found[0]["works"]]
    assert len(of_models[0]) != len(of_models[1])
    assert layout != "4-1-1" or set(of_models[0]) != set(of_models[1])


@pytest.fixture(scope="module")
def three(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = SIZES | {"hidden_size": 48}
    another = make_policy(tmp_path_factory.mktemp("another") / "policy", tokenizer=False, num_hidden_layers=4, **sizes)
    return {**paths, "lm2": another}


@pytest.mark.parametrize("layout", ["4-1-1", "2-1-2"])
def test_three_updates_equal_serial_ones(processes: RankProcesses, three: dict[str, Path], layout: str):
    strategies = STRATEGIES[layout] | {"lm2": STRATEGIES[layout]["lm"]}
    for rank in processes.run(4, both, processes.name(), strategies, three, 4):
        for head in three:
            assert not equal(rank["before"][head], rank["shared"][head][-1]), "the updates must change the weights"
            assert equal(rank["serial"][head], rank["shared"][head])
        assert len(rank["works"]) == 3


@pytest.mark.parametrize("layout", ["4-1-1", "2-2-1"])
def test_forward_passes_equal_serial_ones(processes: RankProcesses, three: dict[str, Path], layout: str):
    strategies = STRATEGIES[layout] | {"lm2": STRATEGIES[layout]["lm"]}
    found = processes.run(4, forwards, processes.name(), strategies, three)
    for rank in found:
        assert equal(rank["serial"], rank["shared"])
        assert not any(work.trains for work in rank["works"])
        assert micro_batches(rank["ran"]) == sum(work.total for work in rank["works"])
    assert any(any(each) for rank in found for each in rank["shared"])


def test_one_rank_searches_and_again_only_for_other_micro_batches(processes: RankProcesses, paths: dict[str, Path]):
    found = processes.run(4, searches, processes.name(), STRATEGIES["2-1-2"], paths)
    assert found == [[1, 1, 2], *[[0, 0, 0]] * 3]


def test_a_search_that_fails_ends_the_updates_of_all_ranks(processes: RankProcesses, paths: dict[str, Path]):
    for rank in processes.run(4, search_that_fails, processes.name(), STRATEGIES["2-1-2"], paths):
        assert all("MemoryError: no room for the search" in error for error in rank)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)], ids=str)
def test_one_model_has_the_gradients_of_megatrons_schedule(processes: RankProcesses, paths: dict[str, Path], sizes):
    strategy = Megatron(pp=sizes[0], tp=sizes[1], dp=sizes[2], micro_tokens=24)
    for rank in processes.run(4, one_model, processes.name(), strategy, paths["lm"], 4):
        assert equal(rank["ours"], rank["megatron"])


@pytest.mark.parametrize("fails", ["lm", "value"])
def test_a_loss_that_raises_leaves_both_models_unstepped(processes: RankProcesses, paths: dict[str, Path], fails: str):
    for rank in processes.run(4, both, processes.name(), STRATEGIES["4-1-1"], paths, 4, fails, 1):
        for head, (error, parameters) in rank["shared"].items():
            assert told(error, fails)
            assert equal(rank["before"][head], parameters)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("fails", "layout", "part", "ranks", "micro"),
    [
        ("lm", "4-1-1", "forward", (0,), 1),
        ("lm", "4-1-1", "backward", (3,), 0),
        ("value", "4-1-1", "backward", (1,), 3),
        ("value", "4-1-1", "forward", (2,), 0),
        ("value", "2-1-2", "backward", (1,), 0),  # one replica of two
        ("lm", "2-2-1", "forward", (2, 3), 1),  # all tensor parallel ranks
    ],
)
def test_a_failed_computation_reaches_every_rank(
    processes: RankProcesses,
    paths: dict[str, Path],
    fails: str,
    layout: str,
    part: str,
    ranks: tuple[int, ...],
    micro: int,
):
    """Peers get the messages that they wait for, so no error is a timeout. No rank steps, in serial updates neither."""
    strategies, breaks = STRATEGIES[layout], (part, ranks, micro)
    for rank in processes.run(4, both, processes.name(), strategies, paths, 4, fails, 1, "", breaks):
        for head, (error, parameters) in rank["shared"].items():
            assert told(error, fails)
            assert equal(rank["before"][head], parameters)
        assert told(rank["serial"][fails][0], fails)
        assert len(rank["serial"][fails]) == 2


def test_steps_before_a_loss_that_raises_stay(processes: RankProcesses, paths: dict[str, Path]):
    """Each of several mini-batches is a step, of serial updates too; the other model's last step is not made."""
    for rank in processes.run(4, both, processes.name(), STRATEGIES["4-1-1"], paths, 4, "value"):
        assert equal(rank["serial"]["value"][:-2], rank["shared"]["value"][:-2])
        assert equal(rank["serial"]["value"][-1], rank["shared"]["value"][-1])
        *made, error, _ = rank["shared"]["lm"]
        assert len(made) == 1 == len(rank["serial"]["lm"]) - 2
        assert told(error, "value")


def test_an_update_that_announces_nothing_runs_alone(processes: RankProcesses, paths: dict[str, Path]):
    for rank in processes.run(4, both, processes.name(), STRATEGIES["2-2-1"], paths, 4, "", 2, "lm"):
        assert all(equal(rank["serial"][head], rank["shared"][head]) for head in paths)
        assert len(rank["works"]) == 1


def test_an_update_that_cannot_begin_on_one_rank_stops_nothing_else(processes: RankProcesses, paths: dict[str, Path]):
    found = processes.run(4, both, processes.name(), STRATEGIES["4-1-1"], paths, 4, "lm", 2, "", None, 2)
    for number, rank in enumerate(found):
        assert equal(rank["serial"]["value"], rank["shared"]["value"])
        if number != 2:
            error, parameters = rank["shared"]["lm"]
            assert isinstance(error, WorkerError)
            assert "failed on other ranks" in str(error)
            assert equal(rank["before"]["lm"], parameters)


def told(error: Exception, fails: str) -> bool:
    """Whether an error names the model whose loss has raised, and why."""
    role = "actor" if fails == "lm" else "critic"
    return isinstance(error, WorkerError) and role in str(error) and "the reward of this row is gone" in str(error)
