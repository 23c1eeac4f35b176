"""Checkpoints of runs without a cluster: random layouts, ranks that write their files, damage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    SavedGroup,
    check_content,
    partial_directory,
    publish,
    step_directory,
)
from hybridflow.engines.checkpoint.rank_state import (
    Kinds,
    RankFile,
    SavedTensors,
    StateWriter,
    random_state,
    report_file,
)
from hybridflow.workers.worker import rank_file

CPU = torch.device("cpu")
SHAPES: Mapping[str, tuple[int, ...]] = {"scalar": (), "vector": (9,), "a.weight": (6, 5), "cube:x": (4, 3, 2)}
Storages = list[dict[str, Tensor]]
"""The tensors of each rank, by storage name."""


def layout_of(shapes: Mapping[str, tuple[int, ...]], regions: Sequence[Sequence[Region]]) -> Layout:
    return Layout(shapes, len(regions), lambda rank: regions[rank])


def even_layout(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Layout:
    """Rows in equal ranges, scalars on all ranks."""
    regions: list[list[Region]] = [[] for _ in range(ranks)]
    for name, shape in shapes.items():
        for rank in range(ranks):
            box = Box.whole(name, shape)
            if shape:
                box = box.slab(0, rank * shape[0] // ranks, (rank + 1) * shape[0] // ranks)
            regions[rank].append(Region(box, name, (0,) * len(shape)))
    return layout_of(shapes, regions)


@st.composite
def boxes(draw: Any, tensor: str, shape: tuple[int, ...]) -> Box:
    edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tensor, tuple(a for a, _ in edges), tuple(b for _, b in edges))


@st.composite
def _cuts(draw: Any, tensor: str, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a tensor."""
    pieces, box = [Box.whole(tensor, shape)], draw(boxes(tensor, shape))
    if box.numel:
        pieces = [box, *pieces[0].subtract(box)]
    return pieces


@st.composite
def layouts(draw: Any, complete: bool = True, ranks: int | None = None) -> Layout:
    """Layouts with replicated, overlapping, flat and empty regions, and ranks that hold nothing.

    `complete`: every element is held.
    """
    count = draw(st.integers(1, 5)) if ranks is None else ranks
    regions: list[list[Region]] = [[] for _ in range(count)]
    for name, shape in SHAPES.items():
        found = [
            (box, draw(st.sets(st.integers(0, count - 1), min_size=int(complete)))) for box in draw(_cuts(name, shape))
        ]
        found += [
            (box, {draw(st.integers(0, count - 1))}) for box in draw(st.lists(boxes(name, shape), max_size=2))
        ]  # fmt: skip
        for box, holders in found:
            for rank in holders:
                regions[rank].append(_placed(draw, box, len(regions[rank])))
    return layout_of(SHAPES, regions)


def _placed(draw: Any, box: Box, number: int) -> Region:
    pad = draw(st.integers(0, 2))
    if not draw(st.booleans()):
        return Region(box, f"s{number}", (pad,) * len(box.shape))
    strides = [math.prod(box.shape[axis + 1 :]) for axis in range(len(box.shape))]
    return Region(box, f"s{number}", (pad,), tuple(max(1, stride) for stride in strides))


def storages(layout: Layout, dtype: torch.dtype, fill: float = 77.0) -> Storages:
    """A storage of the right shape for each region."""
    out: Storages = []
    for rank in range(layout.ranks):
        found = {}
        for region in layout.regions(rank):
            flat = region.strides is not None
            shape = (region.offset[0] + region.box.numel + 1,) if flat else _padded(region)
            found[region.storage] = torch.full(shape, fill, dtype=dtype)
        out.append(found)
    return out


def _padded(region: Region) -> tuple[int, ...]:
    return tuple(n + o for n, o in zip(region.box.shape, region.offset, strict=True))


def fill(layout: Layout, held: Storages, values: Mapping[str, Tensor]) -> Storages:
    """Copy canonical values into the storages."""
    for rank, tensors in enumerate(held):
        for region in layout.regions(rank):
            if region.box.numel:
                index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
                region.view(tensors[region.storage]).copy_(values[region.box.tensor][index])
    return held


