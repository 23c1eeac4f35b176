"""One rank's file of a run's checkpoint: boxes of canonical tensors as safetensors, written in the background.

A layout says which rank holds which boxes of the optimizer's state. `shares` gives every element to one of its holders,
so each rank writes what it has, nothing is written twice, and no element travels. Reading intersects the saved boxes
with those of any other layout.

The snapshot in host memory is the image of the file; its memory is kept for the next save.
"""

from __future__ import annotations

import base64
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridflow.engine3d.layout import Box, Layout, LayoutParts, Region, partition
from hybridflow.engines.checkpoint.manifest import ALIGNED, CHUNK_BYTES, open_plain, write_file
from hybridflow.engines.checkpoint.reader import READABLE, Entry, copy_part, read_header
from hybridflow.errors import CheckpointError

Share = tuple[Box, Region]
"""A box that a rank writes, and the region of its storage that contains it."""
Kinds = Mapping[str, tuple[Layout, Mapping[str, Tensor]]]
"""Kind of state -> its layout, and this rank's tensors by the layout's storage names."""
_BEFORE_SECONDS, _RESERVED = 300.0, 4096
_SHARED_SECONDS, _LOOK_SECONDS = 45.0, 0.2  # NFS may know for half a minute that a new directory is not there
_RANDOM = "random"
_RANDOM_BYTES = 1 << 15
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
}  # fmt: skip
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as safetensors spells it."""
    return _DTYPES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """Errors: CheckpointError for a name that `dtype_name` does not give."""
    if name not in _NAMED:
        raise CheckpointError(f"{name!r} is not a dtype of a checkpoint.")
    return _NAMED[name]


def shares(layout: Layout) -> list[list[Share]]:
    """The boxes that each rank writes: disjoint, covering everything that the layout holds. Pure.

    An element that several ranks hold goes to the one with the fewest elements so far.
    """
    parts = LayoutParts.of(layout, layout.ranks)
    load, out = [0] * layout.ranks, list[list[Share]]([] for _ in range(layout.ranks))
    for atoms in parts.atoms.values():
        for box, owners in atoms:
            rank = min(parts.ranks(owners), key=lambda rank: (load[rank], rank))
            load[rank] += box.numel
            out[rank].append((box, owners[parts.part[rank]][0]))
    return out


def report_file(directory: Path, group: str, rank: int) -> Path:
    """What a rank says of its file once that is on the disk, until the checkpoint is complete."""
    return directory / f".{group}-{rank:05d}.json"


@dataclass(frozen=True)
class RankFile:
    """Files to write in the unfinished checkpoint `id`: `path`, `extra` files with their contents, and the `report`."""

    path: Path
    report: Path
    id: str
    extra: Mapping[Path, bytes] = field(default_factory=dict)


@dataclass
class StateWriter:
    """Writes one rank's files, one at a time: `save` takes a snapshot, a thread writes it.

    The thread reports `{"id", "files"}`, or `{"id", "error"}`, as JSON; `files` are relative paths with sizes and
    checksums.
    """

    rank: int
    device: torch.device
    _image: Tensor | None = None
    _places: list[tuple[str, Tensor]] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _shares: dict[str, tuple[Layout, list[Share]]] = field(default_factory=dict)

    def save(self, file: RankFile, kinds: Kinds) -> None:
        """Returns when the tensors may change; waits for the file before, which ends soon if its save was given up.

        Errors: CheckpointError when that takes too long, and when the directory of checkpoints is not there.
        """
        end, shared = time.monotonic() + _SHARED_SECONDS, file.path.parents[2]  # a save may be given up, this one stays
        while not shared.is_dir():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{shared} is not on {socket.gethostname()}, and the driver has made it: give a "
                    f"directory on a file system that all machines share."
                )
            time.sleep(_LOOK_SECONDS)
        if self._thread is not None:
            self._thread.join(_BEFORE_SECONDS)  # it may be alive for a moment after its report
        if self._thread is not None and self._thread.is_alive():
            raise CheckpointError(f"{file.path}: the checkpoint before it is still being written.")
        tensors = [
            (f"{kind}:{box.tensor}:{','.join(map(str, box.start))}", region.view(storage[region.storage].detach(), box))
            for kind, (layout, storage) in kinds.items()
            for box, region in self._share(kind, layout)
        ]
        text = json.dumps(random_state()).encode()
        text += b" " * (-len(text) % _RANDOM_BYTES)  # the image keeps its size
        state = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        ordered = sorted(tensors, key=lambda one: -one[1].itemsize)  # keeps every tensor aligned
        self._take([*ordered, (_RANDOM, state)], {"id": file.id})
        self._thread = threading.Thread(target=self._write, args=(file,), name="checkpoint", daemon=True)
        self._thread.start()

    def _share(self, kind: str, layout: Layout) -> list[Share]:
        known = self._shares.get(kind)
        if known is None or known[0] is not layout:
            # kinds of one optimizer have one layout
            found = next((share for other, share in self._shares.values() if other is layout), None)
            known = self._shares[kind] = (layout, shares(layout)[self.rank] if found is None else found)
        return known[1]

    def _take(self, tensors: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        at = 0
        for name, tensor in tensors:
            end = at + tensor.numel() * tensor.itemsize
            header[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        start = 8 + len(text)
        if self._image is None or len(self._image) != start + at:
            self._image, self._places = None, []  # freed before there is another
            memory = torch.empty(start + at + ALIGNED, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._image = memory[-memory.data_ptr() % ALIGNED :][: start + at]
        self._image[:start] = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        self._places = []
        for name, tensor in tensors:
            a, b = header[name]["data_offsets"]
            place = self._image[start + a : start + b].view(tensor.dtype).view(tensor.shape)
            self._places.append((name, place.copy_(tensor, non_blocking=True)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _write(self, file: RankFile) -> None:
        try:
            _partial(file).write_bytes(bytes(_RESERVED))  # so that an error can be reported from a full disk
            _check_finite(file.path, self._places)
            entries = {file.path: write_file(file.path, self._chunks(file), direct=True)}
            entries |= {path: write_file(path, (content,)) for path, content in file.extra.items()}
            names = {str(path.relative_to(file.report.parent)): asdict(entry) for path, entry in entries.items()}
            _report(file, {"id": file.id, "files": names})
        except Exception as error:  # the driver must learn of any error
            self._failed(file, error)

    def _chunks(self, file: RankFile) -> Iterator[memoryview]:
        assert self._image is not None
        whole = self._image.numpy().data
        for at in range(0, len(whole), CHUNK_BYTES):
            if not file.report.parent.exists():
                raise CheckpointError(f"{file.path}: the save was given up.")
            yield whole[at : at + CHUNK_BYTES]

    def _failed(self, file: RankFile, error: Exception) -> None:
        """Report the error, from a full disk once the files of all ranks are removed; ends with the save."""
        report = {"id": file.id, "error": failure(error, self.rank, file.path)}
        written = () if isinstance(error, FileExistsError) else (file.path, *file.extra)
        end = time.monotonic() + _BEFORE_SECONDS
        while file.report.parent.exists() and time.monotonic() < end:
            with suppress(OSError):
                for path in written:
                    path.unlink(missing_ok=True)
                _report(file, report)
                return
            time.sleep(1.0)


def _partial(file: RankFile) -> Path:
    return file.report.with_suffix(".partial")


def _report(file: RankFile, report: Mapping[str, Any]) -> None:
    """Errors: OSError, when there is no report: the files may be removed."""
    partial, content = _partial(file), json.dumps(report).encode()
    try:
        with open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as opened:  # keeps the reserved bytes
            opened.write(content)
            opened.truncate()
    except OSError as error:
        error.filename = error.filename or str(partial)
        with suppress(OSError):
            if partial.stat().st_size < _RESERVED:  # nothing was left to reserve
                partial.unlink()
        raise
    try:
        partial.rename(file.report)
    except OSError:
        if partial.exists():  # else the driver has it: a network file system repeats requests
            raise


def failure(error: Exception, rank: int, file: Path, more: str = "") -> str:
    """What went wrong on a rank that was writing `file`, with `more` of an OSError."""
    if isinstance(error, CheckpointError):
        return str(error)
    who = f"rank {rank} on {socket.gethostname()}"
    if isinstance(error, OSError):
        return f"{who} could not write {error.filename or file}: {error.strerror or error}{more}."
    return f"{who}: {type(error).__name__}: {error}."


def is_finite(tensor: Tensor) -> bool:
    """Whether all of its numbers are finite; makes no copy, as isfinite would."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    known = tensor if tensor.itemsize > 1 else tensor.float()  # torch cannot compare float8
    return all(end.isfinite() for end in known.aminmax())


