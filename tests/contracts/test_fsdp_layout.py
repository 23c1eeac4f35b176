"""Layouts of FSDP2, HSDP and FSDP x TP: the arithmetic, and against what torch did to a transformers model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engines.fsdp.layout import check, fsdp_layout
from hybridflow.engines.fsdp.sharded import make_mesh
from hybridflow.engines.train_backends import backend
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ConfigError, LayoutError, ModelError, PlacementError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.family_cases import config
from tests.contracts.rank_processes import World
from tests.fsdp_models import wrap

# nothing divides by 4; 61 rows of the vocabulary leave 21, 21, 19 on three ranks and 31, 30 on two
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 54,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 10,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
WORLD = 6
# (family, tied, replicate, shard, tp): the mesh; whether a training step runs, which DTensor wants even TP shards for
MESHES = {
    "fsdp-4": ("qwen2", False, 1, 4, 1, True),
    "fsdp-3": ("llama", True, 1, 3, 1, True),
    "fsdp-6": ("qwen2", True, 1, 6, 1, True),
    "hsdp-2x2": ("llama", False, 2, 2, 1, True),
    "hsdp-2x3": ("qwen2", True, 2, 3, 1, True),
    "fsdp-2-tp-2": ("qwen2", False, 1, 2, 2, True),
    "fsdp-3-tp-2": ("llama", True, 1, 3, 2, True),
    "fsdp-2-tp-3": ("qwen2", False, 1, 2, 3, False),
    "tp-4": ("llama", False, 1, 1, 4, False),
    "tp-2-twice": ("qwen2", True, 2, 1, 2, False),  # parameters live on a slice of the mesh
}


def make_model(family: str, tied: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = SIZES | {"tie_word_embeddings": tied}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)


def spec_of(model: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(model.config)


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def holds_its_boxes(layout: Layout, rank: int, storage: dict[str, Tensor], truth: dict[str, Tensor]) -> bool:
    for region in layout.regions(rank):
        index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        if not torch.equal(region.view(storage[region.storage]), truth[region.box.tensor][index]):
            return False
    return sum(r.box.numel for r in layout.regions(rank)) == sum(t.numel() for t in storage.values())


def on_a_mesh(world: World, name: str, label: str) -> dict[str, Any] | None:
    """Wrap the model, compare every box with the whole model, train a step, and compare again."""
    from tests.dtensor_layouts import dtensor_layout, dtensor_storage

    family, tied, replicate, shard, tp, trains = MESHES[name]
    first = WORLD - replicate * shard * tp
    if world.rank < first:
        return None
    model: Any = make_model(family, tied).to(world.device)
    spec, before = spec_of(model), whole_tensors(model)
    mesh = make_mesh(world.context(label, RankGrid(d=WORLD - first), first), (replicate, shard, tp))
    wrap(model, mesh, root_stays_gathered=True)
    layout = dtensor_layout(model, spec=spec)
    found: dict[str, Any] = {"wrapped": holds_its_boxes(layout, world.rank - first, dtensor_storage(model), before)}
    if trains:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        ids = torch.arange(12, device=world.device).reshape(2, 6)
        model(ids).logits.float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(ids)  # leaves the root gathered, whose parameters are then not what the optimizer trains
        storage = dtensor_storage(model)
        trained = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
        found["moved"] = all(not torch.equal(trained[name], before[name]) for name in before)
        found["trained"] = holds_its_boxes(layout, world.rank - first, storage, trained)
        moments = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
        found["moments"] = sets_of(dtensor_layout(moments)) == sets_of(layout)
    found["regions"] = regions_of(layout)
    found["parts"] = [layout.part(rank) for rank in range(layout.ranks)]  # type: ignore[misc]
    return found


def refused(world: World, name: str) -> dict[str, str]:
    """What cannot be a layout, each with its error."""
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from tests.dtensor_layouts import dtensor_layout

    model: Any = make_model("llama", True)
    whole = make_mesh(world.context(name, RankGrid(d=WORLD)), (1, 3, 2))
    spec, mesh = spec_of(model), whole[(whole.mesh_dim_names or ())[1:]]

    def error(call: Callable[[], Any]) -> str:
        try:
            return f"no error: {call()}"
        except LayoutError as found:
            return str(found)

    def placed(*placements: Any) -> dict[str, Tensor]:
        return {"weight": DTensor.from_local(torch.zeros(4, 2), mesh, placements, run_check=False)}

    found = {
        "partial": error(lambda: dtensor_layout(placed(Partial(), Shard(0)))),
        "factor": error(lambda: dtensor_layout(placed(_StridedShard(0, split_factor=5), Shard(0)))),
        "replaced": error(
            lambda: dtensor_layout({"weight": _with_local(placed(Shard(0), Shard(1)), torch.zeros(3, 2))})
        ),
        "members": error(lambda: dtensor_layout(placed(Shard(0), Shard(0)), range(8))),
        "vocabulary": error(lambda: dtensor_layout(model, spec=replace(spec, vocab=64))),
    }
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    found["untied"] = error(lambda: dtensor_layout(model, spec=spec))
    return found


def _with_local(tensors: dict[str, Tensor], local: Tensor) -> Any:
    tensor: Any = tensors["weight"]
    tensor._local_tensor = local
    return tensor


def regions_of(layout: Layout) -> list:
    return [list(layout.regions(rank)) for rank in range(layout.ranks)]


def sets_of(layout: Layout) -> list[set]:
    return [set(layout.regions(rank)) for rank in range(layout.ranks)]


@pytest.mark.parametrize("name", MESHES)
def test_boxes_are_those_of_torch(processes, name):
    family, tied, replicate, shard, tp, trains = MESHES[name]
    size = replicate * shard * tp
    answers = processes.run(WORLD, on_a_mesh, name, processes.name())[WORLD - size :]
    spec = spec_of(make_model(family, tied))
    expected = fsdp_layout(spec, shard, replicate=replicate, tp=tp)
    for answer in answers:
        assert answer["wrapped"]
        assert answer["regions"] == regions_of(expected)
        if trains:
            assert answer["moved"]
            assert answer["trained"]
            assert answer["moments"]
    assert expected.part is not None
    parts, own = answers[0]["parts"], [expected.part(rank) for rank in range(size)]
    assert len(set(own)) == shard * tp
    assert [parts.index(part) for part in parts] == [own.index(part) for part in own]


def test_what_has_no_boxes_is_refused(processes):
    for errors in processes.run(WORLD, refused, processes.name()):
        assert "Partial" in errors["partial"]
        assert "weight" in errors["partial"]
        assert "into 5 parts" in errors["factor"]
        assert "(3, 2) of weight" in errors["replaced"]
        assert "ranks [6, 7] are not in the mesh" in errors["members"]
        assert "Layout.placed" in errors["members"]
        assert "model.embed_tokens.weight (64, 54)" in errors["vocabulary"]
        assert "tie_weights()" in errors["untied"]


sizes = st.integers(1, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), sizes, sizes, sizes, st.sampled_from([None, 0, 1]))
def test_boxes_are_torch_chunks_of_chunks(shape, replicate, shard, tp, dim):
    dim = dim if dim is not None and dim < len(shape) else None
    layout = fsdp_layout({"w": tuple(shape)}, shard, replicate=replicate, tp=tp, tp_dim=lambda name: dim)
    whole = torch.arange(math.prod(shape)).reshape(shape)
    assert layout.ranks == replicate * shard * tp
    for rank in range(layout.ranks):
        s, t = rank // tp % shard, rank % tp
        mine = whole if dim is None else _chunk(whole, tp, t, dim)
        mine = _chunk(mine, shard, s, 0)
        regions = layout.regions(rank)
        assert len(regions) == (mine.numel() > 0)
        for region in regions:
            assert torch.equal(region.view(mine), mine)
            index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
            assert torch.equal(whole[index], mine)


def _chunk(tensor: Tensor, parts: int, index: int, dim: int) -> Tensor:
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(sizes, sizes, sizes)
def test_ranks_of_one_part_hold_equal_boxes_and_others_do_not(replicate, shard, tp):
    layout = fsdp_layout({"w": (24, 24)}, shard, replicate=replicate, tp=tp, tp_dim=lambda name: 1)
    assert layout.part is not None
    for a in range(layout.ranks):
        for b in range(layout.ranks):
            assert (layout.part(a) == layout.part(b)) == (layout.regions(a) == layout.regions(b))


@settings(max_examples=40)
@given(st.sampled_from([(2, 2, 2), (1, 8, 1), (4, 2, 1), (1, 1, 8), (1, 4, 2)]), st.sampled_from([1, 2, 4, 8]))
def test_a_plan_to_vllm_moves_what_is_needed_and_not_held(mesh, t_g):
    replicate, shard, tp = mesh
    spec = ModelSpec(
        family="qwen2", hidden=36, intermediate=40, layers=2, heads=8, kv_heads=2, head_dim=4, vocab=61, qkv_bias=True
    )
    source = fsdp_layout(spec, shard, replicate=replicate, tp=tp)
    destination = vllm_layout(spec, RankGrid(t=8).generation(t=t_g))
    received = [0] * 8
    for move in plan(source, destination).moves:
        if not move.local:
            received[move.destination] += move.box.numel
    for rank in range(8):
        held, wanted = _elements(source, rank), _elements(destination, rank)
        assert received[rank] == len(wanted - held)


MOE = TransformersSpec.of(config("qwen3_moe"))
CUTS = [FSDP(ep=2, dp=12), FSDP(ep=3, dp=12), FSDP(ep=6, dp=12), FSDP(ep=3, dp=12, replicate=2), FSDP(ep=2, cp=4, dp=3)]
OTHERS = [FSDP(dp=12), ZeRO(stage=2, dp=12), Megatron(tp=2, dp=6, ep=6), Megatron(pp=3, dp=4, ep=2, etp=2), *CUTS]


def cut(strategy: Any) -> Layout:
    return backend(strategy, "layout").weights_layout(strategy, MOE, strategy.grid(12))


@pytest.mark.parametrize("strategy", CUTS, ids=str)
def test_ranks_that_share_experts_have_whole_ones_once_per_copy(strategy):
    layout, held = cut(strategy), dict.fromkeys(MOE.tensors(), 0)
    assert layout.part is not None
    for rank in range(12):
        at = strategy.grid(12).experts.coords(rank)
        for region in layout.regions(rank):
            held[region.box.tensor] += region.box.numel
            if (found := re.search(r"\.experts\.(\d+)\.", region.box.tensor)) is not None:
                assert region.box.shape == MOE.tensors()[region.box.tensor]
                assert int(found[1]) // (6 // strategy.ep) == at.ep
        for other in range(12):
            assert (layout.part(rank) == layout.part(other)) == (layout.regions(rank) == layout.regions(other))
    assert held == {name: strategy.replicate * math.prod(shape) for name, shape in MOE.tensors().items()}


@pytest.mark.parametrize("one", CUTS, ids=str)
def test_plans_of_shared_experts_move_what_is_needed_and_not_held(one):
    for other in OTHERS:
        for source, destination in ((cut(one), cut(other)), (cut(other), cut(one))):
            received = [0] * 12
            for move in plan(source, destination).moves:
                received[move.destination] += 0 if move.local else move.box.numel
            for rank in range(12):
                assert received[rank] == len(_elements(destination, rank) - _elements(source, rank))


@st.composite
def strategies(draw: st.DrawFn) -> Megatron | FSDP | ZeRO:
    """Of 12 ranks and 6 experts with 24 columns."""

    def size(*fitting: int) -> int:
        return draw(st.sampled_from(fitting))

    kind = draw(st.sampled_from([Megatron, FSDP, ZeRO]))
    if kind is ZeRO:
        return ZeRO(stage=size(1, 2, 3), cp=(cp := size(1, 2, 4)), dp=12 // cp)
    if kind is FSDP:
        replicate = size(1, 2, 3)
        ep = size(*(n for n in (1, 2, 3, 6) if 12 // replicate % n == 0))
        cp = size(*(n for n in (1, 2, 4) if 12 // replicate % n == 0))
        return FSDP(ep=ep, replicate=replicate, cp=cp if replicate == 1 else 1, dp=12 // (cp if replicate == 1 else 1))
    p = size(1, 2, 3)
    t = size(*(n for n in (1, 2, 4) if 12 // p % n == 0))
    d = 12 // p // t
    ep = size(*(n for n in (1, 2, 3, 6) if t * d % n == 0))
    etp = size(*(n for n in (1, 2, 3, 4) if t * d // ep % n == 0))
    cp = size(*(n for n in (1, 2, 4) if d % n == 0 and 4 // t >= n))
    return Megatron(pp=p, tp=t, dp=d // cp, cp=cp, ep=ep, etp=etp)


def masks(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in layout.tensors.items()}
    for region in layout.regions(rank):
        box = region.box
        found[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = True
    return found


@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.slow)])
def test_plans_between_any_two_ways_to_share_experts(count):
    """Bytes are those that a rank needs and does not hold."""
    models = [MOE, TransformersSpec.of(config("glm4_moe")), TransformersSpec.of(config("mixtral-6"))]

    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(st.sampled_from(models), strategies(), strategies())
    def checks(model: TransformersSpec, one: Any, other: Any) -> None:
        sides = [backend(each, "layout").weights_layout(each, model, each.grid(12)) for each in (one, other)]
        received = [0] * 12
        for move in plan(*sides).moves:
            received[move.destination] += 0 if move.local else move.box.numel
        for rank in range(12):
            held, needed = (masks(side, rank) for side in sides)
            assert received[rank] == sum(int((needed[name] & ~held[name]).sum()) for name in needed)

    checks()


@pytest.mark.parametrize(
    ("family", "strategy", "says"),
    [
        ("qwen3_moe", FSDP(ep=4), "6 experts, not divisible by ep=4. Use ep in .1, 2, 3, 6"),
        ("qwen3_moe", FSDP(ep=12), "6 experts, not divisible by ep=12"),
        ("gemma2", FSDP(ep=2), "gemma2 model without experts: ep=2 has nothing to share"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(family, strategy, says):
    with pytest.raises(ModelError, match=says):
        check(strategy, TransformersSpec.of(config(family)), strategy.grid(12))


def test_sizes_that_share_no_experts_are_refused():
    with pytest.raises(ConfigError, match=r"FSDP\(tp=2, ep=2\).*hf.Megatron\(tp=2, ep=2\)"):
        FSDP(tp=2, ep=2)
    with pytest.raises(PlacementError, match=r"FSDP\(ep=3\).*make 4. Use ep in \[1, 2, 4\]"):
        FSDP(ep=3).grid(4)
    with pytest.raises(PlacementError, match=r"replicate=2 make 2. Use ep in \[1, 2\]"):
        FSDP(ep=4, replicate=2).grid(4)
    with pytest.raises(PlacementError, match=r"a grid of its own.*ep=2"):
        check(FSDP(ep=2), MOE, RankGrid(d=4))


def _elements(layout: Layout, rank: int) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for region in layout.regions(rank):
        shape = layout.tensors[region.box.tensor]
        whole = torch.arange(math.prod(shape)).reshape(shape)
        index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        found |= {(region.box.tensor, element) for element in whole[index].flatten().tolist()}
    return found
