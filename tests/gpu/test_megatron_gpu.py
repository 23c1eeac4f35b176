"""The Megatron engine on one CUDA device with nccl: the code of the CPU suite, without its shims."""

from __future__ import annotations

import pytest
import torch

from hybridflow.config import SGD, Adam, Megatron
from hybridflow.topology import RankGrid
from tests.contracts.example_models import load_model, loss_of, make_batch, make_model, reference, spec_of, totals_of

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_in_float32(world, tmp_path, family, recompute):
    from hybridflow.engines.train_backends import build_engine

    path, batch, loss = make_model(family, tmp_path), make_batch(), loss_of("lm")
    model = load_model(path)
    want = reference(model, "lm", batch)
    strategy = Megatron(dtype="float32", micro_tokens=64, recompute=recompute)
    engine = build_engine(
        world.context(f"{family}-{recompute}", RankGrid()), strategy, spec_of(path), path, SGD(lr=0.1)
    )
    found = engine.forward(batch, ("log_probs", "entropy"))
    assert found is not None
    for name, output in want.items():
        assert torch.allclose(found[name].values, output.values, atol=1e-3)
    loss(want, batch, totals_of(batch))[0].backward()
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
    engine.forward_backward(batch, loss, loss.outputs)
    assert engine.step()["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_training_in_bfloat16_lowers_the_loss(world, tmp_path):
    from hybridflow.engines.train_backends import build_engine

    path, batch = make_model("llama", tmp_path), make_batch()
    engine = build_engine(world.context("lowers", RankGrid()), Megatron(), spec_of(path), path, Adam(lr=1e-3))
    assert {tensor.dtype for tensor in engine.storage().values()} == {torch.bfloat16}

    def likelihood(outputs, rows, totals):
        share = -outputs["log_probs"].values.sum() / totals.sequence_tokens
        return share, {"loss": share}

    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(batch, likelihood, ("log_probs",))["loss"])
        assert engine.step()["skipped"] == 0.0
    assert losses[-1] < 0.8 * losses[0]
