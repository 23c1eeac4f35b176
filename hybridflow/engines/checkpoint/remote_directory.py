"""RemoteDirectory: a directory at an address such as s3://bucket/run, which fsspec reaches.

Whatever is sent is written to a staging directory of this machine first, and what is fetched comes there. A checkpoint
is complete at its address when its manifest, the last file sent, is there and all files have the sizes that it says.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
from fsspec.callbacks import Callback
from fsspec.registry import known_implementations

from hybridflow.engines.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    discard,
    partial_directory,
    step_directory,
    step_of,
)
from hybridflow.engines.checkpoint.reader import MODEL_FILES
from hybridflow.errors import CheckpointError, ConfigError, nearest
from hybridflow.settings import STAGING, cache_directory, check_address, is_address, require, staging_directory

_CONFIGS = ("config.json", "adapter_config.json")  # the last file of a model that is sent
_MARKS = (MANIFEST, *_CONFIGS)
_ABANDONED_SECONDS = 86400.0  # no copy takes as long without a new file
_SCHEMES = ("s3", "gs", "az", "oss", "hdfs", "sftp", "webdav", "file")  # those that hints name


class RemoteDirectory:
    """The directory at `address`; names of files are relative to it.

    Errors: ConfigError for a scheme that fsspec does not know, and where the package that it needs is not installed;
    all methods raise CheckpointError for whatever goes wrong.
    """

    def __init__(self, address: str | os.PathLike[str]) -> None:
        check_address(address)
        scheme, _, rest = os.fspath(address).partition(":")
        require("::" not in os.fspath(address), f"{address!r} is a chain of addresses: give one.")
        if not rest.startswith("//"):  # pathlib has taken one of two slashes
            rest = ("//" if scheme in ("file", "local") else "/") + rest
        self.address, own = f"{scheme}:{rest}".rstrip("/"), {"auto_mkdir": True} if scheme in ("file", "local") else {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.address, **own)
        except ImportError as error:
            package = str(known_implementations.get(scheme, {}).get("class", scheme)).partition(".")[0]
            raise ConfigError(
                f"{self.address} needs the package {package}, which is not installed: pip install {package}."
            ) from error
        except Exception as error:
            if scheme not in fsspec.available_protocols():
                raise ConfigError(
                    f"{self.address!r}: fsspec has no scheme {scheme!r}.{nearest(scheme, _SCHEMES)} Give one of these, "
                    f"or a directory that is mounted here."
                ) from error
            raise ConfigError(f"{self.address!r} cannot be opened: {type(error).__name__}: {error}.") from error

    @property
    def lock(self) -> Path:
        """The file of the lock on the address, which is one for all staging directories of this user."""
        key = repr([self.address, self._files.storage_options, os.environ.get("AWS_ENDPOINT_URL")])
        return cache_directory() / "locks" / hashlib.sha256(key.encode()).hexdigest()

    def check_writable(self) -> None:
        """Write and remove a small file. Errors: ConfigError, also for missing or wrong credentials."""
        name = f".hybridflow-{uuid.uuid4().hex}"
        try:
            self.write(name, b"hybridflow")
            self.remove(name)
        except CheckpointError as error:
            raise ConfigError(
                f"{error} Check the address, the credentials, and that it is reached from here."
            ) from error

    @contextmanager
    def _reaching(self, what: str, name: str) -> Iterator[str]:
        """The path of a file. Errors: CheckpointError instead of those that each file system has of its own."""
        try:
            yield f"{self._root.rstrip('/')}/{name}" if name else self._root
        except Exception as error:
            at = f"{self.address}/{name}" if name else self.address
            raise CheckpointError(
                f"{at} cannot be {what}: {type(error).__name__}: {str(error).strip('. ')}."
            ) from error

    def sizes(self, name: str = "") -> dict[str, int]:
        """The files below `name`, with their sizes; empty where there is no such directory."""
        with self._reaching("listed", name) as path:
            self._files.invalidate_cache()
            try:
                found = self._files.find(path, detail=True)
            except FileNotFoundError:
                return {}
            before = path.rstrip("/") + "/"
            return {at[len(before) :]: one["size"] for at, one in found.items() if at.startswith(before)}

    def read(self, name: str) -> bytes:
        with self._reaching("read", name) as path:
            return self._files.cat_file(path)

    def write(self, name: str, content: bytes) -> None:
        with self._reaching("written", name) as path:
            self._make_parent(path)
            self._files.pipe_file(path, content)

    def put(self, source: Path, name: str, beat: Callable[[], None] = lambda: None) -> None:
        """Send a file. `beat` is called as parts of it have arrived."""
        with self._reaching("written", name) as path:
            self._make_parent(path)
            self._files.put_file(str(source), path, callback=Callback(hooks={"beat": lambda *_, **__: beat()}))

    def _make_parent(self, path: str) -> None:
        if not self._files.async_impl:  # object stores have no directories, and would make a bucket
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def get(self, name: str, target: Path) -> None:
        """Fetch a file."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._reaching("read", name) as path:
            self._files.get_file(path, str(target))

    def identities(self, names: Iterable[str]) -> dict[str, str]:
        """What changes when the content of a file does."""
        found = {}
        for name in names:
            with self._reaching("read", name) as path:
                found[name] = str(self._files.ukey(path))
        return found

    def remove(self, name: str, first: str = "") -> None:
        """Remove a file, or a directory: of that the file `first` first, without which the rest is not whole."""
        with self._reaching("removed", name) as path:
            self._files.invalidate_cache()
            if first and self._files.exists(f"{path}/{first}"):
                self._files.rm_file(f"{path}/{first}")
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def move(self, name: str, target: RemoteDirectory, last: str) -> None:
        """Move a directory to `target` on the same file system, where the file `last` arrives last."""
        names = sorted(self.sizes(name), key=lambda file: file == last)
        for file in names:
            with self._reaching("moved", f"{name}/{file}") as path, target._reaching("written", f"{name}/{file}") as to:
                target._make_parent(to)
                try:
                    self._files.cp_file(path, to)
                except NotImplementedError:  # SFTP and FTP
                    with tempfile.TemporaryDirectory() as here:
                        self._files.get_file(path, f"{here}/file")
                        self._files.put_file(f"{here}/file", to)
        self.remove(name, first=last)

    # Checkpoints and models

    def complete_steps(self) -> dict[int, CheckpointManifest]:
        """The complete checkpoints in this directory of checkpoints, newest first."""
        sizes, found = self.sizes(), dict[int, CheckpointManifest]()
        steps = {name.partition("/")[0]: step_of(Path(name.partition("/")[0])) for name in sizes}
        for name, step in sorted(steps.items(), key=lambda one: -(one[1] or 0)):
            if step is not None and f"{name}/{MANIFEST}" in sizes:
                here = {file.partition("/")[2]: size for file, size in sizes.items() if file.startswith(f"{name}/")}
                if (manifest := self.manifest(name, here)) is not None:
                    found[step] = manifest
        return found

    def manifest(self, name: str, sizes: Mapping[str, int]) -> CheckpointManifest | None:
        """The manifest of the checkpoint `name`, which has files of these `sizes`; None if it is not complete."""
        raw = self.read(f"{name}/{MANIFEST}")
        try:
            manifest = CheckpointManifest.parse(f"{self.address}/{name}/{MANIFEST}", raw)
        except CheckpointError:  # half of one, where files are not written as a whole
            return None
        return manifest if all(sizes.get(file) == entry.bytes for file, entry in manifest.files.items()) else None

    def fetch_checkpoint(self, name: str, target: Path) -> Path:
        """Copy the complete checkpoint `name` to `target`, which is replaced as a whole. Errors: CheckpointError."""
        manifest = self.manifest(name, sizes) if MANIFEST in (sizes := self.sizes(name)) else None
        if manifest is None:
            raise CheckpointError(f"{self.address}/{name} is not a complete checkpoint.")
        with _replacing(target) as partial:
            for file in (*manifest.files, MANIFEST):
                self.get(f"{name}/{file}", partial / file)
            discard(target)  # a damaged one
        return target

    def fetch_model(self, files: Sequence[str]) -> Path:
        """A copy of a saved model's `files` (patterns) in the staging directory, fetched where they have changed.

        Errors: CheckpointError."""
        names = [name for name in self.sizes() if any(fnmatch(name, pattern) for pattern in files)]
        if not {*_CONFIGS} & {*names}:
            raise CheckpointError(f"{self.address} has no {' or '.join(_CONFIGS)}: it is not a model, or not complete.")
        there = json.dumps([self.address, self.identities(sorted(names))])
        here, digest = staging_directory(self.address), hashlib.sha256(there.encode()).hexdigest()
        target = here.with_name(f".{here.name}-{digest[:16]}")
        if not target.exists():
            with _replacing(target) as partial:
                for name in names:
                    self.get(name, partial / name)
        return target

    def send_model(self, source: Path) -> None:
        """Replace the files of the directory by those of `source`. What has begun and not ended is no model: its
        configuration, or a checkpoint's manifest, is removed first and sent last. Errors: CheckpointError, also where
        there are files that are neither a model's nor sent again, which would be lost."""
        names, marks = [str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()], _MARKS
        there = [name for name in self.sizes() if "/" not in name]  # directories below are not of a model
        lost = [name for name in there if name not in names]
        if other := [name for name in lost if not any(fnmatch(name, pattern) for pattern in MODEL_FILES)]:
            raise CheckpointError(f"{self.address} has other files, such as {other[0]}: give a directory of its own.")
        for name in sorted(there, key=lambda name: name not in marks):
            if name in marks or name not in names:
                self.remove(name)
        for name in sorted(names, key=lambda name: name in marks):
            self.put(source / name, name)

    @property
    def sending(self) -> Path:
        """The copy of a directory that is sent as a whole; it stays where that fails."""
        here = staging_directory(self.address)
        return here.parent / ".sending" / here.name  # the directory of a run may be `here`

    def check_unsent(self) -> None:
        """Discard the copy of a checkpoint that was not sent as a whole, so that it can be saved again.

        Errors: CheckpointError where there is a checkpoint, or any file that is not of that copy."""
        own = {str(path.relative_to(self.sending)) for path in self.sending.rglob("*")} - {MANIFEST}
        if self.sizes().keys() - own:
            raise CheckpointError(f"{self.address} exists already: nothing is written over. Remove it first.")
        discard(self.sending)


