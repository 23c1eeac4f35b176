"""Adapters: the trained tensors of a sharded model with LoRA, and their merge into its weights (Hu et al. 2021, eq. 3).

`inject` puts peft's layers into a transformers decoder before it is sharded; Megatron's layers have their own
(`megatron.parallel_adapters`). Adapters are saved in peft's format: a directory of `adapter_config.json` and
`adapter_model.safetensors`.

Shapes: r rank of the adapters, I inputs and O outputs of a linear layer; i columns and o rows that this rank holds.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config import DType, LoRA
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.reader import Entry, read_boxes, read_header
from hybridflow.engines.checkpoint.writer import planned, save_files, write_files
from hybridflow.engines.lora.targets import ALL, module_names, modules, parts, suffixes
from hybridflow.engines.process_groups import RankContext
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.hf_spec import Decoder, TransformersSpec, make_model
from hybridflow.models.images import LANGUAGE_MODEL, VISION_TOWER
from hybridflow.models.spec import check_no_code

_NAME = "default"  # what peft calls an adapter that was given no name; its files do not have it
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of names in the file: those of peft's wrapper around the model
TOWER = re.escape(VISION_TOWER) + ".*"  # what encodes images has no adapters
_PLAIN: dict[str, tuple[Any, ...]] = {  # what else an adapter may say; other values change what it computes
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, None, False, "gaussian"),  # PiSSA's, OLoRA's and others' adapters are of another model
    "modules_to_save": (None, [], ["score"], ["classifier", "score"]),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora"), (None, False)),
    **dict.fromkeys(
        (
            *("rank_pattern", "alpha_pattern", "layers_to_transform", "trainable_token_indices", "target_parameters"),
            *("layer_replication", "megatron_config", "alora_invocation_tokens"),
        ),
        (None, {}, []),
    ),
    "exclude_modules": (None, [], TOWER),
}


class Adapters:
    """The adapters of one rank, and of a value model its head: `storage` by the names of `layout`, float32.

    Adapters are never offloaded. They can be merged into the rank's parts of the frozen model, which `shards` have by
    the names of `weights_layout`: a rank that holds rows of a weight holds those of B. `peers` consecutive ranks have
    the rest of A. `layers` compute with the adapters.
    """

    def __init__(
        self,
        context: RankContext,
        spec: Decoder,
        lora: LoRA,
        layout: Layout,
        weights_layout: Layout,
        shards: Any,
        layers: Sequence[Any],
        peers: int = 1,
    ) -> None:
        self.spec, self.lora, self.layout = spec, lora, layout
        self._context, self._weights, self._layers = context, shards.storage, layers
        local = {**shards.storage, **shards.adapters}
        held = dict.fromkeys(region.storage for region in layout.regions(context.rank))
        empty = (name for name in layout.tensors if name in local)  # of FSDP, which has the names of the layout
        self.storage: Mapping[str, Tensor] = {name: local[name] for name in (*held, *empty)}
        self._modules = modules(spec, lora)
        self._adapters, self._merged = layout.by_tensor(context.rank), weights_layout.by_tensor(context.rank)
        first = context.rank // peers * peers
        self._group = context.groups.of(range(first, first + peers))
        self._kept: dict[Region, Tensor] | None = None  # frozen weights, while others are in their place

    def start(self) -> None:
        """Initial values: those of `lora.start`, or A uniform in +-1/sqrt(I) (as peft) and B zero, which leaves the
        model's outputs unchanged; independent of the sharding."""
        if self.lora.start is not None:
            entries = check_adapters(self.lora.start, self.layout.tensors, self.spec)
            for region in self.layout.regions(self._context.rank):
                read_boxes(entries[region.box.tensor], (region,), self.storage)
            return
        for region in self.layout.regions(self._context.rank):
            if region.box.tensor.endswith(".lora_A.weight"):
                shape = self.layout.tensors[region.box.tensor]
                generator = torch.Generator().manual_seed(zlib.crc32(region.box.tensor.encode()))
                bound = 1 / math.sqrt(shape[1])
                whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
                region.view(self.storage[region.storage]).copy_(whole[region.box.index])
            elif region.box.tensor.endswith(".lora_B.weight"):
                self.storage[region.storage].zero_()

    @property
    def merged(self) -> bool:
        """Whether the weights are W + alpha / r * B A now."""
        return self._kept is not None

    @torch.no_grad()
    def merge(self) -> None:
        """Replace every adapted weight W (in memory) by W + alpha / r * B A, and keep W on the host.

        The model must not compute until `restore`. A second call does nothing. Collective over the peers.
        """
        if self._kept is not None:
            return
        self._kept = {}
        try:
            for module in self._modules:
                self._merge(module)
        except Exception:
            self.restore()
            raise

    def _merge(self, module: str) -> None:
        a, b = parts(module)
        a_rI, kept = self._whole(a), self._kept
        assert kept is not None
        for region in self._merged.get(f"{module}.weight", ()):
            (first, left), (last, right) = region.box.start, region.box.stop
            weight_oi = region.view(self._weights[region.storage])
            copy = torch.empty(weight_oi.shape, dtype=weight_oi.dtype, device="cpu", pin_memory=weight_oi.is_cuda)
            kept[region] = copy.copy_(weight_oi)
            held = next(own for own in self._adapters[b] if own.box.start[0] <= first and last <= own.box.stop[0])
            b_or = held.view(self.storage[held.storage], Box(b, (first, 0), (last, self.lora.rank)))
            change_oi = (b_or @ a_rI[:, left:right].to(b_or.device)) * (self.lora.alpha / self.lora.rank)
            weight_oi.copy_(weight_oi.float() + change_oi.to(weight_oi.device))  # rounded once, where W has 16 bits

    def _whole(self, tensor: str) -> Tensor:
        """A tensor of which each of the peers holds a part; without peers, what this rank holds, and zeros."""
        whole = torch.zeros(self.layout.tensors[tensor], dtype=torch.float32, device=self._context.device)
        for region in self._adapters.get(tensor, ()):
            whole[region.box.index] = region.view(self.storage[region.storage])
        if self._group.size() > 1:
            dist.all_reduce(whole, group=self._group)  # a sum with zeros
        return whole

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the weights from before `merge` bit for bit; they must have memory. A second call does nothing."""
        kept, self._kept = self._kept or {}, None
        for region, weight in kept.items():
            region.view(self._weights[region.storage]).copy_(weight)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Multiplies the adapters' outputs by zero inside: the model is its own reference policy."""
        try:
            for layer in self._layers:
                layer.set_scale(_NAME, 0)
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(_NAME, 1)

    def save(self, directory: str | os.PathLike[str], base: str | os.PathLike[str], dtype: DType | None = None) -> None:
        """Write them in peft's format and in `dtype` (float32), as those of the model `base`. Collective over the model
        group.

        The directory is replaced as a whole when all is written. Errors: CheckpointError, on all ranks.
        """

        names = saved_names(self.layout.tensors, self.spec.images is not None)

        def regions(rank: int) -> list[Region]:
            return [replace(r, box=replace(r.box, tensor=names[r.box.tensor])) for r in self.layout.regions(rank)]

        tensors = {names[name]: shape for name, shape in self.layout.tensors.items()}
        renamed = Layout(tensors, self.layout.ranks, regions, self.layout.part)
        group, rank = self._context.groups.everyone(), self._context.rank
        kind: torch.dtype = getattr(torch, dtype or "float32")
        dtypes, files = dict.fromkeys(tensors, kind), {WEIGHTS: list(tensors)}
        fill = planned(renamed, self.storage, group, rank)

        def start(directory: Path) -> None:
            write_files(directory, {CONFIG: self.config(base)})

        save_files(directory, tensors, files, start, fill, dtypes=dtypes, group=group, rank=rank)

    def config(self, base: str | os.PathLike[str]) -> bytes:
        """`adapter_config.json` as peft reads it; `base` is the model that the adapters belong to."""
        from peft import LoraConfig

        lora, value = self.lora, self.spec.head == "value"
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=suffixes(self._modules) if lora.targets == (ALL,) else list(lora.targets),
            exclude_modules=TOWER if self.spec.images else None,
            modules_to_save=["score"] if value else None,
            task_type="SEQ_CLS" if value else "CAUSAL_LM",
            base_model_name_or_path=str(base),
            inference_mode=True,
        )
        with tempfile.TemporaryDirectory() as directory:
            config.save_pretrained(directory)
            return (Path(directory) / CONFIG).read_bytes()


