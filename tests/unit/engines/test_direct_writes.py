"""Files that are written past the page cache: the same bytes on any file system, and its own error on a full one."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.manifest import ALIGNED, write_file
from hybridflow.engines.checkpoint.rank_state import RankFile, StateWriter

MEMORY = mmap.mmap(-1, 64 * ALIGNED)  # aligned
MEMORY[:] = os.urandom(len(MEMORY))
SHARED_MEMORY = Path("/dev/shm")


def parts(size: int, chunk: int) -> Iterator[memoryview]:
    whole = memoryview(MEMORY)[:size]
    return (whole[at : at + chunk] for at in range(0, size, chunk))


@pytest.mark.parametrize("root", [None, SHARED_MEMORY] if SHARED_MEMORY.is_dir() else [None])
@settings(max_examples=30, deadline=None)
@given(size=st.integers(0, len(MEMORY)), blocks=st.integers(1, 20))
def test_a_direct_write_equals_a_plain_one(root: Path | None, size: int, blocks: int):
    with tempfile.TemporaryDirectory(dir=root) as directory:
        path = Path(directory) / "file"
        entry = write_file(path, parts(size, blocks * ALIGNED), direct=True)
        assert path.read_bytes() == MEMORY[:size]
        assert (entry.bytes, entry.checksum) == (size, xxhash.xxh3_128_hexdigest(MEMORY[:size]))


def test_a_file_system_that_asks_for_another_alignment_gets_a_plain_write(tmp_path: Path):
    """Memory that is not aligned is refused by the kernel, as larger blocks are by a disk of such."""
    whole = memoryview(MEMORY)[8 : 8 + 10 * ALIGNED + 3]
    entry = write_file(tmp_path / "file", iter((whole,)), direct=True)
    assert (tmp_path / "file").read_bytes() == whole
    assert entry.bytes == len(whole)


@pytest.mark.parametrize("limit", [10 * ALIGNED, 10 * ALIGNED + 100])
def test_an_error_of_the_disk_is_raised_and_names_the_file(tmp_path: Path, limit: int):
    """Also when it comes within a block: the rest of it cannot be written directly."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="large") as caught:
            write_file(tmp_path / "file", parts(20 * ALIGNED, 16 * ALIGNED), direct=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "file")


@pytest.mark.parametrize("numel", [1, 1024, 5000, 100_000])
def test_the_image_of_a_rank_is_aligned(tmp_path: Path, numel: int):
    tensors = {"weight": torch.randn(numel)}
    regions = [Region(Box.whole("weight", (numel,)), "weight", (0,))]
    writer = StateWriter(0, torch.device("cpu"))
    file = RankFile(tmp_path / "rank.safetensors", tmp_path / ".report.json", "some-id")
    writer.save(file, {"main": (Layout({"weight": (numel,)}, 1, lambda rank: regions), tensors)})
    assert writer._thread is not None
    assert writer._image is not None
    writer._thread.join()
    assert writer._image.data_ptr() % ALIGNED == 0
    assert file.path.read_bytes() == writer._image.numpy().tobytes()