def values(dtype: torch.dtype, seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Finite numbers with all bit patterns that round trips could lose: negative zeros, denormals, the largest."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.finfo(dtype).bits // 8
    out = {}
    for name, shape in shapes.items():
        raw = torch.randint(0, 256, (math.prod(shape) * width,), generator=generator, dtype=torch.uint8)
        found = raw.view(dtype).view(shape)
        out[name] = torch.where(found.isfinite(), found, torch.tensor(-0.0, dtype=dtype))
    return out


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def write_rank(directory: Path, folder: str, rank: int, id: str, kinds: Kinds, **extra: bytes) -> dict[str, Any]:
    """What the rank reports of its file."""
    (directory / folder).mkdir(parents=True, exist_ok=True)
    file = RankFile(
        directory / rank_file(folder, rank),
        report_file(directory, folder, rank),
        id,
        {directory / folder / name: content for name, content in extra.items()},
    )
    writer = StateWriter(rank, CPU)
    writer.save(file, kinds)
    assert writer._thread is not None
    writer._thread.join(60)
    report = json.loads(file.report.read_text())
    file.report.unlink()
    return report


def write_group(
    directory: Path, folder: str, id: str, layout: Layout, held: Mapping[str, Storages]
) -> dict[str, FileEntry]:
    """All ranks of a group write their files; `held` are the storages of each kind."""
    files = {}
    for rank in range(layout.ranks):
        kinds = {kind: (layout, tensors[rank]) for kind, tensors in held.items()}
        extra = {"config": b"{}"} if rank == 0 else {}
        report = write_rank(directory, folder, rank, id, kinds, **extra)
        files |= {name: FileEntry(**entry) for name, entry in report["files"].items()}
    return files


def make_checkpoint(root: Path, step: int, ranks: int = 3, **metrics: float | None) -> Path:
    """A checkpoint of two groups in which every number is `step`."""
    target, id = step_directory(root, step), f"{step:032x}"
    partial, files, groups = partial_directory(target), {}, {}
    for name in ("actor", "critic"):
        shapes = {f"{name}.w": (8, 3), f"{name}.b": (6,)}
        layout = even_layout(shapes, ranks)
        held = {kind: storages(layout, torch.float32, float(step)) for kind in ("main", "exp_avg")}
        files |= write_group(partial, name, id, layout, held)
        names = tuple(rank_file(name, rank) for rank in range(ranks))
        groups[name] = SavedGroup(
            "Actor", names, tuple(held), shapes, {"steps": step}, {"": "F32"}, (f"{name}/config",), None, None
        )
    publish(
        partial,
        target,
        CheckpointManifest(step, id, groups, files, {"loader": {"step": step}}, random_state(), metrics),
    )
    return target


def verify(directory: Path) -> CheckpointManifest:
    """What a run does before it continues. Errors: CheckpointError."""
    manifest = CheckpointManifest.read(directory)
    for name, entry in manifest.files.items():
        check_content(directory, name, entry)
    for group in manifest.groups.values():
        SavedTensors([directory / name for name in group.ranks], manifest.id)
    return manifest


def read_values(directory: Path, manifest: CheckpointManifest, ranks: int) -> set[float]:
    """All numbers of a checkpoint of `make_checkpoint`, read by another number of ranks."""
    found = set[float]()
    for group in manifest.groups.values():
        saved, layout = SavedTensors([directory / name for name in group.ranks], manifest.id), None
        layout = even_layout(group.tensors, ranks)
        for kind in group.kinds:
            for rank, held in enumerate(storages(layout, torch.float32, -1.0)):
                saved.read_into(kind, layout.regions(rank), held)
                found |= {value for tensor in held.values() for value in tensor.flatten().tolist()}
    return found


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it the right checksum, as an attacker can."""
    body = json.loads((directory / MANIFEST).read_text())["manifest"]
    change(body)
    store(directory, body)


def store(directory: Path, body: Any) -> None:
    def canonical(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()

    whole = {"checksum": xxhash.xxh3_128_hexdigest(canonical(body)), "manifest": body}
    (directory / MANIFEST).write_bytes(canonical(whole))
