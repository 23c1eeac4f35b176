"""Properties of vLLM's layout on grids far larger than a test can start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.config import VLLM
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.vllm.discovery import (
    LayoutProbe,
    UnreadableError,
    check_regions,
    checked,
    flat_storages,
    read_regions,
)
from hybridflow.engines.vllm.layout import padded_vocab, probed_layout, stage_layers, unbuilt_layout, vllm_layout
from hybridflow.engines.vllm.requirements import check
from hybridflow.errors import ModelError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import GenerationGrid, RankGrid

SPEC = ModelSpec(
    family="llama", hidden=64, intermediate=96, layers=8, heads=24, kv_heads=8, head_dim=32, vocab=300, context=256
)
specs = st.builds(
    lambda kv_heads, layers, vocab, tied, bias, norm: replace(
        SPEC, kv_heads=kv_heads, layers=layers, vocab=vocab, tied=tied, qkv_bias=bias, qk_norm=norm
    ),
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    layers=st.integers(1, 11),
    vocab=st.integers(2, 700),
    tied=st.booleans(),
    bias=st.booleans(),
    norm=st.booleans(),
)


@st.composite
def generation_grids(draw) -> GenerationGrid:
    """Every rule; tensor parallel sizes with a factor 3, generation sizes larger than those of training."""
    train = RankGrid(
        draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4))
    )
    rule = draw(st.sampled_from(["hybridflow", "vanilla", "general"]))
    p, t = (train.size, train.size) if rule == "general" else (train.p, train.t)
    t_g = draw(st.sampled_from([n for n in range(1, min(t, 24) + 1) if t % n == 0]))
    p_g = draw(st.sampled_from([n for n in range(1, p + 1) if (p // (t_g if rule == "general" else 1)) % n == 0]))
    return train.generation(p_g, t_g, rule)


def fitting(spec: ModelSpec, grid: GenerationGrid) -> ModelSpec | None:
    """`spec` with a vocabulary that t_g ranks can share, or None where vLLM cannot run the model on this grid."""
    if padded_vocab(spec.vocab) % grid.t:
        spec = replace(spec, vocab=192 * grid.t - spec.vocab % 64)
    try:
        check(spec, VLLM(tp=grid.t, pp=grid.p), "cuda")
    except ModelError:
        return None
    return spec


def shapes(spec: ModelSpec, t: int) -> dict[str, tuple[int, ...]]:
    """Shapes of vLLM's parameters on a rank of t, by the ends of their names."""
    q, kv = spec.heads // t * spec.head_dim, max(1, spec.kv_heads // t) * spec.head_dim
    vocabulary, mlp = padded_vocab(spec.vocab) // t, spec.intermediate // t
    return {
        "qkv_proj.weight": (q + 2 * kv, spec.hidden),
        "qkv_proj.bias": (q + 2 * kv,),
        "o_proj.weight": (spec.hidden, q),
        "gate_up_proj.weight": (2 * mlp, spec.hidden),
        "down_proj.weight": (spec.hidden, mlp),
        "embed_tokens.weight": (vocabulary, spec.hidden),
        "lm_head.weight": (vocabulary, spec.hidden),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
        "layernorm.weight": (spec.hidden,),
        "model.norm.weight": (spec.hidden,),
    }


