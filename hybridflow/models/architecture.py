"""Architecture: how the layers of a decoder compute, for a backend that computes them itself (Megatron). Pure.

Which parts a layer has is read from its tensors, numbers from the config. A family whose parts are all here is an entry
of `FAMILIES`; a tensor that has no place in a layer, or a setting that no entry knows, is refused.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from hybridflow.errors import ModelError, nearest
from hybridflow.models.families import NO_EFFECT
from hybridflow.models.hf_spec import Decoder, hf_config
from hybridflow.models.spec import Head, ModelSpec, check_cut

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Rotary embedding of the first 2 * len(inverse) dimensions of a head: pair i turns by `inverse[i]` per position.

    Pairs are (i, i + len(inverse)), `interleaved` ones (2i, 2i + 1). `scale` multiplies cosines and sines.
    """

    inverse: tuple[float, ...]
    scale: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What differs between the attention of layers; None: it does not rotate, or attends to the whole row."""

    rotation: Rotation | None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of `count` experts with `columns` each, of which every token goes to `chosen`.

    Scores are the softmax or the sigmoid of a linear router. With `bias` a constant is added to them where experts are
    chosen, not where their outputs are weighted; of `groups` of experts the `chosen_groups` whose `group_best` best
    scores have the largest sums are looked at. `normalized` weights sum to one, before they are multiplied by `scale`.
    `names` are those of the router, the experts' matrices (gate, up, down, with the expert's number as {}), the shared
    expert and its gate.
    """

    count: int
    chosen: int
    columns: int
    names: tuple[str, str, str, str, str, str]
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    bias: str = ""
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    shared_columns: int = 0

    @property
    def shared_gate(self) -> bool:
        """Whether the shared expert's output is weighted."""
        return bool(self.shared_columns and self.names[5])


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention with keys and values from one small vector per token (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).

    A head's queries and keys have `plain` dimensions and `turned` ones, which rotate and whose keys all heads share;
    values have `values`. Keys and values come from `rank` numbers per token, queries from `query_rank` (0: from the
    hidden state), both normalised with `norm_eps`.
    """

    rank: int
    query_rank: int
    plain: int
    turned: int
    values: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Names of the norms before and after attention and MLP, empty for those that a layer lacks."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and parts of a decoder. `attention` and `sparse` (whether its MLP is `experts`) are by layer.

    `qk_norm`: queries and keys are normalised per "head" or over "all" heads. Norms multiply by weight + `norm_shift`.
    Hidden states are multiplied by `embedding_scale` behind the embedding, what a layer adds to them by
    `residual_scale`, logits by `logit_scale`; `softcap` and `logit_softcap` c turn x into c * tanh(x / c). Attention
    logits are multiplied by `scale` (None: 1 / sqrt(head_dim)).
    """

    family: str
    head: Head
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    norm_eps: float
    attention: tuple[Attention, ...]
    sparse: tuple[bool, ...]
    norms: Norms = Norms()
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    qkv_bias: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    norm_shift: float = 0.0
    activation: Activation = "silu"
    scale: float | None = None
    softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None

    def check_parallel(
        self, p: int, t: int, role: str = "the model", stage_layers: Sequence[int] | None = None
    ) -> None:
        """Errors: those of `check_cut`."""
        columns = [] if all(self.sparse) else [self.intermediate]
        if self.experts is not None and self.experts.shared_columns:
            columns.append(self.experts.shared_columns)
        check_cut(role, p, t, self.heads, self.kv_heads, self.head_dim, columns, self.layers, stage_layers)
        if self.qk_norm == "all" and self.kv_heads % t:
            raise ModelError(
                f"{role} normalises all {self.kv_heads} kv-heads together, so t={t} must divide them: ranks cannot "
                f"share a kv-head."
            )

    def check_experts(self, ep: int, etp: int, role: str = "the model") -> None:
        """Errors: ModelError when experts cannot be shared by ep ranks, or their columns by etp."""
        if self.experts is None:
            if ep > 1:
                raise ModelError(f"{role} is a {self.family} model without experts: ep={ep} has nothing to share.")
            return
        for what, size, name, count in (
            ("experts", ep, "ep", self.experts.count),
            ("columns per expert", etp, "etp", self.experts.columns),
        ):
            if count % size:
                fitting = [n for n in range(1, count + 1) if count % n == 0]
                raise ModelError(f"{role} has {count} {what}, not divisible by {name}={size}. Use {name} in {fitting}.")


@lru_cache(maxsize=64)
def architecture(spec: Decoder) -> Architecture:
    """Of a decoder. Errors: ModelError for a family, or a setting of it, that is not computed here."""
    return _plain(spec) if isinstance(spec, ModelSpec) else _read(spec)


