"""Adapters in peft's format: a directory of `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridflow.config import LoRA
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.reader import Entry, read_boxes, read_header
from hybridflow.engines.checkpoint.writer import save_tensors, writing
from hybridflow.engines.lora.targets import ALL, modules, suffixes
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.spec import Decoder

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of names in the file: those of peft's wrapper around the model
_PLAIN: dict[str, tuple[Any, ...]] = {  # what else an adapter may say; other values change what it computes
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, None, False, "gaussian"),  # PiSSA's, OLoRA's and others' adapters are of another model
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora"), (None, False)),
    **dict.fromkeys(
        (
            *("rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices", "target_parameters"),
            *("layer_replication", "exclude_modules", "megatron_config", "alora_invocation_tokens"),
        ),
        (None, {}, []),
    ),
}


def is_adapter_directory(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / CONFIG).is_file()


def read_config(directory: str | os.PathLike[str]) -> tuple[str, LoRA]:
    """The model that saved adapters belong to, and the option that continues from them.

    Errors: CheckpointError for an unreadable config, or adapters of another kind.
    """
    path = Path(directory) / CONFIG
    try:
        config = json.loads(path.read_text())
        base, targets = config["base_model_name_or_path"], config["target_modules"]
        rank, alpha, dropout = config["r"], config["lora_alpha"], config.get("lora_dropout") or 0.0
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is not readable as the config of LoRA adapters: {error!r}.") from None
    for name, known in _PLAIN.items():
        value = sorted(config[name], key=str) if isinstance(config.get(name), list) else config.get(name)
        if name in config and value not in known:
            raise CheckpointError(f"{path} has {name}={config[name]!r}, which is not supported: use {known[0]!r}.")
    listed = isinstance(targets, list) and bool(targets) and all(isinstance(target, str) for target in targets)
    if not base or not isinstance(base, str) or not (listed or targets == ALL):
        raise CheckpointError(
            f"{path} has base_model_name_or_path={base!r} and target_modules={targets!r}: needed are the model's "
            f"directory or name, and a list of linear layers."
        )
    found = tuple(sorted(targets)) if isinstance(targets, list) else (ALL,)
    try:
        return base, LoRA(rank=rank, alpha=alpha, targets=found, dropout=dropout, start=str(directory))
    except ConfigError as error:
        raise CheckpointError(f"{path} has no adapters that can be trained on: {error}") from None


def check_adapters(directory: str | os.PathLike[str], tensors: Mapping[str, tuple[int, ...]]) -> Mapping[str, Entry]:
    """The entries of the file. Errors: CheckpointError when `tensors` are missing or of other shapes."""
    file = Path(directory) / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {WEIGHTS}: save the adapters with peft's save_pretrained.")
    entries = read_header(file)
    for name, asked in tensors.items():
        entry = entries.get(_PREFIX + name)
        if entry is None or entry.shape != tuple(asked):
            found = f"of shape {entry.shape}" if entry else f"not, but {', '.join(sorted(entries)[:2])}"
            raise CheckpointError(f"{file} should have {_PREFIX}{name} {tuple(asked)} and has it {found}.")
    return entries


def load_adapters(directory: str | os.PathLike[str], layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> None:
    """Read this rank's boxes. Errors: those of `check_adapters`."""
    entries = check_adapters(directory, layout.tensors)
    for region in layout.regions(rank):
        read_boxes(entries[_PREFIX + region.box.tensor], (region,), storage)


def save_adapters(
    directory: str | os.PathLike[str],
    layout: Layout,
    storage: Mapping[str, Tensor],
    *,
    spec: Decoder,
    lora: LoRA,
    base: str | os.PathLike[str],
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
) -> None:
    """Write `layout`'s adapters to `directory`, as those of the model `base`. Collective over `group`.

    The directory is replaced as a whole when all is written. Errors: CheckpointError, on all ranks.
    """

    def start(directory: Path) -> None:
        with writing(directory / CONFIG):
            _write_config(directory, spec, lora, str(base))

    files = {WEIGHTS: [_PREFIX + name for name in layout.tensors]}
    save_tensors(directory, _renamed(layout), storage, files, start, group=group, rank=rank)


def _write_config(directory: Path, spec: Decoder, lora: LoRA, base: str) -> None:
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


def _renamed(layout: Layout) -> Layout:

    def regions(rank: int) -> list[Region]:
        return [
            Region(Box(_PREFIX + r.box.tensor, r.box.start, r.box.stop), r.storage, r.offset, r.strides)
            for r in layout.regions(rank)
        ]

    tensors = {_PREFIX + name: shape for name, shape in layout.tensors.items()}
    return Layout(tensors, layout.ranks, regions, layout.part)