@settings(max_examples=150, deadline=None)
@given(spec=specs, grid=generation_grids())
def test_a_replica_holds_every_tensor_and_every_storage_is_filled_once(spec, grid) -> None:
    if (fitted := fitting(spec, grid)) is None:
        return
    spec, layout = fitted, vllm_layout(fitted, grid)
    known = shapes(spec, grid.t)
    for replica in {0, grid.replicas - 1}:
        held: dict[str, set] = defaultdict(set)
        for rank in (r for r in range(grid.size) if grid.replica(r) == replica):
            filled: dict[str, list[range]] = defaultdict(list)
            for region in layout.regions(rank):
                box, shape = region.box, next(s for end, s in known.items() if region.storage.endswith(end))
                assert all(0 <= a < b <= n for a, b, n in zip(box.start, box.stop, spec.tensors()[box.tensor]))
                assert all(offset + n <= size for offset, n, size in zip(region.offset, box.shape, shape, strict=True))
                assert box.shape[1:] == shape[1:]
                filled[region.storage].append(range(region.offset[0], region.offset[0] + box.shape[0]))
                columns = (box.start[1], box.stop[1]) if len(box.start) == 2 else (0, 1)
                held[box.tensor] |= {(row, columns) for row in range(box.start[0], box.stop[0])}
            for name, rows in filled.items():
                whole = next(s for end, s in known.items() if name.endswith(end))[0]
                covered = [row for part in sorted(rows, key=lambda part: part.start) for row in part]
                assert covered == list(range(len(covered)))
                assert len(covered) == whole or "embed_tokens" in name or "lm_head" in name
        for name, shape in spec.tensors().items():
            assert sum(stop - start for _, (start, stop) in held[name]) == prod(shape), name


@settings(max_examples=60, deadline=None)
@given(spec=specs, grid=generation_grids())
def test_ranks_of_one_part_hold_the_same(spec, grid) -> None:
    if (fitted := fitting(spec, grid)) is None:
        return
    layout, seen = vllm_layout(fitted, grid), {}
    assert layout.part is not None
    for rank in range(grid.size):
        regions = list(layout.regions(rank))
        assert seen.setdefault(layout.part(rank), regions) == regions
    assert len(seen) == grid.p * grid.t


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_stages_cover_all_layers_in_order(layers, stages) -> None:
    stages = min(layers, stages)
    parts = [stage_layers(layers, i, stages) for i in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 10**6))
def test_the_vocabulary_is_padded_to_64_rows(vocab) -> None:
    assert 0 <= padded_vocab(vocab) - vocab < 64
    assert padded_vocab(vocab) % 64 == 0


@pytest.mark.parametrize(
    ("changed", "p", "t", "message"),
    [
        ({}, 1, 16, "24 heads must divide by t_g"),
        ({"kv_heads": 8}, 1, 12, "8 kv-heads must divide by t_g or t_g by them"),
        ({"intermediate": 100}, 1, 8, "100 MLP columns are not divisible"),
        ({"kv_heads": 24}, 1, 3, "320 padded vocabulary rows are not divisible"),
        ({"layers": 2}, 3, 1, "the model has 2 layers"),
    ],
)
def test_sizes_by_which_the_model_cannot_be_split_are_refused(changed, p, t, message) -> None:
    with pytest.raises(ModelError, match=f"generation sizes p_g={p}, t_g={t}: .*{message}"):
        vllm_layout(replace(SPEC, **changed), RankGrid(p=p, t=t).generation())


SHAPES = {
    "q": (8, 150),
    "k": (4, 150),
    "up": (6, 150),
    "down": (150, 6),
    "vocab": (70, 5),
    "norm": (150,),
    "conv": (9, 1, 4),
}
WEIGHTS = {name: torch.randn(shape) for name, shape in SHAPES.items()}
Loader = Callable[[dict[str, Tensor], dict[str, Tensor]], object]


def read(
    loader: Loader, shapes: dict[str, tuple[int, ...]], padded: dict[str, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Region], dict[str, Tensor]]:
    """The regions of a loader, once checked, and parameters with the real weights, written through them."""
    parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        loader(parameters, dict(tensors))

    regions = read_regions(SHAPES, parameters, load, padded, dtype)
    flat = flat_storages(regions)
    storage = {name: tensor.view(-1) if name in flat else tensor for name, tensor in parameters.items()}
    load(checked(SHAPES, dtype, torch.device("cpu")))
    check_regions(SHAPES, storage, regions)
    for tensor in parameters.values():
        tensor.zero_()
    for region in regions:
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        region.view(storage[region.storage]).copy_(WEIGHTS[region.box.tensor][box])
    return regions, parameters