# Saved adapters


def is_adapter_directory(directory: str | os.PathLike[str]) -> bool:
    return (Path(directory) / CONFIG).is_file()


def read_config(directory: str | os.PathLike[str]) -> tuple[str, LoRA]:
    """The model that saved adapters belong to, and the option that continues from them.

    Errors: CheckpointError for an unreadable config, adapters of another kind, and a directory that asks for code.
    """
    check_no_code(directory)
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


def saved_names(tensors: Iterable[str], reads_images: bool) -> dict[str, str]:
    """By canonical tensor its name in peft's file. Of models that read images it is that of transformers' module, whose
    decoder files of Qwen2.5-VL call as that of a text model."""
    layers, own = "model.layers.", f"{LANGUAGE_MODEL}.layers."
    return {name: PREFIX + re.sub(f"^{layers}", own if reads_images else layers, name) for name in tensors}


def check_adapters(
    directory: str | os.PathLike[str], tensors: Mapping[str, tuple[int, ...]], spec: Decoder
) -> Mapping[str, Entry]:
    """The entries of the file by canonical `tensors`. Errors: CheckpointError when some are missing or of other
    shapes."""
    file = Path(directory) / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{directory} has no {WEIGHTS}: save the adapters with peft's save_pretrained.")
    entries = read_header(file)
    own = dict[str, Entry]()
    for canonical, name in saved_names(tensors, spec.images is not None).items():
        entry, asked = entries.get(name), tuple(tensors[canonical])
        if entry is None or entry.shape != asked:
            found = f"of shape {entry.shape}" if entry else f"not, but {', '.join(sorted(entries)[:2])}"
            raise CheckpointError(f"{file} should have {name} {asked} and has it {found}.")
        own[canonical] = entry
    return own


# Injection


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
    layers = set(adapted_layers(decoder))
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


def adapted_layers(decoder: nn.Module) -> list[Any]:
    """peft's layers."""
    from peft.tuners.lora import LoraLayer

    return [module for module in decoder.modules() if isinstance(module, LoraLayer)]
