"""Decoders that only transformers knows, on FSDP and ZeRO: what transformers itself computes and how it is trained, on
every grid."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hybridflow.config import FSDP, ZeRO
from hybridflow.engines.attention import register_packed_attention
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.fsdp.layout import check_tensor_parallel, weights_layout
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.hf_spec import TransformersSpec, read_spec
from tests.contracts import any_model_tasks as tasks
from tests.contracts.any_model_tasks import expected, make
from tests.contracts.example_models import relative
from tests.contracts.family_cases import QUICK_ON_SHARDS, SHARDED_CASES, config, marked, spread
from tests.contracts.rank_processes import DEVICE
from tests.contracts.train_contract import assert_trains, whole


@pytest.fixture(scope="module")
def directories(family) -> Callable[[str], Path]:
    return lambda name: family(name)[0]


@pytest.mark.parametrize("strategy", [FSDP(dp=2), ZeRO(stage=2, dp=2)], ids=("fsdp", "zero"))
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_it_is_transformers_value_model_that_is_trained(processes, family, tmp_path, name, strategy):
    assert_trains(processes, strategy, *family(name, "value"), tmp_path / "saved", "value")


@pytest.mark.parametrize(
    ("name", "tp", "says"),
    [
        ("gpt2", 2, "transformers has no plan"),
        ("mixtral", 2, "styles moe_tp_experts, packed_colwise"),
        ("gemma2", 4, r"2 kv-heads, which do not divide by tp=4. Use FSDP\(tp=\) in \[1, 2\]"),
    ],
)
def test_plans_that_cannot_be_followed_are_refused(directories, name, tp, says):
    spec = read_spec(directories(name), "lm")
    with pytest.raises(ModelError, match=says):
        check_tensor_parallel(spec, tp, "actor")


def test_ways_to_save_memory_and_16_bits(processes, directories, family):
    for name, strategy in (
        ("gemma2", FSDP(recompute=True, micro_tokens=40)),
        ("gemma2", ZeRO(stage=2, packed=False)),  # windows of padded rows need no mask
        ("mixtral", ZeRO(stage=1, recompute=True)),
        ("gpt2", FSDP(offload=True, packed=False)),
    ):
        args = (processes.name(), strategy, directories(name))
        for part in processes.run(2, tasks.norms, *args):
            assert part == pytest.approx(family(name)[1]["norms"][:1], rel=1e-5)
    strategy = ZeRO(stage=3, dtype="bfloat16")
    args = (processes.name(), strategy, directories("mixtral"))
    for part in processes.run(2, tasks.norms, *args):
        assert part == pytest.approx(family("mixtral")[1]["norms"][:1], rel=0.05)


def test_attention_that_is_not_ours_is_refused():
    model = AutoModelForCausalLM.from_config(config("gpt_oss"), attn_implementation=register_packed_attention())
    with pytest.raises(ModelError, match="GptOssAttention attends with s_aux, which packed attention"):
        model(torch.tensor([[3, 4, 5]]), use_cache=False)


def test_ranks_may_have_gradients_of_other_parameters(processes, tmp_path):
    path = make("rwkv", "lm", tmp_path / "rwkv")
    want = expected(path, "lm")["norms"]
    few = FSDP(micro_tokens=40)
    for strategy, near in ((FSDP(), 1e-5), (few, 1e-5), (replace(few, dtype="bfloat16"), 0.1)):
        for found in processes.run(2, tasks.norms_of_one, processes.name(), strategy, path):
            assert found == pytest.approx(want, rel=near)


def test_a_model_that_infers_keeps_its_weights(processes, tmp_path):
    """rwkv divides those of layers from the seventh on by powers of two."""
    path = make("rwkv", "lm", tmp_path / "rwkv", num_hidden_layers=8)
    spec = read_spec(path, "lm")
    found = processes.run(2, tasks.loaded, processes.name(), FSDP(), path, True)
    assert relative(whole(found, spec.tensors()), tasks.tensors(path, spec.tensors())) == 0


def test_experts_are_cut_as_everything_else(processes, directories):
    spec = read_spec(directories("mixtral"), "lm")
    name = "model.layers.0.block_sparse_moe.experts.2.w3.weight"
    assert spec.tensors()[name] == (48, 32)
    for dp in (1, 2, 3):
        layout = weights_layout(FSDP(), spec, FSDP(dp=dp).grid(dp))
        held = [{region.box.tensor: region.box.shape for region in layout.regions(rank)} for rank in range(dp)]
        assert [(48, 32) if rank == dp - 1 else None for rank in range(dp)] == [part.get(name) for part in held]
        assert sum(math.prod(shape) for part in held for shape in part.values()) == spec.num_parameters
    found = processes.run(2, tasks.held, processes.name(), FSDP(), directories("mixtral"))
    assert max(found) < 0.65 * 4 * spec.num_parameters  # rows are padded: of three experts, one of two ranks has one


def test_files_without_the_name_of_the_base_model_are_read(processes, directories, tmp_path):
    path = directories("gpt2")
    shutil.copytree(path, tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, file, metadata={"format": "pt"})
    spec = read_spec(tmp_path / "hub", "lm")
    Checkpoint(tmp_path / "hub").check(spec)
    found = processes.run(2, tasks.loaded, processes.name(), FSDP(), tmp_path / "hub")
    assert relative(whole(found, spec.tensors()), tasks.tensors(path, spec.tensors())) == 0


def test_norms_around_one_begin_as_the_model_itself_begins():
    assert "model.layers.0.input_layernorm.weight" in TransformersSpec.of(config("gemma2")).zeros
    assert not TransformersSpec.of(config("olmo2")).zeros
    assert {n.rpartition(".")[2] for n in TransformersSpec.of(config("gpt2")).zeros} == {"bias"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model_type": "gema2"}, "'gema2' is not supported.* Did you mean 'gemma2'"),
        ({"model_type": "llama"}, "lacks hidden_size"),
        ({"model_type": "gemma2", "quantization_config": {"quant_method": "fp8"}}, "is quantized"),
        ({"model_type": "bert"}, "bert model sees later tokens.*is_decoder"),
        ({"model_type": "roberta"}, "roberta model sees later tokens.*is_decoder"),
        ({"model_type": "xlnet"}, "xlnet model sees later tokens.*Use a causal model"),
        ({"model_type": "gemma3"}, "more than a text decoder"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_before_anything_is_made(tmp_path, settings, says):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=says):
        read_spec(tmp_path, "lm")


@pytest.mark.parametrize("settings", [{"model_type": "gpt_neox"}, {"model_type": "bert", "is_decoder": True}])
def test_what_a_config_says_of_decoders_matters_less_than_what_it_computes(settings):
    assert TransformersSpec.of(settings).family == settings["model_type"]


def test_a_checkpoint_of_other_tensors_is_refused(directories):
    spec = read_spec(directories("mixtral"), "lm")
    with pytest.raises(CheckpointError, match=r"lacks .* such as"):
        Checkpoint(directories("olmo2")).check(spec)


CASES: list[Any] = marked(SHARDED_CASES, QUICK_ON_SHARDS)
if DEVICE.type == "cuda":  # emulated: all of them would take hours, and these need a convolution that it lacks
    convolving = ("falcon_mamba", "jamba", "mamba", "qwen3_next", "recurrent_gemma")
    CASES = sorted(case for case in spread(SHARDED_CASES) if case[0] not in convolving)


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_it_computes_and_trains_as_transformers_does(processes, family, tmp_path, name, grid):
    strategy, (path, want) = SHARDED_CASES[name, grid], family(name)
    parts, spec = assert_trains(processes, strategy, path, want, tmp_path / "saved")
    if isinstance(strategy, FSDP) and (strategy.tp == 1 or not getattr(spec, "experts", ())):  # tp cuts no experts
        assert max(part["bytes"] for part in parts) < 0.8 * 4 * spec.num_parameters
