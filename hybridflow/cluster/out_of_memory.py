"""Out of device memory: what was in it, what was planned, and which settings change that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.config import VLLM

_GIB = 1 << 30
IMAGE = "image"
"""The owner of what is kept in host memory of state that leaves the device."""
_SMALLER_STEPS = ("micro_tokens", "recompute")
_ADVICE: dict[str, tuple[str, ...]] = {
    "__init__": ("share", "offload", "memory_fraction"),
    "transition": ("memory_fraction", "offload", "tp_g", "share"),
    "generation": ("memory_fraction", "max_tokens", "offload", "tp_g"),
    "update": (*_SMALLER_STEPS, "offload", "share", "memory_fraction"),
    "compute": ("micro_tokens", "offload", "share", "memory_fraction"),
    "other": ("offload", "share", "memory_fraction"),
}
_WORDS = {
    "micro_tokens": "fewer tokens computed at a time, train=...(micro_tokens=...)",
    "recompute": "train=...(recompute=True), which computes activations twice instead of keeping them",
    "offload": "offload= of the groups on this device, whose state then waits on the host",
    "share": "a smaller part of the model per device, by larger tp or pp, FSDP() or ZeRO(stage=3)",
    "memory_fraction": "a lower hf.VLLM(memory_fraction=...)",
    "max_tokens": "shorter or fewer sequences at a time, Sampling(max_tokens=...) or VLLM(max_sequences=...)",
    "tp_g": "a larger hf.VLLM(tp=...)",
}


@dataclass(frozen=True)
class DeviceUse:
    """Bytes of a device, and by (group, owner) what groups have there, and as `IMAGE` in host memory; `planned`: by
    group the share of the device for generation."""

    total: int
    free: int
    held: Mapping[tuple[str, str], int]
    planned: Mapping[str, float]


def explain(
    role: str, method: str, stage: str, use: DeviceUse, settings: Mapping[str, Any], said: str, advises: bool = False
) -> str:
    """The message for a call of `role` that ran out of memory in `stage` (or ""); `settings` are those of its group,
    `said` is torch's message, or one of our own that `advises` what to change."""
    resident = {owner: size for owner, size in sorted(use.held.items()) if size and owner[1] != IMAGE}
    images = [f"{group} {_gib(size)}" for (group, kind), size in sorted(use.held.items()) if size and kind == IMAGE]
    there = [f"{group} {kind} {_gib(size)}" for (group, kind), size in resident.items()]
    rest = use.total - use.free - sum(resident.values())
    there.append(f"all else (activations, buffers, other processes) {_gib(max(0, rest))}")
    planned = [
        f"{group} VLLM(memory_fraction={share:g}) = {_gib(share * use.total)}" for group, share in use.planned.items()
    ]
    phase = f"{role}.{method}{f' ({stage})' if stage else ''}"
    account = (
        f"The device has {_gib(use.total)}, of which {_gib(use.free)} are free. In it: {', '.join(there)}. "
        f"Planned for generation: {', '.join(planned) or 'nothing'}."
        + (f" In host memory: {', '.join(images)}." if images else "")
    )
    if advises:
        return f"{phase}: {said} {account}"
    named = [
        _WORDS[name] + (f" (now {now})" if (now := _now(name, settings)) is not None else "")
        for name in _settings_of(method, stage, settings, use)
    ]
    said = " ".join(said.split())[:200].rstrip(". ")
    return f"{phase} ran out of device memory: {said}. {account} Change one of: {'; '.join(named)}."


def _settings_of(method: str, stage: str, settings: Mapping[str, Any], use: DeviceUse) -> list[str]:
    """Names in `_WORDS` that help in this phase and that the groups on the device have."""
    start = method.partition("_")[0] if method != "__init__" else method
    phase = stage if stage in _ADVICE else {"generate": "generation"}.get(start, start)
    absent = set[str]()
    if not use.planned:
        absent.add("memory_fraction")
    if not isinstance(settings.get("generate"), VLLM):
        absent |= {"tp_g", "max_tokens"}
    if settings.get("train") is None:
        absent |= {"share", *_SMALLER_STEPS}
    elif getattr(settings["train"], "recompute", False):
        absent.add("recompute")
    return [name for name in _ADVICE.get(phase, _ADVICE["other"]) if name not in absent]


def _now(name: str, settings: Mapping[str, Any]) -> Any:
    train, generate = settings.get("train"), settings.get("generate")
    sizes = ", ".join(f"{name}={getattr(train, name)}" for name in ("tp", "pp", "stage") if hasattr(train, name))
    values = {
        "micro_tokens": getattr(train, "micro_tokens", None),
        "recompute": getattr(train, "recompute", False),
        "offload": settings.get("offload", False),
        "share": f"{type(train).__name__}({sizes})",
        "memory_fraction": getattr(generate, "memory_fraction", None),
        "max_tokens": getattr(getattr(generate, "sampling", None), "max_tokens", None),
        "tp_g": getattr(generate, "tp", None),
    }
    return values[name]


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
