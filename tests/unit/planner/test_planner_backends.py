"""What groups cost that train with FSDP, ZeRO or LoRA; what rows of unlike lengths and weights in host memory cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dataflows import ppo
from hybridflow.config import FSDP, LoRA, Megatron, ZeRO
from hybridflow.engines.lora.targets import adapter_tensors
from hybridflow.engines.megatron.layout import trained_layout
from hybridflow.engines.transformers_model import TransformersModel
from hybridflow.errors import ConfigError, ModelError, PlacementError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.backends import Backend, adapters
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import saved_activations
from hybridflow.planner.describe.cluster_spec import DEVICES, ClusterSpec, NodeSpec
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from tests.contracts import family_cases
from tests.example_plans import LLAMA_7B as MODEL

GRAPH = ppo(MODEL, replace(MODEL, head="value"))
WORK = Workload(rows=512, prompt=1024, response=1024, minibatches=4)
A100S = ClusterSpec.of("a100:4x8")
GENERATE, INFER, TRAIN = "actor.generate_sequences", "actor.compute_log_prob", "actor.update_actor"
SIXTEEN = Mesh.of(0, 16)


def simulator(strategy: Any, work: Workload = WORK, cluster: ClusterSpec = A100S) -> Costs:
    return Costs(cluster, replace(GRAPH, strategies={"actor": strategy}), work)


def at(strategy: Any, t: int = 1, mesh: Mesh = SIXTEEN) -> CallPlan:
    parallel = Backend.of(strategy).parallel(1, t, mesh.size // t)
    assert parallel is not None
    return CallPlan(mesh, parallel)


@pytest.mark.parametrize(
    ("strategy", "bf16", "float32"),
    [
        (Megatron(), 2 + 4 + 12 / 16, 4 + 4 + 8 / 16),
        (ZeRO(stage=1), 2 + 4 + 12 / 16, 4 + 4 + 8 / 16),
        (ZeRO(stage=2), 2 + (4 + 12) / 16, 4 + (4 + 8) / 16),
        (ZeRO(stage=3), 16 / 16, 16 / 16),
        (FSDP(), 16 / 16, 16 / 16),
        (FSDP(replicate=4), 16 / 4, 16 / 4),
        (FSDP(offload=True), 0, 0),
        (ZeRO(stage=1, offload=True), 2 + 4, 4 + 4),
        (ZeRO(stage=2, offload=True), 2, 4),
    ],
)
def test_bytes_per_parameter_are_those_that_the_engines_hold(strategy, bf16, float32):
    for dtype, expected in (("bfloat16", bf16), ("float32", float32)):
        found = simulator(strategy, replace(WORK, dtype=dtype)).static("actor", at(strategy))
        assert found == pytest.approx(expected * MODEL.num_parameters), dtype


def test_a_frozen_model_is_cut_as_its_strategy_says():
    graph = replace(GRAPH, strategies={"reference": FSDP()})
    found = Costs(A100S, graph, WORK).static("reference", at(FSDP()))
    assert found == pytest.approx(2 * MODEL.num_parameters / 16)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("model.layers.3.mlp.up_proj",)])
def test_adapters_have_the_elements_that_are_trained(targets):
    lora = LoRA(rank=8, targets=targets)
    elements = sum(a * b for a, b in adapter_tensors(MODEL, lora).values())
    assert adapters(MODEL, lora)[0] * MODEL.layers == elements
    found = simulator(FSDP(lora=lora)).static("actor", at(FSDP(lora=lora)))
    assert found == pytest.approx((2 * MODEL.num_parameters + 16 * elements) / 16)


@pytest.mark.parametrize("family", ["phi3", "qwen2_moe", "deepseek_v3"])
def test_adapters_of_other_families_have_the_elements_that_are_trained(family):
    model = TransformersSpec.of(family_cases.config(family).to_dict())
    elements = sum(a * b for a, b in adapter_tensors(model, LoRA(rank=8)).values())
    assert adapters(model, LoRA(rank=8))[0] * model.layers == pytest.approx(elements, rel=1e-12)


@pytest.mark.parametrize("strategy", [Megatron(), Megatron(tp=2), Megatron(pp=4), Megatron(tp=4, pp=2)], ids=str)
def test_adapters_on_megatron_have_the_bytes_that_its_ranks_hold(strategy):
    """Of the first rank, against the layouts: float32 parameters and gradients, a share of the moments."""
    lora, grid = replace(strategy, lora=LoRA(rank=8)), strategy.grid(16)
    held = sum(region.box.numel for region in trained_layout(lora, MODEL, grid).regions(0))
    parallel = Parallel(grid.p, grid.t, grid.d)
    bare = Costs(A100S, replace(GRAPH, strategies={"reference": strategy}), WORK)
    frozen = bare.static("reference", CallPlan(SIXTEEN, parallel))
    found = simulator(lora).static("actor", CallPlan(SIXTEEN, parallel))
    assert found == pytest.approx(frozen + held * (4 + 4 + 8 / grid.d), rel=1e-9)


def test_adapters_on_megatron_cost_less_than_the_model_and_their_exchanges_little():
    whole, thin = Megatron(), Megatron(lora=LoRA(rank=16))
    for t in (1, 4):
        trained, adapted = (simulator(s).cost(TRAIN, at(s, t)).parts for s in (whole, thin))
        assert adapted["compute"] < 0.85 * trained["compute"]
        assert adapted["optimizer"] < trained["optimizer"] / 50
        assert adapted["data_parallel"] < trained["data_parallel"] / 20
        if t > 1:
            assert trained["tensor_parallel"] < adapted["tensor_parallel"] < 1.1 * trained["tensor_parallel"]


def test_targets_that_no_layer_has_are_refused():
    wrong = FSDP(lora=LoRA(targets=("q_proj", "k_prj")))
    with pytest.raises(ConfigError, match=r"'k_prj' matches no linear layer.* Did you mean 'k_proj'"):
        simulator(wrong).cost(TRAIN, at(wrong))


def test_lora_spares_gradients_of_the_model():
    lora = FSDP(lora=LoRA(rank=16))
    whole, thin = (simulator(s).cost(TRAIN, at(s)) for s in (FSDP(), lora))
    inferred, plain = (simulator(s).cost(INFER, at(s)).parts["compute"] for s in (lora, FSDP()))
    assert 1.9 * inferred < thin.parts["compute"] < 0.8 * whole.parts["compute"]
    assert thin.parts["optimizer"] < whole.parts["optimizer"] / 50
    assert inferred > plain


def test_what_ranks_send_each_other():
    """On a slow network: gathers of every pass cost more than a gather of every step, gradients of every micro-batch
    more than those of a step, copies in each node less than one copy over all."""
    slow, work = ClusterSpec.of("a100:4x8@10gbps"), replace(WORK, micro_tokens=2048)
    sent = {
        name: simulator(strategy, work, slow).cost(TRAIN, at(strategy)).parts["data_parallel"]
        for name, strategy in {
            "1": ZeRO(stage=1), "2": ZeRO(stage=2), "3": ZeRO(stage=3), "fsdp": FSDP(), "hsdp": FSDP(replicate=2),
        }.items()
    }  # fmt: skip
    assert sent["1"] < sent["2"] < sent["3"]
    assert sent["1"] < sent["fsdp"] < sent["3"]
    assert sent["hsdp"] < sent["fsdp"]
    assert simulator(FSDP(), work, slow).cost(INFER, at(FSDP())).parts["data_parallel"] > 0
    assert "data_parallel" not in simulator(ZeRO(stage=2), work, slow).cost(INFER, at(ZeRO(stage=2))).parts


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([FSDP(), FSDP(reduce_often=True), FSDP(lora=LoRA()), ZeRO(stage=1), ZeRO(stage=2), ZeRO(stage=3)]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 4]),
)
def test_more_devices_are_not_slower_and_hold_no_more(strategy, devices, minibatches):
    work, one_node = replace(WORK, minibatches=minibatches), ClusterSpec.of("h100:1x32")
    priced = simulator(strategy, work, one_node)
    few, many = (at(strategy, mesh=Mesh.of(0, n)) for n in (devices, 2 * devices))
    for call in (INFER, TRAIN):
        assert priced.cost(call, many).seconds <= priced.cost(call, few).seconds
        most, least = (priced.static("actor", plan) + priced.added(call, plan).active for plan in (few, many))
        assert least <= most * (1 + 1e-9)


def test_gradients_of_several_micro_batches_wait_whole_unless_they_are_reduced_often():
    small = replace(WORK, micro_tokens=2048)
    rarely, often = (simulator(s, small).added(TRAIN, at(s)).gathered for s in (FSDP(), FSDP(reduce_often=True)))
    assert rarely - often > 3 * MODEL.num_parameters
    assert simulator(Megatron(), small).added(TRAIN, at(Megatron())).gathered == 0


def test_settings_that_a_strategy_chooses_are_those_that_it_is_priced_with():
    whole, single = Megatron(), Megatron(dtype="float32")
    assert simulator(single).cost(INFER, at(single)).seconds > 5 * simulator(whole).cost(INFER, at(whole)).seconds
    assert simulator(single).static("actor", at(single)) == pytest.approx((4 + 4 + 8 / 16) * MODEL.num_parameters)
    plan = CallPlan(SIXTEEN, Parallel(1, 2, 8))
    assert simulator(single).cost(GENERATE, plan, 4e9) == simulator(whole).cost(GENERATE, plan, 4e9)
    changes: tuple[dict[str, Any], ...] = ({"recompute": True}, {"micro_tokens": 2048})
    for changed in changes:
        by_work, by_strategy = simulator(whole, replace(WORK, **changed)), simulator(Megatron(**changed))
        assert by_work.cost(TRAIN, plan) == by_strategy.cost(TRAIN, plan)
        assert by_work.added(TRAIN, plan) == by_strategy.added(TRAIN, plan)
        assert by_work.still("actor", plan) == by_strategy.still("actor", plan)
    shared, whole = (simulator(s).cost(INFER, at(s, 2)).parts["memory"] for s in (Megatron(), FSDP()))
    assert shared < whole  # FSDP's tensor parallel ranks do not share the sequence


def test_layouts_that_a_strategy_has_not():
    for strategy, parallel in (
        (FSDP(), Parallel(2, 1, 8, shards=8)),
        (FSDP(), Parallel(1, 1, 16)),
        (FSDP(lora=LoRA()), Parallel(1, 2, 8, shards=8)),
        (ZeRO(stage=2), Parallel(1, 2, 8)),
        (Megatron(), Parallel(1, 1, 16, shards=16)),
    ):
        with pytest.raises(ModelError):
            simulator(strategy).cost(TRAIN, CallPlan(SIXTEEN, parallel))
    assert simulator(FSDP()).cost(GENERATE, CallPlan(SIXTEEN, Parallel(1, 2, 8))).seconds > 0
    with pytest.raises(ModelError):
        simulator(FSDP()).cost(GENERATE, at(FSDP()))
    assert Backend.of(FSDP(replicate=3)).parallel(1, 1, 16) is None
    assert Backend.of(FSDP(tp=4, offload=True)).sized(Parallel(1, 2, 8, shards=8)) == FSDP(tp=2, dp=8, offload=True)
    assert Backend.of(Megatron(stage_layers=(1,))).sized(Parallel(2, 2, 4)) == Megatron(pp=2, tp=2, dp=4)
    with pytest.raises(PlacementError, match="shards must divide"):
        Parallel(d=4, shards=3)
    with pytest.raises(ConfigError, match="no prices"):
        Backend.of(object())  # type: ignore[arg-type]
    assert Backend.of(FSDP(ep=2)).parallel(1, 1, 8, 1, 4) == Parallel(d=8, shards=8, ep=4)
    assert Backend.of(FSDP(replicate=4)).parallel(1, 1, 8, 1, 4) is None
    assert Backend.of(ZeRO(stage=2)).parallel(1, 1, 8, 1, 2) is None


def test_weights_of_shards_are_gathered_for_generation():
    generating = CallPlan(SIXTEEN, Parallel(1, 1, 16))
    found = simulator(FSDP()).reallocation("actor", at(FSDP()), generating)
    assert found >= 15 / 16 * 2 * MODEL.num_parameters / 300e9
    assert simulator(ZeRO(stage=2)).reallocation("actor", at(ZeRO(stage=2)), generating) == 0


def test_weights_that_wait_in_host_memory_come_from_there_and_go_back():
    node = NodeSpec(replace(DEVICES["a100"], host=1e9), 8, 300e9)
    slow, usual = ClusterSpec((node,) * 4, 25e9), ClusterSpec.of("a100:4x8@200Gbps")
    home, there = (CallPlan(Mesh.of(start, 8), Parallel(1, 8, 1)) for start in (0, 8))
    took = [simulator(None, WORK, cluster).reallocation("critic", home, there) for cluster in (usual, slow)]
    copies = 2 * 2 * replace(MODEL, head="value").num_parameters / 8
    assert took[1] - took[0] == pytest.approx(copies * (1 / 1e9 - 1 / 25e9), rel=0.1)
    inside = CallPlan(Mesh.of(0, 8), Parallel(1, 2, 4))  # a generation engine in the processes that train
    took = [simulator(None, WORK, cluster).reallocation("actor", home, inside) for cluster in (usual, slow)]
    assert took[0] == took[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_of_transformers_keeps_what_is_counted(dtype):
    """Bytes that autograd saves of one more layer."""
    spec = ModelSpec(family="llama", hidden=128, intermediate=320, layers=1, heads=4, kv_heads=2, head_dim=32, vocab=64)
    graph = replace(ppo(spec, replace(spec, head="value")), strategies={"actor": ZeRO(stage=1)})
    priced = Costs(ClusterSpec.of("a100:1x1"), graph, replace(WORK, dtype=dtype))
    setting = priced.context("actor", CallPlan(Mesh.of(0, 1), Parallel()), "training")
    assert setting is not None
    two, three = (_saved(replace(spec, layers=layers), getattr(torch, dtype)) for layers in (2, 3))
    assert three - two == pytest.approx(saved_activations(setting), rel=0.03)


def _saved(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Bytes per token that a forward pass saves for the backward pass, parameters apart."""
    model = TransformersModel(spec, dtype)
    model.to_empty(device="cpu")
    model.make_buffers(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    rows, length = 2, 64
    ids, positions = torch.zeros(rows, length, dtype=torch.int64), torch.arange(length).expand(rows, length)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, torch.arange(rows * length), positions, None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values()) / (rows * length)


