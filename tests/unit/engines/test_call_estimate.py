"""What an estimate counts of the real engines' code, against the planner's formulas."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from hybridflow.config import FSDP, Adam, Megatron, ZeRO
from hybridflow.engines.call_estimate import CallEstimate, CallRows, estimate_rank
from hybridflow.errors import ConfigError
from hybridflow.models.spec import PUBLISHED, ModelSpec
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.describe.workload import Workload
from hybridflow.tracing.estimate import spread

SMALL = ModelSpec(
    family="qwen2", hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=151936,
    tied=True, qkv_bias=True,
)  # fmt: skip
SIZES: dict[str, Any] = {"dtype": "bfloat16", "micro_tokens": 8192}
CALLS = (Call("a.update", "a", "update", "training"), Call("a.infer", "a", "infer", "inference"))


def estimated(
    model: str, strategy: Any, size: int, rows: int = 16, longest: int = 512
) -> tuple[dict[str, CallEstimate], dict[str, DeviceMemory]]:
    """Both calls of `rows` rows of each data parallel rank, as run on the first pipeline stage or the last, on which
    they have more, and as planned."""
    spec = SMALL if model == "0.5b" else PUBLISHED[model]
    grid, given = strategy.grid(size), {name: getattr(strategy, name) for name in ("micro_tokens", "recompute")}
    given["sequence_parallel"] = getattr(strategy, "sequence_parallel", False)
    work = Workload(rows=rows * grid.d, prompt=512, response=(512, longest), **given)
    graph = Graph(CALLS, (), {"a": spec}, frozenset({"a"}), {"a": strategy})
    costs = Costs(ClusterSpec.of(f"h100:{-(-size // 8)}x{min(8, size)}"), graph, work)
    parallel = costs.backends["a"].parallel(grid.p, grid.t, grid.d)
    assert parallel is not None
    plan = CallPlan(Mesh.of(0, size), parallel)
    lengths = list(zip(spread(work.prompt, rows), spread(work.response, rows), strict=True))
    asked = {"a.infer": CallRows("inference", lengths), "a.update": CallRows("training", lengths)}
    ranks = sorted({0, grid.rank(grid.p - 1, 0, 0)})
    each = [estimate_rank("a", rank, grid, strategy, spec, Adam(lr=1e-6), asked) for rank in ranks]
    found = {name: max((one[name] for one in each), key=lambda call: call.active) for name in asked}
    still = costs.resting("a", plan)
    kinds = {name: getattr(still, name) for name in ("parameters", "gradients", "optimizer")}
    return found, {call.name: replace(costs.added(call.name, plan), **kinds) for call in CALLS}


CASES = {
    "0.5b, t=2, packed unlike rows": ("0.5b", Megatron(tp=2, sequence_parallel=True, **SIZES), 2, 64, 900),
    "0.5b, t=2, sequence not shared": ("0.5b", Megatron(tp=2, **SIZES), 2),
    "0.5b, zero-2": ("0.5b", ZeRO(stage=2, **SIZES), 8),
    "0.5b, fsdp": ("0.5b", FSDP(reduce_often=True, **SIZES), 8),
    "7b, p=4 t=2": ("llama3-7b", Megatron(tp=2, pp=4, sequence_parallel=True, **SIZES), 16),
    "7b, zero-1, recompute": ("llama3-7b", ZeRO(stage=1, recompute=True, **SIZES), 8),
    "7b, fsdp, recompute": ("llama3-7b", FSDP(recompute=True, **SIZES), 8),
    "7b, t=2, recompute": ("llama3-7b", Megatron(tp=2, sequence_parallel=True, recompute=True, **SIZES), 4),
    "13b, fsdp, t=2": ("llama3-13b", FSDP(tp=2, **SIZES), 8),
    "34b, p=2 t=8": ("llama3-34b", Megatron(tp=8, pp=2, sequence_parallel=True, **SIZES), 32),
    "70b, fsdp": ("llama3-70b", FSDP(recompute=True, **SIZES), 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_estimate_is_what_the_planner_says(case: str):
    found, planned = estimated(*CASES[case])
    for name, kinds in (("a.update", ("parameters", "gradients", "optimizer")), ("a.infer", ("parameters",))):
        for kind in kinds:
            assert found[name].held[kind] == pytest.approx(getattr(planned[name], kind), rel=0.01)
    update, asked = found["a.update"], planned["a.update"]
    # gradients of FSDP come while activations go: at the peak they are not all there
    peak, most = (update.active, asked.active) if "fsdp" not in case else (update.peak, asked.static + asked.active)
    assert peak == pytest.approx(most, rel=0.15)
    assert found["a.infer"].active == pytest.approx(planned["a.infer"].active, rel=0.15)


@pytest.mark.slow
def test_70b_takes_two_minutes_and_four_gigabytes():
    """And its activations are the planner's, also with micro-batches of a thousand tokens."""
    start = time.process_time()
    strategy = Megatron(tp=8, pp=8, sequence_parallel=True, recompute=True, **SIZES)
    found, planned = estimated("llama3-70b", strategy, 128)
    assert time.process_time() - start < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4e6  # kB, of all tests before it, too
    for kind in ("parameters", "gradients", "optimizer"):
        assert found["a.update"].held[kind] == pytest.approx(getattr(planned["a.update"], kind), rel=0.01)
    for name, call in planned.items():
        assert found[name].active == pytest.approx(call.active, rel=0.15)


def test_work_grows_with_micro_batches_that_are_not_run():
    """Of four times the rows a part is run, and the rest added."""
    calls = {str(rows): CallRows("training", [(64, 64)] * rows) for rows in (4, 16)}
    spec, strategy = replace(SMALL, layers=2), FSDP(dtype="bfloat16", micro_tokens=256)
    found = estimate_rank("a", 0, strategy.grid(2), strategy, spec, Adam(lr=1e-6), calls)
    few, many = found["4"], found["16"]
    assert many.flops == pytest.approx(4 * few.flops, rel=1e-6)
    assert many.held == few.held
    assert many.active == pytest.approx(few.active, rel=1e-4)  # token ids of more rows
    assert few.collectives["all-gather"][0] < many.collectives["all-gather"][0] <= 4 * few.collectives["all-gather"][0]
    assert many.collectives["reduce-scatter"] == few.collectives["reduce-scatter"]  # once for a mini-batch
    layer = sum(math.prod(shape) for shape in spec.layer_tensors(0).values() if len(shape) > 1)
    products = 16 * (128 * 2 * layer + 64 * spec.vocab * spec.hidden)  # logits of answers alone
    assert many.flops == pytest.approx(6 * products, rel=0.01)


def test_an_estimate_leaves_no_torch_world_and_takes_no_other(tmp_path):
    strategy = ZeRO(stage=1)
    asked = {"a": CallRows("inference", [(8, 8)])}
    found = estimate_rank("a", 0, strategy.grid(1), strategy, replace(SMALL, layers=1), None, asked)
    assert found["a"].held.keys() == {"parameters"}
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="a process of its own"):
            estimate_rank("a", 0, strategy.grid(1), strategy, replace(SMALL, layers=1), None, asked)
    finally:
        dist.destroy_process_group()
