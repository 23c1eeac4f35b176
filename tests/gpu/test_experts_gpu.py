"""Mixtures of experts on CUDA: torch's grouped matrix products, and vLLM's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.config import VLLM
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.gpu.conftest import OneRank
from tests.integration import vllm_scenarios as scenarios
from tests.tiny_models import greedy

pytestmark = pytest.mark.gpu
COUNTS = (4, 0, 6, 6)  # tokens of each expert


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    ends = torch.tensor(COUNTS, device="cuda").cumsum(0).int()
    return F.grouped_mm(x, weight, offs=ends)


def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([part @ one for part, one in zip(x.split(COUNTS), weight)])


def test_grouped_products_and_their_gradients():
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4, 32, 64, device="cuda", dtype=torch.bfloat16)
    factor = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for product in (grouped, one_by_one):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        out = product(*leaves)
        (out * factor).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found):
        assert torch.allclose(one.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_vllm_generates_with_experts(world: OneRank, tmp_path: Path):
    scenarios.save_model("mixtral", tmp_path)
    grid = RankGrid(p_g=1, t_g=1)
    strategy = VLLM(eager=True, max_sequences=8, memory_fraction=0.2, dtype="float32", max_length=64)
    spec = read_spec(tmp_path, "lm")
    engine = VLLMEngine(world.context("experts", grid), strategy, grid.generation(), spec, tmp_path)
    scenarios._write(engine, 0, scenarios._weights(tmp_path))
    rows = engine.generate(scenarios.PROMPTS, scenarios.GREEDY)
    engine.close()
    assert [row[0].token_ids for row in rows] == greedy(tmp_path, scenarios.PROMPTS, 6)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_experts_are_captured_beside_the_cache(world: OneRank, tmp_path: Path, eager: bool):
    """Also while captured graphs replay, whose padding has no slot, and after the cache gave its memory back."""
    scenarios.save_model("mixtral", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: wanted.append(out[2]))
    grid = RankGrid(p_g=1, t_g=1)
    strategy = VLLM(
        eager=eager, max_sequences=8, memory_fraction=0.2, dtype="float32", max_length=64, return_routed_experts=True
    )
    engine = VLLMEngine(
        world.context(f"routed {eager}", grid), strategy, grid.generation(), read_spec(tmp_path, "lm"), tmp_path
    )
    for _ in range(2):
        scenarios._write(engine, 0, scenarios._weights(tmp_path))
        for [row] in engine.generate(scenarios.PROMPTS, scenarios.GREEDY):
            wanted.clear()
            with torch.no_grad():
                model(torch.tensor([row.prompt_ids + row.token_ids[:-1]]))
            assert row.routed_experts is not None
            assert row.routed_experts.long().tolist() == torch.stack(wanted, 1).tolist()
        engine.sleep()
        assert engine.cache_bytes == 0
        engine.wake()
    engine.close()
