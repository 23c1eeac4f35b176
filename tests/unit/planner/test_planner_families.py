"""Families, context and expert parallelism: what the planner counts is what tensors, torch and engines have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from benchmarks.dataflows import grpo
from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engines.fsdp.layout import check as check_fsdp
from hybridflow.engines.fsdp.layout import state_layout as fsdp_state
from hybridflow.engines.megatron.layout import check as check_megatron
from hybridflow.engines.megatron.layout import state_layout, weights_layout
from hybridflow.errors import ModelError, PlacementError
from hybridflow.models.hf_spec import Decoder, TransformersSpec, make_model, spec_of_config
from hybridflow.planner import ClusterSpec, Coefficients, Parallel, Pin, Workload, plan
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import STEP_TOKENS, image_activations
from hybridflow.planner.cost.pipeline_cost import images_forward, layer_forward, output_forward
from hybridflow.planner.describe.cluster_spec import DeviceSpec, NodeSpec
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.search.auto_mapping import AutoMapping
from hybridflow.planner.search.call_search import options_of
from tests.contracts.family_cases import FAMILIES, MEGATRON, config
from tests.vision_models import KINDS, sizes

LATENT: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "vocab_size": 61,
}
DENSE = ("llama", "qwen2", "qwen3", "mistral")
OF_DENSE = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 8}
OF_DENSE |= {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 61}
OTHERS = [name for name in ("gpt2", "opt", "gpt_neox", "cohere", "starcoder2", "phi") if name in FAMILIES]
EVERY = (*DENSE, *MEGATRON, *OTHERS, "latent")
WORK = Workload(rows=64, prompt=512, response=1536, minibatches=2, recompute=True)
MIXTURES = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral-6", "glm4_moe", "solar_open")


@cache
def spec(name: str) -> Decoder:
    if name in DENSE:
        return spec_of_config(AutoConfig.for_model(name, **OF_DENSE).to_dict(), "lm")
    return TransformersSpec.of(AutoConfig.for_model(**LATENT) if name == "latent" else config(name))


@pytest.mark.parametrize("name", EVERY)
def test_elements_are_those_of_the_tensors(name):
    size, tensors = Sizes.of(spec(name)), spec(name).tensors()
    every = sum(map(prod, tensors.values()))
    assert size.total == every
    assert sum(size.held(1, 1, 1)) == every
    routed = sum(prod(shape) for tensor, shape in tensors.items() if ".experts." in tensor)
    assert size.held(1, 1, 1)[1] == pytest.approx(routed)
    assert size.layers * size.layer + size.outside == every


@pytest.mark.parametrize("name", EVERY)
def test_arithmetic_is_what_torch_counts(name):
    """The seconds of one row, on a device of one operation per second; torch counts all pairs of tokens, and small
    products of rotations."""
    tokens, exact = 12, Coefficients(compute=1.0, attention=1.0, half_columns=0.0)
    device = DeviceSpec("slow", 1e12, {"bfloat16": 1.0}, 1e30)
    costs = Costs(ClusterSpec((NodeSpec(device, 1, 1.0),), 1.0), grpo(spec(name)), WORK, exact)
    context = costs.context("actor", CallPlan(Mesh.of(0, 1), Parallel()))
    assert context is not None
    priced = context.size.layers * layer_forward(context, tokens, tokens**2).compute
    priced += output_forward(context, tokens).compute
    model = make_model(spec(name).config, torch.float32, "eager", "eager").eval()
    ids = torch.arange(1, tokens + 1)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        model(ids, use_cache=False)
    assert counted.get_total_flops() == pytest.approx(priced, rel=0.02)


def test_layers_of_other_kinds_have_neither_keys_nor_experts():
    jamba, recurrent, aria = (Sizes.of(spec(name)) for name in ("jamba", "recurrent_gemma", "aria_text"))
    assert (jamba.experts, jamba.sparse) == (6, pytest.approx(1 / 3))  # no convolution is one
    assert (recurrent.expert, recurrent.each) == (0, ())
    assert jamba.keys_on(1) == pytest.approx(spec("jamba").kv_heads * 32 / spec("jamba").heads / 3)
    assert min(size.attention for size in (jamba, recurrent, aria)) > 0
    assert (aria.experts, aria.chosen, aria.sparse) == (6, 2, 1)


def test_windows_and_latent_caches_are_counted():
    size = Sizes.of(spec("gemma2-more"))
    assert size.seen(9) == pytest.approx(5 * 2 / 3 + 9 / 3)
    assert size.pairs(9, 81) == pytest.approx((2 * 5 * (18 - 5) / 2 + 81 / 2) / 3)
    latent = Sizes.of(spec("latent"))
    assert 2 * latent.keys_on(1) == 2 * latent.keys_on(4) == 16 + 4


def grids(experts: int) -> Iterator[Megatron]:
    for p, t, d in ((1, 1, 6), (2, 1, 6), (3, 2, 2), (1, 2, 6), (1, 4, 3)):
        for ep in (1, 2, 3, 6):
            strategy = Megatron(pp=p, tp=t, dp=d, ep=ep)
            if not experts % ep and not (t * d) % ep:
                yield strategy


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_hold_what_their_layouts_say(name):
    """Of whole tensors on each rank of a mixture, where nothing is a copy: t is 1."""
    model = spec(name)
    for strategy in grids(6):
        grid = strategy.grid((strategy.dp or 1) * strategy.tp * strategy.pp)
        parallel = Backend.of(strategy).parallel(grid.p, grid.t, grid.d, 1, strategy.ep)
        if name == "olmoe" and grid.t == 4:  # it normalises all kv-heads together
            continue
        held, state = weights_layout(strategy, model, grid), state_layout(strategy, model, grid)
        most = max(sum(region.box.numel for region in held.regions(rank)) for rank in range(grid.size))
        graph = replace(grpo(model), strategies={"actor": strategy})
        costs = Costs(ClusterSpec.of("a100:2x12"), graph, replace(WORK, dtype="float32"))
        assert parallel is not None
        found = costs.still("actor", CallPlan(Mesh.of(0, grid.size), parallel))
        copies = 0.12 if grid.t > 1 else 0.0 if grid.p == 1 else 0.02  # norms, routers; biases of routers
        assert found.parameters / 4 == pytest.approx(most, rel=copies + 1e-9)
        owned = [sum(region.box.numel for region in state.regions(rank)) for rank in range(grid.size)]
        if grid.p == grid.t == 1:
            assert found.optimizer / 8 * grid.size == pytest.approx(sum(owned), rel=0.01)


STRATEGIES = Megatron(), Megatron(etp=1), Megatron(packed=False), FSDP(), FSDP(replicate=2), ZeRO(stage=2)


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from((*MIXTURES, *DENSE, "gemma2-more", "phi3-window")),
    strategy=st.sampled_from(STRATEGIES),
    sizes=st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 8)), st.sampled_from((1, 2, 3, 4, 6, 8, 12))),
    contexts=st.sets(st.sampled_from((1, 2, 4, 8)), min_size=1),
)
def test_engines_take_whatever_is_proposed(name, strategy, sizes, contexts):
    """By the engines' own checks, and the grids' own constructors."""
    backend, model = Backend.of(strategy), spec(name)
    for found in backend.layouts(model, Parallel(*sizes), sorted(contexts)):
        made = backend.sized(found)
        grid = made.grid(found.size)
        assert (grid.p, grid.t, grid.d) == found.sizes
        assert (grid.experts.ep, grid.experts.etp) == (found.ep, found.columns)
        check: Any = check_megatron if isinstance(made, Megatron) else check_fsdp
        check(made, model, grid)


@cache
def mixture() -> Decoder:
    """Qwen3-30B-A3B with half of its layers."""
    sizes = {"num_hidden_layers": 24, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    more = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    return TransformersSpec.of(AutoConfig.for_model("qwen3_moe", head_dim=128, vocab_size=151936, **sizes, **more))


def at(costs: Costs, call: str, *sizes: int) -> CallPlan:
    p, t, d, cp, ep = (*sizes, 1, 1)[:5]
    return CallPlan(Mesh.of(0, p * t * d), Parallel(p, t, d, cp=cp, ep=ep))


def test_experts_are_shared_stepped_and_reached_by_their_ranks():
    costs = Costs(ClusterSpec.of("h100:2x8"), grpo(mixture()), WORK)
    size = Sizes.of(mixture())
    alone, shared = (costs.still("actor", at(costs, "", 1, 1, 8, 1, ep)) for ep in (1, 8))
    routed = size.layers * size.expert
    assert alone.parameters - shared.parameters == pytest.approx(2 * routed * 7 / 8)
    assert alone.gradients - shared.gradients == pytest.approx(4 * routed * 7 / 8)
    assert alone.optimizer == pytest.approx(shared.optimizer)  # a share of experts that all have, or all of a share
    one, many = (costs.cost("actor.update_actor", at(costs, "", 1, 1, 8, 1, ep)).parts for ep in (1, 8))
    assert "exchange" not in one
    assert many["exchange"] > 0
    assert many["data_parallel"] < one["data_parallel"] / 2
    far = costs.cost("actor.update_actor", at(costs, "", 1, 1, 16, 1, 16)).parts
    assert far["exchange"] > 1.2 * many["exchange"]  # half of the rows on a rank, but over the network


def test_ranks_of_fsdp_gather_only_experts_of_their_kind():
    graph = replace(grpo(mixture()), strategies={"actor": FSDP()})
    costs, size = Costs(ClusterSpec.of("h100:1x8"), graph, WORK), Sizes.of(mixture())
    alone, shared = (CallPlan(Mesh.of(0, 8), Parallel(d=8, shards=8, ep=ep)) for ep in (1, 4))
    assert costs.static("actor", shared) == pytest.approx(costs.static("actor", alone))
    less = [costs.added("actor.compute_log_prob", at).gathered for at in (alone, shared)]
    assert less[0] - less[1] == pytest.approx(2 * 2 * size.expert * 3 / 4)
    whole, parts = (costs.cost("actor.update_actor", at).parts for at in (alone, shared))
    assert parts["exchange"] > 0
    assert parts["data_parallel"] < whole["data_parallel"] / 2


def test_ranks_that_share_rows_share_activations_and_exchange_heads():
    costs = Costs(ClusterSpec.of("h100:1x8"), grpo(spec("llama")), replace(WORK, recompute=False, response=32000))
    whole, halves, parts = (costs.added("actor.update_actor", at(costs, "", 1, 1, 8, cp)) for cp in (1, 2, 4))
    assert halves.activations == pytest.approx(whole.activations / 2)
    assert parts.logits == pytest.approx(whole.logits / 4, rel=0.1)
    alone, shared = (costs.cost("actor.update_actor", at(costs, "", 1, 1, 8, cp)) for cp in (1, 4))
    assert "exchange" not in alone.parts
    assert shared.parts["exchange"] > 0
    assert shared.parts["compute"] == pytest.approx(alone.parts["compute"], rel=0.05)


def test_engines_generate_without_ranks_that_share_experts():
    costs = Costs(ClusterSpec.of("h100:1x4"), grpo(mixture()), WORK).sharing_rows()
    options = dict(zip([call.name for call in costs.calls], options_of(costs, prune=False), strict=True))
    assert {option.plan.parallel.ep for option in options["actor.update_actor"]} > {1}
    generating = [option.plan.parallel for option in options["actor.generate_sequences"]]
    assert generating
    assert {(one.cp, one.ep, one.etp) for one in generating} == {(1, 1, None)}


def test_a_mixture_gets_expert_parallel_ranks():
    work = replace(WORK, rows=1024)
    placed = plan(grpo(mixture()), "h100:1x8", work, per_call=False)
    assert isinstance(train := placed["actor"].train, Megatron)
    assert train.ep > 1
    assert f"ep={train.ep}" in placed.calls["actor.update_actor"].layout
    assert f"ep={train.ep}" in placed.explain()
    pinned = plan(grpo(mixture()), "h100:1x8", work, [Pin("actor", parallel=Parallel(1, 2, 4, ep=4))], per_call=False)
    assert pinned["actor"].train == replace(train, tp=2, pp=1, dp=4, ep=4)
    assert pinned.seconds >= placed.seconds * (1 - 1e-6)
    with pytest.raises(PlacementError, match=r"128 experts, not divisible by ep=3"):
        plan(grpo(mixture()), "h100:1x6", WORK, [Pin("actor", parallel=Parallel(1, 1, 6, ep=3))])


def test_rows_that_do_not_fit_are_shared():
    long = Workload(rows=16, prompt=1024, response=160_000, recompute=True)
    sizes = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32}
    model = spec_of_config(AutoConfig.for_model("phi3", **sizes, vocab_size=32064).to_dict(), "lm")
    graph = replace(grpo(model), strategies=dict.fromkeys(("actor", "reference"), FSDP()))
    assert AutoMapping(Costs(ClusterSpec.of("h100:1x8"), graph, long)).first is None
    placed = plan(graph, "h100:1x8", long, per_call=False, budget_s=2)
    assert isinstance(train := placed["actor"].train, FSDP)
    assert train.cp > 1
    assert f"cp={train.cp}" in placed.calls["actor.update_actor"].layout


def test_families_without_prices_are_refused_by_their_reason():
    with pytest.raises(ModelError, match="Megatron does not compute gpt2"):
        plan(replace(grpo(spec("gpt2")), strategies={"actor": Megatron()}), "h100:1x8", WORK)


# Images


@cache
def vision(kind: str) -> Decoder:
    return TransformersSpec.of(sizes(kind, num_hidden_layers=3))


def image_costs(kind: str, strategy: Any, work: Workload) -> Any:
    exact = Coefficients(compute=1.0, attention=1.0, half_columns=0.0)
    node = NodeSpec(DeviceSpec("slow", 1e12, {"bfloat16": 1.0, "float32": 1.0}, 1e30), 8, 1.0)
    graph = replace(grpo(vision(kind)), strategies={"actor": strategy})
    return Costs(ClusterSpec((node,), 1.0), graph, work, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_what_encodes_images_is_counted(kind):
    """Its elements, on ranks that train whole, and its arithmetic beside that of the text."""
    model, size, side = vision(kind), Sizes.of(vision(kind)), 16
    tower = sum(prod(shape) for name, shape in model.tensors().items() if "visual" in name)
    assert size.tower.elements == tower
    assert size.embedding == 96 * size.hidden
    assert sum(size.held(1, 1, 1)) == sum(map(prod, model.tensors().values()))
    assert sum(size.held(1, 2, 2)) == pytest.approx((size.total - tower) / 2 + tower)
    assert sum(size.held(1, 2, 2, 2)) == pytest.approx(size.total / 2)
    costs = image_costs(kind, FSDP(), replace(WORK, patches=side**2))
    context = costs.context("actor", CallPlan(Mesh.of(0, 1), Parallel()))
    module: Any = make_model(model.config, torch.float32).get_submodule("model.visual").eval()
    module.set_attn_implementation("eager")
    pixels, grid = torch.zeros(2 * side**2, size.tower.patch), torch.tensor([[1, side, side]] * 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        module(pixels, grid_thw=grid)
    assert counted.get_total_flops() == pytest.approx(images_forward(context, 2).compute, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_encodes_images_keeps_is_what_autograd_saves(kind, dtype):
    model, kept = vision(kind), dict[int, int]()
    module = make_model(model.config, getattr(torch, dtype)).get_submodule("model.visual")
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in parameters:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    costs = image_costs(kind, FSDP(), replace(WORK, patches=256, recompute=False, dtype=dtype))
    context = costs.context("actor", CallPlan(Mesh.of(0, 1), Parallel()))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or pack(one), lambda one: one):
        module(torch.zeros(256, Sizes.of(model).tower.patch, dtype=getattr(torch, dtype)), torch.tensor([[1, 16, 16]]))
    found, _ = image_activations(context, 256, training=True)
    assert found - 256 * Sizes.of(model).tower.patch * 4 == pytest.approx(sum(kept.values()), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_has_no_gradients_state_or_backward_pass(kind):
    work = replace(WORK, patches=64, recompute=False, dtype="float32")
    whole, apart = (image_costs(kind, FSDP(freeze=freeze), work) for freeze in ((), ("visual",)))
    at, tower = CallPlan(Mesh.of(0, 2), Parallel(d=2, shards=2)), Sizes.of(vision(kind)).tower
    all_of_it, less = (costs.still("actor", at) for costs in (whole, apart))
    assert less.parameters == all_of_it.parameters
    assert all_of_it.gradients - less.gradients == pytest.approx(4 * tower.elements / 2)
    assert all_of_it.optimizer - less.optimizer == pytest.approx(8 * tower.elements / 2)
    context = apart.context("actor", at)
    seconds = [costs.cost("actor.update_actor", at).parts["compute"] for costs in (whole, apart)]
    backward = 2 * images_forward(context, WORK.rows / 2).compute
    assert seconds[0] - seconds[1] == pytest.approx(backward, rel=1e-3)
    same = [costs.cost("actor.compute_log_prob", at).parts["compute"] for costs in (whole, apart)]
    assert same[0] == same[1]
    attention = image_costs(kind, FSDP(freeze=("self_attn",)), work)
    text = attention.cost("actor.update_actor", at).parts["compute"]
    matrices = [shape for name, shape in vision(kind).tensors().items() if "self_attn" in name and len(shape) == 2]
    by_weights = 2 * WORK.rows / 2 * WORK.tokens * sum(map(prod, matrices))
    assert seconds[0] - text == pytest.approx(by_weights, rel=0.02)
    grid, strategy = FSDP().grid(2), FSDP(freeze=("visual",))
    state = fsdp_state(strategy, vision(kind), grid)
    owned = max(sum(region.box.numel for region in state.regions(rank)) for rank in range(2))
    assert less.optimizer / 8 == pytest.approx(owned, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_leaves_memory_to_the_images_of_a_step(kind):
    """Also for rows of text, as vLLM measures it when it starts; a bound on images gives it to the KV cache."""
    call, at, taken, left = "actor.generate_sequences", CallPlan(Mesh.of(0, 1), Parallel()), [], []
    for most in (16384, STEP_TOKENS, 1024):
        costs = image_costs(kind, FSDP(), replace(WORK, image_tokens=most))
        taken.append(costs.added(call, at).activations)
        left.append(costs.kv_budget(call, at))
    assert taken[0] == taken[1] == 8 * taken[2] > 0  # an image is no longer than rows are
    assert left[2] - left[1] == pytest.approx(taken[1] - taken[2])
    assert not Costs(costs.cluster, grpo(spec("llama")), WORK).added(call, at).activations
