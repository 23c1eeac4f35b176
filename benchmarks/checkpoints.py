"""Cost of checkpoints: an actor of 100 M parameters in float32 with Adam, at 1-1-2 (Megatron-core) on two hosts.

- `bytes_per_share`: bytes that a rank writes over its share of the checkpoint; the largest of the ranks.
- `save`: seconds of `hf.save`, from the call until the checkpoint is complete, against `plain`: the same hosts write
  the same bytes from touched memory into new files and flush them. Interleaved; medians, and the ratio of the
  fastest ones.
- `asynchronous`: an iteration updates the actor on fixed rows. Every second one begins with a save in the background,
  `Checkpoints.step()`. `overhead` is the difference of the two medians over the one without, so that of `every=1`;
  `cpu_overhead` is that of the hosts' processor seconds;
  `blocking` are the driver's seconds in `step()`, `snapshot` those of the slowest host, `complete` those until the
  checkpoint is there.
- `load`: seconds of `hf.load`, which verifies all files first.

Files go to `--directory` (default: `.cache/checkpoints` here), which should be on a disk. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import hybridflow as hf
from benchmarks.transition import CONFIG
from hybridflow.engines.checkpoint.manifest import MANIFEST, CheckpointManifest
from hybridflow.models.spec import ModelSpec

PROMPT, RESPONSE = 32, 96


class TimedActor(hf.ActorWorker):
    """An actor that measures its snapshots, and writes the bytes of its last one without a checkpoint."""

    def write_checkpoint(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        saved = super().write_checkpoint(*arguments)
        self.snapshot = time.perf_counter() - start
        return saved

    @hf.register(hf.ONE_TO_ALL)
    def snapshot_seconds(self) -> float:
        return self.snapshot

    @hf.register(hf.ONE_TO_ALL)
    def cpu_seconds(self) -> float:
        """Of this host, all threads."""
        return time.process_time()

    @hf.register(hf.ONE_TO_ALL)
    def write_plain(self, directory: str) -> int:
        """A new file of the bytes in the snapshot, flushed to disk."""
        assert self._writer is not None
        assert self._writer._image is not None
        rest = self._writer._image.numpy().data
        with (Path(directory) / f"{self.context.rank}.bin").open("xb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        return self._writer._image.nbytes


class SameRows:
    """A loader that gives the same rows in each of `steps` iterations."""

    def __init__(self, rows: int, steps: int) -> None:
        ids = torch.randint(
            2, CONFIG["vocab_size"], (rows, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(1)
        )
        columns = {"prompt_ids": ids[:, :PROMPT].reshape(-1), "response_ids": ids[:, PROMPT:].reshape(-1)}
        lengths = {"prompt_ids": [PROMPT] * rows, "response_ids": [RESPONSE] * rows}
        ragged = {name: hf.Ragged.from_lengths(columns[name], lengths[name]) for name in columns}
        self._batch, self.steps, self._done = hf.BatchRef.from_batch(hf.Batch(ragged)), steps, 0

    def __iter__(self) -> Iterator[hf.BatchRef]:
        while self._done < self.steps:
            self._done += 1
            yield self._batch

    def state(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state(self, state: Mapping[str, int]) -> None:
        self._done = state["done"]


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def settle(*paths: Path) -> None:
    """Remove files and wait until the disk is idle, outside of the measured time."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
    os.sync()


