"""Requirements of vLLM, checked before a process starts; and the model that it resolved, compared with the trainer's
spec: each has its own reading of a `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config import VLLM, DType
from hybridflow.engines.vllm.isolation import is_invariant
from hybridflow.engines.vllm.layout import check_sizes, padded_vocab, stage_layers
from hybridflow.errors import ConfigError, DeviceMemoryError, ModelError
from hybridflow.models.families import NO_EFFECT, unread_rope_keys, vllm_only_keys
from hybridflow.models.hf_spec import Decoder, TransformersSpec, hf_config, latent_size, text_config
from hybridflow.models.spec import ModelSpec, read_config

if TYPE_CHECKING:
    from torch import nn

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_RANK, CPU_SIZE = 512, 576
"""`kv_lora_rank`, and with it `qk_rope_head_dim`, that vLLM's latent attention on CPU is made for."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def resolved_dtype(strategy: VLLM, device_type: str) -> DType:
    return strategy.dtype or ("bfloat16" if device_type == "cuda" else "float32")


def runs_eagerly(strategy: VLLM, device_type: str) -> bool:
    """Without captured graphs; on CPU compilation costs seconds and makes small models slower."""
    return strategy.eager or device_type == "cpu"


def max_length(spec: Decoder, strategy: VLLM) -> int:
    """Most tokens of prompt plus response."""
    return strategy.max_length or spec.context


def head_dim(spec: Decoder) -> int:
    """Dimensions of an attention head. Errors: ModelError for a model without attention."""
    if isinstance(spec, ModelSpec):
        return spec.head_dim
    config = text_config(spec)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise ModelError(
            f"this {spec.family} model has no attention heads, whose size vLLM on CPU depends on. Generate with a "
            f"model that has attention."
        )
    # not spec.hidden, which is what the output layer reads: OPT's layers may be wider
    return getattr(config, "head_dim", None) or (getattr(config, "hidden_size", None) or spec.hidden) // heads


def check(spec: Decoder, strategy: VLLM, device_type: str) -> None:
    """Errors: ModelError when vLLM cannot run or shard this model, ConfigError when lengths or the cache do not fit."""
    t, p = strategy.tp, strategy.pp
    if spec.head != "lm":
        raise ModelError(f"vLLM generates text; this model has a {spec.head!r} head and no output embedding.")
    name = architecture(spec)
    if on_transformers(spec) and device_type != "cpu":
        raise ModelError(
            f"vLLM has no model class {name} of its own. On CUDA it compiles transformers' class of this {spec.family} "
            "model for the whole process, in which it trains. Use a model that vLLM has, or train without generation."
        )
    _check_latent(spec, device_type)
    if spec.family in _WIDER and "sliding_attention" in _kinds(spec):
        raise ModelError(
            f"vLLM computes {spec.family} with windows of sliding_window + 1 tokens, training with sliding_window. "
            f"Train it without generation, or use a model without windows."
        )
    if getattr(spec, "constants", ()) and spec.family not in _BIASED:
        raise ModelError(
            f"whether vLLM adds to the scores of experts what routers of {spec.family} add has not been compared. "
            f"Train it without generation, or use a model of {', '.join(_BIASED)}."
        )
    if device_type == "cpu" and spec.family in _ADDS_TO_SCORES:
        raise ModelError(
            f"vLLM on CPU leaves out what routers of {spec.family} add to scores where they choose experts. Train it "
            f"without generation, or generate on CUDA."
        )
    if device_type == "cpu" and spec.family in _DELTA_RULE:
        raise ModelError(
            f"vLLM on CPU does not compute the linear attention of {spec.family} in float32. Train it without "
            f"generation, or generate on CUDA."
        )
    if device_type == "cpu" and head_dim(spec) not in CPU_HEAD_DIMS:
        raise ModelError(
            f"vLLM on CPU runs heads of {', '.join(map(str, CPU_HEAD_DIMS))} dimensions, this model has "
            f"head_dim={head_dim(spec)}. Use a model with another head_dim, or CUDA."
        )
    if spec.family == "qwen2" and isinstance(spec, ModelSpec) and spec.head_dim * spec.heads != spec.hidden:
        raise ModelError(
            f"vLLM computes qwen2 with heads of hidden_size / heads = {spec.hidden // spec.heads} dimensions, this "
            f"model has head_dim={spec.head_dim}. Train it without generation, or use a qwen3 model."
        )
    asked = f"VLLM(tp={t}, pp={p})" if p > 1 else f"VLLM(tp={t})"
    if strategy.expert_parallel or strategy.return_routed_experts:
        _check_experts(spec, strategy)
    if t > 2 and is_invariant(device_type):
        raise ConfigError(
            f"{asked} in a session with deterministic=True: NCCL adds up over three ranks or more in an order that "
            f"depends on the rows of a step, unless all groups of the process have one channel. Use tp=1 or tp=2."
        )
    if isinstance(spec, ModelSpec):
        check_sizes(spec, p, t, asked, "tp")
    else:
        _check_probed(spec, p, t, asked)
    length = max_length(spec, strategy)
    if length > spec.context:
        raise ConfigError(f"VLLM(max_length={length}): the model's context is {spec.context} tokens.")
    check_response(spec, strategy, strategy.sampling.max_tokens)
    if device_type == "cpu":
        _check_cache(spec, strategy, length)


