"""Writes sharded weights as a Hugging Face directory; every rank writes its share of the files.

Saving executes one weight plan per round of files into CPU buffers: its destination holds a file's whole tensors on the
writing rank.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.config import DType
from hybridflow.engine3d.layout import Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.handshake import wire_device
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.engines.checkpoint.manifest import discard, flush, partial_directory
from hybridflow.engines.checkpoint.rank_state import failure, is_finite, torch_dtype
from hybridflow.engines.checkpoint.reader import INDEX, MODEL_FILES, SINGLE
from hybridflow.engines.process_groups import gather
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.hf_spec import hf_config

logger = logging.getLogger(__name__)
Turn = Sequence[tuple[str, Sequence[str]]]
"""Files that are written at the same time, one by each rank, with their tensors."""
Fill = Callable[[Turn, Mapping[str, Tensor]], None]
MAX_FILE_BYTES = 4 << 30
MIN_FILE_BYTES = 256 << 20  # smaller files are not worth another writer
_WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf"),
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.npz", "*.distcp"),
)
"""Names of weights, of whatever format: a save writes them anew, or would leave them stale."""
_MOST_BESIDE = 64 << 20  # bytes of a file: larger ones are no part of a tokenizer


def save_checkpoint(
    directory: str | os.PathLike[str],
    layout: Layout,
    storage: Mapping[str, Tensor],
    *,
    like: str | os.PathLike[str] | Mapping[str, bytes],
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    dtypes: Mapping[str, torch.dtype] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `layout`'s tensors to `directory`, with the config, generation config and tokenizer that `like` has.

    `like` is a directory, or what `read_beside` read of one; rank 0 looks at it only. Collective over `group` (`rank`
    in it, as in the layout); `directory` is on a file system that all ranks share. Tensors are written in `dtypes`
    (float32 without), and the config says which most have. Each rank holds one file of at most `max_file_bytes` in
    memory at a time (a single larger tensor is a file of its own). Everything is written beside `directory` and renamed
    when complete. A crash between the two renames of a replacement leaves the old checkpoint as `.<name>.replaced`; the
    next save puts it back first.

    Errors: CheckpointError, the same on all ranks, when a rank cannot write: it names the rank, the file and the
    reason, and says what is in `directory` now. Also when `like` has no config, or when `directory` exists and holds
    other things than a checkpoint.
    """
    dtypes = dtypes or dict.fromkeys(layout.tensors, torch.float32)
    nbytes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in layout.tensors.items()}
    files = file_contents(nbytes, group.size() if group is not None else 1, max_file_bytes)

    def start(directory: Path) -> None:
        write_beside(directory, like if isinstance(like, Mapping) else read_beside(like), files, nbytes, dtypes)

    fill = planned(layout, storage, group, rank)
    save_files(directory, layout.tensors, files, start, fill, group=group, rank=rank, dtypes=dtypes)


