"""Rows of a generation session, and the seeds of their draws."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.engines.contract import Row, derived_seed, draw_seeds
from hybridflow.engines.vllm.engine_loop import _steps_ahead
from hybridflow.engines.vllm.row_images import RowImages, check_prompt
from hybridflow.errors import ConfigError, PromptError, ProtocolError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.protocols.protocol import SKIP, on_replica
from hybridflow.topology import RankGrid
from tests.vision_models import IMAGE, sizes

SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**20)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=40))
def test_the_seed_of_a_draw_depends_on_its_row_and_position_only(rows):
    seeds, positions = (np.array(each) for each in zip(*rows, strict=True))
    found = draw_seeds(seeds.astype(np.uint64), positions.astype(np.int64))
    assert found.tolist() == [derived_seed(seed, position) for seed, position in rows]
    assert found.min() >= 0


def test_seeds_of_neighbouring_rows_and_positions_are_uniform():
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    found = draw_seeds(seeds.ravel(), positions.ravel())
    assert len(np.unique(found)) == found.size
    bits = (found[:, None] >> np.arange(63)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(found[:-1].astype(float), found[1:].astype(float))[0, 1]) < 0.02


@pytest.mark.parametrize("along", ["positions", "rows"])
def test_draws_have_the_distribution_of_the_logits(along):
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)

    from hybridflow.engines.vllm.sampler import gumbel_argmax

    count, wanted = 100_000, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    rows = range(count) if along == "rows" else [0] * count
    positions = np.arange(count) if along == "positions" else np.zeros(count, np.int64)
    seeds = draw_seeds(np.array([derived_seed(5, row) for row in rows], np.uint64), positions)
    drawn = gumbel_argmax(wanted.log().expand(count, 5).contiguous(), torch.from_numpy(seeds))
    pairs = (drawn[:-1] * 5 + drawn[1:]).bincount(minlength=25) / (count - 1)
    both = wanted[:, None].mul(wanted).flatten()
    assert float((drawn.bincount(minlength=5) / count - wanted).square().div(wanted).sum() * count) < 30  # chi2(4)
    assert float((pairs - both).square().div(both).sum() * count) < 70  # chi2(24)


@given(
    st.lists(st.tuples(st.integers(0, 99), st.floats(-50, 0, width=32), st.integers(-1, 9)), max_size=20),
    SEEDS,
    st.lists(st.text(min_size=1), max_size=2),
)
def test_a_row_survives_json(tokens, seed, stop):
    token_ids, log_probs, versions = ([token[i] for token in tokens] for i in range(3))
    sampling = hf.Sampling(max_tokens=30, temperature=0.7, stop=tuple(stop))
    row = Row(3, 1, [5, 6], sampling, seed, token_ids, log_probs, versions)
    assert Row(**json.loads(json.dumps(asdict(row)))) == row
    assert not row.finished


@given(st.floats(0.01, 1e4), st.floats(0, 1e4), st.integers(0, 10**6))
def test_looks_at_the_clock_are_neither_late_nor_many(seconds, passed, made):
    ahead = _steps_ahead(seconds, passed, made)
    assert (ahead == 0) == (passed >= seconds)
    assert ahead <= 64
    if ahead > 1:
        assert passed + ahead * passed / made <= seconds * 1.000001


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seconds": 0.0}, {"rows": -1}, {"groups": 1.5}, {"tokens": 3}])
def test_limits_are_checked(wrong):
    with pytest.raises(ConfigError):
        hf.Until(**wrong)


@given(st.sampled_from([(1, 2, 3, 1, 2), (2, 2, 2, 1, 2), (1, 4, 1, 1, 1), (2, 1, 2, 2, 1)]), st.data())
def test_a_call_on_one_replica_reaches_its_ranks_only(sizes, data):
    p, t, d, p_g, t_g = sizes
    grid = RankGrid(p, t, d, p_g=p_g, t_g=t_g)
    number = data.draw(st.integers(0, grid.generation().replicas - 1))
    inputs = on_replica(number).split(grid, "rows")
    called = [rank for rank, mine in enumerate(inputs) if mine is not SKIP]
    assert called == sorted(grid.generation().group(called[0], "p", "t"))
    assert (
        on_replica(number).collect(grid, [SKIP if mine is SKIP else rank for rank, mine in enumerate(inputs)]) in called
    )


@pytest.mark.parametrize("number", [-1, 2, 0.0, True])
def test_a_replica_that_is_not_there_is_refused(number):
    with pytest.raises(ProtocolError, match=r"replicas 0\.\.1"):
        on_replica(number).split(RankGrid(1, 1, 2), "rows")


def test_an_image_beyond_what_generation_has_memory_for_is_refused():
    spec = TransformersSpec.of(sizes("qwen3_vl"))
    assert spec.images is not None
    grids = torch.tensor([[1, 256, 256], [1, 256, 258]])
    one = RowImages([torch.empty(256 * 256, spec.images.patch)], grids[:1], ["one"])
    check_prompt(0, [IMAGE] * 16384, one, spec, 16384)
    both = RowImages(
        [*torch.empty(256 * 514, spec.images.patch).split([256 * 256, 256 * 258])], grids, ["one", "other"]
    )
    with pytest.raises(PromptError, match=r"prompt 0 has an image of 16512 tokens, .*\(image_tokens=16384\)"):
        check_prompt(0, [IMAGE] * (16384 + 16512), both, spec, 16384)