def prompt_limit(spec: Decoder, strategy: VLLM) -> int:
    """The longest prompt that leaves room for a response."""
    sampling = strategy.sampling
    return max_length(spec, strategy) - (sampling.longest if sampling.ignore_eos else 1)


def expert_count(spec: Decoder) -> int:
    """Routed experts of a layer that has some; 0 without experts."""
    config = text_config(spec)
    return next((count for name in _EXPERTS if (count := getattr(config, name, None))), 0)


def _check_experts(spec: Decoder, strategy: VLLM) -> None:
    experts, option = expert_count(spec), "expert_parallel" if strategy.expert_parallel else "return_routed_experts"
    if not experts:
        raise ModelError(
            f"VLLM({option}=True) is about experts, and this {spec.family} model has none. Leave {option} out."
        )
    if strategy.expert_parallel and strategy.tp > experts:
        raise ModelError(
            f"VLLM(tp={strategy.tp}, expert_parallel=True): the model has {experts} experts, and each rank needs one. "
            f"Use tp up to {experts}, or leave expert_parallel out."
        )


def _check_latent(spec: Decoder, device_type: str) -> None:
    if not (size := latent_size(spec)):
        return
    if device_type != "cpu" or spec.family not in _LATENT:
        raise ModelError(
            f"vLLM derives matrices of the latent attention of {spec.family} from kv_b_proj when it loads. That they "
            f"follow training has been shown on CPU, for {', '.join(_LATENT)}, only. Train it without generation, or "
            f"use a model without kv_lora_rank."
        )
    rank: int = spec.config["kv_lora_rank"]
    if (rank, size) != (CPU_RANK, CPU_SIZE):
        raise ModelError(
            f"vLLM on CPU computes latent attention with kv_lora_rank={CPU_RANK} and qk_rope_head_dim="
            f"{CPU_SIZE - CPU_RANK}; this {spec.family} model has {rank} and {size - rank}. Use a model with those, or "
            f"CUDA."
        )


def _kinds(spec: Decoder) -> list[str]:
    """Kind of attention by layer, of families whose config says so."""
    return [] if isinstance(spec, ModelSpec) else getattr(text_config(spec), "layer_types", None) or []


def check_config(checkpoint: str | Path) -> None:
    """Errors: ModelError for keys of a `config.json` that vLLM follows and the model that trains does not."""
    config = read_config(checkpoint)
    known = type(made := hf_config(config).get_text_config())
    if unread := unread_rope_keys(made):
        raise ModelError(
            f"{checkpoint}/config.json has the rope parameters {', '.join(unread)}, which transformers does not read "
            f"in a {made.model_type} model: vLLM may rotate otherwise than the model that trains. Delete them."
        )
    if found := vllm_only_keys(config.get("text_config", config), known):
        raise ModelError(
            f"{checkpoint}/config.json has {', '.join(f'{key}={value!r:.40}' for key, value in found.items())}, which "
            f"vLLM follows and transformers' {known.__name__} does not know: responses would come from another model "
            f"than the one that trains. Delete {'the key' if len(found) == 1 else 'the keys'}, if the model was made "
            f"without."
        )


def check_response(spec: Decoder, strategy: VLLM, max_tokens: int | None) -> None:
    """Errors: ConfigError for `max_tokens` (None: not asked for) that leave no room for a prompt of one token."""
    length = max_length(spec, strategy)
    if max_tokens is not None and max_tokens >= length:
        bound = f"VLLM(max_length={length})" if strategy.max_length else "the model's context"
        raise ConfigError(
            f"max_tokens={max_tokens} leaves no room for a prompt: {bound} is {length} tokens of prompt and response. "
            f"Use max_tokens below {length}{f', or max_length up to {spec.context}' if length < spec.context else ''}."
        )


