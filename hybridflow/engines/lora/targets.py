"""Targets: the linear layers with adapters, and the names of their tensors. Pure.

An adapter's canonical tensors have the names of peft's files, without their prefix: `<module>.lora_A.weight`
[rank, in] and `<module>.lora_B.weight` [out, rank].
"""

from __future__ import annotations

from hybridflow.config import LoRA
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.hf_spec import Decoder

ALL = "all-linear"
_HEAD = "score.weight"


def modules(spec: Decoder, lora: LoRA) -> list[str]:
    """Names of the linear layers that have adapters, in model order.

    Errors: ConfigError for a target that matches no linear layer of the decoder, or a decoder without any.
    """
    linear = [
        name.removesuffix(".weight")
        for layer in range(spec.layers)
        for name, shape in spec.layer_tensors(layer).items()
        if len(shape) == 2
    ]
    if not linear:
        raise ConfigError(
            f"LoRA(targets={list(lora.targets)}): this {spec.family} decoder has no linear layers that adapters could "
            f"be added to. Train it without lora=."
        )
    for target in lora.targets:
        if not any(lora.matches(target, name) for name in linear):
            known = [*suffixes(linear), ALL]
            raise ConfigError(
                f"LoRA(targets={list(lora.targets)}): {target!r} matches no linear layer of this {spec.family} "
                f"decoder, which has {', '.join(known[:-1])} in {spec.layers} layers.{nearest(target, known)}"
            )
    return [name for name in linear if lora.adapts(name)]


def module_names(spec: Decoder, lora: LoRA) -> dict[str, str]:
    """These layers' names in transformers' model -> names in a checkpoint. Errors: those of `modules`."""
    owners = {part.tensors[0]: name for name, part in spec.parts.items() if len(part.tensors) == 1}
    found = {}
    for module in modules(spec, lora):
        weight = f"{module}.weight"
        found[owners.get(weight, weight).removesuffix(".weight")] = module
    return found


def adapter_names(spec: Decoder, lora: LoRA) -> dict[str, str]:
    """Parameter of transformers' model with adapters -> canonical tensor of an adapter. Errors: those of `modules`."""
    pairs = ((parts(here), parts(saved)) for here, saved in module_names(spec, lora).items())
    return {here: saved for names in pairs for here, saved in zip(*names, strict=True)}


def suffixes(names: list[str]) -> list[str]:
    """The last parts of module names, each once."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def parts(module: str) -> tuple[str, str]:
    """Names of A and B of a linear layer."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def is_adapter(tensor: str) -> bool:
    """Whether a canonical tensor belongs to an adapter."""
    return tensor.endswith((".lora_A.weight", ".lora_B.weight"))


def adapter_tensors(spec: Decoder, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of all adapters, in model order. Errors: those of `modules`."""
    whole, found = spec.tensors(), {}
    for module in modules(spec, lora):
        rows, columns = whole[f"{module}.weight"]
        a, b = parts(module)
        found |= {a: (lora.rank, columns), b: (rows, lora.rank)}
    return found


def trained_tensors(spec: Decoder, lora: LoRA) -> dict[str, tuple[int, ...]]:
    """Trained tensors: adapters, and a value head, which is not pretrained. Errors: those of `modules`."""
    head = {_HEAD: spec.tensors()[_HEAD]} if spec.head == "value" else {}
    return adapter_tensors(spec, lora) | head
