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
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import quote, unquote

import xxhash

from hybridflow.errors import CheckpointError

MANIFEST, FORMAT = "manifest.json", 1
CHUNK_BYTES = 16 << 20  # written or read at a time
_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})", re.ASCII)
ALIGNED = 4096  # memory and lengths of direct writes
_FILE = re.compile(r"(?:[A-Za-z0-9_-][\w.-]*/)?[A-Za-z0-9_%-][\w.%-]*", re.ASCII)
_MOST_MANIFEST_BYTES = 1 << 30


def beside_name(path: str) -> str:
    """The name in a checkpoint, without directories, of the file `path` beside an export's weights."""
    return quote(path, safe="").replace("~", "%7E")


def beside_path(name: str) -> str:
    """What `beside_name` was given. Errors: CheckpointError for a path that leaves the directory."""
    path = unquote(Path(name).name)
    if "\0" in path or not all(part.strip() and not part.startswith(".") for part in path.split("/")):
        raise CheckpointError(f"{name!r} is no file beside weights: {path!r} is hidden, or outside the directory.")
    return path


@dataclass(frozen=True)
class FileEntry:
    """Size and xxh3-128 checksum of a file."""

    bytes: int
    checksum: str


FREEZE = "freeze"
"""Of `SavedGroup.use`: the patterns of weights that are not trained, and not in the checkpoint."""


@dataclass(frozen=True)
class SavedGroup:
    """The state of a worker group: `kinds` of tensors ("main", "exp_avg", ...; "weights" without training) in boxes of
    `tensors`, in the safetensors files `ranks` of its ranks.

    `use` are the settings by which the model computes from its tensors, `counters` are those of the optimizer, `dtypes`
    the dtypes of an export's tensors as safetensors spells them (the key "" is the default), `beside` the files that it
    has beside the weights. `follows`: a group whose weights are to be synchronized from this group instead.
    `values` is what a class with `state()` returned on each rank.
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
    use: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointManifest:
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
        """Write it as the last file of `directory`, flushed. Errors: OSError; CheckpointError for a state that JSON
        does not have."""
        body = asdict(self)
        try:
            checksum = xxhash.xxh3_128_hexdigest(_canonical(body))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{directory / MANIFEST}: a state is not plain data for JSON: {error}.") from None
        write_file(directory / MANIFEST, (_canonical({"checksum": checksum, "manifest": body}),))

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> CheckpointManifest:
        """The manifest of a checkpoint whose files all have their sizes; their content is not read.

        Errors: CheckpointError for a directory that is not a complete checkpoint, naming the file.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        _check_plain(directory, stat.S_ISDIR, "a directory")
        try:
            with open_plain(path) as file:
                if (size := os.fstat(file.fileno()).st_size) > _MOST_MANIFEST_BYTES:
                    raise CheckpointError(f"{path} has {size:,} bytes: it is not a manifest.")
                raw = file.readall()
        except OSError as error:
            raise CheckpointError(f"{path} is not a checkpoint's manifest: {type(error).__name__}: {error}.") from None
        found = cls.parse(path, raw)
        if step_of(directory) not in (None, found.step):
            raise CheckpointError(
                f"{path} is of step {found.step}, but its directory is {directory.name}: one of them was renamed, or "
                f"belongs to another checkpoint."
            )
        for name, entry in found.files.items():
            check_size(directory, name, entry)
        return found

    @classmethod
    def parse(cls, path: str | Path, raw: bytes) -> CheckpointManifest:
        """The manifest in the file `path`. Errors: CheckpointError for other content, naming the file."""
        try:
            whole = json.loads(raw)
            body, checksum = whole["manifest"], whole["checksum"]
            sound = checksum == xxhash.xxh3_128_hexdigest(_canonical(body))
            sound &= raw == _canonical({"checksum": checksum, "manifest": body})
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a checkpoint's manifest: {type(error).__name__}: {error}.") from None
        if not sound:
            raise CheckpointError(f"{path} is damaged: its content does not have its checksum.")
        version = body.get("format") if isinstance(body, dict) else None
        if type(version) is not int or version != FORMAT:
            raise CheckpointError(f"{path} has format {version!r}; this version of hybridflow reads {FORMAT}.")
        try:
            found: CheckpointManifest = _as(cls, body)
        except (LookupError, TypeError) as error:
            raise CheckpointError(f"{path} is not a manifest of format {FORMAT}: {error!r}.") from None
        named = [name for group in found.groups.values() for name in (*group.ranks, *group.beside)]
        for name in (*found.files, *named):
            if not _FILE.fullmatch(name) or name not in found.files or name == MANIFEST:
                raise CheckpointError(f"{path} names the file {name!r}, which cannot be part of a checkpoint.")
        if len(set(named)) != len(named):
            raise CheckpointError(f"{path} names a file for two ranks.")
        return found


