"""Directories of checkpoints: one is complete or has no name, and the right ones stay."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.manifest import (
    ALIGNED,
    MANIFEST,
    CheckpointManifest,
    leftovers,
    partial_directory,
    publish,
    remove,
    saved_steps,
    step_directory,
    step_of,
    write_file,
)
from hybridflow.engines.checkpoint.rank_state import RankFile, StateWriter
from hybridflow.errors import CheckpointError
from hybridflow.run.checkpoints import Checkpoints
from tests.example_checkpoints import make_checkpoint, verify


@pytest.fixture
def saved(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "run", 20)


def test_steps_are_found_by_exact_names_newest_first(tmp_path):
    names = ["step-00000020", "step-00000100", "step-123456789", "step-00000003"]
    others = [
        *("step-000000020", "step-20", "step-00000020.tmp", ".step-00000020.partial", "step-٠٠٠٠٠٠٢٠"),
        "Step-00000020",
    ]
    for name in (*names, *others):
        (tmp_path / name).mkdir()
    assert [path.name for path in saved_steps(tmp_path)] == sorted(names, key=lambda name: -int(name[5:]))
    assert all(step_directory(tmp_path, step_of(path) or 0) == path for path in saved_steps(tmp_path))
    assert saved_steps(tmp_path / "none") == []
    (tmp_path / "file").write_text("")
    assert saved_steps(tmp_path / "file") == []


@pytest.mark.parametrize("there", ["checkpoint", "empty", "file", "link"])
def test_nothing_is_published_over_what_is_there(there, saved, tmp_path):
    target = tmp_path / "step-00000060"
    {
        "checkpoint": lambda: saved.rename(target),
        "empty": target.mkdir,
        "file": lambda: target.write_text("mine"),
        "link": lambda: target.symlink_to("nowhere"),
    }[there]()
    partial = partial_directory(target)
    partial.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError, match="step-00000060"):
        publish(partial, target, CheckpointManifest(60, "id", {}, {}, {}, {}))
    assert sorted(tmp_path.iterdir()) == before


def test_a_state_that_json_does_not_have_is_an_error_before_the_name_exists(tmp_path):
    for state in (float("nan"), object(), {(1, 2): 3}):
        partial, target = tmp_path / ".p", tmp_path / "step-00000001"
        partial.mkdir()
        with pytest.raises(CheckpointError, match=r"manifest\.json: a state is not plain data for JSON"):
            publish(partial, target, CheckpointManifest(1, "id", {}, {}, {"part": state}, {}))
        assert not target.exists()
        shutil.rmtree(partial)


def test_a_manifest_for_which_there_is_no_space_names_its_file(tmp_path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    (tmp_path / ".p").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
        with pytest.raises(OSError) as caught:
            publish(
                tmp_path / ".p", tmp_path / "step-00000001", CheckpointManifest(1, "id", {}, {}, {"x": "y" * 9000}, {})
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.filename == str(tmp_path / ".p" / MANIFEST)
    assert not (tmp_path / "step-00000001").exists()


def killed_at_each_call(directory: Path, act: Callable[[], None]) -> int:
    """Run `act` in processes that end at the 1st, 2nd, ... change of a directory; the number of processes."""
    for calls in range(1, 100):
        if (child := os.fork()) == 0:
            left = [calls]
            for name in ("rename", "unlink", "rmdir", "mkdir"):
                setattr(os, name, _counted(getattr(os, name), left))
            try:
                act()
            finally:
                os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return calls
        for path in saved_steps(directory):
            verify(path)
    raise AssertionError("it never ended")


def _counted(function: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os._exit(9)
        return function(*args, **kwargs)

    return call


def test_removing_leaves_a_whole_checkpoint_or_none_under_its_name(tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path, step)
    target = step_directory(tmp_path, 1)
    assert killed_at_each_call(tmp_path, lambda: remove(target)) >= 2
    make_checkpoint(tmp_path, 1)  # remains of an earlier removal are in the way of nothing
    assert killed_at_each_call(tmp_path, lambda: remove(target)) >= 2
    assert [path.name for path in saved_steps(tmp_path)] == ["step-00000002"]
    verify(step_directory(tmp_path, 2))


def test_a_removal_that_was_interrupted_is_a_leftover(saved):
    root = saved.parent
    saved.rename(root / f".{saved.name}.removed")
    partial_directory(step_directory(root, 60)).mkdir()
    assert sorted(path.name for path in leftovers(root)) == [".step-00000020.removed", ".step-00000060.partial"]
    remove(saved)  # is not there: removes its remains
    assert [path.name for path in leftovers(root)] == [".step-00000060.partial"]


def test_a_link_is_removed_and_not_its_target(saved, tmp_path):
    fake = saved.parent / "step-00000030"
    fake.symlink_to(saved)
    (saved.parent / ".step-00000030.removed").symlink_to(saved)
    remove(fake)
    assert not os.path.lexists(fake)
    assert not list(leftovers(saved.parent))
    verify(saved)


# What stays


def policy(root: Path, **options: Any) -> Checkpoints:
    return Checkpoints(root, **options)


def steps(root: Path) -> list[int]:
    return [step_of(path) or 0 for path in saved_steps(root)]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 2}, [6, 5]),
        ({"keep": 1}, [6]),
        ({"keep": 99}, [6, 5, 4, 3, 2, 1]),
        ({"keep": 2, "best": "reward"}, [6, 5, 2]),
        ({"keep": 2, "best": "-reward"}, [6, 5, 3]),
        ({"keep": 1, "best": "loss"}, [6, 4]),
        ({"keep": 2, "best": "unknown"}, [6, 5]),
        ({"keep": 5, "best": "reward"}, [6, 5, 4, 3, 2]),
    ],
)
def test_the_newest_and_the_best_stay(options, kept, tmp_path):
    for step, reward in enumerate([0.1, 0.9, -0.5, None, 0.3, 0.2], start=1):
        make_checkpoint(tmp_path, step, ranks=1, reward=reward, **({"loss": 1.0} if step in (2, 4) else {}))
    policy(tmp_path, **options)._store.prune()
    assert steps(tmp_path) == kept
    for path in saved_steps(tmp_path):
        verify(path)


def test_a_damaged_checkpoint_is_never_the_best(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, ranks=1, reward=float(-step))
    (step_directory(tmp_path, 1) / "actor/config").unlink()
    policy(tmp_path, keep=1, best="reward")._store.prune()
    assert steps(tmp_path) == [3, 2]


def test_pruning_outlives_strange_directories(tmp_path, caplog):
    for step in (3, 4):
        make_checkpoint(tmp_path, step, ranks=1)
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-00000002").symlink_to("/")
    policy(tmp_path, keep=1)._store.prune()
    assert steps(tmp_path) == [4]
    assert policy(tmp_path).newest == step_directory(tmp_path, 4)
    make_checkpoint(tmp_path, 5, ranks=1)
    (tmp_path / ".step-00000004.removed").mkdir()
    shutil.rmtree(tmp_path / ".step-00000004.removed")


def test_the_newest_that_is_complete_is_continued(tmp_path):
    for step in (1, 2, 3):
        make_checkpoint(tmp_path, step, ranks=1)
    checkpoints = policy(tmp_path)
    assert checkpoints.newest == step_directory(tmp_path, 3)
    os.truncate(step_directory(tmp_path, 3) / "actor/rank-00000.safetensors", 100)
    assert checkpoints.newest == step_directory(tmp_path, 2)
    step_directory(tmp_path, 2).rename(step_directory(tmp_path, 9))  # claims another step
    assert checkpoints.newest == step_directory(tmp_path, 1)
    remove(step_directory(tmp_path, 1))
    assert checkpoints.newest is None


def test_remains_are_removed_before_a_run_continues_and_checkpoints_are_not(tmp_path):
    make_checkpoint(tmp_path, 1, ranks=1)
    (tmp_path / ".step-00000002.partial/actor").mkdir(parents=True)
    (tmp_path / ".step-00000003.removed").symlink_to(tmp_path / "step-00000001")
    (tmp_path / ".step-00000004.partial").write_text("")
    store = policy(tmp_path)._store
    store.open()
    assert list(store.steps()) == [step_directory(tmp_path, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    verify(step_directory(tmp_path, 1))


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
