"""The model that vLLM resolved, compared with the trainer's spec: each has its own reading of a `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hybridflow.errors import ModelError
from hybridflow.models.families import NO_EFFECT
from hybridflow.models.hf_spec import Decoder, text_config
from hybridflow.models.spec import ModelSpec

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
