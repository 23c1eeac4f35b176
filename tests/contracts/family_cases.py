"""Families of decoders as small configs, and the grids on which the suites of each backend compute and train them.

`python -m tests.contracts.family_cases` writes the table of docs/backends.md, which `test_families.py` compares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedConfig

from hybridflow.config import FSDP, Megatron, ZeRO
from tests.contracts.example_models import VOCABULARY

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
    "num_labels": 1,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(_EXPERTS, 6),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "expansion_ratio": 2,
}
_ALWAYS = {"vocab_size", "pad_token_id", "num_labels", "hidden_size", "num_hidden_layers", "num_attention_heads"}
_TWO = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **_TWO},
    "gemma3": {"model_type": "gemma3_text", **_TWO},
    "gpt2": {"model_type": "gpt2"},  # dropout, transposed matrices, positions that are learned
    "gpt_neox": {"model_type": "gpt_neox", "tie_word_embeddings": False},
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "bloom": {"model_type": "bloom"},  # attends by distance, in a way of its own: rows cannot be packed
}


_FULL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
_OF_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OF_GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MEGATRON: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    "gemma2-more": {**FAMILIES["gemma2"], "query_pre_attn_scalar": 11},
    "gemma3-scaled": {
        **FAMILIES["gemma3"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    },
    "vaultgemma": {"model_type": "vaultgemma", **_TWO},
    "phi3-window": {"model_type": "phi3", "sliding_window": 6},
    "olmo2-again": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", **_FULL},
    "glm": {"model_type": "glm", "attention_bias": True},
    "glm4": {"model_type": "glm4", "attention_bias": True},
    "helium": {"model_type": "helium"},
    "granite-more": {
        **FAMILIES["granite"],
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "seed_oss": {"model_type": "seed_oss"},
    "exaone4": {"model_type": "exaone4", **_FULL},
    "cwm": {"model_type": "cwm", **_FULL},
    "ernie4_5": {"model_type": "ernie4_5"},
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": _YARN,
    },
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2-windows": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
    "qwen2_moe": {"model_type": "qwen2_moe", **_OF_QWEN, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **_OF_QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    "mixtral-6": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6},
    "glm4_moe": {"model_type": "glm4_moe", **_OF_GLM, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "solar_open": {"model_type": "solar_open", **_OF_GLM},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        **_OF_GLM,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_OF_GLM,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_LATENT, **_OF_GLM, "rope_interleave": False},
    "youtu": {"model_type": "youtu", **_LATENT, "num_key_value_heads": 4},
}
"""On Megatron."""
_PLAIN = """
    afmoe arcee aria_text biogpt bitnet codegen cohere diffllama ernie4_5_moe falcon falcon_mamba flex_olmo gpt_bigcode
    gptj granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jais2 jetmoe laguna lfm2 mamba mellum ministral
    ministral3 mpt nanochat nemotron olmo opt persimmon phi phimoe recurrent_gemma stablelm starcoder2 xglm