def opened(path: Any) -> RemoteDirectory | None:
    """The directory at an address; None for a path of this machine."""
    return RemoteDirectory(path) if is_address(path) else None


@contextmanager
def written_here(path: str | os.PathLike[str], sends: bool = True) -> Iterator[Path]:
    """Where to write a directory that is meant for `path`: `path` itself, or for an address a staging directory, which
    is sent when the block ends (where `sends`) and removed. Errors: ConfigError; CheckpointError, and then it stays."""
    if (remote := opened(path)) is None:
        yield Path(path)
        return
    target = remote.sending
    try:
        yield target
    except CheckpointError as error:
        error.add_note(f"{path} is written in {target}, which ranks of several machines have to share: see {STAGING}.")
        raise
    if sends:
        try:
            remote.send_model(target)
        except CheckpointError as error:
            raise CheckpointError(f"{error} It was not sent as a whole, and is in {target}.") from error
        discard(target)


def checkpoint_at(remote: RemoteDirectory) -> tuple[RemoteDirectory, str]:
    """The checkpoint at an address, or the newest complete one of a directory of checkpoints or of a run: its directory
    and its name there. Errors: CheckpointError without any."""
    if MANIFEST in remote.sizes():
        parent, _, name = remote.address.rpartition("/")
        return RemoteDirectory(parent), name
    for source in (remote, RemoteDirectory(f"{remote.address}/checkpoints")):
        if (newest := next(iter(source.complete_steps()), None)) is not None:
            return source, step_directory(Path(), newest).name
    raise CheckpointError(f"{remote.address} is not a checkpoint and has none that is complete.")