def fused(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    p["qk"][:4] = w["q"][4:]
    p["qk"][4:] = w["k"][2:]
    p["down"].copy_(w["down"][:, 3:])
    p["norm"].copy_(w["norm"])
    p["vocab"][:6] = w["vocab"][64:]


def turned(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    p["qk"][:, :8] = w["q"].T
    p["qk"][:, 8:] = w["k"].T


def stacked(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    for i in range(2):
        p["experts"][i, :2] = w["q"][2 * i : 2 * i + 2]
        p["experts"][i, 2:] = w["k"][i : i + 2]


def interleaved(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    p["heads"].copy_(w["q"].view(2, 2, 2, 150).transpose(0, 1).reshape(8, 150))


def reshaped(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    p["conv"].copy_(w["conv"][:, 0])
    p["halves"].copy_(w["q"].view(2, 4, 150))


def repeated(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
    p["rows"].copy_(w["q"][3:4].expand(5, 150))


LOADERS: dict[str, tuple[Loader, dict[str, tuple[int, ...]], dict[str, int], int]] = {  # the last: number of regions
    "fused": (fused, {"qk": (6, 150), "down": (150, 3), "norm": (150,), "vocab": (64, 5)}, {"vocab": 6}, 5),
    "turned": (turned, {"qk": (150, 12)}, {}, 2),
    "stacked": (stacked, {"experts": (2, 4, 150)}, {}, 4),
    "interleaved": (interleaved, {"heads": (8, 150)}, {}, 4),
    "repeated": (repeated, {"rows": (5, 150)}, {}, 5),
    "reshaped": (reshaped, {"conv": (9, 4), "halves": (2, 4, 150)}, {}, 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOADERS)
def test_what_a_loader_does_is_read_off_it(name, dtype) -> None:
    loader, shapes, padded, count = LOADERS[name]
    regions, found = read(loader, shapes, padded, dtype)
    wanted = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    loader(wanted, WEIGHTS)
    assert all(torch.equal(found[name], wanted[name]) for name in shapes)
    assert len(regions) == count


def test_boxes_in_their_own_order_are_plain_regions() -> None:
    regions, _ = read(*LOADERS["fused"][:3])
    assert Region(Box("q", (4, 0), (8, 150)), "qk", (0, 0)) in regions
    assert Region(Box("vocab", (64, 0), (70, 5)), "vocab", (0, 0)) in regions
    turned_regions, _ = read(*LOADERS["turned"][:3])
    assert Region(Box("k", (0, 0), (4, 150)), "qk", (8,), (1, 12)) in turned_regions


@st.composite
def programs(draw: Any) -> list[tuple[str, int, int, int, int]]:
    """Rows of a parameter of 40 columns: tensor, its first row and column, rows, and whether rows go backwards."""
    out = []
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(["q", "k", "up"]))
        rows = draw(st.integers(1, SHAPES[name][0]))
        first = draw(st.integers(0, SHAPES[name][0] - rows))
        out.append((name, first, draw(st.integers(0, 110)), rows, draw(st.sampled_from([1, 1, -1]))))
    return out


@settings(max_examples=60, deadline=None)
@given(program=programs())
def test_any_rows_of_boxes_are_read(program) -> None:
    def loader(p: dict[str, Tensor], w: dict[str, Tensor]) -> None:
        at = 0
        for name, first, column, rows, step in program:
            box = w[name][first : first + rows, column : column + 40]
            p["x"][at : at + rows] = box if step > 0 else box.flip(0)
            at += rows

    shape = (sum(rows for *_, rows, _ in program), 40)
    _, found = read(loader, {"x": shape}, {}, torch.float32)
    wanted = {"x": torch.zeros(shape)}
    loader(wanted, WEIGHTS)
    assert torch.equal(found["x"], wanted["x"])


def change(value: Callable[[dict[str, Tensor]], Tensor]) -> Loader:
    return lambda p, w: p["x"].copy_(value(w))


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(change(lambda w: w["q"] * 2), id="scaled"),
        pytest.param(change(lambda w: w["q"] / 2), id="halved"),
        pytest.param(change(lambda w: w["q"] + 1), id="shifted"),
        pytest.param(change(lambda w: -w["q"]), id="negated"),
        pytest.param(change(lambda w: w["q"] + w["down"].T[:1]), id="summed"),
        pytest.param(change(lambda w: (w["q"] + w["k"][:1]) / 2), id="averaged"),
        pytest.param(change(lambda w: w["q"] * 129), id="too large"),
        pytest.param(change(lambda w: w["q"] * w["norm"]), id="multiplied"),
        pytest.param(change(lambda w: w["q"].where(w["q"] != 3, 0)), id="holes"),
        pytest.param(change(lambda w: w["norm"].expand(8, 150).flip(-1).cumsum(-1)), id="added up"),
    ],
)
def test_what_is_no_copy_of_boxes_is_refused(loader) -> None:
    with pytest.raises(UnreadableError) as found:
        read(loader, {"x": (8, 150)}, {})
    assert found.value.name == "x"


def test_rows_that_nobody_writes_are_refused_unless_they_are_padding() -> None:
    loader, shapes, _, _ = LOADERS["fused"]
    for padded in ({}, {"vocab": 7}):
        with pytest.raises(UnreadableError, match="writes 30 of its"):
            read(loader, shapes, padded)


def test_a_form_that_kernels_need_is_noticed() -> None:
    parameters = {"x": torch.zeros(8, 150)}

    def load(tensors: Iterator[tuple[str, Tensor]]) -> None:
        parameters["x"].copy_(dict(tensors)["q"])

    regions = read_regions(SHAPES, parameters, load, {}, torch.float32)
    load(checked(SHAPES, torch.float32, torch.device("cpu")))
    parameters["x"] = parameters["x"].roll(1, 0)
    with pytest.raises(UnreadableError, match="another form"):
        check_regions(SHAPES, parameters, regions)


class OneLinear(torch.nn.Linear):
    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self.weight.copy_(dict(tensors)["weight"])


@pytest.mark.parametrize("derives", ["nothing", "copy", "view"])
def test_a_parameter_that_processing_computes_is_refused(derives) -> None:
    """vLLM's latent attention registers W_UV and W_UK_T, made of kv_b_proj: as views they follow it."""
    model: Any = OneLinear(4, 6, bias=False)
    probe = LayoutProbe({"weight": (6, 4)}, "some")

    def process() -> None:
        if derives != "nothing":
            turned = model.weight.data.T
            model.W_UV = torch.nn.Parameter(turned.clone() if derives == "copy" else turned, requires_grad=False)

    probe._around(model, torch.float32, torch.device("cpu"), process)
    assert (probe.failure is None) is (derives != "copy")
    assert derives != "copy" or "'W_UV': vLLM computes it from other weights" in str(probe.failure)
    assert probe.viewed == ({"weight"} if derives == "view" else frozenset())
    if derives == "view":
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        model.weight.data.fill_(3.0)
        assert torch.equal(model.W_UV, torch.full((4, 6), 3.0))


def test_ranks_of_a_replica_share_what_they_found() -> None:
    shapes = {"q": (8, 150)}
    halves = [(Region(Box("q", (4 * i, 0), (4 * i + 4, 150)), "x", (0, 0)),) for i in range(2)]
    grid = RankGrid(t=4).generation(t=2)
    layout = probed_layout(shapes, "some", grid, [(half, None) for half in halves])
    assert isinstance(layout, Layout)
    assert [layout.regions(rank)[0].box.start[0] for rank in range(4)] == [4 * grid.coords(rank).t for rank in range(4)]
    with pytest.raises(ModelError, match=r"keeps 600 elements of q \(8, 150\) of this some model in no parameter"):
        probed_layout(shapes, "some", grid, [(halves[0], None)] * 2)
    with pytest.raises(ModelError, match=r"too odd \(rank 1 of the replica\)"):
        probed_layout(shapes, "some", grid, [(halves[0], None), ((), "too odd")])
    with pytest.raises(ModelError, match="known when its engine is built"):
        unbuilt_layout(shapes, grid).regions(0)