def _plain(spec: ModelSpec) -> Architecture:
    rotation = Rotation(inverse=inverse_frequencies(spec))
    same = ("family", "head", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "context")
    return Architecture(
        **{name: getattr(spec, name) for name in (*same, "tied", "norm_eps", "qkv_bias")},
        qk_norm="head" if spec.qk_norm else "",
        attention=(Attention(rotation=rotation, window=spec.sliding_window),) * spec.layers,
        sparse=(False,) * spec.layers,
    )


def inverse_frequencies(spec: ModelSpec) -> tuple[float, ...]:
    """Rotations per position (float32), with Llama 3's scaling of long wavelengths where the model asks for it."""
    import torch

    exponent_E = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inverse_E = 1.0 / (spec.rope_theta**exponent_E)
    if not spec.rope_scaling:
        return tuple(inverse_E.tolist())
    scaling = dict(spec.rope_scaling)
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength_E = 2 * math.pi / inverse_E
    smooth_E = ((context / wavelength_E - low) / (high - low)).clamp(0, 1)
    return tuple(((1 - smooth_E) * inverse_E / factor + smooth_E * inverse_E).tolist())


# Other families, from transformers' reading of a config

_GEMMA = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO = Norms(
    before_attention="",
    after_attention="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)
_GLM = Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
_KNOWN_NAMES = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_theta
    partial_rotary_factor attention_bias mlp_bias use_cache model_type
"""
_KNOWN = frozenset(_KNOWN_NAMES.split())


def _gemma(c: Any) -> dict[str, Any]:
    return {"norm_shift": 1.0, "embedding_scale": c.hidden_size**0.5}


def _gemma2(c: Any) -> dict[str, Any]:
    return {
        **_gemma(c),
        "norms": _GEMMA,
        "scale": c.query_pre_attn_scalar**-0.5,
        "softcap": c.attn_logit_softcapping,
        "logit_softcap": c.final_logit_softcapping,
    }


def _granite(c: Any) -> dict[str, Any]:
    return {
        "scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": 1 / c.logits_scaling,
    }


_EXPERTS = ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")


def _qwen_moe(c: Any) -> dict[str, Any]:
    return {
        "experts": Experts(
            count=c.num_experts,
            chosen=c.num_experts_per_tok,
            columns=getattr(c, "moe_intermediate_size", None) or c.intermediate_size,
            names=(*_EXPERTS, "mlp.shared_expert", "mlp.shared_expert_gate"),
            normalized=bool(c.norm_topk_prob),
            shared_columns=getattr(c, "shared_expert_intermediate_size", 0),
        )
    }


def _mixtral(c: Any) -> dict[str, Any]:
    at = "block_sparse_moe"
    names = (f"{at}.gate", *(f"{at}.experts.{{}}.{part}" for part in ("w1", "w3", "w2")), "", "")
    count, chosen = c.num_local_experts, c.num_experts_per_tok
    return {"experts": Experts(count=count, chosen=chosen, columns=c.intermediate_size, names=names)}  # type: ignore[arg-type]


def _glm_moe(c: Any) -> dict[str, Any]:
    return {
        "experts": Experts(
            count=c.n_routed_experts,
            chosen=c.num_experts_per_tok,
            columns=c.moe_intermediate_size,
            names=(*_EXPERTS, "mlp.shared_experts", ""),
            score="sigmoid",
            normalized=bool(c.norm_topk_prob),
            scale=c.routed_scaling_factor,
            bias="mlp.gate.e_score_correction_bias",
            groups=c.n_group,
            chosen_groups=c.topk_group,
            shared_columns=c.n_shared_experts * c.moe_intermediate_size,
        )
    }


def _latent(c: Any) -> dict[str, Any]:
    module = importlib.import_module(type(c).__module__.replace("configuration_", "modeling_"))
    head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
    return {
        "head_dim": head_dim,
        "scale": module.yarn_apply_mscale(c.rope_parameters, head_dim**-0.5),
        "latent": Latent(
            rank=c.kv_lora_rank,
            query_rank=c.q_lora_rank or 0,
            plain=c.qk_nope_head_dim,
            turned=c.qk_rope_head_dim,
            values=c.v_head_dim,
            norm_eps=1e-6,  # transformers' own, whatever the config's is
        ),
    }


def _deepseek2(c: Any) -> dict[str, Any]:
    """Weights are not normalised, whatever the config says, and a group is as good as its best expert."""
    limited = c.topk_method == "group_limited_greedy"
    groups = {"groups": c.n_group, "chosen_groups": c.topk_group, "group_best": 1} if limited else {}
    own = {"score": "softmax", "bias": "", "normalized": False, "groups": 1, "chosen_groups": 1, **groups}
    return {**_latent(c), "experts": replace(_glm_moe(c)["experts"], **own)}


_QWEN_MOE_KEYS = """
    num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers
    shared_expert_intermediate_size qkv_bias use_sliding_window max_window_layers num_local_experts
"""
_GLM_MOE_KEYS = """
    n_routed_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob routed_scaling_factor
    n_group topk_group n_shared_experts first_k_dense_replace num_experts
"""
_LATENT_KEYS = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave"
_DEEPSEEK_KEYS = f"{_LATENT_KEYS} {_GLM_MOE_KEYS} pretraining_tp"
_GEMMA2_KEYS = "query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping sliding_window_pattern"
Parts = Callable[[Any], dict[str, Any]]
FAMILIES: Mapping[str, tuple[str, Parts]] = {
    "llama": ("pretraining_tp", lambda c: {}),
    "qwen2": ("use_sliding_window max_window_layers", lambda c: {}),
    "qwen3": ("use_sliding_window max_window_layers", lambda c: {}),
    "mistral": ("", lambda c: {}),
    "gemma": ("", _gemma),
    "gemma2": (_GEMMA2_KEYS, _gemma2),
    "gemma3_text": (f"{_GEMMA2_KEYS} rope_local_base_freq", _gemma2),
    "vaultgemma": (_GEMMA2_KEYS, lambda c: {**_gemma2(c), "norms": Norms(before_mlp="pre_feedforward_layernorm")}),
    "phi3": ("original_max_position_embeddings", lambda c: {}),
    "olmo2": ("", lambda c: {"norms": _OLMO}),
    "olmo3": ("", lambda c: {"norms": _OLMO}),
    "glm": ("", lambda c: {}),
    "glm4": ("", lambda c: {"norms": _GLM}),
    "helium": ("", lambda c: {}),
    "granite": ("attention_multiplier embedding_multiplier residual_multiplier logits_scaling", _granite),
    "smollm3": ("pretraining_tp no_rope_layers no_rope_layer_interval use_sliding_window", lambda c: {}),
    "seed_oss": ("attention_out_bias", lambda c: {}),
    "exaone4": ("sliding_window_pattern", lambda c: {"norms": _OLMO}),
    "cwm": ("", lambda c: {}),
    "ernie4_5": ("use_bias", lambda c: {}),
    "qwen2_moe": (_QWEN_MOE_KEYS, _qwen_moe),
    "qwen3_moe": (f"{_QWEN_MOE_KEYS} use_qk_norm", _qwen_moe),
    "olmoe": (_QWEN_MOE_KEYS, _qwen_moe),
    "mixtral": ("num_local_experts num_experts_per_tok", _mixtral),
    "glm4_moe": (f"{_GLM_MOE_KEYS} use_qk_norm", _glm_moe),
    "solar_open": (_GLM_MOE_KEYS, _glm_moe),
    "deepseek_v2": (f"{_DEEPSEEK_KEYS} topk_method scoring_func", _deepseek2),
    "deepseek_v3": (f"{_DEEPSEEK_KEYS} topk_method scoring_func", lambda c: {**_latent(c), **_glm_moe(c)}),
    "glm4_moe_lite": (f"{_DEEPSEEK_KEYS} mlp_layer_types", lambda c: {**_latent(c), **_glm_moe(c)}),
    "youtu": (f"{_LATENT_KEYS} pretraining_tp embedding_initializer_range", _latent),
}
"""By model_type: the settings that the family's entry knows beside the common ones, and what is special about it."""
_INTERLEAVED = frozenset({"glm", "glm4", "helium", "ernie4_5", "deepseek_v2"})
"""Of families whose configs do not say it (`rope_interleave`)."""
_AUXILIARY_NAMES = """
    output_router_logits router_aux_loss_coef aux_loss_coef seq_aux router_jitter_noise ep_size num_nextn_predict_layers
"""
_AUXILIARY = frozenset(_AUXILIARY_NAMES.split())
"""Settings of losses that only pre-training adds, and of modules that transformers leaves out."""


def _read(spec: Any) -> Architecture:
    config, family = hf_config(spec.config), spec.family
    if family not in FAMILIES:
        raise ModelError(
            f"Megatron does not compute {family} models{', which read images' if spec.images else ''}."
            f"{nearest(family, FAMILIES)} Use FSDP() or ZeRO(), which take any decoder."
        )
    keys, parts = FAMILIES[family]
    _check_settings(config, _KNOWN | frozenset(keys.split()), family)
    if spec.layer_list != "model.layers":
        raise ModelError(f"the layers of this {family} model are {spec.layer_list}: Megatron looks for model.layers.")
    own = {"head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads}
    own |= parts(config)
    return Architecture(
        family=family,
        head=spec.head,
        hidden=spec.hidden,
        intermediate=getattr(config, "intermediate_size", 0) or config.moe_intermediate_size,  # without dense layers
        layers=spec.layers,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        vocab=spec.vocab,
        context=spec.context,
        tied=spec.tied,
        norm_eps=config.rms_norm_eps,
        attention=_attention(config, spec.layers),
        **_of_tensors(spec, own),
        **own,
    )


def _check_settings(config: Any, known: frozenset[str], family: str) -> None:
    """Errors: ModelError for a setting that differs from the family's default and is not `known`."""
    default = type(config)().to_dict()
    known |= default.keys() & {"layer_types", "sliding_window", "hidden_activation"}  # only where the family has them
    unknown = {
        key: value
        for key, value in config.to_dict().items()
        if key not in known | NO_EFFECT | _AUXILIARY and not key.startswith("_") and value != default.get(key)
    }
    activation = _activation(config)
    if activation not in ("silu", "gelu_pytorch_tanh"):
        unknown["hidden_act"] = activation
    for name in ("clip_qkv", "router_jitter_noise", "attn_logit_softcapping"):
        if getattr(config, name, None) and (name != "attn_logit_softcapping" or family == "gemma3_text"):
            unknown[name] = getattr(config, name)
    if unknown:
        asked = ", ".join(f"{key}={value!r:.60}" for key, value in sorted(unknown.items()))
        raise ModelError(f"Megatron does not compute {family} with {asked}. Use FSDP() or ZeRO().")


def _activation(config: Any) -> Any:
    return config.hidden_activation if "hidden_activation" in type(config)().to_dict() else config.hidden_act


def _of_tensors(spec: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that the names and shapes of the tensors show."""
    at, config, experts = "model.layers.", hf_config(spec.config), own.get("experts")
    first = {name.removeprefix(f"{at}0."): shape for name, shape in spec.shapes.items() if name.startswith(f"{at}0.")}
    norm = first.get("self_attn.q_norm.weight")
    router = None if experts is None else f"{experts.names[0]}.weight"
    return {
        "qkv": ("qkv_proj",) if "self_attn.qkv_proj.weight" in first else ("q_proj", "k_proj", "v_proj"),
        "gate_up": ("gate_up_proj",) if "mlp.gate_up_proj.weight" in first else ("gate_proj", "up_proj"),
        "qkv_bias": "self_attn.q_proj.bias" in first,
        "qk_norm": "" if norm is None else ("head" if norm == (own["head_dim"],) else "all"),
        "activation": _activation(config),
        "sparse": tuple(router is not None and f"{at}{i}.{router}" in spec.shapes for i in range(spec.layers)),
    }


def _attention(config: Any, layers: int) -> tuple[Attention, ...]:
    kinds = getattr(config, "layer_types", None) or [None] * layers
    window, family = getattr(config, "sliding_window", None), config.model_type
    if unknown := {str(kind) for kind in kinds if kind} - {"full_attention", "sliding_attention"}:
        raise ModelError(f"Megatron does not compute {family} with layers of {', '.join(sorted(unknown))}.")
    switched = getattr(config, "use_sliding_window", True)
    found = []
    for layer, kind in enumerate(kinds):
        sliding = switched and (kind == "sliding_attention" or kind is None)
        turned = getattr(config, "no_rope_layers", None)
        turns = turned is None or bool(turned[layer])
        if family == "exaone4":  # layers that see everything know no positions, where others have a window
            turns = window is None or kind == "sliding_attention"
        found.append(Attention(rotation=_rotation(config, kind) if turns else None, window=window if sliding else None))
    return tuple(found)


def _rotation(config: Any, kind: str | None) -> Rotation:
    """From transformers' own functions: of the family, or of the kind of scaling that its config asks for."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    family, given = config.model_type, config.rope_parameters
    by_kind = kind is not None and kind in given
    rope = given[kind] if by_kind else given
    name = rope.get("rope_type", "default")
    if name in ("dynamic", "longrope"):
        raise ModelError(f"Megatron does not compute {family} with rope type {name!r}, which depends on the row.")
    if name == "default":
        module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        [own] = {getattr(module, n) for n in dir(module) if n.endswith("RotaryEmbedding")}
        compute = own.compute_default_rope_parameters
    else:
        compute = ROPE_INIT_FUNCTIONS[name]
    inverse, scale = compute(config, **({"layer_type": kind} if by_kind else {}))
    interleaved = bool(getattr(config, "rope_interleave", family in _INTERLEAVED))
    return Rotation(inverse=tuple(inverse.tolist()), scale=float(scale), interleaved=interleaved)
