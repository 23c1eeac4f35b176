"""Writes sharded weights as a Hugging Face directory, every rank its share of the files.

A file is a destination like any other: its tensors whole on the rank that writes it. So saving is a weight plan per
round of files, executed into CPU buffers.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer import execute
from hybridflow.engine3d.wire import agree_dtypes, wire_device
from hybridflow.engines.checkpoint import INDEX, SINGLE
from hybridflow.errors import CheckpointError

MAX_FILE_BYTES = 4 << 30
MIN_FILE_BYTES = 256 << 20  # smaller files are not worth another writer
_BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "spiece.model", "*.tiktoken", "chat_template*", "*.jinja"),
)


def save_checkpoint(
    directory: str | os.PathLike[str],
    layout: Layout,
    storage: Mapping[str, Tensor],
    *,
    like: str | os.PathLike[str],
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `layout`'s tensors to `directory`, with config, generation config and tokenizer of the directory `like`.

    Collective over `group` (`rank` in it, as in the layout); `directory` is on a file system that all ranks share.
    Tensors keep their dtype unless `dtype` is given, and the config says which. Each rank holds one file of at most
    `max_file_bytes` in memory at a time (a single larger tensor is a file of its own). Everything is written beside
    `directory` and renamed when complete, so a crash never leaves half a checkpoint there. A crash between the two
    renames of a replacement leaves the old checkpoint as `.<name>.replaced`; the next save puts it back first.

    Errors: CheckpointError, on all ranks, when a rank cannot write, when `like` has no config, or when `directory`
    exists and holds other things than a checkpoint.
    """
    dtypes = _dtypes(layout, storage, group, rank, dtype)
    nbytes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in layout.tensors.items()}
    files = file_contents(nbytes, group.size() if group is not None else 1, max_file_bytes)

    def start(directory: Path) -> None:
        _start(directory, Path(like), files, nbytes, dtypes)

    save_tensors(directory, layout, storage, files, start, group=group, rank=rank, dtypes=dtypes)


