"""A Hugging Face directory of safetensors: validated from its headers alone, read box by box.

Importing and validating need no torch, so the driver can check a checkpoint before any process starts.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.errors import CheckpointError
from hybridflow.models.hf_spec import Decoder

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "spiece.model", "*.tiktoken", "chat_template*", "*.jinja"),
    *("adapter_config.json", "*.safetensors", INDEX),
)
"""Of any model's directory, which a save may replace; other files only if it writes them again."""
HEADS = frozenset({"score.weight"})  # may be absent: a value head can start from a language model
_OUTPUTS = HEADS | {"lm_head.weight"}  # outside of the base model
_SAMPLED = 256  # elements of each tensor in a fingerprint
_OUTPUT_LAYERS = ("lm_head", "embed_out", "output", "cls.predictions.decoder")
_BUFFERS = (".inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Of older checkpoints, which transformers makes itself."""
READ_ELEMENTS = 1 << 24  # elements read at a time, which bounds the memory beside the storage
TRAINED = ("F64", "F32", "F16", "BF16")
READABLE = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""Dtypes as safetensors spells them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a safetensors file: its name there, dtype as safetensors spells it, and shape.

    `version` is the file's size and time of change when its header was read.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    version: tuple[int, int]

    def opened(self) -> Any:
        """The file, opened by safetensors: nothing is read before it is used.

        Errors: CheckpointError for a dtype that torch lacks, or when the file changed since its header was read.
        """
        if self.dtype not in READABLE:
            raise CheckpointError(f"{self.file} has {self.name} in {self.dtype}. Readable are {', '.join(READABLE)}.")
        if _version(self.file) != self.version:
            raise CheckpointError(f"{self.file} was changed while it was being loaded. Load it again.")
        return safe_open(self.file, framework="pt")


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
            pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in self.directory.glob(pattern))
            found = f"it has only {', '.join(pickled[:3])}" if pickled else "it has none"
            raise CheckpointError(
                f"{self.directory} needs *.safetensors files, {found}. Convert the model once with transformers: "
                "from_pretrained(directory), then save_pretrained(directory)."
            )
        return {name: entry for file in files for name, entry in read_header(file).items()}

    def _sharded(self, index: Path) -> dict[str, Entry]:
        try:
            where: dict[str, str] = json.loads(index.read_text())["weight_map"]
            if not all(isinstance(file, str) for file in where.values()):
                raise TypeError("its files are not names")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{index} is not a safetensors index with a 'weight_map': {error!r}.") from None
        files = sorted(set(where.values()))
        if outside := [file for file in files if Path(file).name != file or file == ".."]:
            raise CheckpointError(
                f"{index} names {outside[0]!r}: an index may name files of its own directory only. Download or copy "
                f"the checkpoint again."
            )
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

    def dtypes(self, tensors: Iterable[str]) -> dict[str, str]:
        """The dtypes of canonical tensors as safetensors spells them: of those that the files lack, or have in a dtype
        that holds no trained weights (float8, integers), that of most of their elements, or else F32."""
        count = Counter[str]()
        for entry in self.entries.values():
            count[entry.dtype] += math.prod(entry.shape) if entry.dtype in TRAINED else 0
        most = max(count, key=lambda dtype: count[dtype], default="F32")
        most = most if most in TRAINED else "F32"
        found = {name: self.find(name) for name in tensors}
        return {name: entry.dtype if entry and entry.dtype in TRAINED else most for name, entry in found.items()}

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
        self._check_surplus(spec)

    def surplus(self, spec: Decoder) -> list[str]:
        """Tensors of the files that no tensor of `spec` is read from."""
        used = {entry.name for name in spec.tensors() if (entry := self.find(name)) is not None}
        return sorted(self.entries.keys() - used)

    def _check_surplus(self, spec: Decoder) -> None:
        """Tensors that a model of this spec has no use for: named once in a warning.

        Errors: CheckpointError for an output layer of tied embeddings that is another matrix.
        """
        asked, surplus = spec.tensors(), self.surplus(spec)
        if spec.tied and spec.head == "lm":
            embedding = next(name for name, shape in asked.items() if shape == (spec.vocab, spec.hidden))
            for name in [name for name in surplus if name.rpartition(".")[0] in _OUTPUT_LAYERS]:
                if not _equal(self.entries[name], self.find(embedding)):
                    raise CheckpointError(
                        f"{self.directory}/config.json ties the output layer to the embeddings, and {name} in "
                        f"{self.entries[name].file.name} is another matrix than {embedding}. Set "
                        f"tie_word_embeddings to false there to use it, or delete the tensor."
                    )
                surplus.remove(name)
        elif spec.head == "value":
            surplus = [name for name in surplus if name.rpartition(".")[0] not in _OUTPUT_LAYERS]
        if surplus := tuple(name for name in surplus if not name.endswith(_BUFFERS)):
            _warn_of_surplus(self.directory, spec.family, surplus)

    def fingerprint(self) -> str:
        """A hash of names, shapes and the first elements of all tensors: equal for copies in other files."""
        digest = xxhash.xxh3_128()
        for name, entry in sorted(self.tensors.items()):
            digest.update(f"{name} {entry.shape} ".encode())
            if entry.shape and math.prod(entry.shape):
                with entry.opened() as file:
                    first = (*[slice(0, 1)] * (len(entry.shape) - 1), slice(0, _SAMPLED))
                    digest.update(file.get_slice(entry.name)[first].float().numpy().tobytes())
        return digest.hexdigest()

    def read_into(self, layout: Layout, rank: int, storage: Mapping[str, Tensor]) -> None:
        """Fill this rank's regions, reading only their boxes, converted to the storage's dtype.

        Tensors are read one after the other, and in parts: memory beside the storage stays bounded. A value head that
        the files do not have is left alone.

        Errors: CheckpointError for any other tensor that is absent, or that has another shape than in the layout.
        """
        wanted = layout.by_tensor(rank)
        found = {name: self.find(name) for name in wanted}
        for name, entry in found.items():
            asked = tuple(layout.tensors[name])
            if (entry is None and name not in HEADS) or (entry is not None and entry.shape != asked):
                has = f"of shape {entry.shape}" if entry else "no such tensor"
                raise CheckpointError(
                    f"rank {rank} reads {name} {asked}; {self.directory} has {has}. "
                    "Use the checkpoint that the model spec was read from."
                )
        for name, entry in found.items():
            if entry is not None:
                read_boxes(entry, wanted[name], storage)


