"""ZeRO stages 1 and 2 against torch's optimizers in one process, and the bytes of the paper's table 1.

Four gloo processes serve the whole file (see conftest.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.config import SGD, Adam
from hybridflow.engines.units import ALIGNMENT, optimizer_layout, parameter_layout, step_groups, whole_units
from hybridflow.models.spec import ModelSpec
from tests.contracts import zero_tasks as tasks
from tests.contracts.example_models import Oracle, load_model, make_batch, make_model, relative, spec_of
from tests.contracts.rank_processes import DEVICE
from tests.contracts.train_contract import whole

on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="counts all memory, of the host and of workspaces too")
STAGES = [1, 2]
MODELS = [("llama", "lm"), ("qwen3-tied", "lm"), ("qwen2", "value")]
CLIP, DECAY = 0.7, 0.1


def grouped(make: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[[Iterable[Tensor]], Any]:
    """An optimizer whose weight decay leaves out norms and biases."""

    def made(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        every = list(parameters)
        decayed = {"params": [p for p in every if p.ndim > 1], "weight_decay": DECAY}
        return make([decayed, {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0}], **settings)

    return made


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (
        SGD(lr=0.05, momentum=0.5, clip_grad=CLIP, weight_decay=DECAY),
        grouped(torch.optim.SGD, lr=0.05, momentum=0.5),
    ),
    "adam": (
        Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=CLIP, weight_decay=DECAY),
        grouped(torch.optim.AdamW, lr=0.02, eps=1e-3, betas=(0.9, 0.95)),
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    directory = tmp_path_factory.mktemp("models")
    return {key: make_model(key[0], directory, key[1]) for key in MODELS}


@pytest.fixture(scope="module")
def oracles(models: dict[tuple[str, str], Path]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Two updates of each model with each optimizer in plain PyTorch."""
    found = {}
    for (name, head), kind in itertools.product(MODELS, OPTIMIZERS):
        oracle = Oracle(models[name, head], head, OPTIMIZERS[kind][1], clip=CLIP)
        before = oracle.parameters()
        seen = [oracle.update(make_batch(seed=seed)) for seed in range(2)]
        after = oracle.parameters()
        assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3, "100 times the tolerance"
        assert any(norm > CLIP for norm, _, _ in seen), "clipping must take part"
        state: dict[str, dict[str, Tensor]] = {"main": after}
        for tensor, parameter in oracle.model.named_parameters():
            for moment, value in oracle.optimizer.state[parameter].items():
                if moment != "step":
                    state.setdefault(moment, {})[tensor] = value.clone()
        found[name, head, kind] = {"norms": [n for n, _, _ in seen], "gradients": seen[0][1], "state": state}
    return found


