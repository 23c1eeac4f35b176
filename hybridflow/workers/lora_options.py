"""Driver-side checks of a worker's LoRA settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config import FSDP, LoRA
from hybridflow.engines.lora.adapters import check_adapters, check_injection, is_adapter_directory, read_config
from hybridflow.engines.lora.targets import modules, trained_tensors
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.hf_spec import Decoder, read_spec
from hybridflow.settings import require


def lora_of(settings: Mapping[str, Any]) -> LoRA | None:
    """The adapters that a worker's strategy trains, if it trains any."""
    return getattr(settings.get("train"), "lora", None)


def with_saved_adapters(settings: Mapping[str, Any], find: Callable[[str], Path]) -> dict[str, Any]:
    """If `model` is an adapter directory: settings with the adapters' base model, and the directory as their start.

    `find` returns a checkpoint's directory. Errors: ConfigError for a strategy that trains other adapters or none;
    CheckpointError for adapters that cannot be read or whose base model is missing.
    """
    found, lora = dict(settings), lora_of(settings)
    saved = found.get("model")
    if saved is not None and is_adapter_directory(saved):
        base, start = read_config(saved)
        try:
            found["model"] = str(find(base))
        except CheckpointError as error:
            raise CheckpointError(f"{saved} has adapters of the model {base}: {error}") from None
    elif lora is not None and lora.start is not None:
        start = read_config(os.path.abspath(lora.start))[1]
    else:
        return found
    strategy = found["train"]
    if not isinstance(strategy, FSDP):
        raise ConfigError(f"{start.start} has LoRA adapters, which train={strategy!r} does not compute. Use hf.FSDP().")
    if lora is not None:
        _check_equal(read_spec(found["model"], "lm", strategy), lora, start)
        start = replace(lora, start=start.start)
    found["train"] = replace(strategy, lora=start)
    return found


def _check_equal(spec: Decoder, asked: LoRA, saved: LoRA) -> None:
    for name in ("rank", "alpha", "targets"):
        here, there = getattr(asked, name), getattr(saved, name)
        require(
            modules(spec, asked) == modules(spec, saved) if name == "targets" else here == there,
            f"LoRA({name}={here!r}): the adapters in {saved.start} have {name}={there!r}. Leave lora= out to take "
            f"what they have.",
        )


def check_lora(spec: Decoder, settings: Mapping[str, Any]) -> None:
    """Errors: ConfigError for targets that match nothing or that peft cannot add adapters to, CheckpointError for saved
    adapters of other layers or shapes."""
    lora = lora_of(settings)
    if lora is None:
        return
    tensors = trained_tensors(spec, lora)
    check_injection(spec, lora)
    if lora.start is not None:
        check_adapters(lora.start, tensors)
