"""What FSDP and ZeRO hold on each rank, what they never hold, and where their optimizer state can go.

Rajbhandari et al. 2020, table 1: of P parameters on N ranks, ZeRO-1 keeps 1/N of the optimizer's state, ZeRO-2 of
gradients too, ZeRO-3 and FSDP of parameters too. Four gloo processes serve the whole file (see conftest.py).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from hybridflow.engines.call_estimate import CallRows, asked_rows, estimate_rank
from hybridflow.engines.fsdp.layout import check_tensor_parallel, fsdp_layout
from hybridflow.engines.initial_weights import initialise
from hybridflow.engines.router_replay import ROUTING
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import read_spec, spec_of_config
from hybridflow.models.spec import ModelSpec
from tests.contracts import state_tasks
from tests.contracts.engine_tasks import build, share
from tests.contracts.example_models import loss_of, make_batch, make_model, spec_of
from tests.contracts.family_cases import config
from tests.contracts.rank_processes import World, threads
from tests.contracts.state_tasks import update
from tests.contracts.train_contract import SMALL, whole


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


ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
HELD: dict[str, tuple[Any, dict[str, float]]] = {  # in parameters of four bytes, P = 1
    "fsdp-4": (FSDP(), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "fsdp-4-bf16": (FSDP(dtype="bfloat16"), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "fsdp-2-tp-2": (FSDP(tp=2), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "hsdp-2x2": (FSDP(replicate=2), {"parameters": 1 / 2, "gradients": 1 / 2, "moments": 2 / 2, "main": 0}),
    "zero-1": (ZeRO(stage=1), {"parameters": 1, "gradients": 1, "moments": 2 / 4, "main": 0}),
    "zero-1-bf16": (
        ZeRO(stage=1, dtype="bfloat16"),
        {"parameters": 1 / 2, "gradients": 1, "moments": 2 / 4, "main": 1 / 4},
    ),
    "zero-2": (ZeRO(stage=2), {"parameters": 1, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "zero-2-bf16": (
        ZeRO(stage=2, dtype="bfloat16"),
        {"parameters": 1 / 2, "gradients": 1 / 4, "moments": 2 / 4, "main": 1 / 4},
    ),
    "zero-3": (ZeRO(stage=3), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
}
DEEP = ModelSpec(
    family="llama", hidden=64, intermediate=128, layers=16, heads=4, kv_heads=4, head_dim=16, vocab=64, head="lm"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-tied", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", HELD)
def test_a_rank_holds_what_the_table_says(processes, path, name):
    """Up to padding: FSDP cuts whole rows, and norms stay whole under tensor parallelism; ZeRO's shares are multiples
    of 64 elements, and the last rank of a unit may own less."""
    strategy, shares = HELD[name]
    whole_bytes = 4 * spec_of(path).num_parameters
    found = processes.run(4, bytes_held, processes.name(), strategy, 4, path, ADAM)
    for what, part in shares.items():
        held = [rank[what] for rank in found]
        assert max(held) >= part * whole_bytes
        assert max(held) <= part * whole_bytes * 1.05, f"{what}: {held} bytes, the model has {whole_bytes}"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", [FSDP(), FSDP(tp=2), FSDP(replicate=2), ZeRO(stage=3)], ids=str)
def test_no_rank_ever_holds_the_whole_model(processes, tmp_path, strategy):
    """A rank has its part, and for a moment what it reads of a tensor, or the layer that it computes and the next."""
    checkpoint = saved(tmp_path / "deep", DEEP)
    everything = 4 * DEEP.num_parameters
    layer = 4 * sum(a * b for a, b in ((s[0], s[1] if len(s) > 1 else 1) for s in DEEP.layer_tensors(0).values()))
    part = everything / (2 if isinstance(strategy, FSDP) and strategy.replicate == 2 else 4)
    for found in processes.run(4, peak_bytes, processes.name(), strategy, 4, checkpoint, DEEP):
        assert part <= found["build"] < part + 2 * layer < 0.75 * everything
        assert 0 < found["forward"] < 5 * layer < 0.4 * everything


WIDE = ModelSpec(family="llama", hidden=256, intermediate=704, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=1024)


RUN: list[Any] = [
    FSDP(),
    FSDP(recompute=True),
    FSDP(tp=2),
    FSDP(cp=2),
    FSDP(lora=LoRA(rank=8)),
    ZeRO(stage=1),
    ZeRO(stage=2),
    ZeRO(stage=3, recompute=True),
    Megatron(tp=2),
    Megatron(tp=2, recompute=True),
    Megatron(pp=2),
    Megatron(cp=2),
    Megatron(lora=LoRA(rank=8)),
]
MIXTURE = spec_of_config(
    config("qwen3_moe", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, num_experts=8).to_dict(), "lm"
)
SCORES = replace(WIDE, head="value")
MIXTURES: list[Any] = [FSDP(), Megatron(tp=2), Megatron(ep=2)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("strategy", "spec"),
    [(one, WIDE) for one in RUN] + [(one, SCORES) for one in (RUN[0], RUN[-1])] + [(one, MIXTURE) for one in MIXTURES],
    ids=lambda one: str(one) if isinstance(one, FSDP | Megatron | ZeRO) else f"{one.family} {one.head}",
)
def test_an_estimate_is_what_a_run_takes(processes, strategy, spec):
    """Of the peak of each call, to 5 %: tensors without memory are counted as those with. Of dense models beside what
    is held; mixtures compute in 16 bits, in which the device's kernel of attention keeps less than the host's."""
    dense = spec is not MIXTURE
    strategy = replace(strategy, micro_tokens=512, dtype="float32" if dense else "bfloat16")
    grid, lengths = strategy.grid(2), [(40, 60 + row) for row in range(12)]
    args = (processes.name(), strategy, 2, spec, asked_rows(lengths, spec), Adam(lr=1e-6))
    calls = {"infer": CallRows("inference", lengths), "update": CallRows("training", lengths)}
    for rank, ran in enumerate(processes.run(2, call_peaks, *args)):
        found = estimate_rank("a", rank, grid, strategy, spec, Adam(lr=1e-6), calls)
        for name, one in found.items():
            held = sum(one.held.values()) if dense else 0
            assert one.peak - held == pytest.approx(ran[name] - held, rel=0.05)


def saved(directory: Path, spec: ModelSpec) -> Path:
    """The model of `spec` with drawn weights as a Hugging Face directory."""
    from hybridflow.models.hf_spec import hf_config

    storage = {name: torch.empty(shape) for name, shape in spec.tensors().items()}
    initialise(fsdp_layout(spec, 1), 0, storage)
    directory.mkdir()
    save_file(storage, directory / "model.safetensors")
    hf_config(spec.config).save_pretrained(directory)
    return directory


CIRCLES: dict[str, list[Any]] = {
    "sizes": [Megatron(pp=p, tp=t, dp=d) for p, t, d in ((1, 2, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (1, 2, 2))],
    "backends": [
        FSDP(),
        Megatron(tp=2),
        ZeRO(stage=2),
        FSDP(tp=2),
        Megatron(pp=2),
        ZeRO(stage=1),
        FSDP(replicate=2),
    ],
    "experts": [
        FSDP(ep=2),
        Megatron(tp=2, ep=2),
        FSDP(),
        FSDP(ep=2, replicate=2),
        Megatron(ep=2, etp=2, dp=4),
        ZeRO(stage=2),
    ],
}


@pytest.mark.parametrize(
    ("circle", "optimizer", "dtype"),
    [
        *[("sizes", optimizer, dtype) for optimizer, dtype in ((ADAM, "float32"), (MOMENTUM, "bfloat16"))],
        ("backends", ADAM, "float32"),
        pytest.param("backends", MOMENTUM, "bfloat16", marks=pytest.mark.slow),
        ("experts", ADAM, "float32"),
    ],
    ids=str,
)
def test_training_goes_on_in_another_layout(processes, path, family, circle, optimizer, dtype):
    """Main parameters and moments are bit-equal after each move; losses are those of the run that never moved.

    Backends round in other places, and every update carries the difference on: in float32 to 1e-5 of the norm after six
    on some processors. In bfloat16 it is 2^-9 at a time: the first updates are compared.
    """
    strategies = [replace(strategy, dtype=dtype, **SMALL) for strategy in CIRCLES[circle]]
    path = family("qwen3_moe")[0] if circle == "experts" else path
    found = processes.run(4, state_tasks.moving, processes.name(), strategies, path, optimizer)
    shapes = read_spec(path, "lm").tensors()
    kinds = ("main", "exp_avg", "exp_avg_sq") if optimizer == ADAM else ("main", "momentum_buffer")
    for i in range(len(strategies) - 1):
        for kind in kinds:
            before, after = (whole([part[when][i][kind] for part in found], shapes) for when in ("before", "after"))
            assert all(after[name].equal(tensor) for name, tensor in before.items()), (kind, i)
            assert any(tensor.any() for tensor in before.values())
        if circle == "sizes":
            main = whole([part["after"][i]["main"] for part in found], shapes)
            parameters = whole([part["parameters"][i] for part in found], shapes)
            assert all(parameters[name].equal(own.to(getattr(torch, dtype)).float()) for name, own in main.items())
    tolerance = 0.05 if dtype == "bfloat16" else 1e-5 if circle == "sizes" else 5e-5
    for seed in range(4 if dtype == "bfloat16" else len(strategies)):
        straight = {key: value for part in found for key, value in part["straight"][seed].items()}
        moved = {key: value for part in found for key, value in part["moved"][seed].items()}
        assert moved.keys() == straight.keys()
        for key in ("grad_norm", "lr", "actor/loss"):
            assert moved[key] == pytest.approx(straight[key], rel=tolerance, abs=tolerance * 0.1), (key, seed)


def test_a_rank_gathers_its_experts_only(processes, family):
    """Every layer has six, of which the engine of a rank never has more than three."""
    path, _ = family("qwen3_moe")
    for shapes in processes.run(4, shapes_of_experts, processes.name(), FSDP(ep=2), 4, path):
        assert len(shapes) == 2 * 2
        assert {shape[0] for shape in shapes} == {3}


@pytest.mark.parametrize(
    "strategies",
    [
        (FSDP(dtype="float16"), Megatron(dtype="float16")),
        (Megatron(dtype="float16"), ZeRO(stage=1, dtype="float16")),
        (Megatron(dtype="float16", **SMALL),) * 2,
    ],
    ids=["fsdp to megatron", "megatron to zero", "megatron"],
)
def test_step_counts_and_loss_scales_move_too(processes, path, strategies):
    fresh, before, after = processes.run(1, state_tasks.counters_follow, processes.name(), strategies, path, ADAM)[0]
    assert (fresh["steps"], before["steps"], after["steps"]) == (0, 1, 2)
    assert before["loss_scale"]["scale"] < fresh["loss_scale"]["scale"]
    assert after["loss_scale"]["scale"] == before["loss_scale"]["scale"]


def test_closed_groups_end_with_their_threads(processes, path):
    """Each gloo group has threads of its own, and a process may train many models one after the other. The first one
    also starts what autograd keeps."""
    strategies = [FSDP(**SMALL), FSDP(tp=2), FSDP(replicate=2), ZeRO(stage=1), ZeRO(stage=2), Megatron(pp=2)]
    args = (processes.name(), strategies, path, ADAM)
    for left in processes.run(4, threads_left, *args):
        assert left[1:] == [0] * (len(strategies) - 1)


def test_a_kv_head_belongs_to_one_rank(path):
    spec = replace(spec_of(path), kv_heads=2)
    with pytest.raises(
        ModelError, match=r"actor has 2 kv-heads, which do not divide by tp=4. Use FSDP\(tp=\) in \[1, 2\]"
    ):
        check_tensor_parallel(spec, 4, "actor")
