"""Facts about transformers' decoders by family: which see later tokens, and which support packed rows.

Tests compute small copies of all families and keep these lists; transformers' version is pinned.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import ModelError

_ENCODER_NAMES = """
    bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
    roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod
"""
_ENCODERS = frozenset(_ENCODER_NAMES.split())
"""They see later tokens unless their config has "is_decoder": true."""
_BIDIRECTIONAL = frozenset({"cpmant", "xlm", "xlnet"})
_PACKABLE_NAMES = """
    afmoe apertus arcee aria_text biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm ernie4_5 ernie4_5_moe exaone4
    exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox
    granite granitemoe granitemoeshared helium hy_v3 hyperclovax jais2 laguna llama mellum minicpm3 minimax_m2
    minimax_m3_vl_text ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt persimmon phi
    phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen3 qwen3_moe qwen3_vl seed_oss smollm3 solar_open starcoder2
    vaultgemma youtu
"""
PACKABLE = frozenset(_PACKABLE_NAMES.split())
"""Every layer attends exactly once, by transformers' attention function, under the causal mask (or window) that it is
given, and nothing else in a layer reads other positions: our attention function alone keeps packed rows apart."""
FUSED_LINEAR: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer"), ("out_proj",)),
    **dict.fromkeys(("NemotronHMamba2Mixer", "Zamba2MambaMixer"), ("out_proj",)),
    **dict.fromkeys(("FalconMambaMixer", "MambaMixer"), ("x_proj", "dt_proj", "out_proj")),
    "JambaMambaMixer": ("dt_proj",),
}
"""Linear layers of transformers' state space mixers whose weights a fused kernel reads."""

_NO_EFFECT_NAMES = """
    architectures attention_dropout bos_token_id cache_implementation chunk_size_feed_forward dtype embd_pdrop
    eos_token_id hidden_dropout hidden_dropout_prob id2label initializer_range label2id max_window_layers
    name_or_path output_attentions output_hidden_states pad_token_id problem_type resid_pdrop return_dict
    transformers_version use_cache use_sliding_window
"""
NO_EFFECT = frozenset(_NO_EFFECT_NAMES.split())
"""Keys that decide nothing about a forward pass, or whose effect is in `layer_types`."""
VLLM_ONLY: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "bias", "mlp_bias", "qkv_bias", "qk_norm", "use_qk_norm", "score_bias"), False),
    **dict.fromkeys(("attention_sinks", "ada_rms_norm_t_cond", "use_bidirectional_attention"), False),
    **dict.fromkeys(("is_matryoshka", "is_mm_prefix_lm", "attn_temperature_tuning", "rotary"), False),
    **dict.fromkeys(("layer_scale", "swa_attention_sink_enabled", "add_swa_attention_sink_bias"), False),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "rswa_window", "attention_chunk_size", "chunk_size"), 0),
    "shared_expert_intermediate_size": 0,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu_pytorch_tanh",
    **dict.fromkeys(("logit_scale", "moe_layer_freq", "n_group", "topk_group"), 1),
    **dict.fromkeys(("is_causal", "route_norm", "attn_output_gate", "use_moe"), True),
    **dict.fromkeys(("attn_config", "block_configs", "compression_config", "dual_chunk_attention_config"), None),
    **dict.fromkeys(("head_dtype", "hidden_size_per_head", "hybrid_layer_pattern", "index_topk", "kv_lora_rank"), None),
    **dict.fromkeys(("layer_rope_theta", "layer_types", "llama_4_scaling", "no_rope_layers", "rotary_dim"), None),
    **dict.fromkeys(("rope_local_base_freq", "swa_rope_parameters", "target_layer_count", "attn_scale"), None),
    **dict.fromkeys(("attn_rotary_emb", "moe_router_dtype", "rms_norm_eps", "rope_parameters"), None),
    **dict.fromkeys(("sliding_windows", "swa_rope_theta", "swa_v_head_dim", "swiglu_limits"), None),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), None),
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"), None),
}
"""Keys of a `config.json` by which vLLM's classes compute something else, and the value that changes nothing. Where
transformers' config of a family lacks such a key, the model that trains would not follow it."""


def vllm_only_keys(config: Mapping[str, Any], known: type) -> dict[str, Any]:
    """The keys of a `config.json` that vLLM follows and transformers' config class `known` does not have."""
    plain = known()
    return {
        key: value
        for key, value in config.items()
        if key in VLLM_ONLY
        and not hasattr(plain, key)
        and key not in getattr(known, "attribute_map", {})
        and value is not None
        and value != VLLM_ONLY[key]
        and not (key == "layer_types" and set(value) == {"full_attention"})
    }


def unread_rope_keys(config: Any) -> list[str]:
    """Rope parameters of a transformers configuration that its code does not mention, and settings by kind of layer of
    a model whose layers are of one kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if by_kind and getattr(config, "layer_types", None) is None:
        return sorted(by_kind)
    own = Path(inspect.getfile(type(config)))
    files = [own, *own.parent.glob("modeling_*.py")]
    found = set[str]()
    for one in by_kind.values() or [rope]:
        kind = one.get("rope_type", "default")
        shared = [] if kind == "default" else [own.parents[2] / "modeling_rope_utils.py"]
        text = "".join(file.read_text() for file in (*files, *shared))
        found |= {
            key
            for key, value in one.items()
            if value is not None and key not in _ROPE and not re.search(rf"\b{key}\b", text)
        }
    return sorted(found)


_ROPE = ("rope_type", "type", "rope_theta")


def is_packable(config: Mapping[str, Any]) -> bool:
    """Whether the model of a `config.json` computes a packed row like its rows one by one."""
    return config.get("model_type") in PACKABLE


def check_causal(config: Any) -> None:
    """Of a transformers configuration.

    Errors: ModelError for a model that is not causal: what it says of a token would depend on later ones.
    """
    family, encoder = config.model_type, config.model_type in _ENCODERS and not config.is_decoder
    if encoder or family in _BIDIRECTIONAL or getattr(config, "use_bidirectional_attention", False):
        hint = ' Give it "is_decoder": true in its config.json if it was trained so, or use a causal model.'
        raise ModelError(
            f"this {family} model sees later tokens: log-probabilities of a token would know what follows it."
            f"{hint if encoder else ' Use a causal model.'}"
        )
