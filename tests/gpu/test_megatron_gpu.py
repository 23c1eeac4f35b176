"""The Megatron engine on one CUDA device with nccl: the code of the CPU suite, without its shims."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))

from example_models import load_model, loss_of, make_batch, make_model, reference, spec_of, totals_of

from hybridflow.config import SGD, Adam, Megatron
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.topology import RankGrid

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def context() -> Iterator[RankContext]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = dist.PrefixStore("world", store)
    dist.init_process_group("nccl", store=world, rank=0, world_size=1, timeout=datetime.timedelta(seconds=60))
    yield RankContext("actor", 0, RankGrid(), device, ProcessGroups(store, "gpu", [0], 0, device, 60.0))
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("recompute", [False, True])
def test_outputs_and_gradients_in_float32(context, tmp_path, family, recompute):
    from hybridflow.engines.megatron.engine import MegatronEngine

    path, batch, loss = make_model(family, tmp_path), make_batch(), loss_of("lm")
    model = load_model(path)
    want = reference(model, "lm", batch)
    strategy = Megatron(dtype="float32", micro_tokens=64, recompute=recompute)
    engine = MegatronEngine(context, strategy, spec_of(path), path, SGD(lr=0.1))
    found = engine.forward(batch, ("log_probs", "entropy"))
    assert found is not None
    for name, output in want.items():
        assert torch.allclose(found[name].values, output.values, atol=1e-3)
    loss(want, batch, totals_of(batch))[0].backward()
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])))
    engine.forward_backward(batch, loss, loss.outputs)
    assert engine.step()["grad_norm"] == pytest.approx(norm, rel=1e-3)


def test_training_in_bfloat16_lowers_the_loss(context, tmp_path):
    from hybridflow.engines.megatron.engine import MegatronEngine

    path, batch = make_model("llama", tmp_path), make_batch()
    engine = MegatronEngine(context, Megatron(), spec_of(path), path, Adam(lr=1e-3))
    assert {tensor.dtype for tensor in engine.storage().values()} == {torch.bfloat16}

    def likelihood(outputs, rows, totals):
        share = -outputs["log_probs"].values.sum() / totals.sequence_tokens
        return share, {"loss": share}

    losses = []
    for _ in range(20):
        losses.append(engine.forward_backward(batch, likelihood, ("log_probs",))["loss"])
        assert engine.step()["skipped"] == 0.0
    assert losses[-1] < 0.8 * losses[0]
