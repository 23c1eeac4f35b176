"""Actors of models that only vLLM and transformers know train on FSDP or ZeRO, and generate with what they learnt.

Tokens are compared with transformers' own generation from what the actor saves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import hybridflow as hf
from hybridflow.errors import ModelError
from tests.tiny_models import SIZES, greedy, make_prompts, make_rows

SGD = hf.SGD(lr=0.5)
GREEDY: dict[str, Any] = {"kv_cache_gb": 0.02, "sampling": hf.Sampling(max_tokens=8, greedy=True)}
GEMMA2 = {**SIZES, "query_pre_attn_scalar": 32, "sliding_window": 8}
GPT2 = {**SIZES, "hidden_size": 128, "num_attention_heads": 4, "n_inner": 96}
QWEN3_MOE = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK_V2 = {**SIZES, "num_key_value_heads": 8, "head_dim": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
DEEPSEEK_V2 |= {"kv_lora_rank": 512, "q_lora_rank": None, "v_head_dim": 32, "moe_intermediate_size": 32}
DEEPSEEK_V2 |= {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK_V2 |= {"first_k_dense_replace": 1, "topk_method": "greedy"}
OLMO2 = {name: size for name, size in SIZES.items() if name != "head_dim"} | {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make(directory: Path, family: str, **sizes: Any) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **sizes)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return directory


def generated(group: hf.WorkerGroup, prompts: hf.Batch) -> list[list[int]]:
    batch = group.generate_sequences(hf.BatchRef.from_batch(prompts))
    return batch.get()["response_ids"].tolist()


def expected(checkpoint: str | Path, prompts: hf.Batch) -> list[list[int]]:
    return greedy(Path(checkpoint), prompts["prompt_ids"].tolist(), 8)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
OF_GLM = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
ALONE: list[tuple[str, Any, hf.FSDP, int]] = [
    ("gemma2", GEMMA2, hf.FSDP(), 2),
    ("deepseek_v2", DEEPSEEK_V2, hf.FSDP(), 1),  # kv_b_proj, which vLLM has views of, shares no memory with training
    ("olmo2", OLMO2, hf.FSDP(), 2),  # vLLM runs it on modules of transformers, whose classes train in the same process
]
BESIDE: list[tuple[str, Any, Any, hf.VLLM, hf.VLLM]] = [  # how it trains and generates, and generates elsewhere
    ("gpt2", GPT2, hf.ZeRO(stage=2), hf.VLLM(tp=1, **GREEDY), hf.VLLM(tp=2, **GREEDY)),  # whose matrices are turned
    ("gemma2", GEMMA2, hf.Megatron(tp=2), hf.VLLM(tp=2, **GREEDY), hf.VLLM(tp=1, **GREEDY)),
    *[
        (family, {**SIZES, **more}, train, hf.VLLM(tp=2, **GREEDY), hf.VLLM(tp=1, **GREEDY))
        for family, more, train in (
            ("qwen3_moe", EXPERTS, hf.Megatron(dp=2, ep=2)),
            ("glm4_moe", OF_GLM, hf.Megatron(tp=2, ep=2)),
        )
    ],
    *[
        ("qwen3_moe", QWEN3_MOE, train, *[hf.VLLM(tp=2, expert_parallel=True, **GREEDY)] * 2)
        for train in (hf.FSDP(), hf.FSDP(ep=2))
    ],
]


@pytest.mark.parametrize(("family", "sizes", "train", "tp"), ALONE, ids=[case[0] for case in ALONE])
def test_an_actor_generates_with_what_it_trains(pool, place, tmp_path, family, sizes, train, tp) -> None:
    policy, prompts = make(tmp_path / "model", family, **sizes), make_prompts(6)
    generate = hf.VLLM(tp=tp, **GREEDY)
    actor = place(hf.ActorWorker, pool[0:tp], model=policy, train=train, optim=SGD, generate=generate)
    before = generated(actor, prompts)
    assert before == expected(policy, prompts)
    _ = actor.update_actor(hf.BatchRef.from_batch(make_rows(8))).get()
    after = generated(actor, prompts)
    assert after == expected(actor.save(tmp_path / "saved"), prompts)
    assert after != before


@pytest.mark.parametrize(("family", "sizes", "train", "here", "elsewhere"), BESIDE, ids=[case[0] for case in BESIDE])
def test_weights_go_on_to_engines_elsewhere(pool, place, tmp_path, family, sizes, train, here, elsewhere) -> None:
    """Into engines of other sizes, which have other shares of the experts than training."""
    policy, prompts = make(tmp_path / "model", family, **sizes), make_prompts(6)
    actor = place(hf.ActorWorker, pool[0:2], model=policy, train=train, optim=SGD, generate=here)
    rollout = place(hf.RolloutWorker, pool[2 : 2 + elsewhere.tp], model=policy, generate=elsewhere)
    before = generated(rollout, prompts)
    assert before == expected(policy, prompts) == generated(actor, prompts)
    _ = actor.update_actor(hf.BatchRef.from_batch(make_rows(8))).get()
    after, saved = generated(actor, prompts), actor.save(tmp_path / "saved")
    assert after == expected(saved, prompts) != before
    assert hf.sync_weights(actor, rollout).get()["bytes"] > 0
    assert generated(rollout, prompts) == after


@pytest.mark.parametrize(
    "train", [hf.Megatron(tp=2, ep=2), hf.FSDP(), hf.FSDP(ep=2)], ids=("megatron", "fsdp", "fsdp-ep2")
)
def test_updates_follow_the_experts_of_generation(pool, place, tmp_path, train) -> None:
    """A router whose scores are almost equal chooses by rounding, so otherwise in each engine."""
    policy = make(tmp_path / "model", "qwen3_moe", **{**SIZES, **EXPERTS, "num_experts": 16})
    tensors = load_file(policy / "model.safetensors")
    nearly = {n: t * 1e-6 if n.endswith("mlp.gate.weight") else t for n, t in tensors.items()}
    save_file(nearly, policy / "model.safetensors", {"format": "pt"})
    sampling = hf.Sampling(max_tokens=8, seed=1)
    settings = {"model": policy, "train": train, "mismatch": hf.Mismatch(refuse=None, warn=None)}
    generate = hf.VLLM(tp=2, kv_cache_gb=0.02, expert_parallel=True, sampling=sampling)
    actor = place(hf.ActorWorker, pool[0:2], generate=generate, optim=hf.SGD(lr=0.01), replay_routing=True, **settings)
    other = place(hf.ActorWorker, pool[2:3], **{**settings, "train": hf.FSDP()})
    for _ in range(2):  # the second time with new weights
        rows = actor.generate_sequences(hf.BatchRef.from_batch(make_prompts(6)))
        assert "routed_experts" in rows.columns
        sampled = rows.get("log_probs")["log_probs"].values
        replayed, own = (g.compute_log_prob(rows).get()["old_log_probs"].values for g in (actor, other))
        assert float((replayed - sampled).abs().max()) < 1e-3
        assert float((own - sampled).abs().max()) > 1e-2
        rows |= actor.compute_log_prob(rows)
        rows |= hf.BatchRef.from_batch(hf.Batch({"advantages": rows.get("log_probs")["log_probs"]}))
        metrics = actor.update_actor(rows).get()
        assert 0.0 < metrics["actor/routing_difference"] < 1.0
        assert metrics["actor/log_prob_difference"] < 1e-3
        assert metrics["actor/log_prob_difference_without_replay"] > 1e-2
        _ = hf.sync_weights(actor, other).get()


def test_a_model_that_vllm_does_not_have_is_refused_before_anything_is_placed(pool, place, tmp_path) -> None:
    policy = make(tmp_path / "gpt_neox", "gpt_neox", **OLMO2)
    with pytest.raises(ModelError, match="vLLM has no model class GPTNeoXForCausalLM of its own"):
        place(hf.ActorWorker, pool[0:2], model=policy, train=hf.FSDP(), generate=hf.VLLM(**GREEDY))
