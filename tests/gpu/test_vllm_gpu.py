"""Parts of vLLM on CUDA: captured graphs, experts, edits of logits, and the memory of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.config import VLLM, Sampling
from hybridflow.engines.vllm import core
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.engine_loop import LogitEdits
from hybridflow.engines.vllm.row_images import torchvision_names
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.gpu.conftest import OneRank
from tests.integration import vllm_scenarios as scenarios
from tests.tiny_models import greedy
from tests.vision_models import make_vision

pytestmark = pytest.mark.gpu
COUNTS = (4, 0, 6, 6)  # tokens of each expert


def started(world: OneRank, path: Path, name: str, **settings: Any) -> VLLMEngine:
    grid, small = RankGrid(p_g=1, t_g=1), {"max_sequences": 8, "memory_fraction": 0.2, "max_length": 64}
    strategy = VLLM(**{**small, "dtype": "float32", **settings})
    return VLLMEngine(world.context(name, grid), strategy, grid.generation(), read_spec(path, "lm"), path)


def tokens(engine: VLLMEngine, path: Path) -> list[list[int]]:
    scenarios._write(engine, 0, scenarios._weights(path))
    rows = engine.generate(scenarios.PROMPTS, scenarios.GREEDY)
    engine.close()
    return [row[0].token_ids for row in rows]


def test_graphs_generate_the_tokens_of_an_eager_engine(world, tmp_path, monkeypatch):
    replays = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(self), replay(self))[1])
    scenarios.save_model("llama", tmp_path)
    eager = tokens(started(world, tmp_path, "eager", eager=True), tmp_path)
    assert not replays
    assert tokens(started(world, tmp_path, "graphs", eager=False), tmp_path) == eager
    assert replays


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


def test_vllm_generates_with_experts(world, tmp_path):
    scenarios.save_model("mixtral", tmp_path)
    found = tokens(started(world, tmp_path, "experts", eager=True), tmp_path)
    assert found == greedy(tmp_path, scenarios.PROMPTS, 6)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_experts_are_captured_beside_the_cache(world, tmp_path, eager):
    """Also while captured graphs replay, whose padding has no slot, and after the cache gave its memory back."""
    scenarios.save_model("mixtral", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: wanted.append(out[2]))
    engine = started(world, tmp_path, f"routed {eager}", eager=eager, return_routed_experts=True)
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


def test_edits_on_a_device_are_those_on_the_cpu():
    sampling = Sampling(
        min_p=0.2, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={3: 2.0, 40: -1.0}
    )
    edits = LogitEdits(sampling, ((7,), (5, 9)))
    prompt, response = np.array([1, 2, 3, 3], np.int32), np.array([4, 4, 9, 5], np.int32)
    host = torch.randn(64, generator=torch.Generator().manual_seed(1))
    device = host.cuda()
    for logits in (host, device):
        edits.edit(logits, prompt, response)
        assert torch.isinf(logits[[7, 9]]).all()
    assert torch.allclose(device.cpu(), host, atol=1e-6)
    for logits in (host, device):
        edits.truncate(logits)
    assert torch.equal(device.cpu().isinf(), host.isinf())
    assert 1 < int(host.isfinite().sum()) < 62


@pytest.mark.slow
def test_the_cache_leaves_room_for_images(world, tmp_path, monkeypatch):
    """vLLM's profile encodes them. Its kernels take minutes where they are emulated."""
    with torchvision_names():
        from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
    model, forward, seen = make_vision(tmp_path / "model", "qwen2_5_vl"), Qwen2_5_VisionTransformer.forward, []

    def watched(self: Any, patches: Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = forward(self, patches, *args, **kwargs)
        seen.append((len(patches), torch.cuda.max_memory_allocated() - before))
        return found

    monkeypatch.setattr(Qwen2_5_VisionTransformer, "forward", watched)
    monkeypatch.setattr(core, "_STEP_TOKENS", 256)
    fraction = 0.5
    engine = started(world, model, "images", memory_fraction=fraction, max_sequences=16, max_length=128, dtype=None)
    [(patches, needed)] = seen
    assert 4 * 256 <= patches < 4 * 256 * 1.05
    asked = fraction * torch.cuda.get_device_properties(0).total_memory
    assert engine.cache_bytes < asked - needed
    engine.close()
