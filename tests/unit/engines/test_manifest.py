"""Checkpoints that are damaged or hostile: each one is refused before it is used, and the error names the file."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridflow.engines.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    check_content,
    leftovers,
    step_directory,
    write_file,
)
from hybridflow.errors import CheckpointError
from tests.example_checkpoints import make_checkpoint, read_values, rewrite, store, verify

TENSORS = "actor/rank-00001.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two checkpoints of one run."""
    root = tmp_path_factory.mktemp("run")
    for step in (20, 40):
        make_checkpoint(root, step)
    return root


@pytest.fixture
def saved(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run") / "step-00000020")


def test_a_checkpoint_is_read_as_it_was_written(run):
    for step in (20, 40):
        directory = step_directory(run, step)
        manifest = verify(directory)
        assert (manifest.step, manifest.parts) == (step, {"loader": {"step": step}})
        assert manifest.groups["actor"].tensors == {"actor.w": (8, 3), "actor.b": (6,)}
        assert {read for ranks in (1, 2, 5) for read in read_values(directory, manifest, ranks)} == {float(step)}
        listed = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
        assert listed == {*manifest.files, MANIFEST}  # no report is left, nothing else is there
    assert not list(leftovers(run))


# Damage


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(chance: random.Random, one: Path, _: Path) -> list[Path]:
    path = chance.choice(files_of(one))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return [path]


def flip_manifest(chance: random.Random, one: Path, _: Path) -> list[Path]:
    content = bytearray((one / MANIFEST).read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    (one / MANIFEST).write_bytes(content)
    return [one / MANIFEST]


def truncate(chance: random.Random, one: Path, _: Path) -> list[Path]:
    path = chance.choice(files_of(one))
    os.truncate(path, chance.randrange(path.stat().st_size))
    return [path]


def extend(chance: random.Random, one: Path, _: Path) -> list[Path]:
    path = chance.choice(files_of(one))
    path.write_bytes(path.read_bytes() + chance.choice([b"\0", b"\n", b" ", b"}", b"\0" * 5000]))
    return [path]


def delete(chance: random.Random, one: Path, _: Path) -> list[Path]:
    path = chance.choice(files_of(one))
    path.unlink()
    return [path]


def swap(one: Path, other: Path) -> list[Path]:
    assert one.stat().st_size == other.stat().st_size
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second), other.write_bytes(first)
    return [one]


def swap_steps(chance: random.Random, one: Path, other: Path) -> list[Path]:
    names = [path.relative_to(one) for path in files_of(one) if path.suffix in (".safetensors", ".json")]
    name = chance.choice(names)
    return swap(one / name, other / name)


def swap_ranks(chance: random.Random, one: Path, _: Path) -> list[Path]:
    first, second = chance.sample([path for path in files_of(one) if path.suffix == ".safetensors"], 2)
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1]), second.write_bytes(content[0])
    return [first, second]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVIL"],)


def put_pickle(chance: random.Random, one: Path, _: Path) -> list[Path]:
    path = chance.choice([path for path in files_of(one) if path.suffix == ".safetensors"])
    path.unlink()
    entry = write_file(path, [pickle.dumps(Evil())])
    name = path.relative_to(one).as_posix()
    rewrite(one, lambda body: body["files"].update({name: {"bytes": entry.bytes, "checksum": entry.checksum}}))
    return [path]


def rename(chance: random.Random, one: Path, other: Path) -> list[Path]:
    found = step_directory(one.parent, chance.choice([0, 19, 21, 10**8 + 20]))
    one.rename(found)
    return [found / MANIFEST]


def exchange_directories(_: random.Random, one: Path, other: Path) -> list[Path]:
    one.rename(one.parent / "x"), other.rename(one), (one.parent / "x").rename(other)
    return [one / MANIFEST]


def empty_manifest(chance: random.Random, one: Path, _: Path) -> list[Path]:
    (one / MANIFEST).write_bytes(chance.choice([b"", b"{}", b"null", b"[]", b'{"checksum":"","manifest":{}}']))
    return [one / MANIFEST]


