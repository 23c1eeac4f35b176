"""A Hugging Face directory of safetensors: validated from its headers alone, read box by box.

Importing and validating need no torch, so the driver can check a checkpoint before any process starts.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from hybridflow.engine3d.layout import Layout, Region
from hybridflow.errors import CheckpointError
from hybridflow.model_spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = frozenset({"score.weight"})  # may be absent: a value head can start from a language model
READ_ELEMENTS = 1 << 24  # elements read at a time, which bounds the memory beside the storage
_ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: its name there, dtype as safetensors spells it, and shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The weights of a Hugging Face directory: `model.safetensors`, or shards with an index.

    Files are looked at on first use. Errors: CheckpointError, naming the directory, file and tensor.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by the names in the files."""
        if not self.directory.is_dir():
            raise CheckpointError(
                f"there is no checkpoint directory {self.directory}. Give the path of a local Hugging Face directory "
                "(config.json and *.safetensors)."
            )
        if (self.directory / SINGLE).exists():
            return read_header(self.directory / SINGLE)
        if (index := self.directory / INDEX).exists():
            return self._sharded(index)
        if not (files := sorted(self.directory.glob("*.safetensors"))):
            raise self._no_weights()
        return {name: entry for file in files for name, entry in read_header(file).items()}

    def _sharded(self, index: Path) -> dict[str, Entry]:
        try:
            where = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index with a 'weight_map': {error!r}.") from None
        files = sorted(set(where.values()))
        if absent := [file for file in files if not (self.directory / file).exists()]:
            raise CheckpointError(
                f"{index} names {len(files)} files, of which {len(absent)} do not exist: {', '.join(absent[:5])}. "
                "Download or copy the rest of the checkpoint."
            )
        headers = {file: read_header(self.directory / file) for file in files}
        out = {}
        for name, file in where.items():
            if name not in headers[file]:
                raise CheckpointError(f"{index} says that {name} is in {file}, which does not have it.")
            out[name] = headers[file][name]
        return out

    def _no_weights(self) -> CheckpointError:
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern))
        found = f"it has only {', '.join(pickled[:3])}" if pickled else "it has none"
        return CheckpointError(
            f"{self.directory} needs *.safetensors files, {found}. Convert the model once with transformers: "
            "from_pretrained(directory), then save_pretrained(directory)."
        )

    def find(self, tensor: str) -> Entry | None:
        """The entry of a canonical tensor. Base models saved alone have names without the `model.` prefix."""
        return self.entries.get(tensor) or self.entries.get(tensor.removeprefix("model."))

    def missing(self, spec: ModelSpec) -> tuple[str, ...]:
        """Canonical tensors of `spec` that the files do not have: of a checked checkpoint at most the value head."""
        return tuple(name for name in spec.tensors() if self.find(name) is None)

    def check(self, spec: ModelSpec) -> None:
        """Errors: CheckpointError when files are missing or truncated, or tensors are missing or misshapen."""
        absent = [name for name in self.missing(spec) if name not in HEADS]
        if absent:
            hint = " If the model ties its embeddings, set tie_word_embeddings." if "lm_head.weight" in absent else ""
            raise CheckpointError(
                f"{self.directory} lacks {len(absent)} of the {len(spec.tensors())} tensors that its config.json asks "
                f"for: {', '.join(absent[:5])}. It has {len(self.entries)}, such as "
                f"{', '.join(sorted(self.entries)[:3])}.{hint}"
            )
        for name, asked in spec.tensors().items():
            entry = self.find(name)
            if entry is not None and entry.shape != asked:
                raise CheckpointError(
                    f"{entry.file} has {name} of shape {entry.shape}, the model asks for {asked}. "
                    f"Is {self.directory / 'config.json'} that of another model?"
                )

    def read_into(self, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Fill this rank's regions, reading only their boxes, converted to the storage's dtype.

        Returns the canonical tensors that the files do not have and whose regions were left alone: a value head.

        Errors: CheckpointError for any other tensor that is absent, or that has another shape than in the layout.
        """
        by_file: dict[Path, list[tuple[Entry, Region]]] = {}
        left: dict[str, None] = {}
        for region in layout.regions(rank):
            entry, asked = self.find(region.box.tensor), tuple(layout.tensors[region.box.tensor])
            if entry is None and region.box.tensor in HEADS:
                left[region.box.tensor] = None
            elif entry is None or entry.shape != asked:
                found = f"of shape {entry.shape}" if entry else "no such tensor"
                raise CheckpointError(
                    f"rank {rank} reads {region.box.tensor} {asked}; {self.directory} has {found}. "
                    "Use the checkpoint that the model spec was read from."
                )
            else:
                by_file.setdefault(entry.file, []).append((entry, region))
        for file, reads in by_file.items():
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for entry, region in reads:
                    _read(tensors.get_slice(entry.name), region, storage[region.storage].detach())
        return tuple(left)


def _read(entry: Any, region: Region, into: Tensor) -> None:
    if not region.box.numel:
        return
    for part in region.box.split(READ_ELEMENTS):
        index = tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
        into[region.index(part)].copy_(entry[index])


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Errors: CheckpointError when it is not one, or is truncated."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if start.startswith(b"version "):
            raise CheckpointError(f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` there.")
        if len(start) < 8 or 8 + length > size:
            raise CheckpointError(
                f"{file} is truncated or no safetensors file: it has {size} bytes, its header alone asks for "
                f"{8 + length}. Download or copy it again."
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        fields = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in fields.values()), default=0)
        entries = {name: Entry(file, name, t["dtype"], tuple(t["shape"])) for name, t in fields.items()}
        extents = {name: tensor["data_offsets"][1] - tensor["data_offsets"][0] for name, tensor in fields.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: its header is unreadable ({error!r}).") from None
    if end != size:
        what = "truncated" if end > size else "damaged (bytes after the last tensor)"
        raise CheckpointError(
            f"{file} is {what}: its header asks for {end} bytes, it has {size}. Download or copy it again."
        )
    for name, entry in entries.items():
        asked = math.prod(entry.shape) * _ITEMSIZE.get(entry.dtype, 0)
        if asked and asked != extents[name]:
            raise CheckpointError(f"{file} is damaged: {name} {entry.shape} {entry.dtype} has {extents[name]} bytes.")
    return entries