def _as(kind: Any, value: Any) -> Any:
    """A value of JSON in the type of an annotation. Errors: TypeError, LookupError."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:  # with None
        return None if value is None else _as(inside[0], value)
    types = {tuple: (list,), Mapping: (dict,), float: (int, float)}.get(origin or kind, (dict,))
    types = (kind,) if kind in (int, str) else types
    if type(value) not in types or (kind is int and value < 0):
        raise TypeError(f"{value!r:.80} is not {' or '.join(one.__name__ for one in types)}")
    if origin is tuple:
        return tuple(_as(inside[0], one) for one in value)
    if origin is Mapping:
        return {name: _as(inside[1], one) for name, one in value.items()}
    if not is_dataclass(kind):
        return value
    known = {"use": {}, **value}  # groups of earlier checkpoints do not have it
    return kind(**{name: _as(hint, known[name]) for name, hint in _hints(kind).items()})


_hints = cache(get_type_hints)


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


def open_plain(path: Path) -> FileIO:
    """A file that is no link, opened for reading; a pipe in its place does not block. Errors: CheckpointError."""
    _check_plain(path, stat.S_ISREG, "a file")
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path} is not a file: a checkpoint has none.")
    return file


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
        with open_plain(directory / name) as file:
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

    Errors: OSError that names the file, which is then removed.
    """
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb", buffering=0) as file:
        try:
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
            with suppress(OSError):
                path.unlink()  # a disk that is full has space again, for the report
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


def flush(path: Path) -> None:
    """Flush a file or directory to disk, so that a rename cannot reach the disk before the data."""
    descriptor = os.open(path, os.O_RDONLY)
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


def publish(partial: Path, target: Path, manifest: CheckpointManifest) -> None:
    """Complete a checkpoint: all of it reaches the disk before its name does. Errors: OSError, FileExistsError."""
    manifest.write(partial)
    for directory in {partial, *((partial / name).parent for name in manifest.files)}:
        flush(directory)
    if os.path.lexists(target):
        raise FileExistsError(17, "exists already", str(target))
    partial.rename(target)
    flush(target.parent)


def remove(directory: Path) -> None:
    """Remove a checkpoint: at no moment is there a part of one under its name. Errors: OSError."""
    doomed = directory.with_name(f".{directory.name}.removed")
    discard(doomed)
    with suppress(FileNotFoundError):
        directory.rename(doomed)
        discard(doomed)


def complete_steps(root: Path) -> Iterator[tuple[Path, CheckpointManifest]]:
    """The complete checkpoints of a run, newest first; their files are not read."""
    for path in saved_steps(root):
        with suppress(CheckpointError):
            manifest = CheckpointManifest.read(path)
            yield path, manifest


def best_step(metrics: Iterable[tuple[int, Mapping[str, float | None]]], best: str | None) -> tuple[int, float] | None:
    """The step with the highest value of the metric `best` ("-name": the lowest), and the value; of equal ones the
    first."""
    name, sign = (best or "").removeprefix("-"), -1 if best and best.startswith("-") else 1
    found = [(step, value) for step, values in metrics if (value := values.get(name)) is not None] if name else []
    return max(found, key=lambda one: sign * one[1], default=None)


def set_aside(root: Path, checkpoints: Iterable[Path]) -> Path:
    """Move checkpoints to `<root>.1`, or the next number that is free, and return it."""
    numbers = (root.with_name(f"{root.name}.{n}") for n in itertools.count(1))
    aside = next(path for path in numbers if not os.path.lexists(path))
    aside.mkdir(parents=True)
    for path in checkpoints:
        path.rename(aside / path.name)
    return aside


def is_set_aside(root: Path) -> bool:
    return root.suffix.removeprefix(".").isdecimal()


def discard(path: Path) -> None:
    """Remove a directory tree, a file or a link, if it is there. Errors: OSError."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def leftovers(root: Path) -> Iterator[Path]:
    """What interrupted saves and removals have left."""
    for suffix in ("partial", "removed"):
        yield from root.glob(f".step-*.{suffix}")
