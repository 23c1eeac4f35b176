"""Mixtures of experts in vLLM: small models, and what the processes of test_expert_generation.py do with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config import VLLM, Sampling, Until
from hybridflow.engine3d.layout import Box
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import World

SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 3},  # not the same number on each of two ranks
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    | {"head_dim": 32, "query_pre_attn_scalar": 32},
    "deepseek_v2": LATENT | {"n_routed_experts": 4, "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": LATENT | {"n_routed_experts": 8, "n_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
PROMPTS = [[5, 9, 33, 69], [12, 7], list(range(3, 20)), [60]]
SEEDS = [11, 12, 13, 14]
GREEDY = Sampling(max_tokens=10, greedy=True, ignore_eos=True)


def make(directory: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """A random model whose router decides clearly, with norms and biases that count."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    model: Any = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("gate.weight"):
                tensor.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def strategy(**options: Any) -> VLLM:
    return VLLM(**{"kv_cache_gb": 0.02, "memory_fraction": 0.2, "max_sequences": 16, "dtype": "float32", **options})


def build(world: World, name: str, directory: Path, chosen: VLLM) -> VLLMEngine:
    """An engine without weights."""
    context = world.context(name, RankGrid(chosen.pp, chosen.tp))
    spec = read_spec(directory, "lm")
    world.engines.append(VLLMEngine(context, chosen, context.grid.generation(chosen.pp, chosen.tp), spec, directory))
    return world.engines[-1]


def write(engine: VLLMEngine, rank: int, directory: Path) -> None:
    """The checkpoint's weights, through the layout; all else is poisoned first."""
    weights, storage = load_file(directory / "model.safetensors"), engine.storage()
    for tensor in storage.values():
        tensor.fill_(1e4)
    for region in engine.layout().regions(rank):
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        region.view(storage[region.storage]).copy_(weights[region.box.tensor][box])
    engine.weights_changed()


def experts(engine: VLLMEngine, rank: int) -> dict[str, list[str]]:
    """The experts that lie whole on this rank, by layer."""
    tensors, held = engine.layout().tensors, Counter[str]()
    for region in engine.layout().regions(rank):
        if "experts." in (name := region.box.tensor) and "shared" not in name:
            assert region.box == Box.whole(name, tensors[name])
            held[name.rsplit(".", 2)[0]] += 1
    found = defaultdict[str, list[str]](list)
    for name, matrices in held.items():
        assert matrices == 3
        found[name.rpartition(".")[0]].append(name)
    return dict(found)


def generated(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Greedy tokens and log-probabilities with the weights of the one and then of the other, and where experts lie."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {"experts": experts(engine, world.rank)}
    for directory in (first, then):
        write(engine, world.rank, directory)
        rows = engine.generate(PROMPTS, GREEDY)
        found[directory.name] = [(row.token_ids, row.log_probs) for [row] in rows]
    return found


LONG = list(range(2, 66)) * 2 + list(range(20, 40))  # more than a block of the KV cache
SHARED = [[*LONG, 60], [*LONG, 5, 9, 33], [12, 7], [*LONG, 60]]
DRAWN = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)


def plain(row: Row) -> dict[str, Any]:
    assert row.routed_experts is not None
    return {"ids": row.prompt_ids + row.token_ids, "experts": row.routed_experts, "prefilled": row.prefilled}


def captured(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Rows with shared prefixes, conversations of two turns, and both again after other weights were written."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {"bytes": engine.cache_bytes}
    for at, directory in enumerate((first, then)):
        write(engine, world.rank, directory)
        calls = [engine.generate(SHARED, DRAWN, SEEDS) for _ in range(2)]  # the second finds the cache of the first
        turns = []
        prompts = [[5, 9, 33], LONG]
        for turn in range(2):
            rows = [Row(at * 10 + i, 0, prompt, DRAWN, turn, kept=True) for i, prompt in enumerate(prompts)]
            engine.submit(rows)
            engine.advance()
            done = sorted(engine.take(), key=lambda row: row.row_id)
            prompts = [row.prompt_ids + row.token_ids + [7, 8, 9] for row in done]
            turns.append([plain(row) for row in done])
        found[directory.name] = [*([plain(row) for [row] in rows] for rows in calls), *turns]
        engine.sleep()
        engine.wake()
    found["asleep"] = engine.sleep() or engine.cache_bytes
    return found


def waited(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Rows whose keys and values have waited while the engine slept, and rows of the same prompts that begin later,
    also under other weights."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {}
    for directory in (first, then):
        for kv in ("keep", "offload", "recompute"):
            write(engine, world.rank, first)
            engine.submit(engine.new_rows(SHARED, DRAWN, SEEDS))
            engine.advance(Until(steps=4))
            engine.sleep(kv)
            engine.wake()
            write(engine, world.rank, directory)
            fresh = engine.generate(SHARED, DRAWN, SEEDS)
            engine.advance()
            rows = sorted(engine.take(), key=lambda row: row.row_id)
            beside = [row for [row] in fresh]
            found[f"{directory.name} {kv}"] = [[asdict(row) for row in each] for each in (rows, beside)]
        found[directory.name] = [asdict(row) for [row] in engine.generate(SHARED, DRAWN, SEEDS)]
    return found
