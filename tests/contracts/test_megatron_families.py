"""Families on Megatron: what transformers computes and how it is trained, on every grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engines.router_replay import replay_sizes
from hybridflow.models.hf_spec import read_spec
from tests.contracts import any_model_tasks as tasks
from tests.contracts.any_model_tasks import MEGATRON, expected, make
from tests.contracts.example_models import make_batch, relative
from tests.contracts.train_contract import joined, whole

EXPERTS = (
    *("qwen2_moe", "qwen3_moe", "olmoe", "mixtral-6", "glm4_moe", "solar_open"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
GRIDS = {"1": Megatron(), "t2": Megatron(tp=2, sequence_parallel=True), "p2-d2": Megatron(pp=2, dp=2)}
OF_EXPERTS = {
    "1": Megatron(),
    "t2": Megatron(tp=2),
    "ep2": Megatron(ep=2, dp=2),
    "t2-ep2": Megatron(tp=2, ep=2),
    "p2-ep2": Megatron(pp=2, dp=2, ep=2),
    "t2-etp1": Megatron(tp=2, etp=1),
    "t2-d2-ep2-etp2": Megatron(tp=2, dp=2, ep=2, etp=2),
    "d3-ep3-recompute": Megatron(dp=3, ep=3, recompute=True),
    "t2-d2-ep2": Megatron(tp=2, dp=2, ep=2),
}
CASES = [
    pytest.param(name, grid, marks=[] if at in (i % len(grids), (i + 4) % len(grids)) else pytest.mark.slow)
    for i, name in enumerate(MEGATRON)
    for grids in (OF_EXPERTS if name in EXPERTS else GRIDS,)
    for at, grid in enumerate(grids)
]
"""`make test` runs two grids of each family, each time others."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def oracle(directory) -> Any:
    found: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in found:
            path = make(name, "lm", directory / name)
            found[name] = path, expected(path, "lm")
        return found[name]

    return of


@pytest.mark.parametrize(("name", "grid"), CASES, ids=str)
def test_it_computes_and_trains_as_transformers_does(processes, oracle, tmp_path, name, grid):
    (path, want), strategy = oracle(name), (OF_EXPERTS if name in EXPERTS else GRIDS)[grid]
    assert_trains(processes, strategy, path, want, tmp_path / "saved", micro_tokens=40)


def assert_trains(
    processes: Any, strategy: Any, path: Path, want: dict[str, Any], target: Path, micro_tokens: int
) -> None:
    """Outputs, gradient norms, weights after two updates and what is saved are those of transformers."""
    sizes = p, t, d = getattr(strategy, "pp", 1), strategy.tp, (strategy.dp or 1) * strategy.cp
    names, ranks = [processes.name(), processes.name()], p * t * d
    strategy = replace(strategy, micro_tokens=micro_tokens)
    found = processes.run(ranks, tasks.trained, names, strategy, path, "lm", target, ranks)
    outputs = joined([part["outputs"] or None for part in found], sizes)
    for output in ("log_probs", "entropy"):
        assert torch.allclose(outputs[output].values, want[output].values, atol=1e-4)
    for part in found:
        assert part["norms"] == pytest.approx(want["norms"], rel=1e-5)
    spec = read_spec(path, "lm")
    after = tasks.tensors(path.with_name(f"{path.name}-after"), spec.tensors())
    assert relative(whole([part["boxes"] for part in found], spec.tensors()), after) < 1e-6
    assert relative(tasks.tensors(target, spec.tensors()), after) < 1e-6


SHARED = [
    ("gemma2-more", Megatron(cp=2)),
    ("gemma2-more", Megatron(cp=4)),
    ("gemma2-more", Megatron(cp=2, dp=2)),
    ("helium", Megatron(cp=2, tp=2, sequence_parallel=True, recompute=True)),
    ("llama-yarn", Megatron(cp=2, pp=2)),
    ("qwen2-windows", Megatron(cp=2, tp=2)),
    ("mixtral-6", Megatron(cp=2, ep=2)),
    ("qwen3_moe", Megatron(cp=2, tp=2, ep=2)),
    ("deepseek_v3", Megatron(cp=2, tp=2, ep=2)),
    ("gemma2-more", FSDP(cp=2)),
    ("phi3-window", FSDP(cp=2, dp=2, recompute=True)),
    ("olmo2-again", FSDP(cp=4)),
    ("llama-yarn", FSDP(cp=2, tp=2, reduce_often=True)),
    ("mixtral-6", FSDP(cp=2)),
]


@pytest.mark.thinned(7)
@pytest.mark.parametrize(("name", "strategy"), SHARED, ids=str)
def test_ranks_share_the_tokens_of_their_rows(processes, oracle, tmp_path, name, strategy):
    """A packed row is cut anywhere, across rows too."""
    path, want = oracle(name)
    assert_trains(processes, strategy, path, want, tmp_path / "saved", micro_tokens=60)


@pytest.mark.parametrize("backend", [Megatron, FSDP])
def test_activations_are_shared(processes, oracle, backend):
    path, batch, found = oracle("llama-yarn")[0], make_batch(rows=48), {}
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
def test_tokens_go_to_the_experts_of_the_batch(processes, oracle, name, way):
    (path, plain), strategy = oracle(name), REPLAYS[way]
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
def test_what_a_router_adds_to_scores_stays_and_is_saved(processes, oracle, tmp_path, dtype):
    """It is state of the model like any other, float32 where the model has 16 bits."""
    path, strategy = oracle("glm4_moe")[0], Megatron(tp=2, ep=2, dtype=dtype)
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