def read_beside(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """By relative path the files of a Hugging Face directory that go with any weights of the model: all but weights,
    hidden files, and directories inside that are models themselves.

    Files that are too large to belong to a tokenizer are left out, and named in a warning. Errors: CheckpointError
    without a config.
    """
    root = Path(directory)
    if not (root / "config.json").is_file():
        raise CheckpointError(f"cannot save a checkpoint like {directory}: it has no config.json to copy.")
    found: dict[str, bytes] = {}
    for file in _beside(root):
        if (size := file.stat().st_size) > _MOST_BESIDE:
            logger.warning("%s has %s bytes: saved models will not have it", file, f"{size:,}")
            continue
        found[str(file.relative_to(root))] = file.read_bytes()
    return found


def _beside(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or any(path.match(pattern) for pattern in _WEIGHTS):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            inside = [*path.iterdir()]
            if not any(file.match(pattern) for file in inside for pattern in ("config.json", *_WEIGHTS)):
                yield from _beside(path)


def write_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write files by relative path. Errors: OSError naming the file."""
    for name, content in contents.items():
        file = directory / name
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def planned(layout: Layout, storage: Mapping[str, Tensor], group: dist.ProcessGroup | None, rank: int) -> Fill:
    """For `save_files`: the tensors of `layout`, as they lie in `storage` of each rank."""

    def fill(turn: Turn, buffers: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(layout.tensors[name]) for _, names in turn for name in names}
        # the whole tensors of each file on the rank that writes it in this round
        files = Layout(shapes, len(turn), lambda writer: [Region.whole(name, shapes[name]) for name in turn[writer][1]])
        execute(plan(layout, files), storage, buffers, group, rank)

    return fill


def save_files(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, tuple[int, ...]],
    files: Mapping[str, Sequence[str]],
    start: Callable[[Path], None],
    fill: Fill,
    *,
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
) -> None:
    """Write safetensors `files` of `tensors` (name -> shape) to `directory`, which is replaced as a whole.

    `start` writes what is beside them, a `*config.json` at least, into the empty directory that it is given, on rank 0.
    `fill` fills the tensors of this rank's file, once for each turn; it is collective over `group`. Otherwise as
    `save_checkpoint`. Errors: CheckpointError also for weights that are not finite.
    """
    save = _Save(Path(os.path.realpath(directory)), group, rank)
    partial = save.partial
    with save.step():
        if rank == 0:
            save.begin()
            start(partial)
            save.check_target()
            for file in partial.rglob("*"):
                with writing(file):
                    flush(file)
    writers = group.size() if group is not None else 1
    for first in range(0, len(files), writers):
        turn = list(files.items())[first : first + writers]
        buffers: dict[str, Tensor] = {}
        with save.step():
            shapes = {name: tuple(tensors[name]) for name in (turn[rank][1] if rank < len(turn) else ())}
            buffers = {name: torch.empty(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        with save.step() if group is None else nullcontext():  # a collective call fails on all ranks by itself
            fill(turn, buffers)
        with save.step():
            _check_finite(buffers, rank)
            if rank < len(turn):
                file = partial / turn[rank][0]
                with writing(file):
                    save_file(buffers, file, metadata={"format": "pt"})
                    # safetensors lets only its owner read it
                    shutil.copymode(next(partial.glob("*config.json")), file)
                    flush(file)
    with save.step():
        if rank == 0:
            save.complete()


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


def check_dtype(dtype: Any) -> None:
    """Errors: ConfigError for a dtype that weights are not saved in."""
    if dtype is not None and not (isinstance(dtype, str) and dtype in get_args(DType)):
        raise ConfigError(
            f"dtype={dtype!r}: weights are saved as {', '.join(map(repr, get_args(DType)))}, or, with None, in the "
            f"dtypes of the files that the model came from."
        )


def saved_dtypes(
    files: Mapping[str, str], dtype: DType | None, config: Mapping[str, Any] | None = None
) -> dict[str, torch.dtype]:
    """By tensor the dtype to save it in: that of `files`, as safetensors spells it; or `dtype`, and float32 for what
    transformers computes so in a model of `config` whose rest has 16 bits (routers, decays of recurrent layers)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if dtype is None:
        return {name: torch_dtype(found) for name, found in files.items()}
    made: Any = None if config is None else type(hf_config(config))
    known = MODEL_FOR_CAUSAL_LM_MAPPING if made in MODEL_FOR_CAUSAL_LM_MAPPING else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model: Any = None if made is None else known[made]
    kept = () if model is None else (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    wide = re.compile("|".join(rf"(^|\.){re.escape(part)}(\.|$)" for part in kept) or "$^")
    return {name: torch.float32 if wide.search(name) else getattr(torch, dtype) for name in files}


def _check_finite(tensors: Mapping[str, Tensor], rank: int) -> None:
    """Errors: CheckpointError naming the tensors with numbers that are not finite, and how many."""
    found, overflow = [], True
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            known = tensor.double()  # torch cannot compare float8
            found.append(f"{name} ({int((~known.isfinite()).sum())})")
            overflow = overflow and tensor.dtype == torch.float16 and not bool(known.isnan().any())
    if found:
        more = f" and {len(found) - 5} more tensors" if len(found) > 5 else ""
        if overflow:
            raise CheckpointError(
                f"rank {rank} has weights beyond float16's largest number, 65504, in {', '.join(found[:5])}{more}: "
                f'save them with dtype="bfloat16" or "float32".'
            )
        raise CheckpointError(
            f"rank {rank} has weights that are not finite, in {', '.join(found[:5])}{more}: training has diverged, and "
            f"no model can start from these. Continue from an earlier checkpoint, with a lower lr."
        )


def write_beside(
    directory: Path,
    like: Mapping[str, bytes],
    files: Mapping[str, list[str]],
    nbytes: Mapping[str, int],
    dtypes: Mapping[str, torch.dtype],
) -> None:
    """Write the files of `like`, with the config of these tensors (their dtype, and a one-label classifier where they
    have such a head), and the index of several files."""
    widths = {dtype: sum(nbytes[name] for name in dtypes if dtypes[name] == dtype) for dtype in set(dtypes.values())}
    widest = max(widths, key=lambda dtype: widths[dtype])
    config = json.loads(like["config.json"])
    config |= dict.fromkeys({"dtype", "torch_dtype"} & config.keys() or ("dtype",), str(widest).removeprefix("torch."))
    if "score.weight" in dtypes:
        names = config.get("architectures") or []
        config["architectures"] = [re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", n) for n in names]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    contents = {**like, "config.json": _json(config)}
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        contents[INDEX] = _json({"metadata": {"total_size": sum(nbytes.values())}, "weight_map": where})
    write_files(directory, contents)


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


class _Save:
    """One save of a group: it writes `partial`, which becomes `target` when it is complete and is removed otherwise."""

    def __init__(self, target: Path, group: dist.ProcessGroup | None, rank: int) -> None:
        self.target, self.partial = target, partial_directory(target)
        self.old = target.with_name(f".{target.name}.replaced")
        self._group, self._rank, self._replaced = group, rank, False

    @contextmanager
    def step(self) -> Iterator[None]:
        """All ranks finish the block, or all raise the same error: no rank waits for one whose disk is full."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # the other ranks must learn of any error before they continue
            failure = error
        failed = torch.tensor([failure is not None], dtype=torch.int32, device=wire_device(self._group))
        if self._group is not None:
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if not int(failed):
            return
        mine = (None if failure is None else self._reason(failure), self._undo() if self._rank == 0 else "")
        everyone = [mine] if self._group is None else gather(mine, self._group)
        first = next(rank for rank, (reason, _) in enumerate(everyone) if reason is not None)
        state = everyone[0][1]
        error = CheckpointError(f"{self.target} was not saved: {everyone[first][0]} {state}")
        error.rank = first
        raise error from failure

    def _reason(self, error: Exception) -> str:
        more = f" ({_free_bytes(self.partial)} bytes free)"
        if isinstance(error, OSError) and error.errno == errno.ENOENT and self._rank:
            more += "; rank 0 has made the directory, so give one that all ranks share"
        return failure(error, self._rank, self.partial, more)

    def begin(self) -> None:
        """Clean up after saves that were interrupted, and make the directory."""
        self._restore()
        discard(self.partial)
        self.partial.mkdir(parents=True)

    def check_target(self) -> None:
        """A checkpoint may replace a checkpoint, but never somebody's other files than those that this save writes.
        Errors: CheckpointError."""
        target = self.target
        if not target.exists():
            return
        if target.is_mount():
            raise CheckpointError(f"{target} is a mount point, which cannot be replaced. Choose a directory in it.")
        others = [target.name]
        if target.is_dir():
            again = {target / path.relative_to(self.partial) for path in self.partial.rglob("*")}
            again = again if (target / "config.json").is_file() else set()
            known = again | {path for pattern in MODEL_FILES for path in target.glob(pattern)}
            inside = [path for one in (target, *again) if one.is_dir() for path in one.iterdir()]
            others = sorted(str(path.relative_to(target)) for path in inside if path not in known)
        if others:
            raise CheckpointError(
                f"saving to {target} would replace it, and it holds more than a checkpoint: {', '.join(others[:5])}. "
                "Choose another directory."
            )

    def complete(self) -> None:
        flush(self.partial)
        if self.target.exists():
            self.target.rename(self.old)
        try:
            self.partial.rename(self.target)
        except OSError:
            self._restore()
            raise
        self._replaced = True
        flush(self.target.parent)
        if self.old.exists():
            self._remove(self.old)

    def _restore(self) -> None:
        """Undo a replacement that ended between its two renames; remove what one left behind after them."""
        if self.old.exists() and not self.target.exists():
            self.old.rename(self.target)
        elif self.old.exists():
            shutil.rmtree(self.old)

    def _undo(self) -> str:
        """Remove the written files; returns the directory's state as a sentence."""
        left = "" if self._remove(self.partial) else f" What was written is left in {self.partial}: delete it."
        if self._replaced:
            return f"The new checkpoint is there, but a crash of the machine may still lose it.{left}"
        if os.path.lexists(self.target):
            return f"What was there before is unchanged.{left}"
        return f"{f'The earlier checkpoint is {self.old}' if self.old.exists() else 'Nothing is there'}.{left}"

    def _remove(self, directory: Path) -> bool:
        try:
            if os.path.lexists(directory):
                shutil.rmtree(directory)
        except OSError as error:
            logger.warning("%s could not be removed (%s): delete it.", directory, error.strerror)
            return False
        return True


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turns a write error inside into an OSError that names `file`."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error


def _free_bytes(path: Path) -> str:
    """On the file system of the nearest directory that exists."""
    for directory in path.parents:
        with suppress(OSError):
            return f"{shutil.disk_usage(directory).free:,}"
    return "unknown"
