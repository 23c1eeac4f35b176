"""Transitions on one CUDA device: memory that goes back to the allocator, copies on a stream of their own."""

from __future__ import annotations

import pytest
import torch

from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.plain_holders import PlainGenerator, PlainTrainer

pytestmark = pytest.mark.gpu
SPEC = ModelSpec(
    family="llama", hidden=256, intermediate=512, layers=6, heads=8, kv_heads=4, head_dim=32, vocab=1000, tied=False
)


def holders(train_dtype: torch.dtype, dtype: torch.dtype, shares: bool, device: str = "cuda"):
    grid = RankGrid(p_g=1, t_g=1)
    trainer = PlainTrainer(SPEC, megatron_layout(SPEC, grid), grid, 0, train_dtype, device=device)
    return trainer, PlainGenerator(vllm_layout(SPEC, grid.generation()), 0, dtype, shares, device)


@pytest.mark.parametrize(
    ("train", "generate"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("shares", [True, False])
def test_cycles_move_the_weights_and_give_memory_back(train: str, generate: str, shares: bool):
    trainer, generator = holders(getattr(torch, train), getattr(torch, generate), shares)
    engine = HybridEngine(trainer, generator, None, 0)
    allocated = []
    for _ in range(5):
        trainer.train()
        engine.trained()
        engine.to_generation()
        assert not trainer.canon.wrong(generator.layout(), 0, generator.storage())
        assert engine.resident_bytes == engine.report.resident_bytes
        engine.to_training()
        assert not trainer.canon.wrong(trainer.layout(), 0, trainer.storage())
        allocated.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    assert len(set(allocated[1:])) == 1


@pytest.mark.parametrize("offload", [(), ("generation",)])
def test_an_overlapped_step_is_a_step_and_a_move(offload: tuple[str, ...]):
    trainer, generator = holders(torch.bfloat16, torch.bfloat16, shares=False)
    engine = HybridEngine(trainer, generator, None, 0, overlap=True, offload=offload)  # type: ignore[arg-type]
    for _ in range(3):
        engine.step()
        engine.to_generation()
        assert not trainer.canon.wrong(generator.layout(), 0, generator.storage())
        engine.to_training()
        assert not trainer.canon.wrong(trainer.layout(), 0, trainer.storage())
