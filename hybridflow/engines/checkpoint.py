"""A Hugging Face directory of safetensors: validated from its headers alone, a layout and a storage like any other.

Whoever sees the file system holds everything, so loading is a plan in which nothing travels. Importing and validating
need no torch, so the driver can check a checkpoint before any process starts.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.errors import CheckpointError
from hybridflow.model_spec import Decoder

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEADS = frozenset({"score.weight"})  # may be absent: a value head can start from a language model
_OUTPUTS = HEADS | {"lm_head.weight"}  # outside of the base model
READ_ELEMENTS = 1 << 24  # elements read at a time, which bounds the memory beside the storage
_DTYPES = {  # of safetensors, as torch calls them
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_ITEMSIZE = {name: {"64": 8, "32": 4, "16": 2}.get(name.lstrip("BFIU"), 1) for name in _DTYPES}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: its name there, dtype as safetensors spells it, shape, and first byte.

    `version` is the file's size and time of change when its header was read.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    version: tuple[int, int]


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

    @cached_property
    def tensors(self) -> Mapping[str, Entry]:
        """All tensors by canonical name. Base models saved alone have names without the `model.` prefix."""
        if any(name.startswith("model.") for name in self.entries):
            return self.entries
        return {name if name in _OUTPUTS else f"model.{name}": entry for name, entry in self.entries.items()}

    def find(self, tensor: str) -> Entry | None:
        """The entry of a canonical tensor, or None; base models saved alone leave out their own name."""
        _, _, rest = tensor.partition(".")
        left_out = rest if "." in rest else tensor
        return self.tensors.get(tensor) or self.entries.get(tensor) or self.entries.get(left_out)

    def layout(self, ranks: int = 1) -> Layout:
        """Every canonical tensor of the files, whole on each of `ranks` ranks that see the file system."""
        return _whole({name: entry.shape for name, entry in self.tensors.items()}, ranks)

    def storage(self) -> Mapping[str, Tensor]:
        """The tensors by the names of `layout()`, in the dtype and on the pages of their files."""
        return MappedTensors(self.tensors)

    def missing(self, spec: Decoder) -> tuple[str, ...]:
        """Canonical tensors of `spec` that the files do not have: of a checked checkpoint at most the value head."""
        return tuple(name for name in spec.tensors() if self.find(name) is None)

    def check(self, spec: Decoder) -> None:
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

        Tensors are mapped one after the other, and copied in parts: memory beside the storage stays bounded.
        Returns the canonical tensors that the files do not have and whose regions were left alone: a value head.

        Errors: CheckpointError for any other tensor that is absent, or that has another shape than in the layout.
        """
        regions = layout.regions(rank)
        entries = {name: self.find(name) for name in dict.fromkeys(region.box.tensor for region in regions)}
        left = tuple(name for name, entry in entries.items() if entry is None and name in HEADS)
        wanted = [region for region in regions if region.box.tensor not in left]
        files: dict[str, Entry] = {}
        for name in (name for name in entries if name not in left):
            entry, asked = entries[name], tuple(layout.tensors[name])
            if entry is None or entry.shape != asked:
                found = f"of shape {entry.shape}" if entry else "no such tensor"
                raise CheckpointError(
                    f"rank {rank} reads {name} {asked}; {self.directory} has {found}. "
                    "Use the checkpoint that the model spec was read from."
                )
            files[name] = entry
        shapes, mapped = {name: tuple(layout.tensors[name]) for name in files}, MappedTensors(files)
        for move in plan(_whole(shapes, 1), Layout(shapes, 1, lambda _: wanted)).local(0):
            held = mapped[move.origin.storage]
            for part in move.box.split(READ_ELEMENTS):
                for region in move.into:
                    region.view(storage[region.storage].detach(), part).copy_(move.origin.view(held, part))
        return left


def _whole(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Layout:
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in shapes.items()]
    return Layout(shapes, ranks, lambda rank: regions, lambda rank: 0)


class MappedTensors(Mapping[str, "Tensor"]):
    """Tensors of safetensors files, each mapped into memory when it is asked for and unmapped with its last view.

    Nothing is read before it is used, and pages can be dropped by the system at any time. Writing into such a tensor
    changes this process's copy only.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> Tensor:
        """Errors: CheckpointError for a dtype that torch lacks, or when the file changed since its header was read."""
        import torch

        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{entry.file} has {name} in {entry.dtype}. Readable are {', '.join(_DTYPES)}.")
        dtype, itemsize = getattr(torch, _DTYPES[entry.dtype]), _ITEMSIZE[entry.dtype]
        nbytes, inside = math.prod(entry.shape) * itemsize, entry.offset % mmap.ALLOCATIONGRANULARITY
        with entry.file.open("rb") as stream:
            if _version(os.fstat(stream.fileno())) != entry.version:
                raise CheckpointError(f"{entry.file} was changed while it was being loaded. Load it again.")
            if not nbytes:
                return torch.empty(entry.shape, dtype=dtype)
            pages = mmap.mmap(stream.fileno(), inside + nbytes, access=mmap.ACCESS_COPY, offset=entry.offset - inside)
        flat = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=inside)
        if entry.offset % itemsize:  # headers of other writers need not end at a multiple of eight bytes
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _version(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Errors: CheckpointError when it is not one, or is truncated."""
    with file.open("rb") as stream:
        version = _version(os.fstat(stream.fileno()))
        size = version[0]
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
        entries = {
            name: Entry(file, name, t["dtype"], tuple(t["shape"]), 8 + length + t["data_offsets"][0], version)
            for name, t in fields.items()
        }
        extents = {name: tensor["data_offsets"][1] - tensor["data_offsets"][0] for name, tensor in fields.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, LookupError, TypeError) as error:
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
