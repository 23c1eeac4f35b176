"""Manifest: the JSON description of a run's checkpoint, and the rules by which a directory is one.

`step-00000020/manifest.json` lists every other file with its size and checksum. Files are written into
`.step-00000020.partial`, flushed and renamed, so the directory is complete or does not exist. Reading executes nothing:
tensors are safetensors, everything else is JSON.

torch.distributed.checkpoint is not used: its `.metadata` is a pickle, nothing has a checksum, and a save into an
existing directory that dies half-way leaves a mix of two steps that loads.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hybridflow.errors import CheckpointError

MANIFEST, FORMAT = "manifest.json", 1
CHUNK_BYTES = 16 << 20  # written or read at a time
ALIGNED = 4096  # memory and lengths of direct writes
_STEP = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"(?:[A-Za-z0-9_-][\w.-]*/)?[A-Za-z0-9_-][\w.-]*", re.ASCII)
_MOST_MANIFEST_BYTES = 1 << 30


@dataclass(frozen=True)
class FileEntry:
    """Size and xxh3-128 checksum of a file."""

    bytes: int
    checksum: str


@dataclass(frozen=True)
class SavedGroup:
    """The state of a worker group: `kinds` of tensors ("main", "exp_avg", ...; "weights" without training) in boxes of
    `tensors`, in the safetensors files `ranks` of its ranks.

    `counters` are those of the optimizer, `dtypes` the dtypes of the parameters as safetensors spells them (the key ""
    is the default), `beside` the files that an export puts beside the weights. `follows`: a group whose weights are to
    be synchronized from this group instead. `values` is what a class with `state()` returned on each rank.
    """

    worker: str
    ranks: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    counters: Mapping[str, Any] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    follows: str | None = None
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's content: `step` iterations are done, `parts` are the states of loaders, tracker and other objects
    of the driver, `random` that of its random number generators. `id` is in the header of every tensor file."""

    step: int
    id: str
    groups: Mapping[str, SavedGroup]
    files: Mapping[str, FileEntry]
    parts: Mapping[str, Any]
    random: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, directory: Path) -> None:
        """Write it as the last file of `directory`, flushed."""
        body = asdict(self)
        text = _canonical({"checksum": xxhash.xxh3_128_hexdigest(_canonical(body)), "manifest": body})
        with (directory / MANIFEST).open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> Manifest:
        """The manifest of a checkpoint whose files all have their sizes; their content is not read.

        Errors: CheckpointError for a directory that is not a complete checkpoint, naming the file.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        _check_plain(directory, stat.S_ISDIR, "a directory")
        _check_plain(path, stat.S_ISREG, "a file")
        try:
            if path.stat().st_size > _MOST_MANIFEST_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes: it is not a manifest.")
            raw = path.read_bytes()
            whole = json.loads(raw)
            body, checksum = whole["manifest"], whole["checksum"]
            sound = checksum == xxhash.xxh3_128_hexdigest(_canonical(body)) and _canonical(whole) == raw
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a checkpoint's manifest: {type(error).__name__}: {error}.") from None
        if not sound:
            raise CheckpointError(f"{path} is damaged: its content does not have its checksum.")
        found = cls._parsed(path, body)
        for name, entry in found.files.items():
            check_size(directory, name, entry)
        return found

    @classmethod
    def _parsed(cls, path: Path, body: Any) -> Manifest:
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            version = body.get("format") if isinstance(body, dict) else None
            raise CheckpointError(f"{path} has format {version!r}; this version of hybridflow reads {FORMAT}.")
        try:
            files = {
                str(name): FileEntry(int(one["bytes"]), str(one["checksum"])) for name, one in body["files"].items()
            }
            groups = {str(name): _group(one) for name, one in body["groups"].items()}
            named = [name for group in groups.values() for name in (*group.ranks, *group.beside)]
            found = cls(int(body["step"]), str(body["id"]), groups, files, dict(body["parts"]), dict(body["random"]),
                        dict(body["metrics"]))  # fmt: skip
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a manifest of format {FORMAT}: {error!r}.") from None
        for name in (*files, *named):
            if not _FILE.fullmatch(name) or name not in files:
                raise CheckpointError(f"{path} names the file {name!r}, which cannot be part of a checkpoint.")
        return found


def _group(one: Mapping[str, Any]) -> SavedGroup:
    return SavedGroup(
        worker=str(one["worker"]),
        ranks=tuple(map(str, one["ranks"])),
        kinds=tuple(map(str, one["kinds"])),
        tensors={str(name): tuple(map(int, shape)) for name, shape in one["tensors"].items()},
        counters=None if one["counters"] is None else dict(one["counters"]),
        dtypes={str(name): str(dtype) for name, dtype in one["dtypes"].items()},
        beside=tuple(map(str, one["beside"])),
        follows=None if one["follows"] is None else str(one["follows"]),
        values=None if one["values"] is None else tuple(one["values"]),
    )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _check_plain(path: Path, is_kind: Any, kind: str) -> None:
    """Errors: CheckpointError unless the path is of this kind itself, not through a link."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path} is missing from the checkpoint ({error.strerror}).") from None
    if not is_kind(mode):
        raise CheckpointError(f"{path} is {'a link' if stat.S_ISLNK(mode) else 'not ' + kind}: a checkpoint has none.")