def measure_saves(actor: hf.WorkerGroup, root: Path, repeats: int) -> dict[str, Any]:
    target, plain = root / "saved", root / "plain"
    times: dict[str, list[float]] = {"save": [], "plain": []}
    first = seconds(lambda: hf.save(target, [actor]))
    files = CheckpointManifest.read(target).files
    written = [entry.bytes for name, entry in files.items() if "rank-" in name]
    load = [seconds(lambda: hf.load(target, [actor])) for _ in range(3)]
    for turn in range(repeats):
        for way in ("save", "plain") if turn % 2 else ("plain", "save"):
            settle(target, plain)
            plain.mkdir()
            save = (lambda: hf.save(target, [actor])) if way == "save" else actor.write_plain(str(plain)).get
            times[way].append(seconds(save))
    settle(target, plain)
    return {
        "megabytes": round(sum(written) / 1e6, 1),
        "bytes_per_share": round(max(written) * len(written) / sum(written), 5),
        "save": {
            "seconds": median(times["save"]),
            "plain_seconds": median(times["plain"]),
            "ratio": round(statistics.median(times["save"]) / statistics.median(times["plain"]), 2),
            "ratio_of_fastest": round(min(times["save"]) / min(times["plain"]), 2),
            "each": {way: [round(value, 2) for value in times[way]] for way in times},
            "first_seconds": round(first, 3),
        },
        "load_seconds": median(load),
    }


def measure_iterations(actor: hf.WorkerGroup, root: Path, rows: int, repeats: int) -> dict[str, Any]:
    checkpoints = hf.Checkpoints(root / "checkpoints", every=2, keep=1)
    names = ("with", "without", "cpu_with", "cpu_without", "blocking", "snapshot", "complete")
    found: dict[str, list[float]] = {name: [] for name in names}
    for batch in checkpoints.resume(SameRows(rows, 2 * repeats + 2)):
        cpu, clock, start = actor.cpu_seconds().get(), time.time(), time.perf_counter()
        checkpoints.step()
        blocking = time.perf_counter() - start
        actor.update_actor(batch, loss="pretrain").get()
        checkpoints._report(wait=True)  # also what is left of the save, and the removal of the one before
        took = time.perf_counter() - start
        spent = max(after - before for before, after in zip(cpu, actor.cpu_seconds().get(), strict=True))
        if checkpoints.done <= 2:  # the first ones touch memory for the first time
            continue
        way = "without" if checkpoints.done % 2 else "with"
        found[way].append(took)
        found[f"cpu_{way}"].append(spent)
        if way == "with":
            assert checkpoints.newest is not None
            found["blocking"].append(blocking)
            found["complete"].append((checkpoints.newest / MANIFEST).stat().st_mtime - clock)
            found["snapshot"].append(max(actor.snapshot_seconds().get()))
    saving, plain = statistics.median(found["with"]), statistics.median(found["without"])
    cpu_saving, cpu_plain = statistics.median(found["cpu_with"]), statistics.median(found["cpu_without"])
    return {
        "tokens": rows * (PROMPT + RESPONSE),
        "seconds_without": median(found["without"]),
        "seconds_with": median(found["with"]),
        "overhead": round(saving / plain - 1, 4),
        "cpu_overhead": round(cpu_saving / cpu_plain - 1, 4),
        "added_seconds": round(saving - plain, 3),
        "added_cpu_seconds": round(cpu_saving - cpu_plain, 3),
        "each": {name: [round(value, 3) for value in found[name]] for name in names[:4]},
        **{
            f"{name}_seconds": round(statistics.median(found[name]), 4) for name in ("blocking", "snapshot", "complete")
        },
    }


def make_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    shapes = ModelSpec.from_hf_config(CONFIG).tensors()
    drawn = {name: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape) for name, shape in shapes.items()}
    save_file(drawn, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8, help="of an update, 128 tokens each")
    parser.add_argument("--directory", default=".cache/checkpoints")
    args = parser.parse_args()
    Path(args.directory).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        root = Path(directory)
        model = make_model(root / "model")
        actor = TimedActor.on(
            hf.ResourcePool([2]), model=str(model), train=hf.Megatron(), optim=hf.Adam(lr=1e-5), name="actor"
        )
        result = {
            "benchmark": "checkpoints",
            "parameters": ModelSpec.from_hf_config(CONFIG).num_parameters,
            **measure_saves(actor, root, args.repeats),
            "asynchronous": measure_iterations(actor, root, args.rows, args.repeats),
        }
        hf.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
