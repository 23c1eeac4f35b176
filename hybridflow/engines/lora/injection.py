"""peft's layers in a transformers decoder, before it is cut over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybridflow.config import LoRA
from hybridflow.engines.lora.targets import ALL, module_names, modules, suffixes
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import TransformersSpec, make_model
from hybridflow.models.spec import Decoder

_NAME = "default"  # what peft calls an adapter that was given no name; its files do not have it


def inject(decoder: nn.Module, spec: Decoder, lora: LoRA) -> None:
    """Give `decoder`, the `spec.decoder` of canonical names, its adapters: float32, on the meta device, undefined.

    Errors: ConfigError where peft does not add them to exactly the layers that `lora` names.
    """
    from peft import LoraConfig, inject_adapter_in_model

    within = [name.removeprefix(f"{spec.decoder}.") for name in module_names(spec, lora)]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=within)  # type: ignore[arg-type]
    # Of a model that has a config peft takes names for those of older checkpoints, `down_proj` for that of all experts.
    nameless = nn.Module()
    nameless.add_module(spec.decoder.replace(".", "_"), decoder)
    try:
        inject_adapter_in_model(config, nameless, adapter_name=_NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{_asked(spec, lora, within)}: peft does not add adapters to them: {error}") from None
    layers = set(_layers(decoder))
    given = {name for name, module in decoder.named_modules() if module in layers}
    if wrong := sorted(given ^ set(within)):
        raise ConfigError(f"{_asked(spec, lora, within)}: peft takes them otherwise, see {wrong[0]}. Name others.")
    for layer in layers:
        layer.lora_A.to(torch.float32)
        layer.lora_B.to(torch.float32)


def check_injection(spec: Decoder, lora: LoRA) -> None:
    """On the meta device, for other families than those of ModelSpec. Errors: those of `inject`."""
    if isinstance(spec, TransformersSpec):
        with torch.device("meta"):
            model = make_model(spec.config)
        inject(model.get_submodule(spec.decoder), spec, lora)


def _asked(spec: Decoder, lora: LoRA, names: Sequence[str]) -> str:
    return f"LoRA(targets={list(lora.targets)}) of a {spec.family} decoder means {', '.join(suffixes(list(names)))}"


@contextmanager
def without_adapters(decoder: nn.Module) -> Iterator[None]:
    """The decoder computes as if it had none: what they add is multiplied by zero."""
    layers = list(_layers(decoder))
    try:
        for layer in layers:
            layer.set_scale(_NAME, 0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(_NAME, 1)


def write_config(directory: Path, spec: Decoder, lora: LoRA, base: str) -> None:
    """`adapter_config.json` as peft reads it; `base` is the model that the adapters belong to."""
    from peft import LoraConfig

    value = spec.head == "value"
    targets = suffixes(modules(spec, lora)) if lora.targets == (ALL,) else list(lora.targets)
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=["score"] if value else None,
        task_type="SEQ_CLS" if value else "CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    ).save_pretrained(str(directory))


def _layers(decoder: nn.Module) -> Iterator[Any]:
    from peft.tuners.lora import LoraLayer

    return (module for module in decoder.modules() if isinstance(module, LoraLayer))
