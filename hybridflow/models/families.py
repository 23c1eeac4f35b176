"""Facts about transformers' decoders by family: which see later tokens, and which support packed rows.

Tests compute small copies of all families and keep these lists; transformers' version is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
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