@lru_cache(maxsize=64)
def _warn_of_surplus(directory: Path, family: str, names: tuple[str, ...]) -> None:
    logger.warning(
        "%s has %d tensors that a %s model of its config.json has no use for: %s%s. They are not loaded, nor saved.",
        directory,
        len(names),
        family,
        ", ".join(names[:5]),
        ", ..." if len(names) > 5 else "",
    )


def _equal(one: Entry, other: Entry | None) -> bool:
    """Whether two matrices of the files have the same elements; part by part."""
    if other is None or one.shape != other.shape:
        return False
    step = max(1, READ_ELEMENTS // max(1, one.shape[-1]))
    with one.opened() as own, other.opened() as theirs:
        left, right = own.get_slice(one.name), theirs.get_slice(other.name)
        ranges = [slice(row, row + step) for row in range(0, one.shape[0], step)]
        return all(bool((left[rows] == right[rows]).all()) for rows in ranges)


def read_boxes(entry: Entry, regions: Iterable[Region], storage: Mapping[str, Tensor]) -> None:
    """Fill regions of one tensor from its file, converted to the storage's dtype. Errors: those of `Entry.opened`."""
    with entry.opened() as file:
        for region in regions:
            copy_part(file.get_slice(entry.name), (0,) * len(entry.shape), region, region.box, storage)


def copy_part(saved: Any, start: Sequence[int], region: Region, part: Box, storage: Mapping[str, Tensor]) -> None:
    """Fill `part` of a region from a saved tensor, whose first element is that at `start`, a bounded part at a time."""
    for few in part.split(READ_ELEMENTS):
        index = tuple(slice(a - o, b - o) for a, b, o in zip(few.start, few.stop, start, strict=True))
        region.view(storage[region.storage].detach(), few).copy_(saved[index])


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Errors: CheckpointError when it is not one, or is truncated or damaged."""
    version = _version(file)
    try:
        with safe_open(file, framework="np") as opened:  # does not import torch
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
            return {n: Entry(file, n, s.get_dtype(), tuple(s.get_shape()), version) for n, s in slices.items()}
    except SafetensorError as error:
        with file.open("rb") as stream:
            if stream.read(8) == b"version ":
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not the weights. Run `git lfs pull` there."
                ) from None
        raise CheckpointError(
            f"{file} is truncated, damaged or not a safetensors file: it has {version[0]} bytes, and safetensors says: "
            f"{error}. Download or copy it again."
        ) from None


def _version(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns
