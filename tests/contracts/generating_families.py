"""Small random models of the families that generation takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dense_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_nope_head_dim", "index_head_dim"), 32),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "q_lora_rank": 64,
    "kv_lora_rank": 512,  # with the rotary part the size that vLLM's latent attention has on CPU
    "qk_rope_head_dim": 64,
    "vocab_size": 64,
    "initializer_range": 0.1,
    "initializer_std": 0.1,
    "max_position_embeddings": 128,
    "sliding_window": 8,
}


_OF_FAMILY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "first_k_dense_replace": 2},  # no experts: they are another matter
    "nemotron": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "gptj": {"rotary_dim": 16},
}


def small(family: str) -> dict[str, Any]:
    """The family's default config with few parameters; what it says of each layer it says of the first and last."""
    known = CONFIG_MAPPING[family]
    given = known().to_dict()
    layers = given.get("num_hidden_layers")
    for name, value in given.items():
        if name in _SMALL and value is not None:
            given[name] = _SMALL[name]
        elif isinstance(value, list) and len(value) == layers:
            given[name] = [value[0], value[-1]]
    given.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None))
    given |= _OF_FAMILY.get(family, {})
    return given


def make(path: Path, family: str) -> Path:
    config = CONFIG_MAPPING[family].from_dict(small(family))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert model.num_parameters() < 20_000_000
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return path