def check_size(directory: Path, name: str, entry: FileEntry) -> None:
    """Errors: CheckpointError when a file is missing, a link, or has another size."""
    path = directory / name
    if path.parent != directory:
        _check_plain(path.parent, stat.S_ISDIR, "a directory")
    _check_plain(path, stat.S_ISREG, "a file")
    if (found := path.lstat().st_size) != entry.bytes:
        raise CheckpointError(f"{path} is damaged: it has {found:,} bytes, the manifest says {entry.bytes:,}.")


def check_content(directory: Path, name: str, entry: FileEntry) -> None:
    """Reads the file. Errors: CheckpointError when its content does not have the checksum of the manifest."""
    check_size(directory, name, entry)
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(CHUNK_BYTES, max(1, entry.bytes))))
    try:
        with open(os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
    except OSError as error:
        raise CheckpointError(f"{directory / name} cannot be read: {error.strerror}.") from None
    if digest.hexdigest() != entry.checksum:
        raise CheckpointError(
            f"{directory / name} is damaged, or belongs to another checkpoint: it does not have the checksum in the "
            f"manifest."
        )


def write_file(path: Path, content: Iterable[bytes | memoryview], direct: bool = False) -> FileEntry:
    """Write a new file and flush it to disk. `direct`: all parts are `ALIGNED` in memory, and go to the disk without a
    copy in the page cache, which costs several times the processor time, where the file system can do so.

    Errors: OSError that names the file.
    """
    digest, size = xxhash.xxh3_128(), 0
    try:
        with path.open("xb", buffering=0) as file:
            for part in content:
                rest = memoryview(part).cast("B")
                digest.update(rest)
                size += len(rest)
                if direct:
                    rest = rest[_write_directly(file, rest) :]
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return FileEntry(size, digest.hexdigest())


def _set_direct(descriptor: int, on: bool) -> bool:
    """False where the file system cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


def _write_directly(file: Any, part: memoryview) -> int:
    """Returns the number of bytes written: whole blocks, or none where the file system cannot."""
    done, whole = 0, len(part) - len(part) % ALIGNED
    if not whole or not _set_direct(file.fileno(), True):
        return 0
    try:
        while done < whole:
            done += file.write(part[done:whole])
    except OSError as error:
        if error.errno != errno.EINVAL:  # another alignment is asked for; also after a part was written
            raise
    finally:
        _set_direct(file.fileno(), False)
    return done


def flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Directories of checkpoints


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_directory(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def step_of(directory: Path) -> int | None:
    """The step that a directory's name says; None for other names."""
    found = _STEP.fullmatch(directory.name)
    return int(found[1]) if found else None


def saved_steps(root: Path) -> list[Path]:
    """The checkpoints of a run, newest first, by their names."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = {path: step_of(path) for path in root.iterdir()}
        return sorted((path for path, step in found.items() if step is not None), key=lambda p: -(found[p] or 0))
    return []


def publish(partial: Path, target: Path, manifest: Manifest) -> None:
    """Complete a checkpoint: all of it reaches the disk before its name does. Errors: OSError, FileExistsError."""
    manifest.write(partial)
    for directory in {partial, *((partial / name).parent for name in manifest.files)}:
        flush_directory(directory)
    if target.exists():
        raise FileExistsError(17, "exists already", str(target))
    partial.rename(target)
    flush_directory(target.parent)


def remove(directory: Path) -> None:
    """Remove a checkpoint: at no moment is there a part of one under its name."""
    doomed = directory.with_name(f".{directory.name}.removed")
    with suppress(FileNotFoundError):
        shutil.rmtree(doomed)
    with suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed)


def leftovers(root: Path) -> Iterator[Path]:
    """What interrupted saves and removals have left."""
    for suffix in ("partial", "removed"):
        yield from root.glob(f".step-*.{suffix}")
