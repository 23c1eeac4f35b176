"""A rank's file: every element is written once, and read by any other layout bit by bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint import rank_state
from hybridflow.engines.checkpoint.manifest import FileEntry
from hybridflow.engines.checkpoint.rank_state import (
    RankFile,
    SavedTensors,
    StateWriter,
    random_state,
    set_random_state,
    shares,
)
from hybridflow.errors import CheckpointError
from tests.example_checkpoints import (
    CPU,
    SHAPES,
    bits,
    even_layout,
    fill,
    layout_of,
    layouts,
    storages,
    values,
    write_group,
    write_rank,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def elements(box: Box) -> set[tuple[object, ...]]:
    ranges = itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True)))
    return {(box.tensor, *at) for at in ranges}


def covered(layout: Layout, rank: int) -> set[tuple[object, ...]]:
    return set().union(*(elements(region.box) for region in layout.regions(rank)))


@settings(max_examples=150, deadline=None)
@given(layouts(complete=False))
def test_every_element_is_written_once_by_a_rank_that_holds_it(layout):
    written = Counter[tuple[object, ...]]()
    for rank, found in enumerate(shares(layout)):
        held = covered(layout, rank)
        for box, region in found:
            assert region in layout.regions(rank)
            assert elements(box) <= elements(region.box)
            assert elements(box) <= held
            written.update(elements(box))
    everything = set().union(*(covered(layout, rank) for rank in range(layout.ranks)))
    assert set(written) == everything
    assert set(written.values()) <= {1}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.integers(1, 9))
def test_replicas_share_the_writing(sizes, replicas):
    shapes = {f"t{i}": (size,) for i, size in enumerate(sizes)}
    everything = [Region(Box.whole(name, shape), name, (0,)) for name, shape in shapes.items()]
    for layout in (
        layout_of(shapes, [everything] * replicas),
        Layout(shapes, replicas, lambda _: everything, lambda _: 0),
    ):
        loads = [sum(box.numel for box, _ in found) for found in shares(layout)]
        assert sum(loads) == sum(sizes)
        assert max(loads) <= sum(sizes) / replicas + max(sizes)


@settings(max_examples=60, deadline=None)
@given(layouts(), layouts(complete=False), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_another_layout_reads_the_same_bits(tmp_path_factory, source, destination, dtype, seed):
    directory = tmp_path_factory.mktemp("saved")
    expected = {"main": values(dtype, seed), "exp_avg": values(torch.float32, seed + 1)}
    held = {kind: fill(source, storages(source, full["scalar"].dtype), full) for kind, full in expected.items()}
    before = {kind: [{n: t.clone() for n, t in one.items()} for one in ranks] for kind, ranks in held.items()}
    write_group(directory, "actor", "id", source, held)
    for kind, ranks in held.items():
        assert [{n: bits(t) for n, t in one.items()} for one in ranks] == [
            {n: bits(t) for n, t in one.items()} for one in before[kind]
        ]
    saved = SavedTensors([directory / f"actor/rank-{rank:05d}.safetensors" for rank in range(source.ranks)], "id")
    for kind, full in expected.items():
        got, want = (storages(destination, full["scalar"].dtype) for _ in range(2))
        fill(destination, want, full)  # what lies around the regions is left alone
        for rank in range(destination.ranks):
            saved.read_into(kind, destination.regions(rank), got[rank])
            assert {n: bits(t) for n, t in got[rank].items()} == {n: bits(t) for n, t in want[rank].items()}


def test_a_writer_saves_again_into_the_same_memory_and_after_a_change_of_layout(tmp_path):
    writer, full = StateWriter(0, CPU), values(torch.float32, 1)
    for number, layout in enumerate([even_layout(SHAPES, 1), even_layout(SHAPES, 1), even_layout(SHAPES, 2)]):
        held = fill(layout, storages(layout, torch.float32), full)[0]
        (path, report) = tmp_path / f"{number}.safetensors", tmp_path / f".{number}.json"
        image = None if writer._image is None else writer._image.data_ptr()
        writer.save(RankFile(path, report, "id"), {"main": (layout, held)})
        for tensor in held.values():
            tensor.zero_()  # the snapshot is taken
        assert writer._thread is not None
        writer._thread.join(60)
        assert number != 1 or writer._image.data_ptr() == image
        got = storages(layout, torch.float32)[0]
        SavedTensors([path], "id").read_into("main", layout.regions(0), got)
        assert bits(got["vector"]) == bits(full["vector"][: len(got["vector"])])


def test_missing_elements_other_kinds_and_other_checkpoints_are_errors(tmp_path):
    layout = even_layout({"w": (8, 2)}, 4)
    held = storages(layout, torch.float32, 1.0)
    write_group(tmp_path, "actor", "id", layout, {"main": held})
    files = [tmp_path / f"actor/rank-{rank:05d}.safetensors" for rank in range(4)]
    whole, into = even_layout({"w": (8, 2)}, 1).regions(0), {"w": torch.full((8, 2), 5.0)}
    with pytest.raises(CheckpointError, match=r"lacks 4 elements of w\[0:8, 0:2\] \(main\)"):
        SavedTensors(files[:1] + files[2:], "id").read_into("main", whole, into)
    with pytest.raises(CheckpointError, match=r"lacks 16 elements of .* \(exp_avg\)"):
        SavedTensors(files, "id").read_into("exp_avg", whole, into)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 16 elements"):
        SavedTensors([], "id").read_into("main", whole, into)
    assert into["w"].eq(5).all()
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors belongs to another checkpoint: its id is id"):
        SavedTensors(files, "other")


def test_a_box_that_two_files_have_does_not_hide_a_missing_one(tmp_path):
    layout = even_layout({"w": (8,)}, 2)
    write_group(tmp_path, "actor", "id", layout, {"main": storages(layout, torch.float32, 1.0)})
    files = [tmp_path / f"actor/rank-{rank:05d}.safetensors" for rank in range(2)]
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"w\[0:4\] \(main\) is in .*rank-00000.* and again in .*rank-00001"):
        SavedTensors(files, "id")


@pytest.mark.parametrize("name", ["main", "main:w", "main:w:x", "main:w:0,0", "", ":", "main:w:0:0"])
def test_names_that_no_save_writes_are_errors(name, tmp_path):
    save_file({name: torch.zeros(2)}, tmp_path / "f", metadata={"id": "id"})
    if name != "main:w:0:0":  # a tensor "w:0"
        with pytest.raises(CheckpointError, match=r"/f has .*, which is not a tensor of a checkpoint"):
            SavedTensors([tmp_path / "f"], "id")


def test_files_that_are_absent_links_or_pipes_are_errors(tmp_path):
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("version https://git-lfs")
    for name, says in {"none": "missing", "link": "link", "pipe": "not a file", "text": "LFS"}.items():
        with pytest.raises(CheckpointError, match=f"/{name} .*{says}"):
            SavedTensors([tmp_path / name], "id")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_numbers_that_are_not_finite_are_not_saved(value, dtype, tmp_path):
    layout = even_layout({"w": (8, 2), "v": (3,)}, 1)
    held = storages(layout, torch.float32)[0]
    held["w"][5, 1] = value
    held = {name: tensor.to(dtype) for name, tensor in held.items()}
    report = write_rank(tmp_path, "actor", 0, "id", {"exp_avg": (layout, held)})
    assert report["id"] == "id"
    assert report["error"] == "w[0:8, 0:2] (exp_avg) has numbers that are not finite."
    assert "files" not in report
    assert not list((tmp_path / "actor").iterdir())


# Random number generators


def draws() -> list[float]:
    found = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
    return [*map(float, found), *torch.randn(3).tolist()]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_random_numbers_continue(seed, drawn):
    outside = random_state()
    try:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        for _ in range(drawn):
            draws()  # an odd number leaves the second of a pair of Gaussians behind
        if drawn % 2:
            random.gauss(0, 1)
        state = json.loads(json.dumps(random_state()))
        expected = [draws() for _ in range(3)]
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        set_random_state(state)
        assert [draws() for _ in range(3)] == expected
    finally:
        set_random_state(outside)


def test_a_rank_continues_with_its_own_random_numbers(tmp_path):
    outside, expected = random_state(), []
    layout = even_layout({"w": (4,)}, 1)
    try:
        for rank in range(3):
            torch.manual_seed(rank)
            write_rank(tmp_path, "actor", rank, "id", {"main": (layout, {"w": torch.ones(4)})} if not rank else {})
            expected.append(draws())
        saved = SavedTensors([tmp_path / f"actor/rank-{rank:05d}.safetensors" for rank in range(3)], "id")
        for rank in (2, 0, 1):
            saved.restore_random_state(rank)
            assert draws() == expected[rank]
    finally:
        set_random_state(outside)


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "[]", "5", "{}"], ids=range(6))
def test_a_file_without_random_numbers_changes_nothing(text, tmp_path):
    good, saved = random_state(), SavedTensors([], "id")
    saved.files = [tmp_path / "f"]
    stored = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    for tensors in ({"random": stored}, {"random": torch.ones(3)}, {"other": stored}):
        save_file(tensors, tmp_path / "f")
        with pytest.raises(CheckpointError, match="/f has no state of random number generators"):
            saved.restore_random_state(0)
        assert random_state() == good


KEYS = [1] * 624


@pytest.mark.parametrize(
    ("generator", "state"),
    [
        *(("torch", value) for value in (None, 5, "", "AA==", "?", "A" * 5056)),
        *(("numpy", value) for value in (None, [], ["PCG64", KEYS, 0, 0, 0.0], ["MT19937", [1], 0, 0, 0.0])),
        *(("numpy", ["MT19937", KEYS, position, 0, 0.0]) for position in (-1, 625, 10**9, 2**70, "a", None)),
        *(("numpy", ["MT19937", [key] * 624, 0, 0, 0.0]) for key in (2**32, -1, 2**70, "a", None)),
        *(("python", value) for value in (None, [], [3, [1], None], [9, [1] * 625, None], [3, [1] * 624 + [-1], None])),
        *(("python", [3, [*KEYS, position], None]) for position in (625, 2**70, "a")),
        *(("python", [3, [*KEYS, 0], gauss]) for gauss in ("a", [1.0])),
    ],
    ids=range(31),
)
def test_hostile_states_of_generators_change_nothing(generator, state):
    good = random_state()
    with pytest.raises(CheckpointError, match="the checkpoint has no state of random number generators"):
        set_random_state({**good, generator: state})
    assert random_state() == good
    draws()
    set_random_state(good)


# Disks that are full


def save_on(directory: Path, writer: StateWriter, megabytes: int) -> dict[str, object] | None:
    layout = even_layout({"w": (megabytes << 18,)}, 1)
    directory.mkdir()
    report = directory / ".actor-00000.json"
    kinds = {"main": (layout, {"w": torch.ones(megabytes << 18)})}
    writer.save(RankFile(directory / "rank", report, "id", {directory / "config": b"c" * 9000}), kinds)
    assert writer._thread is not None
    writer._thread.join(60)
    assert not writer._thread.is_alive()
    return json.loads(report.read_text()) if report.exists() else None


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_reported_and_its_space_given_back(small_disk):
    writer = StateWriter(0, CPU)
    report = save_on(small_disk / "a", writer, 8)
    assert report is not None
    assert report["id"] == "id"
    assert "rank 0 on" in str(report["error"])
    assert f"could not write {small_disk}/a/rank: No space left on device" in str(report["error"])
    assert [path.name for path in (small_disk / "a").iterdir()] == [".actor-00000.json"]
    assert "files" in (save_on(small_disk / "b", writer, 3) or {})


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("left", [0, 4096, 8192, 12288, 40960])
def test_a_disk_that_fills_up_at_any_file_is_reported(left, small_disk, monkeypatch):
    """Space for nothing at all until other files are removed, part of the file, the file alone, or all but the
    report."""
    layout = even_layout({"w": (4,)}, 1)
    taken = small_disk / "taken"
    pause = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: taken.unlink())
    monkeypatch.setattr(rank_state, "time", pause)
    (small_disk / "a").mkdir()
    with taken.open("wb", buffering=0) as file:  # fill the disk
        with suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        file.truncate(file.tell() - left)
    found = RankFile(small_disk / "a/rank", small_disk / "a/.r.json", "id", {small_disk / "a/config": b"c"})
    writer = StateWriter(0, CPU)
    writer.save(found, {"main": (layout, {"w": torch.ones(4)})})
    assert writer._thread is not None
    writer._thread.join(60)
    assert [path.name for path in (small_disk / "a").iterdir()] == [".r.json"]
    assert "No space left on device" in json.loads(found.report.read_text())["error"]
    assert taken.exists() == (left > 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_over_the_limit_of_the_process_is_reported(tmp_path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        report = save_on(tmp_path / "a", StateWriter(0, CPU), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in str((report or {})["error"])


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_save_that_was_given_up_ends_its_thread(tmp_path):
    writer = StateWriter(0, CPU)
    file = RankFile(tmp_path / "gone/rank", tmp_path / "gone/.r.json", "id")
    writer.save(file, {})
    assert writer._thread is not None
    writer._thread.join(60)
    assert not (tmp_path / "gone").exists()


def test_a_directory_that_is_not_shared_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_state, "_SHARED_SECONDS", 0.3)
    checkpoints = tmp_path / "of the driver"
    file = RankFile(checkpoints / "step-1/actor/rank", checkpoints / "step-1/.r.json", "id")
    with pytest.raises(CheckpointError, match=r"of the driver is not on .* a file system that all"):
        StateWriter(0, CPU).save(file, {})


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    """Which may be given up, or have reported already."""
    writer, block, layout = StateWriter(0, CPU), threading.Event(), even_layout({"w": (1 << 20,)}, 1)
    monkeypatch.setattr(rank_state, "CHUNK_BYTES", 1 << 16)
    write = rank_state.write_file

    def slow(path: Path, content: Iterable[memoryview], direct: bool = False) -> FileEntry:
        return write(path, (part for part in content if block.wait(60)), direct)

    monkeypatch.setattr(rank_state, "write_file", slow)
    given_up, after = tmp_path / "a", tmp_path / "b"
    given_up.mkdir(), after.mkdir()
    kinds = {"main": (layout, {"w": torch.ones(1 << 20)})}
    writer.save(RankFile(given_up / "rank", given_up / ".r.json", "a"), kinds)
    while not (given_up / "rank").exists():
        time.sleep(0.001)
    shutil.rmtree(given_up)
    threading.Timer(0.1, block.set).start()
    writer.save(RankFile(after / "rank", after / ".r.json", "b"), kinds)
    assert writer._thread is not None
    writer._thread.join(60)
    assert not given_up.exists()
    assert json.loads((after / ".r.json").read_text())["id"] == "b"
    SavedTensors([after / "rank"], "b")


def test_files_of_another_save_are_left_alone(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/rank-00000.safetensors").write_text("of another")
    report = write_rank(tmp_path, "actor", 0, "id", {})
    assert "File exists" in report["error"]
    assert (tmp_path / "actor/rank-00000.safetensors").read_text() == "of another"


def test_a_writer_writes_one_file_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_state, "_BEFORE_SECONDS", 0.01)
    writer, block = StateWriter(0, CPU), threading.Event()
    writer._thread = threading.Thread(target=block.wait)
    writer._thread.start()
    try:
        with pytest.raises(CheckpointError, match="the checkpoint before it is still being written"):
            writer.save(RankFile(tmp_path / "f", tmp_path / ".r.json", "id"), {})
    finally:
        block.set()
        writer._thread.join()