@contextmanager
def fetched_checkpoint(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A checkpoint to read: `path`, or a copy of the one at an address, which is removed when the block ends.

    Errors: ConfigError; CheckpointError."""
    if (remote := opened(path)) is None:
        yield Path(os.path.abspath(path))
        return
    source, name = checkpoint_at(remote)
    copies = staging_directory(source.address).with_name(f".fetched-{uuid.uuid4().hex}")
    _discard_abandoned(copies.parent)
    try:
        yield source.fetch_checkpoint(name, copies / name)
    finally:
        discard(copies)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new directory that becomes `target` when the block ends, unless another process has made that meanwhile.

    Errors: CheckpointError."""
    partial = partial_directory(target.with_name(f"{target.name}.{uuid.uuid4().hex}"))
    try:
        partial.mkdir(parents=True)
        _discard_abandoned(target.parent)
        try:
            yield partial
            try:
                partial.rename(target)
            except OSError:
                if not target.is_dir():
                    raise
        finally:
            discard(partial)
    except OSError as error:
        raise CheckpointError(f"{error.filename or partial} cannot be written: {error.strerror}.") from error


def _discard_abandoned(directory: Path) -> None:
    """Copies in a staging directory that processes which were killed have left."""
    for path in (*directory.glob(".fetched-*"), *directory.glob(".*.partial")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                discard(path)