# What is pure


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[ModelSpec, int]:
    spec = ModelSpec(
        family="qwen3",
        hidden=draw(st.integers(1, 70)),
        intermediate=draw(st.integers(1, 20)),
        layers=draw(st.integers(1, 12)),
        heads=6,
        kv_heads=draw(st.sampled_from([1, 6])),
        head_dim=6,
        vocab=draw(st.integers(1, 40)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        head=draw(st.sampled_from(["lm", "value"])),
    )
    return spec, draw(st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(cut_models())
def test_ranks_own_every_element_once_and_equally_much(case):
    spec, ranks = case
    tensors = spec.tensors()
    owners = {name: torch.zeros(shape, dtype=torch.int8) for name, shape in tensors.items()}
    layout, cut = optimizer_layout(tensors, ranks), whole_units(tensors)
    for rank in range(ranks):
        owned = {name: span for unit in cut for name, span in unit.owned(ranks, rank).items()}
        stored = {name: torch.zeros(stop - start, dtype=torch.int8) for name, (start, stop) in owned.items()}
        for region in layout.regions(rank):
            index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            owners[region.box.tensor][index] += 1
            region.view(stored[region.storage]).add_(1)
        assert all(bool((flat == 1).all()) for flat in stored.values()), "regions overlap or leave gaps in storage"
    assert all(bool((tensor == 1).all()) for tensor in owners.values())
    padding = sum(ranks * unit.share(ranks) for unit in cut) - spec.num_parameters
    assert 0 <= padding <= len(tensors) * ALIGNMENT + len(cut) * ranks * ALIGNMENT


@settings(max_examples=60, deadline=None)
@given(cut_models())
def test_units_are_the_model_and_parts_of_a_step_are_units(case):
    spec, _ = case
    tensors = spec.tensors()
    named = [name for unit in whole_units(tensors) for name in unit.parameters]
    assert named == list(tensors)
    parts = step_groups(tensors)
    assert sorted(name for part in parts for name in part) == sorted(tensors)
    assert all(any(unit.parameters.keys() <= part for part in parts) for unit in whole_units(tensors))


def test_a_layout_of_parameters_holds_everything_everywhere():
    layout = parameter_layout({"w": (3, 4), "b": (3,)}, 5)
    assert all([r.box.numel for r in layout.regions(rank)] == [12, 3] for rank in range(5))
    assert layout.part is not None
    assert len({layout.part(rank) for rank in range(5)}) == 1


# Updates


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_updates_and_state_are_those_of_one_process(processes, models, oracles, model, stage, kind):
    args = (models[model], model[1], OPTIMIZERS[kind][0], {"stage": stage})
    found = processes.run(4, tasks.updates, processes.name(), *args)
    assert_updates(found, oracles[(*model, kind)], spec_of(models[model], model[1]))


@pytest.mark.parametrize("counts", [(7, 0, 0, 0), (0, 1, 5, 1)])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_without_rows(processes, models, oracles, stage, counts):
    model = MODELS[1]
    args = (models[model], model[1], OPTIMIZERS["adam"][0], {"stage": stage}, counts)
    found = processes.run(4, tasks.updates, processes.name(), *args)
    assert_updates(found, oracles[(*model, "adam")], spec_of(models[model], model[1]))


@pytest.mark.parametrize("more", [{"ranks": 1}, {"ranks": 3}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_other_numbers_of_ranks_and_overlap(processes, models, oracles, stage, more):
    model = MODELS[0]
    args = (models[model], model[1], OPTIMIZERS["adam"][0], {"stage": stage, **more})
    found = processes.run(more.get("ranks", 4), tasks.updates, processes.name(), *args)
    assert_updates(found, oracles[(*model, "adam")], spec_of(models[model], model[1]))


def assert_updates(found: list[dict[str, Any]], oracle: dict[str, Any], spec: ModelSpec) -> None:
    """Gradients, norms, parameters and moments of all ranks against plain PyTorch."""
    for part in found:
        assert relative(part["gradients"], oracle["gradients"]) < 1e-5
        assert [result["grad_norm"] for result in part["results"]] == pytest.approx(oracle["norms"], rel=1e-5)
        assert part["results"] == found[0]["results"]
        for name, want in oracle["state"]["main"].items():
            assert float((part["parameters"][name] - want).abs().max()) < 1e-5, name
            assert part["parameters"][name].equal(found[0]["parameters"][name]), name
    for kind, want in oracle["state"].items():
        assert relative(whole([part["state"][kind] for part in found], spec.tensors()), want) < 1e-5, kind


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_add_up_until_a_step(processes, models, stage):
    for straight, looked_at in processes.run(4, tasks.passes_add_up, processes.name(), models[MODELS[0]], stage):
        assert relative(looked_at, straight) < 1e-6
        assert all(bool(gradient.any()) for gradient in straight.values())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_layers_in_any_order_and_layers_that_a_rank_does_not_use(processes, stage, overlap):
    for same, kept in processes.run(4, tasks.any_order, processes.name(), stage, overlap):
        assert same
        assert not kept, f"{kept} still have gradients of their own"


@pytest.mark.parametrize(
    ("stage", "kind", "dtype"),
    [
        (1, "adam", torch.float32),
        (1, "sgd", torch.bfloat16),
        (2, "adam", torch.bfloat16),
        (2, "sgd", torch.float32),
    ],
    ids=str,
)
def test_steps_in_parts_are_whole_steps(processes, models, stage, kind, dtype):
    args = (models[MODELS[1]], OPTIMIZERS[kind][0], {"stage": stage, "dtype": dtype})
    assert all(processes.run(4, tasks.in_parts, processes.name(), *args))


# Memory


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose units divide by 4 ranks nearly without padding, and dwarf its activations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
    settings: Any = {"num_key_value_heads": 4, "vocab_size": 256, "tie_word_embeddings": True, "pad_token_id": None}
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("even")
    LlamaForCausalLM(LlamaConfig(**sizes, **settings)).float().save_pretrained(path)
    return path


@on_cpu
@pytest.mark.parametrize(("stage", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "bfloat16")])
def test_bytes_per_rank_are_those_of_the_papers_table(processes, even, stage, dtype):
    """Table 1 with N = 4: stage 1 keeps parameters and gradients and K/N of the optimizer's bytes, stage 2 also 1/N of
    the gradients. Gradients are float32; K is Adam's 8 bytes, and 12 with main parameters apart."""
    spec = spec_of(even)
    count, own, k = spec.num_parameters, 4 if dtype == "float32" else 2, 8 if dtype == "float32" else 12
    table = {1: (own + 4) * count + k * count // 4, 2: own * count + (4 + k) * count // 4}[stage]
    cut = whole_units(spec.tensors())
    padding = (own + 4) * sum(4 * unit.share(4) - _numel(unit) for unit in cut)
    buffers = sum(b.nbytes for b in load_model(even).buffers())
    scalars = 4 * len(spec.tensors()) + 1024  # Adam counts steps per tensor; and a few numbers here and there
    unit = 4 * max(4 * u.share(4) for u in cut)
    for found in processes.run(4, tasks.bytes_held, processes.name(), even, dtype, Adam(lr=1e-3), stage):
        assert table <= found["held"] <= table + padding + buffers + scalars
        assert found["again"] == found["held"], "gradients must not need more between passes than they had before"
        assert found["gradients"] <= 4 * (count if stage == 1 else count / 4) + 2 * padding
        if stage == 1:
            assert found["added"] < unit / 100
        else:
            assert 0.5 * unit < found["added"] <= unit * 1.01


def _numel(unit: Any) -> int:
    return sum(math.prod(shape) for shape in unit.parameters.values())


@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_parameters_follow_float32_main_parameters(processes, models, stage):
    """Steps of 1e-4 are lost on most bfloat16 parameters, whose neighbours are 2^-8 of their size away."""
    path = models[MODELS[1]]
    found = processes.run(4, tasks.main_parameters, processes.name(), path, "bfloat16", stage)
    main = whole([part["state"]["main"] for part in found], spec_of(path).tensors())
    moved = {name: (main[name] - found[0]["first"][name]).abs() for name in main}
    assert all(float(m.mean()) > 1e-4 for m in moved.values()), "main parameters keep what bfloat16 would lose"
    for part in found:
        assert all(part["parameters"][name].equal(main[name].bfloat16().float()) for name in main)
        assert part["restored"]
        assert part["written"]


def test_float16_gradients_are_scaled(processes, models, oracles):
    model, optimizer = MODELS[1], OPTIMIZERS["adam"][0]
    settings = {"stage": 2, "dtype": torch.float16}
    found = processes.run(4, tasks.updates, processes.name(), models[model], "lm", optimizer, settings)[0]
    assert found["results"][0]["skipped"] == 0.0
    assert found["results"][0]["grad_norm"] == pytest.approx(oracles[(*model, "adam")]["norms"][0], rel=0.05)
    assert found["scale"]["scale"]


@pytest.mark.parametrize(("stage", "kind"), [(1, "adam"), (2, "sgd")])
def test_state_in_host_memory_changes_nothing(processes, models, stage, kind):
    args = (models[MODELS[0]], OPTIMIZERS[kind][0], stage)
    assert all(processes.run(4, tasks.offloaded, processes.name(), *args))


@on_cpu
@pytest.mark.parametrize(
    ("stage", "more", "away"),
    [(1, {}, True), (1, {"offload": True}, False), (2, {"dtype": torch.bfloat16}, False), (2, {"offload": True}, True)],
    ids=str,
)
def test_close_gives_all_memory_back(processes, models, stage, more, away):
    args = (models[MODELS[1]], {"stage": stage, **more}, away)
    assert processes.run(4, tasks.left_after_close, processes.name(), *args) == [0] * 4


def test_models_without_memory_and_models_that_do_not_train(processes, models):
    for found in processes.run(4, tasks.meta_and_frozen, processes.name(), models[MODELS[1]]):
        assert found["devices"] == {DEVICE.type}
        assert found["dtypes"] == {torch.bfloat16}
        assert found["same"]
        assert found["tied"]
        assert found["kept"] == (0, 0, 0)
        assert found["left"] == 0


# State


@pytest.mark.parametrize(("stage", "kind"), [(1, "sgd"), (2, "adam")])
def test_state_moves_between_numbers_of_ranks(processes, models, stage, kind):
    path = models[MODELS[1]]
    found = processes.run(4, tasks.moved, processes.name(), path, OPTIMIZERS[kind][0], stage)
    for part in found:
        assert relative(part["moved"], part["straight"]) < 1e-6
        assert part["counters"][0] == part["counters"][1]
    shapes = spec_of(path).tensors()
    for moment in found[0]["rows"]:
        assert whole([part["rows"][moment] for part in found], shapes).keys() == shapes.keys()