"""
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name} for name in _PLAIN.split()},
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 32},  # a row of one token has no gradient of its decay
    "cohere2": {"model_type": "cohere2", **_FULL},
    "cohere2_moe": {"model_type": "cohere2_moe", **_FULL},
    "gpt_oss": {"model_type": "gpt_oss", **_FULL},  # sinks, biases of experts, matrices the other way round
    "jamba": {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}


def config(name: str, **sizes: int) -> PreTrainedConfig:
    given = (FAMILIES | MEGATRON | OTHERS)[name]
    known = AutoConfig.for_model(given["model_type"]).to_dict()
    usual = {key: size for key, size in _SIZES.items() if key in known or key in _ALWAYS}
    return AutoConfig.for_model(**(usual | given | sizes))


# Grids

ON_MEGATRON: dict[str, Megatron] = {
    "1": Megatron(dp=1),
    "t2": Megatron(tp=2, dp=1, sequence_parallel=True),
    "p2-d2": Megatron(pp=2, dp=2),
}
WITH_EXPERTS_ON_MEGATRON: dict[str, Megatron] = {
    "1": Megatron(dp=1),
    "t2": Megatron(tp=2, dp=1),
    "d2-ep2": Megatron(ep=2, dp=2),
    "t2-ep2": Megatron(tp=2, dp=1, ep=2),
    "p2-d2-ep2": Megatron(pp=2, dp=2, ep=2),
    "t2-etp1": Megatron(tp=2, dp=1, etp=1),
    "t2-d2-ep2-etp2": Megatron(tp=2, dp=2, ep=2, etp=2),
    "d3-ep3-recompute": Megatron(dp=3, ep=3, recompute=True),
    "t2-d2-ep2": Megatron(tp=2, dp=2, ep=2),
}
SHARED_ON_MEGATRON: dict[tuple[str, str], Megatron] = {
    ("gemma2-more", "cp2"): Megatron(cp=2, dp=1),
    ("gemma2-more", "cp4"): Megatron(cp=4, dp=1),
    ("gemma2-more", "d2-cp2"): Megatron(cp=2, dp=2),
    ("helium", "t2-cp2-recompute"): Megatron(cp=2, dp=1, tp=2, sequence_parallel=True, recompute=True),
    ("llama-yarn", "p2-cp2"): Megatron(cp=2, dp=1, pp=2),
    ("qwen2-windows", "t2-cp2"): Megatron(cp=2, dp=1, tp=2),
    ("mixtral-6", "cp2-ep2"): Megatron(cp=2, dp=1, ep=2),
    ("qwen3_moe", "t2-cp2-ep2"): Megatron(cp=2, dp=1, tp=2, ep=2),
    ("deepseek_v3", "t2-cp2-ep2"): Megatron(cp=2, dp=1, tp=2, ep=2),
}
_SPARSE = (
    *("qwen2_moe", "qwen3_moe", "olmoe", "mixtral-6", "glm4_moe", "solar_open"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
MEGATRON_CASES: dict[tuple[str, str], Megatron] = {
    (name, grid): strategy
    for name in MEGATRON
    for grid, strategy in (WITH_EXPERTS_ON_MEGATRON if name in _SPARSE else ON_MEGATRON).items()
} | SHARED_ON_MEGATRON

ON_SHARDS: dict[str, dict[str, FSDP | ZeRO]] = {
    "": {
        "d2": FSDP(dp=2),
        "d3-recompute": FSDP(dp=3, recompute=True),
        "d4-replicate2": FSDP(dp=4, replicate=2),
        "zero1-d2-recompute": ZeRO(stage=1, dp=2, recompute=True),
        "zero2-d3-offload": ZeRO(stage=2, dp=3, offload=True),
    },
    "t": {"t2": FSDP(tp=2, dp=1), "t2-d2": FSDP(tp=2, dp=2)},
    "c": {
        "cp4": FSDP(cp=4, dp=1),
        "d2-cp2-recompute": FSDP(cp=2, dp=2, recompute=True),
        "zero2-d2-cp2": ZeRO(stage=2, cp=2, dp=2),
    },
    "tc": {"t2-cp2-often": FSDP(cp=2, dp=1, tp=2, reduce_often=True)},
    "e": {
        "d2-ep2-recompute": FSDP(dp=2, ep=2, recompute=True),
        "d4-ep2": FSDP(dp=4, ep=2),
        "d4-ep2-replicate2": FSDP(dp=4, ep=2, replicate=2),
        "d3-ep3-often": FSDP(dp=3, ep=3, reduce_often=True),
        "d2-ep2-offload": FSDP(dp=2, ep=2, offload=True),
    },
    "ce": {"cp2-ep2": FSDP(cp=2, dp=1, ep=2)},
}
"""By what a family needs for them: t a plan of tensor parallelism, c packed rows, e experts that ranks can share."""
_SHARDED = {
    "": """bloom codegen diffllama falcon falcon_mamba gptj hunyuan_v1_dense jetmoe lfm2 mamba mpt nemotron
        recurrent_gemma rwkv stablelm xglm""",
    "t": "ministral",
    "c": "biogpt bitnet gpt2 gpt_bigcode mixtral opt persimmon",
    "tc": """arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3 glm glm4 gpt_neox granite helium jais2
        llama-yarn ministral3 mistral nanochat olmo olmo2 olmo3 phi phi3 qwen2-windows qwen3 seed_oss smollm3 starcoder2
        vaultgemma youtu""",
    "e": "deepseek_v2 deepseek_v3 glm4_moe_lite gpt_oss hunyuan_v1_moe jamba qwen3_next",
    "ce": """afmoe ernie4_5_moe flex_olmo glm4_moe granitemoe granitemoeshared laguna mellum mixtral-6 olmoe phimoe
        qwen3_moe solar_open""",
    "tce": "aria_text cohere2_moe qwen2_moe",
}
SHARDED_CASES: dict[tuple[str, str], FSDP | ZeRO] = {
    (name, grid): strategy
    for has, names in _SHARDED.items()
    for name in names.split()
    for needs, grids in ON_SHARDS.items()
    if set(needs) <= set(has)
    for grid, strategy in grids.items()
}


def spread(cases: Mapping[tuple[str, str], Any], each: int = 1) -> set[tuple[str, str]]:
    """Each family on so many grids, every grid about equally often."""
    found, used = set[tuple[str, str]](), dict.fromkeys((grid for _, grid in cases), 0)
    for name in dict.fromkeys(name for name, _ in cases):
        for grid in sorted((grid for other, grid in cases if other == name), key=lambda grid: used[grid])[:each]:
            used[grid] += 1
            found.add((name, grid))
    return found


QUICK_ON_SHARDS = {case for at, case in enumerate(sorted(spread(SHARDED_CASES))) if at % 3}
QUICK_ON_MEGATRON = spread(MEGATRON_CASES, each=2)


def marked(cases: Mapping[tuple[str, str], Any], kept: Collection[tuple[str, str]]) -> list[Any]:
    """Parameters of a suite, those that are not `kept` marked as slow."""
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow, id="-".join(case)) for case in cases]


# The table

DOCUMENT = Path(__file__).parents[2] / "docs" / "backends.md"
BEGIN, END = "<!-- written by tests.contracts.family_cases: begin -->\n", "<!-- end -->\n"
_GROUPS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "Megatron": {"m": ON_MEGATRON, "x": WITH_EXPERTS_ON_MEGATRON},
    "FSDP and ZeRO": {needs or "d": grids for needs, grids in ON_SHARDS.items()},
}


def table() -> str:
    """Families by backend and grid, as the suites have them."""
    from tests.contracts.test_readings import AGREE
    from tests.integration.test_expert_generation import LATENT, SHARED_OUT
    from tests.integration.test_vllm_probing import GENERATED

    configs = FAMILIES | MEGATRON | OTHERS
    generated = [*((name, "t1") for name in AGREE.split()), *((name, f"t{t}") for name, t in GENERATED)]
    generated += [(name, f"p{pp}-" * (pp > 1) + f"t{tp}-ep{tp}") for name, pp, tp in SHARED_OUT]
    generated += [(name, f"t{tp}-ep{tp}" if tp > 1 else "t1") for name, tp, _ in LATENT]
    columns: dict[str, dict[str, list[str]]] = {"Megatron": {}, "FSDP and ZeRO": {}, "vLLM": {}}
    for column, cases in (("Megatron", MEGATRON_CASES), ("FSDP and ZeRO", SHARDED_CASES)):
        for name, grid in cases:
            columns[column].setdefault(configs[name]["model_type"], []).append(grid)
    for name, grid in generated:
        columns["vLLM"].setdefault(name, []).append(grid)
    lines = []
    for column, groups in _GROUPS.items():
        meant = [f"**{key}** {', '.join(grids)}" for key, grids in groups.items()]
        lines.append(f"{column}: {'; '.join(meant)}.\n")
    lines += ["| family | " + " | ".join(columns) + " |", "| --- " * 4 + "|"]
    trained = sorted(columns["Megatron"].keys() | columns["FSDP and ZeRO"].keys())
    for family in trained:
        cells = (_cell(found.get(family, []), _GROUPS.get(column, {})) for column, found in columns.items())
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(grids: Sequence[str], groups: Mapping[str, Mapping[str, Any]]) -> str:
    """The groups of which all grids are there, and the grids of no such group."""
    whole = [key for key, group in groups.items() if group.keys() <= set(grids)]
    whole = [key for key in whole if not any(groups[key].keys() < groups[other].keys() for other in whole)]
    rest = dict.fromkeys(grid for grid in grids if not any(grid in groups[key] for key in whole))
    return ", ".join((*whole, *rest))


def written(document: str) -> str:
    """The document with the table as it is now. Errors: ValueError without the marks."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