def save_tensors(
    directory: str | os.PathLike[str],
    layout: Layout,
    storage: Mapping[str, Tensor],
    files: Mapping[str, Sequence[str]],
    start: Callable[[Path], None],
    *,
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write safetensors `files` (name -> tensors of `layout`) to `directory`, which is replaced as a whole.

    `start` writes what is beside them, a `*config.json` at least, into the empty directory that it is given, on rank 0;
    when it raises nothing has changed. Otherwise as `save_checkpoint`.
    """
    target = Path(os.path.abspath(directory))
    partial = target.with_name(f".{target.name}.partial")
    dtypes = dtypes or _dtypes(layout, storage, group, rank, None)
    writers = group.size() if group is not None else 1
    with _agreed(group, rank):
        if rank == 0:
            _restore(target)
            _check_replaceable(target)
            if partial.exists():  # of a save that was interrupted
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            try:
                start(partial)
            except CheckpointError:
                shutil.rmtree(partial)
                raise
    for first in range(0, len(files), writers):
        turn = list(files.items())[first : first + writers]
        buffers = _gather(turn, layout, storage, dtypes, group, rank)
        with _agreed(group, rank):
            if rank < len(turn):
                file = partial / turn[rank][0]
                save_file(buffers, file, metadata={"format": "pt"})
                shutil.copymode(next(partial.glob("*config.json")), file)  # safetensors lets only its owner read it
                _flush(file)
    with _agreed(group, rank):
        if rank == 0:
            _flush(partial)
            _replace(target, partial)


def file_contents(
    nbytes: Mapping[str, int], writers: int = 1, max_bytes: int = MAX_FILE_BYTES, min_bytes: int = MIN_FILE_BYTES
) -> dict[str, list[str]]:
    """File name -> tensors, in model order: about one file per writer within `min_bytes` and `max_bytes` each."""
    limit = min(max_bytes, max(min_bytes, -(-sum(nbytes.values()) // writers)))
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in nbytes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _dtypes(
    layout: Layout, storage: Mapping[str, Tensor], group: dist.ProcessGroup | None, rank: int, dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    if dtype is not None:
        return dict.fromkeys(layout.tensors, dtype)
    regions = layout.regions(rank) if rank < layout.ranks else ()
    return agree_dtypes(list(layout.tensors), {r.box.tensor: storage[r.storage].dtype for r in regions}, group)


def _gather(
    turn: Sequence[tuple[str, Sequence[str]]],
    layout: Layout,
    storage: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None,
    rank: int,
) -> dict[str, Tensor]:
    """The whole tensors of the file that `rank` writes in this round, on the CPU."""
    shapes = {name: tuple(layout.tensors[name]) for _, names in turn for name in names}

    def regions(writer: int) -> list[Region]:
        return [Region(Box.whole(name, shapes[name]), name, (0,) * len(shapes[name])) for name in turn[writer][1]]

    mine = turn[rank][1] if rank < len(turn) else ()
    buffers = {name: torch.empty(shapes[name], dtype=dtypes[name]) for name in mine}
    execute(plan(layout, Layout(shapes, len(turn), regions)), storage, buffers, group, rank)
    return buffers


def _start(
    partial: Path,
    like: Path,
    files: Mapping[str, list[str]],
    nbytes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    if not (like / "config.json").is_file():
        raise CheckpointError(f"cannot save a checkpoint like {like}: it has no config.json to copy.")
    for pattern in _BESIDE_WEIGHTS:
        for file in like.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, partial / file.name)
    config = json.loads((like / "config.json").read_text())
    widths = {dtype: sum(nbytes[name] for name in dtypes if dtypes[name] == dtype) for dtype in set(dtypes.values())}
    _write_json(
        partial / "config.json", _adapted(config, max(widths, key=lambda d: widths[d]), "score.weight" in dtypes)
    )
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        _write_json(partial / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": where})


def _adapted(config: dict, dtype: torch.dtype, classifies: bool) -> dict:
    """The config of the weights that are saved: their dtype, and a one-label classifier where they have such a head."""
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if classifies:
        names = config.get("architectures") or []
        config["architectures"] = [re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", n) for n in names]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _check_replaceable(target: Path) -> None:
    """A checkpoint may replace a checkpoint, but never somebody's other files."""
    if not target.exists():
        return
    known = {
        f.name
        for pattern in (*_BESIDE_WEIGHTS, "adapter_config.json", "*.safetensors", INDEX)
        for f in target.glob(pattern)
    }
    others = sorted({f.name for f in target.iterdir()} - known) if target.is_dir() else [target.name]
    if others:
        raise CheckpointError(
            f"saving to {target} would replace it, and it holds more than a checkpoint: {', '.join(others[:5])}. "
            "Choose another directory."
        )


def _set_aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _replace(target: Path, partial: Path) -> None:
    old = _set_aside(target)
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        _restore(target)
        raise
    _flush(target.parent)
    if old.exists():
        shutil.rmtree(old)


def _restore(target: Path) -> None:
    """Undo a replacement that ended between its two renames; remove what one left behind after them."""
    old = _set_aside(target)
    if old.exists() and not target.exists():
        old.rename(target)
    elif old.exists():
        shutil.rmtree(old)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
    _flush(file)


def _flush(path: Path) -> None:
    """What was written survives a crash of the machine: a rename may otherwise reach the disk before the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _agreed(group: dist.ProcessGroup | None, rank: int) -> Iterator[None]:
    """All ranks finish this step or all of them raise: nobody waits for a rank whose disk is full."""
    failure: Exception | None = None
    try:
        yield
    except (OSError, SafetensorError, ValueError) as error:
        failure = error
    failed = torch.tensor([0 if failure is None else rank + 1], device=wire_device(group))
    if group is not None:
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        raise CheckpointError(f"rank {rank} could not write the checkpoint: {failure}") from failure
    if int(failed):
        raise CheckpointError(f"rank {int(failed) - 1} could not write the checkpoint; its error says why.")