def memory_error(strategy: VLLM, length: int, free: int, total: int, said: str = "") -> DeviceMemoryError | None:
    """The error of a start on a device with `free` of `total` bytes, whether foreseen or `said` by vLLM; None if it is
    not about memory."""
    asked = strategy.memory_fraction * total
    text = (
        f"VLLM(memory_fraction={strategy.memory_fraction:g}) asks for {asked / 2**30:.2f} GiB of the device's "
        f"{total / 2**30:.2f}, of which {free / 2**30:.2f} are free"
    )
    if free < asked:
        return DeviceMemoryError(
            f"{text}. Use a lower memory_fraction, or offload= of the groups on this device, whose state then waits on "
            f"the host."
        )
    if "memory utilization" not in said.replace("_", " "):
        return None
    return DeviceMemoryError(
        f"{text}. That does not hold the weights, the activations of a step and the KV cache of one row of {length} "
        f"tokens: {said.partition('. ')[0]}. Use a higher memory_fraction, a larger tp, or a smaller max_length."
    )


def _check_probed(spec: TransformersSpec, p: int, t: int, asked: str) -> None:
    """Requirements of every vLLM model; building the engine finds the model's own."""
    kinds = _kinds(spec)
    if spec.family in _UNIFORM and len(set(kinds)) > 1:
        raise ModelError(
            f"vLLM runs {spec.family} models whose layers all have the same attention window; of the {spec.layers} "
            f"layers of this one {kinds.count('full_attention')} attend to everything. Use a model without "
            "windows, or with one for all layers."
        )
    counts = (("kv-heads", spec.kv_heads), ("padded vocabulary rows", padded_vocab(spec.vocab)))
    for what, count in counts:
        if count % t and (what != "kv-heads" or t % count):
            raise ModelError(f"{asked}: {count} {what} are not divisible by tp. Use a tp that divides them.")
    if p > spec.layers:
        raise ModelError(f"{asked}: the model has {spec.layers} layers. Use at most as many stages.")
    vision = hf_config(spec.config).vision_config if spec.images else None
    adds, first = len(getattr(vision, "deepstack_visual_indexes", ())), len(stage_layers(spec.layers, 0, p))
    if adds > first:
        raise ModelError(
            f"{asked}: images are added to the first {adds} layers of this {spec.family} model, which one stage must "
            f"hold, and the first has {first} of {spec.layers}. Use fewer stages."
        )


