"""Export: a worker group of a run's checkpoint as a Hugging Face directory, without a cluster or the original model."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.config import DType
from hybridflow.engine3d.layout import Region
from hybridflow.engines.checkpoint.manifest import (
    FREEZE,
    MANIFEST,
    CheckpointManifest,
    SavedGroup,
    beside_path,
    check_content,
    saved_steps,
    step_of,
)
from hybridflow.engines.checkpoint.rank_state import SavedTensors
from hybridflow.engines.checkpoint.remote_directory import fetched_checkpoint, opened, written_here
from hybridflow.engines.checkpoint.writer import (
    Turn,
    check_dtype,
    file_contents,
    save_files,
    saved_dtypes,
    write_beside,
    write_files,
)
from hybridflow.engines.lora.adapters import CONFIG, TOWER, WEIGHTS, saved_names
from hybridflow.errors import CheckpointError, ConfigError, nearest

logger = logging.getLogger(__name__)
_KINDS = ("main", "weights")  # those that contain parameters


def export(
    checkpoint: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    group: str = "actor",
    dtype: DType | None = None,
) -> str:
    """Write the model of a group in a run's checkpoint to `directory`, as `save` of the group did at that step: a
    Hugging Face directory, or adapters in peft's format, in the dtypes that `save(dtype=)` gives. Starts no process.

    `checkpoint` is one checkpoint, or a directory of them or of a run: then the newest whole one is exported. Files are
    verified first. At most one file of the export is in memory at a time; `directory` is replaced as a whole. Both may
    be addresses such as `s3://bucket/model`. Returns the absolute path of `directory`, or its address.

    Errors: CheckpointError for a damaged checkpoint, or when `directory` cannot be written; ConfigError for a group
    that the checkpoint does not have, or has no tensors of, and for another dtype.
    """
    check_dtype(dtype)
    remote = opened(directory)
    with fetched_checkpoint(checkpoint) as here, written_here(directory) as target:
        export_here(here, target, group, dtype)
    return os.path.abspath(directory) if remote is None else remote.address


def export_here(checkpoint: Path, directory: Path, group: str = "actor", dtype: DType | None = None) -> int:
    """`export` without addresses; returns the step of the checkpoint."""
    check_dtype(dtype)
    found, damaged = _candidates(checkpoint), list[CheckpointError]()
    for path in found:
        try:
            manifest = CheckpointManifest.read(path)
            saved = _group(path, manifest, group)
            for name in (*saved.ranks, *saved.beside):
                check_content(path, name, manifest.files[name])
            tensors = SavedTensors([path / name for name in saved.ranks], manifest.id)
        except CheckpointError as error:
            damaged.append(error)
            if path is not found[-1]:
                logger.warning("%s is skipped: %s", path, error)
            continue
        target = Path(os.path.realpath(directory))
        if path.resolve() in (target, *target.parents):
            raise ConfigError(f"{directory} is in the checkpoint {path}: choose a directory outside of it.")
        _write(target, path, saved, tensors, dtype)
        return manifest.step
    if len(damaged) == 1:
        raise damaged[0]
    raise CheckpointError(f"none of the {len(damaged)} checkpoints in {checkpoint} is whole. The first: {damaged[0]}")


def _candidates(path: Path) -> list[Path]:
    """The checkpoints to export from, the newest first. Errors: CheckpointError without any."""
    if step_of(path) is not None or os.path.lexists(path / MANIFEST):
        return [path]
    if found := saved_steps(path) or saved_steps(path / "checkpoints"):
        return found
    raise CheckpointError(f"{path} is not a checkpoint of a run and has none. Give a directory such as step-00000020.")


def _group(path: Path, manifest: CheckpointManifest, group: str) -> SavedGroup:
    """Errors: ConfigError."""
    if group not in manifest.groups:
        raise ConfigError(f"{path} has no group {group!r}.{nearest(group, manifest.groups)}")
    saved = manifest.groups[group]
    if saved.follows is not None:
        raise ConfigError(f"{path} has no tensors of {group!r}: its weights are those of {saved.follows!r}. Export it.")
    if not any(kind in saved.kinds for kind in _KINDS):
        having = [name for name, one in manifest.groups.items() if any(kind in one.kinds for kind in _KINDS)]
        raise ConfigError(
            f"{path} has no tensors of {group!r} ({saved.worker}), which does not change in training. Groups with "
            f"tensors: {', '.join(having) or 'none'}."
        )
    if FREEZE in saved.use:
        raise ConfigError(
            f"{path} has only the trained tensors of {group!r}, which has freeze={saved.use[FREEZE]}. Continue the run "
            f"and call save() of the group."
        )
    return saved


def _write(target: Path, checkpoint: Path, saved: SavedGroup, tensors: SavedTensors, dtype: DType | None) -> None:
    shapes = dict(saved.tensors)
    beside = {beside_path(name): (checkpoint / name).read_bytes() for name in saved.beside}
    adapters = json.loads(beside[CONFIG]) if CONFIG in beside else None
    config = None if adapters else json.loads(beside["config.json"])
    known = {name: saved.dtypes.get(name, saved.dtypes.get("", "F32")) for name in shapes}
    dtypes = saved_dtypes(known, dtype, config)
    own = saved_names(shapes, adapters.get("exclude_modules") == TOWER) if adapters else {}
    named = {own.get(name, name): name for name in shapes}
    nbytes = {new: math.prod(shapes[name]) * dtypes[name].itemsize for new, name in named.items()}
    files = {WEIGHTS: list(named)} if adapters else file_contents(nbytes, len(saved.ranks))
    kind = next(kind for kind in _KINDS if kind in saved.kinds)

    def start(directory: Path) -> None:
        if not adapters:
            write_beside(directory, beside, files, nbytes, {new: dtypes[name] for new, name in named.items()})
            return
        write_files(directory, beside)

    def fill(turn: Turn, buffers: Mapping[str, Tensor]) -> None:
        regions = [Region.whole(named[new], tuple(buffer.shape), new) for new, buffer in buffers.items()]
        tensors.read_into(kind, regions, buffers)

    with torch.no_grad():
        renamed = {new: shapes[name] for new, name in named.items()}
        save_files(target, renamed, files, start, fill, dtypes={new: dtypes[name] for new, name in named.items()})
