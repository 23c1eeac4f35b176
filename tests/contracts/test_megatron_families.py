"""Families on Megatron: what transformers computes and how it is trained, on every grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engines.router_replay import replay_sizes
from hybridflow.models.hf_spec import read_spec
from tests.contracts import any_model_tasks as tasks
from tests.contracts.example_models import make_batch
from tests.contracts.family_cases import MEGATRON_CASES, QUICK_ON_MEGATRON, marked
from tests.contracts.train_contract import assert_trains, joined


@pytest.mark.parametrize(("name", "grid"), marked(MEGATRON_CASES, QUICK_ON_MEGATRON))
def test_it_computes_and_trains_as_transformers_does(processes, family, tmp_path, name, grid):
    """Where ranks share the tokens of a packed row, it is cut anywhere, across rows too."""
    assert_trains(processes, MEGATRON_CASES[name, grid], *family(name), tmp_path / "saved")


@pytest.mark.parametrize("backend", [Megatron, FSDP, partial(ZeRO, stage=1)], ids=["megatron", "fsdp", "zero"])
def test_activations_are_shared(processes, family, backend):
    path, batch, found = family("llama-yarn")[0], make_batch(rows=48), {}
    for cp in (1, 2, 4):
        strategy = backend(cp=cp, dp=1)
        parts = processes.run(cp, tasks.activation_bytes, processes.name(), strategy, path, cp, batch)
        found[cp] = max(parts)
    assert found[2] <= 0.6 * found[1]
    assert found[4] <= 0.35 * found[1]


REPLAYS = {
    "1": Megatron(micro_tokens=40),
    "t2-ep2-recompute": Megatron(tp=2, ep=2, recompute=True, micro_tokens=40),
    "p2-ep2-recompute": Megatron(pp=2, dp=2, ep=2, recompute=True, micro_tokens=40),
    "padded": Megatron(tp=2, packed=False, micro_tokens=40),
    "fsdp-2": FSDP(micro_tokens=40, recompute=True),
    "zero-2": ZeRO(stage=2, micro_tokens=40),
    "cp2-ep2": Megatron(cp=2, ep=2, micro_tokens=60),
    "fsdp-ep2-recompute": FSDP(ep=2, micro_tokens=40, recompute=True),
}


@pytest.mark.thinned(10)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in ("qwen3_moe", "qwen2_moe", "mixtral-6") for way in REPLAYS),
        *(("deepseek_v2", "fsdp-2"), ("deepseek_v2", "t2-ep2-recompute"), ("deepseek_v3", "t2-ep2-recompute")),
        *(("deepseek_v3", "padded"), ("deepseek_v3", "cp2-ep2")),
    ],
)
def test_tokens_go_to_the_experts_of_the_batch(processes, family, name, way):
    (path, plain), strategy = family(name), REPLAYS[way]
    spec = read_spec(path, "lm")
    sizes = replay_sizes(spec, "actor")
    batch = tasks.with_routing(make_batch(), *sizes)
    want = tasks.replayed(path, batch)
    assert not torch.allclose(want["log_probs"].values, plain["log_probs"].values, atol=1e-2)
    p, t = getattr(strategy, "pp", 1), getattr(strategy, "tp", 1)
    d = 2 if isinstance(strategy, FSDP | ZeRO) else (strategy.dp or 1) * strategy.cp
    found = processes.run(p * t * d, tasks.replays, processes.name(), strategy, path, p * t * d, batch)
    outputs = joined([part["outputs"] or None for part in found], (p, t, d))
    assert torch.allclose(outputs["log_probs"].values, want["log_probs"].values, atol=1e-4)
    for part in found:
        assert part["norm"] == pytest.approx(want["norm"], rel=1e-5)
    differing = {part["metrics"]["actor/routing_difference"] for part in found if part["metrics"]}
    assert len(differing) == 1
    assert 0.3 < differing.pop() < 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [Megatron(tp=2, ep=2), FSDP(), ZeRO(stage=1), ZeRO(stage=2)], ids=str)
def test_what_a_router_adds_to_scores_stays_and_is_saved(processes, family, tmp_path, strategy, dtype):
    """It is state of the model like any other, float32 where the model has 16 bits; no decay of weights moves it."""
    path, strategy = family("glm4_moe")[0], replace(strategy, dtype=dtype)
    found = processes.run(2, tasks.bias_after, processes.name(), strategy, path, 2, tmp_path / "saved")
    names = [name for name in read_spec(path, "lm").tensors() if name.endswith("correction_bias")]
    want = tasks.tensors(path, names)
    assert len(names) == 2
    assert all(tensor.any() for tensor in want.values())
    for part in found:
        assert len(part["before"]) == 2
        for name, tensor in part["before"].items():
            assert tensor.dtype == torch.float32
            assert part["after"][name].equal(tensor)
    assert {*names} <= {name for part in found for name in part["owned"]}
    saved = tasks.tensors(tmp_path / "saved", names)
    assert all(saved[name].float().equal(tensor) for name, tensor in want.items())