# Rows of unlike lengths


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.sampled_from([(1, 1, 1), (2, 2, 2), (4, 1, 4)]),
    st.sampled_from([INFER, TRAIN]),
    st.sampled_from([1024, (300, 1024), [30] * 50 + [5000]]),
)
def test_more_rows_never_need_less_memory(rows, sizes, call, response):
    plan, work = (
        CallPlan(Mesh.of(0, sizes[0] * sizes[1] * sizes[2]), Parallel(*sizes)),
        replace(WORK, response=response),
    )
    few, many = (simulator(None, replace(work, rows=n)).added(call, plan).active for n in (rows, rows + 3))
    assert few <= many


def test_the_longest_row_fits_although_it_is_longer_than_a_micro_batch():
    plan, usual = CallPlan(SIXTEEN, Parallel(1, 2, 8)), replace(WORK, micro_tokens=2048, response=(100, 200))
    tail = replace(usual, response=[100] * 99 + [20000])
    short, long = (simulator(None, work).added(TRAIN, plan) for work in (usual, tail))
    assert long.activations > 8 * short.activations
    assert long.logits > 20000 * MODEL.vocab / 2 * 4


def test_rows_that_end_early_leave_room_in_the_cache():
    plan, room = CallPlan(SIXTEEN, Parallel(1, 1, 16)), 4e9
    even, uneven = (
        simulator(None, replace(WORK, response=lengths)).cost(GENERATE, plan, room) for lengths in (1024, (256, 4096))
    )
    reserved = simulator(None, replace(WORK, response=4096)).cost(GENERATE, plan, room)
    assert uneven.seconds < reserved.seconds / 3
    assert even.seconds < reserved.seconds