def _check_cache(spec: Decoder, strategy: VLLM, length: int) -> None:
    """One sequence of full length has to fit into the KV cache of a rank (blocks of 128 tokens)."""
    layers, kv_heads = -(-spec.layers // strategy.pp), max(1, spec.kv_heads // strategy.tp)
    numbers = latent_size(spec) or 2 * kv_heads * head_dim(spec)
    per_token = layers * numbers * _BYTES[resolved_dtype(strategy, "cpu")]
    needed = (-(-length // 128) + 1) * 128 * per_token / 2**30
    if needed > strategy.kv_cache_gb:
        raise ConfigError(
            f"VLLM(kv_cache_gb={strategy.kv_cache_gb}) holds no sequence of {length} tokens, which needs "
            f"{needed:.2g} GiB. Use kv_cache_gb of at least that, or a smaller max_length."
        )


_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")  # where vLLM looks, too
_OWN = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = """
afmoe apertus axk1 bloom cohere cohere2 cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5
ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba gemma gemma2 gemma3_text gemma3n_text gemma4_text glm4
glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared hrm_text hy_v3 hy_v4 hyperclovax inkling_text jamba kimi_linear laguna lfm2
lfm2_moe llama llama4 llama4_text longcat_flash mamba mamba2 mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral
mixtral nemotron nemotron_h olmo_hybrid olmoe opt phi3 qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text stablelm zamba2
"""
_FAMILIES = frozenset(_NAMES.split())
"""Models that vLLM 0.32 has a class of its own for; a test compares them with its table. Those that it runs on
transformers' modules are not among them."""
_ON_TRANSFORMERS = ("arcee", "glm", "jais2", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "starcoder2")
"""Models that vLLM runs on transformers' modules and computes as these train: a test compares them."""
_UNIFORM = ("qwen2", "qwen3")  # vLLM's classes of these assert that all layers have the same window
_WIDER = ("cohere2", "cohere2_moe")
_LATENT = ("deepseek_v2", "deepseek_v3")
BUILT_IN: dict[str, dict[str, str]] = {
    "deepseek_v2": {"scoring_func": "softmax"},
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Settings that transformers' model of a family has built in, and vLLM's reads from the config."""
_BIASED = ("deepseek_v3", "glm4_moe")
"""Families with constants that routers add to scores, whose log-probabilities a test compares."""
_ADDS_TO_SCORES = ("ernie4_5_moe",)  # of those that choose by softmax, without groups of experts
_DELTA_RULE = ("kimi_linear", "olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")


def on_transformers(spec: Decoder) -> bool:
    """Whether vLLM runs the model on modules of transformers."""
    return spec.family in _ON_TRANSFORMERS


def architecture(spec: Decoder) -> str:
    """The name of vLLM's class, whatever head the checkpoint has.

    Errors: ModelError for a model that vLLM has no class of its own for, and none of `_ON_TRANSFORMERS`.
    """
    if isinstance(spec, ModelSpec):
        return _OWN[spec.family]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as VISION

    if spec.images:
        return str(VISION[spec.family])
    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(spec.family))
    if spec.family not in _FAMILIES and not on_transformers(spec):
        raise ModelError(
            f"vLLM has no model class {name} of its own, so it cannot generate with this {spec.family} model in the "
            "process that trains it. Use a model that vLLM has."
        )
    return name


# The model that vLLM resolved


_OF_LAYERS = frozenset({"head_dim", "max_position_embeddings", "vocab_size"})
"""What `_of_modules` looks at, or the shapes of weights say."""


def check_resolved(vllm_config: Any, model: nn.Module, spec: Decoder) -> None:
    """`vllm_config` is the engine's, `model` this rank's stage.

    Errors: ModelError naming the settings that differ.
    """
    differences = [*_of_config(vllm_config.model_config.hf_text_config, spec), *_of_modules(model, spec)]
    if differences:
        raise ModelError(
            f"vLLM reads this {spec.family} model otherwise than training does: {'; '.join(differences[:6])}. Its "
            "responses would come from another policy. Save the config again with transformers, and delete keys that "
            "only one of the two knows."
        )


def _of_config(resolved: Any, spec: Decoder) -> Iterator[str]:
    asked, found = text_config(spec).to_dict(), resolved.to_dict()
    keys = asked.keys() - NO_EFFECT - (_OF_LAYERS if isinstance(spec, ModelSpec) else frozenset())
    if isinstance(spec, ModelSpec):
        keys &= spec.config.keys()
    if layer_windows(spec) is not None:
        keys -= {"sliding_window", "layer_types"}
    for key in sorted(key for key in keys if not key.startswith("_")):
        if (own := _plain(found.get(key))) != (other := _plain(asked[key])):
            yield f"{key} is {own!r}, {other!r} was asked for"


def _plain(value: Any) -> Any:
    """Numbers as floats, and no difference between an absent setting and None."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None and key != "type"}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value == "deepseek_yarn":  # vLLM's name in models with latent attention, whose test has such rotations
        return "yarn"
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _of_modules(model: nn.Module, spec: Decoder) -> Iterator[str]:
    """What the layers themselves hold: windows, head sizes, scales, rotations."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    windows = layer_windows(spec)
    for name, module in model.named_modules():
        if isinstance(module, Attention) and windows is not None:
            layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            if (window := module.sliding_window) != windows[layer]:
                yield f"{name} has the window {window}, {windows[layer]} was asked for"
        if isinstance(spec, ModelSpec):
            if isinstance(module, Attention):
                scale = getattr(module.impl, "scale", spec.head_dim**-0.5)
                if module.head_size != spec.head_dim or abs(scale * spec.head_dim**0.5 - 1) > 1e-6:
                    yield f"{name} has heads of {module.head_size} with scale {scale:g}, {spec.head_dim} were asked for"
            elif isinstance(module, RotaryEmbeddingBase):
                found = module.base, module.rotary_dim, hasattr(module, "low_freq_factor")
                if found != (asked := (spec.rope_theta, spec.head_dim, bool(spec.rope_scaling))):
                    yield f"{name} rotates with (theta, dimensions, scaled) = {found}, {asked} was asked for"


def layer_windows(spec: Decoder) -> list[int | None] | None:
    """By layer, of families whose config says so."""
    if isinstance(spec, ModelSpec):
        return [spec.sliding_window] * spec.layers
    config = text_config(spec)
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not kinds or not set(kinds) <= {"full_attention", "sliding_attention"}:
        return None
    return [window if kind == "sliding_attention" else None for kind in kinds]