DAMAGES = (
    *(flip, flip_manifest, truncate, extend, delete, swap_steps, swap_ranks, put_pickle, rename),
    *(exchange_directories, empty_manifest),
)


def test_one_hundred_of_one_hundred_damages_are_detected(run, tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    missed, done = [], dict.fromkeys((damage.__name__ for damage in DAMAGES), 0)
    for seed in range(100):
        chance = random.Random(seed)
        root = Path(shutil.copytree(run, tmp_path / str(seed)))
        one, other = chance.sample([step_directory(root, 20), step_directory(root, 40)], 2)
        damage = DAMAGES[seed % len(DAMAGES)]
        damaged = damage(chance, one, other)
        done[damage.__name__] += 1
        try:
            verify(damaged[0].parent if damage in (rename, exchange_directories) else one)
            missed.append((seed, damage.__name__, "not detected"))
        except CheckpointError as error:
            if not any(str(path) in str(error) for path in damaged):
                missed.append((seed, damage.__name__, str(error)))
        shutil.rmtree(root)
    assert missed == []
    assert min(done.values()) >= 9
    assert not (tmp_path / "evil").exists()


def test_every_bit_of_a_manifest_counts(saved):
    path = saved / MANIFEST
    whole = path.read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 300):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with pytest.raises(CheckpointError, match=r"step-00000020/manifest\.json"):
                CheckpointManifest.read(saved)


# Hostile manifests, with the right checksum


def set_files(name: str, **entry: Any) -> Callable[[dict[str, Any]], Any]:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = {"bytes": 3, "checksum": "0" * 32, **entry}
        body["groups"]["actor"]["ranks"][0] = name

    return change


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], Any]:
    def change(body: dict[str, Any]) -> None:
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return change


NAMES = [
    *("../x", "../run/x", "a/../../x", "..", ".", "", "/etc/passwd", "//etc/passwd", "a//b", "a/", "/", "./x"),
    *(
        "actor/../x",
        "a\0b",
        "a\n",
        "\n",
        "a b",
        "~/x",
        "a\\..\\x",
        "C:x",
        ".hidden",
        "a/.hidden",
        "a/b/c",
        "é",
        "a\ud800",
    ),
    *("x" * 300, "a:b", "-/..", MANIFEST),
]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_outside_the_checkpoint_are_refused(name, saved):
    (saved.parent / "x").write_text("abc")
    (saved.parents[1] / "x").write_text("abc")
    rewrite(saved, set_files(name))
    with pytest.raises(CheckpointError, match="step-00000020"):
        CheckpointManifest.read(saved)
    rewrite(saved, lambda body: body["files"].pop(name))  # named by the group alone
    with pytest.raises(CheckpointError, match="which cannot be part of a checkpoint"):
        CheckpointManifest.read(saved)


