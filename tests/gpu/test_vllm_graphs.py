"""vLLM's captured graphs: an engine that is not eager generates what an eager one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.config import VLLM
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.topology import RankGrid
from tests.contracts.example_models import spec_of
from tests.gpu.conftest import OneRank
from tests.integration import vllm_scenarios as scenarios

pytestmark = pytest.mark.gpu


def tokens(world: OneRank, checkpoint: Path, eager: bool) -> list[list[int]]:
    grid = RankGrid(p_g=1, t_g=1)
    strategy = VLLM(eager=eager, max_sequences=8, memory_fraction=0.2, dtype="float32", max_length=64)
    context = world.context(f"vllm-{eager}", grid)
    engine = VLLMEngine(context, strategy, grid.generation(), spec_of(checkpoint, "lm"), checkpoint)
    scenarios._write(engine, 0, scenarios._weights(checkpoint))
    rows = engine.generate(scenarios.PROMPTS, scenarios.GREEDY)
    engine.close()
    return [row[0].token_ids for row in rows]


def test_graphs_generate_the_tokens_of_an_eager_engine(world, tmp_path, monkeypatch):
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(self), replay(self))[1])
    scenarios.save_model("llama", tmp_path)
    eager = tokens(world, tmp_path, eager=True)
    assert not replays
    assert tokens(world, tmp_path, eager=False) == eager
    assert replays
