"""Properties of vLLM's layout on grids far larger than a test can start."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import VLLM
from hybridflow.engines.vllm.layout import padded_vocab, stage_layers, vllm_layout
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
