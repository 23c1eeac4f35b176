"""Properties of vLLM's layout on grids far larger than a test can start."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import VLLM
from hybridflow.engines.vllm.layout import padded_vocab, stage_layers, vllm_layout
from hybridflow.engines.vllm.requirements import check
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import RankGrid

SPEC = ModelSpec(
    family="llama", hidden=64, intermediate=96, layers=8, heads=8, kv_heads=8, head_dim=32, vocab=300, context=256
)
specs = st.builds(
    lambda kv_heads, vocab, tied, bias, norm: replace(
        SPEC, kv_heads=kv_heads, vocab=vocab, tied=tied, qkv_bias=bias, qk_norm=norm
    ),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(2, 700),
    tied=st.booleans(),
    bias=st.booleans(),
    norm=st.booleans(),
)
sizes = st.sampled_from([1, 2, 4, 8])


@settings(max_examples=60, deadline=None)
@given(spec=specs, p=sizes, t=sizes, p_g=sizes, t_g=sizes, rule=st.sampled_from(["hybridflow", "vanilla"]))
def test_a_replica_holds_every_tensor_and_no_storage_is_written_twice(spec, p, t, p_g, t_g, rule) -> None:
    grid = RankGrid(p, t, 2).generation(min(p, p_g), min(t, t_g), rule)
    check(spec, VLLM(tp=grid.t, pp=grid.p), "cpu")
    layout = vllm_layout(spec, grid)
    for replica in {0, grid.replicas - 1}:
        held: dict[str, set] = defaultdict(set)
        for rank in (r for r in range(grid.size) if grid.replica(r) == replica):
            written: dict[str, set] = defaultdict(set)
            for region in layout.regions(rank):
                box = region.box
                assert all(0 <= a < b <= n for a, b, n in zip(box.start, box.stop, spec.tensors()[box.tensor]))
                rows = range(region.offset[0], region.offset[0] + box.shape[0])
                assert not written[region.storage] & set(rows)
                written[region.storage] |= set(rows)
                columns = (box.start[1], box.stop[1]) if len(box.start) == 2 else (0, 1)
                held[box.tensor] |= {(row, columns) for row in range(box.start[0], box.stop[0])}
        for name, shape in spec.tensors().items():
            area = sum(stop - start for _, (start, stop) in held[name])
            assert area == prod(shape), name


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