@pytest.mark.parametrize(
    "change",
    [
        *(put("step", value=value) for value in (-20, "20", 20.0, True, None, 21, 10**5000 // 10**4990, [20])),
        *(put("format", value=value) for value in (2, 0, "1", None, True, 1.0)),
        *(put("files", TENSORS, "bytes", value=value) for value in (-1, 1.5, "9", None, 2**70, True, 0)),
        *(put("files", TENSORS, "checksum", value=value) for value in (None, 5, ["a"])),
        *(put("files", value=value) for value in ([], None, "x", {"a": 1}, {"a": {}}, {})),
        *(put("groups", value=value) for value in ([], None, {"a": {}}, {"a": None})),
        *(put("groups", "actor", "ranks", value=value) for value in ("ab", None, {"a": 1}, [[1]], ["absent"], [None])),
        *(put("groups", "actor", "beside", value=value) for value in (["absent"], "x", [TENSORS])),
        put("groups", "actor", "ranks", value=[TENSORS, TENSORS]),
        put("groups", "actor", "ranks", value=["critic/rank-00000.safetensors"]),
        *(put("groups", "actor", "tensors", value=value) for value in ({"w": [-1]}, {"w": ["8"]}, {"w": 8}, [], None)),
        *(put("groups", "actor", "counters", value=value) for value in ([], 3, "a")),
        *(put("groups", "actor", "dtypes", value=value) for value in ({"": 3}, [], None)),
        *(put("groups", "actor", "follows", value=value) for value in (3, ["critic"])),
        *(put("groups", "actor", "values", value=value) for value in (3, "ab", {"a": 1})),
        *(put("metrics", value=value) for value in ({"reward": "high"}, {"reward": [1]}, {"reward": True}, [], None)),
        *(put(key, value=value) for key in ("parts", "random") for value in ([], None, "x", [["a", 1]])),
        *(drop(key) for key in ("step", "id", "groups", "files", "parts", "random", "metrics", "format")),
        *(drop("groups", "actor", key) for key in ("worker", "ranks", "kinds", "tensors", "counters", "values")),
        put("id", value=5),
    ],
)
def test_hostile_values_are_refused(change, saved):
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match="step-00000020"):
        CheckpointManifest.read(saved)


@pytest.mark.parametrize("body", [None, [], "manifest", 5, {}, {"format": 1}])
def test_manifests_that_are_no_mappings_are_refused(body, saved):
    store(saved, body)
    with pytest.raises(CheckpointError, match=r"step-00000020/manifest\.json"):
        CheckpointManifest.read(saved)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 200_000,
        b'{"manifest":' * 100_000,
        b'{"manifest":' + b"[" * 100_000 + b"]" * 100_000 + b',"checksum":""}',
        b'{"manifest":{"step":' + b"9" * 100_000 + b'},"checksum":""}',
        b'{"manifest":{"step":1e400},"checksum":""}',
        b'{"manifest":{"step":NaN},"checksum":""}',
        b"\xff\xfe{}",
        b"\0" * 1000,
        b'{"checksum":"","checksum":"","manifest":{}}',
        b"!!python/object:os.system",
    ],
    ids=range(10),
)
def test_hostile_json_is_refused(raw, saved):
    (saved / MANIFEST).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"step-00000020/manifest\.json"):
        CheckpointManifest.read(saved)


def test_duplicate_keys_and_other_spellings_are_refused(saved):
    raw = (saved / MANIFEST).read_bytes()
    for other in (
        raw.replace(b'"step":20', b'"step":40,"step":20'),
        raw.replace(b'"step":20', b'"step": 20'),
        raw + b"\n",
        raw.replace(b"main", b"\\u006dain"),
        raw[:-1] + b',"zzz":1}',
    ):
        assert other != raw
        (saved / MANIFEST).write_bytes(other)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            CheckpointManifest.read(saved)


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("kind", [link, pipe, device, folder])
@pytest.mark.parametrize("name", [MANIFEST, TENSORS, "actor/config"])
def test_a_file_that_is_no_file_is_refused(name, kind, saved):
    manifest = CheckpointManifest.read(saved)
    kind(saved / name)
    with pytest.raises(CheckpointError, match=name):
        CheckpointManifest.read(saved)
    if name in manifest.files:
        for size in (manifest.files[name].bytes, 0, 4096):
            with pytest.raises(CheckpointError, match=name):
                check_content(saved, name, FileEntry(size, ""))


@pytest.mark.parametrize("name", ["", "actor"])
def test_a_directory_that_is_a_link_is_refused(name, saved):
    link(saved / name if name else saved)
    with pytest.raises(CheckpointError, match="is a link"):
        CheckpointManifest.read(saved)


@pytest.mark.parametrize("name", ["", "actor"])
def test_a_directory_that_is_a_file_is_refused(name, saved):
    path = saved / name if name else saved
    shutil.rmtree(path)
    path.write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointManifest.read(saved)
