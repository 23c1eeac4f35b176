"""What vLLM on CPU needs of attention heads, of models that hybridflow knows from transformers only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster import device
from hybridflow.config import VLLM, Sampling
from hybridflow.engines.vllm.requirements import check, check_response, head_dim
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from tests.vision_models import sizes

OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {"vocab_size": 64, "max_position_embeddings": 64}
MAMBA = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 64}
GEMMA = {"model_type": "gemma2", "hidden_size": 16, "num_attention_heads": 2, "head_dim": 64, "num_hidden_layers": 1}


def spec(config) -> TransformersSpec:
    return TransformersSpec.of({**SMALL, **config})


def test_heads_are_of_what_the_layers_compute_with():
    narrow = spec(OPT | {"word_embed_proj_dim": 32})
    assert narrow.hidden == 32
    assert head_dim(narrow) == 32
    check(narrow, VLLM(max_length=32), "cpu")
    assert head_dim(spec(GEMMA)) == 64


def test_a_model_without_attention_is_refused():
    with pytest.raises(ModelError, match="this mamba model has no attention heads"):
        check(spec(MAMBA), VLLM(max_length=32), "cpu")


LATENT = {"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"qk_rope_head_dim": 64, "q_lora_rank": None, "first_k_dense_replace": 1, "kv_lora_rank": 512}
LATENT |= {"model_type": "deepseek_v2", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def test_latent_attention_is_taken_where_it_has_been_shown_to_follow_training():
    """W_UV and W_UK_T are views of kv_b_proj on CPU, whose kernel has one size."""
    check(spec(LATENT), VLLM(max_length=32), "cpu")
    with pytest.raises(ModelError, match="kv_lora_rank=512 and qk_rope_head_dim=64; this deepseek_v2 model has 256"):
        check(spec(LATENT | {"kv_lora_rank": 256}), VLLM(max_length=32), "cpu")
    with pytest.raises(ModelError, match="derives matrices of the latent attention of deepseek_v2"):
        check(spec(LATENT), VLLM(max_length=32), "cuda")
    other = replace(spec(LATENT), family="axk1")
    with pytest.raises(ModelError, match=r"derives matrices of the latent attention of axk1.*without kv_lora_rank"):
        check(other, VLLM(max_length=32), "cpu")


def test_the_cache_of_latent_attention_is_counted():
    long = spec(LATENT | {"max_position_embeddings": 1 << 20})
    check(long, VLLM(max_length=4096, kv_cache_gb=0.01), "cpu")
    with pytest.raises(ConfigError, match="holds no sequence of 8192 tokens"):
        check(long, VLLM(max_length=8192, kv_cache_gb=0.01), "cpu")


@pytest.mark.parametrize("family", ["cohere2", "cohere2_moe"])
def test_windows_that_vllm_computes_wider_are_refused(family):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}
    sizes = {"model_type": family, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, **heads}
    full, local = (spec(sizes | {"layer_types": [kind]}) for kind in ("full_attention", "sliding_attention"))
    check(full, VLLM(max_length=32), "cpu")
    with pytest.raises(ModelError, match=f"computes {family} with windows of sliding_window \\+ 1 tokens"):
        check(local, VLLM(max_length=32), "cpu")


def test_heads_of_other_sizes_are_refused():
    with pytest.raises(ModelError, match=r"head_dim=16\. Use a model with another head_dim"):
        check(spec(OPT | {"num_attention_heads": 4}), VLLM(max_length=32), "cpu")


def test_max_tokens_that_leave_no_room_for_a_prompt():
    opt = spec(OPT)
    check(opt, VLLM(), "cpu")  # who asks for nothing gets 256, or what there is room for
    assert VLLM().sampling.longest == 256
    check(opt, VLLM(sampling=Sampling(max_tokens=63)), "cpu")
    with pytest.raises(ConfigError, match=r"max_tokens=64 .* the model's context is 64 .* Use max_tokens below 64\.$"):
        check(opt, VLLM(sampling=Sampling(max_tokens=64)), "cpu")
    with pytest.raises(ConfigError, match=r"VLLM\(max_length=32\) is 32 .* below 32, or max_length up to 64\."):
        check(opt, VLLM(max_length=32, sampling=Sampling(max_tokens=32)), "cpu")
    with pytest.raises(ConfigError, match="max_tokens=500 leaves no room"):
        check_response(opt, VLLM(sampling=Sampling(max_tokens=5)), 500)


def test_the_first_stage_holds_the_layers_that_images_are_added_to():
    """As vLLM asserts on every other stage, of which the driver would see the end of a process."""
    found = sizes("qwen3_vl", num_hidden_layers=4).to_dict()
    check(TransformersSpec.of(found), VLLM(pp=4, max_length=32), "cpu")
    deep = found | {"vision_config": found["vision_config"] | {"deepstack_visual_indexes": [0, 1]}}
    check(TransformersSpec.of(deep), VLLM(pp=2, max_length=32), "cpu")
    refused = r"VLLM\(tp=1, pp=3\): images are added to the first 2 layers of this qwen3_vl.* has 1 of 4\. Use fewer"
    with pytest.raises(ModelError, match=refused):
        check(TransformersSpec.of(deep), VLLM(pp=3, max_length=32), "cpu")


MODEL = ModelSpec(family="qwen3", hidden=128, intermediate=64, layers=2, heads=4, kv_heads=4, head_dim=32, vocab=64)


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [((7, 5), object(), r"this is Tesla T4 with 7\.5"), ((9, 0), None, "Triton is not installed")],
)
def test_devices_without_batch_invariant_kernels_are_refused(monkeypatch, capability: Any, triton: Any, why: str):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(device, "find_spec", lambda _: triton)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with pytest.raises(ConfigError, match=rf"deterministic=True.*{why}.*Leave it out"):
        device.make_deterministic(0)


def test_sums_over_many_ranks_are_refused(monkeypatch):
    check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"VLLM\(tp=4\).*deterministic=True.*Use tp=1 or tp=2"):
        check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    check(MODEL, hf.VLLM(tp=2, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cpu")