def _check_finite(file: Path, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Errors: CheckpointError for a tensor with numbers that are not finite: nothing could be continued from it."""
    for name, tensor in tensors:
        if not is_finite(tensor):
            kind, box = _box(file, name, tensor.shape)
            raise CheckpointError(f"{box} ({kind}) has numbers that are not finite.")


def _box(file: Path, name: str, shape: Sequence[int]) -> tuple[str, Box]:
    """The kind and box of a tensor in a file. Errors: CheckpointError for a name that no save writes."""
    try:
        kind, rest = name.split(":", 1)
        tensor, starts = rest.rsplit(":", 1)
        start = tuple(map(int, starts.split(","))) if starts else ()
        return kind, Box(tensor, start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    except ValueError:
        raise CheckpointError(f"{file} has {name!r:.80}, which is not a tensor of a checkpoint.") from None


class SavedTensors:
    """The boxes in a group's files. Errors: CheckpointError for a file that is not part of checkpoint `id`."""

    def __init__(self, files: Sequence[Path], id: str) -> None:
        self.files = files
        self._found: dict[tuple[str, str], list[tuple[Box, Entry]]] = {}
        for file in files:
            open_plain(file).close()
            for name, entry in read_header(file).items():
                if name != _RANDOM:
                    kind, box = _box(file, name, entry.shape)
                    self._found.setdefault((kind, box.tensor), []).append((box, entry))
            with safe_open(file, framework="np") as opened:
                found = (opened.metadata() or {}).get("id")
            if found != id:
                raise CheckpointError(f"{file} belongs to another checkpoint: its id is {found}, not {id}.")
        for (kind, _), boxes in self._found.items():
            if twice := [(box, entries) for box, entries in partition(boxes) if len(entries) > 1]:
                box, entries = twice[0]
                raise CheckpointError(f"{box} ({kind}) is in {entries[0].file} and again in {entries[1].file}.")

    def read_into(self, kind: str, regions: Sequence[Region], storage: Mapping[str, Tensor]) -> None:
        """Fill regions of `storage` from the boxes of one kind. Errors: CheckpointError when elements are missing."""
        parts: dict[Path, list[tuple[Entry, Box, Box, Region]]] = {}
        for region in regions:
            missing = region.box.numel
            for box, entry in self._found.get((kind, region.box.tensor), ()):
                if (common := box.intersect(region.box)) is not None:
                    if entry.dtype not in READABLE:
                        raise CheckpointError(f"{entry.file} has {entry.name} in {entry.dtype}: no save writes that.")
                    parts.setdefault(entry.file, []).append((entry, box, common, region))
                    missing -= common.numel
            if missing:
                where = self.files[0].parent if self.files else "the checkpoint"
                raise CheckpointError(f"{where} lacks {missing} elements of {region.box} ({kind}).")
        for file, found in parts.items():
            with safe_open(file, framework="pt") as opened:
                for entry, box, common, region in found:
                    copy_part(opened.get_slice(entry.name), box.start, region, common, storage)

    def restore_random_state(self, rank: int) -> None:
        """Continue the random number generators of the rank that wrote file number `rank`."""
        try:
            with safe_open(self.files[rank], framework="pt") as opened:
                state = json.loads(bytes(opened.get_tensor(_RANDOM).tolist()))
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self.files[rank]} has no state of random number generators: {error!r}.") from None
        set_random_state(state, str(self.files[rank]))


# Random number generators of a process


def random_state() -> dict[str, Any]:
    """The states of torch's, numpy's and Python's global generators, as plain values for JSON."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, values, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": [version, list(values), gauss],
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any], origin: str = "the checkpoint") -> None:
    """Continue from `random_state`. Errors: CheckpointError when it is not one, with nothing changed."""
    before = random_state()
    try:
        _set_random_state(state)
    except (ArithmeticError, ValueError, LookupError, TypeError, RuntimeError) as error:
        _set_random_state(before)
        raise CheckpointError(f"{origin} has no state of random number generators: {error!r:.200}.") from None


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    kind, keys, position, *rest = state["numpy"]
    if not 0 <= position <= len(keys):  # numpy does not check it
        raise ValueError(f"position {position} of {len(keys)} keys")
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, *rest))
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), None if gauss is None else float(gauss)))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
