"""Memory of images on CUDA: vLLM's profile encodes them, and the KV cache gets what they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.engines.vllm import core
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.row_images import torchvision_names
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.vision_models import make_vision

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # its kernels take minutes where they are emulated


def test_the_cache_leaves_room_for_images(world, tmp_path, monkeypatch):
    with torchvision_names():
        from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VisionTransformer
    model, forward, seen = make_vision(tmp_path / "model", "qwen2_5_vl"), Qwen2_5_VisionTransformer.forward, []

    def watched(self: Any, patches: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = forward(self, patches, *args, **kwargs)
        seen.append((len(patches), torch.cuda.max_memory_allocated() - before))
        return found

    monkeypatch.setattr(Qwen2_5_VisionTransformer, "forward", watched)
    monkeypatch.setattr(core, "_STEP_TOKENS", 256)
    grid, fraction = RankGrid(p_g=1, t_g=1), 0.5
    context = world.context("images", grid)
    strategy = hf.VLLM(memory_fraction=fraction, max_sequences=16, max_length=128)
    engine = VLLMEngine(context, strategy, grid.generation(), read_spec(model, "lm"), model)
    try:
        [(patches, needed)] = seen
        assert 4 * 256 <= patches < 4 * 256 * 1.05
        asked = fraction * torch.cuda.get_device_properties(0).total_memory
        assert engine.cache_bytes < asked - needed
    finally:
        engine.close()
