"""Runs over several machines, made of namespaces: the same figures, and a machine that is lost."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import tiny_models, vision_models
from tests.multinode.machines import Machines, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := missing()), reason=why or "it can")]
DRIVER = str(Path(__file__).parents[1] / "integration" / "resuming_driver.py")
DEADLINES = {"peers": 1800, "deadline": 600}
"""The defaults of `hf.init`: a run that waits for one of them exceeds the limit of its test."""


class Runs:
    """Runs of `resuming_driver.py` on machine 1 of a cluster, in directories that all machines share."""

    def __init__(self, machines: Machines) -> None:
        self.machines, self.shared = machines, machines.shared
        self.thread = ThreadPoolExecutor(1)  # a machine ends with the thread that started it
        tiny_models.make_policy(self.shared / "policy")
        lines = [json.dumps({"prompt": text}) + "\n" for text in ("abc", "x y", "kd", "ab", "c z", "pq", "hello", "ok")]
        (self.shared / "prompts.jsonl").write_text("".join(lines))

    def command(self, name: str, steps: int, again: bool = False, **options: Any) -> list[str]:
        (self.shared / name).mkdir(exist_ok=again)
        words = [f"{key}={value}" for key, value in options.items()]
        return ["python", "-u", DRIVER, name, "policy", "prompts.jsonl", str(steps), *words]

    def run(self, name: str, steps: int, **options: Any) -> Path:
        done = self.machines.run(1, self.command(name, steps, **options))
        assert done.returncode == 0, done.stdout[-5000:]
        return self.shared / name

    def disturbed(
        self, name: str, steps: int, how: str, phase: str = "", away: float | None = None, **options: Any
    ) -> Path:
        """A run in which a machine of the rollout, not the driver's, is lost in iteration 3, in the middle of `phase`
        if one is given. There is a spare machine, unless the lost one comes back after so many seconds `away`.

        What the run said is in log.txt, with the times."""
        options |= {"phase": phase} if phase else {}
        command = self.machines.command(1, self.command(name, steps, **options))
        used, lost, returns, log = [""], 0, None, (self.shared / name / "log.txt").open("w", buffering=1)
        with log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                log.write(f"{time.strftime('%T')} {line}")
                used = line.split()[1:] if line.startswith("nodes") else used
                if lost or not line.startswith(f"phase {phase}" if phase else "iteration 3"):
                    continue
                lost = int(next(node for node in used if node != "node1").removeprefix("node"))
                if phase not in ("", "idle"):
                    if options.get("in_memory"):
                        time.sleep(5)  # copies of the last iteration's state are on their way; the driver waits
                    self.machines.stop(lost)
                    (self.shared / name / "stopped").touch()
                    time.sleep(1)  # the call is on its way
                log.write(f"{time.strftime('%T')} machine {lost}: {how}\n")
                self.machines.kill(lost) if how == "killed" else self.machines.link(lost, "down")
                (self.shared / name / "stopped").touch()
                if away is not None:
                    returns = self.thread.submit(self._back, lost, how, away)
        self._back(lost, how) if returns is None else returns.result()
        assert driver.returncode == 0, (self.shared / name / "log.txt").read_text()[-6000:]
        return self.shared / name

    def _back(self, lost: int, how: str, after: float = 0.0) -> None:
        time.sleep(after)
        if how == "link away":
            self.machines.link(lost, "up")
            return
        if how == "link down":
            self.machines.kill(lost)
        self.machines.start(lost)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    with Machines(tmp_path_factory.mktemp("shared"), 3) as machines:
        yield Runs(machines)


@pytest.fixture(scope="module")
def one_machine(runs) -> Path:
    return runs.run("one", 5, layout="d2", record=1)


def check_equal(run: Path, other: Path) -> None:
    """Figures, rows and trained parameters are the same, bit for bit."""

    def records(path: Path) -> dict[int, Any]:
        lines = list(map(json.loads, (path / "record.jsonl").read_text().splitlines()))
        for line in lines:
            line["figures"].pop("stream/wait", None)  # seconds
        return {line["step"]: line for line in lines}

    assert records(run) == records(other)
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (run, other))
    assert all(weights[name].equal(others[name]) for name in weights)


def test_two_machines_train_as_one(runs, one_machine):
    check_equal(runs.run("two", 5, layout="d2", devices="1+1", record=1), one_machine)


@pytest.mark.parametrize(("first", "then"), [("1+1", "2"), ("2", "1+1")])
def test_a_run_continues_on_another_number_of_machines(runs, one_machine, first, then):
    name = f"from {first} to {then}"
    options = {"layout": "d2", "record": 1, "every": 1, "asynchronous": 0}
    done = runs.machines.run(1, runs.command(name, 5, devices=first, die=3, **options))
    assert done.returncode in (-9, 137), done.stdout[-3000:]
    check_equal(runs.run(name, 5, devices=then, again=True, **options), one_machine)


@pytest.mark.parametrize("how", ["killed", "link down"])
def test_a_lost_machine_is_replaced_by_a_spare_one(runs, one_machine, how):
    """It has a rank of every group. The run continues from its checkpoint, on machines that are there."""
    options = {"layout": "d2", "devices": "1+1", "record": 1, "retry": 1, "every": 1}
    run = runs.disturbed(f"lost {how}", 5, how, **options)
    assert "restart 1 of 3" in (run / "log.txt").read_text()
    check_equal(run, one_machine)


def test_a_link_that_is_away_for_a_moment_restarts_nothing(runs, one_machine):
    options = {"layout": "d2", "devices": "1+1", "record": 1, "tolerate": 15}
    run = runs.disturbed("away", 5, "link away", "idle", 9.0, **options)
    said = (run / "log.txt").read_text()
    assert "answers again, after" in said
    assert "restart" not in said
    check_equal(run, one_machine)


@pytest.mark.parametrize("how", ["killed", "link down"])
@pytest.mark.parametrize("layout", ["d2", "hsdp"])
def test_trainers_continue_from_the_memory_of_other_machines(runs, layout, how):
    """The optimizer's state is sharded (d2) or has replicas (hsdp); there is no checkpoint."""
    if not (runs.shared / f"whole {layout}").exists():
        runs.run(f"whole {layout}", 5, layout=layout, devices="1+1", record=1)
    options = {"layout": layout, "devices": "1+1", "record": 1, "retry": 1, "every": 100, "in_memory": 1}
    run = runs.disturbed(f"memory {layout} {how}", 5, how, "update", **options)
    said = (run / "log.txt").read_text()
    assert re.search(r"continuing after 2 iterations, from memory in [0-9.]+ s .*from memory of", said)
    check_equal(run, runs.shared / f"whole {layout}")


@pytest.mark.parametrize("how", ["killed", "link down"])
def test_a_lost_machine_that_only_generates_costs_no_training(runs, how):
    """There is no checkpoint to go back to: the iteration that was under way is done again."""
    options = {"layout": "d2", "devices": "2", "at": "node1", "record": 1, "retry": 1, "every": 100}
    options |= {"rollout": 1}
    run = runs.disturbed(f"rollout {how}", 5, how, **options)
    lines = [json.loads(line)["step"] for line in (run / "record.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4, 5]
    assert "placed on new hosts" in (run / "log.txt").read_text()


PHASES = ("idle", "generate", "update", "sync", "save")


@pytest.fixture(scope="module")
def undisturbed(runs) -> dict[bool, Path]:
    """With a rollout of its own, and without."""
    apart = runs.run("apart", 5, layout="d2", devices="2", at="node1", record=1, rollout=1)
    return {True: apart, False: runs.run("together", 5, layout="d2", devices="1+1", record=1)}


@pytest.mark.parametrize("spare", [True, False], ids=["spare", "comes back"])
@pytest.mark.parametrize("how", ["killed", "link down"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_machine_is_lost_in_any_phase(runs, undisturbed, phase, how, spare):
    """The run continues with equal figures, from the last checkpoint or without going back."""
    apart = phase == "sync"
    options: dict[str, Any] = {"layout": "d2", "record": 1, "retry": 1, "every": 1, "wait": 120, **DEADLINES}
    options |= {"devices": "2", "at": "node1", "rollout": 1} if apart else {"devices": "1+1"}
    name = f"{phase} {how} {spare}"
    if spare:
        run = runs.disturbed(name, 5, how, phase, **options)
    else:
        runs.machines.kill(3)
        try:
            run = runs.disturbed(name, 5, how, phase, 20.0, **options)
        finally:
            runs.machines.start(3)
    check_equal(run, undisturbed[apart])


def test_a_run_directory_that_is_not_shared_is_named(runs):
    command = ["python", DRIVER, "/tmp/alone", "policy", "prompts.jsonl", "2", "layout=d2", "devices=1+1", "every=1"]
    runs.machines.run(1, ["mkdir", "-p", "/tmp/alone"])
    done = runs.machines.run(1, command, timeout=200)
    assert done.returncode == 1
    assert "on a file system that all machines share" in done.stdout


def test_a_model_directory_of_one_machine_is_named(runs):
    runs.machines.run(1, ["cp", "-r", str(runs.shared / "policy"), "/tmp/only-here"])
    (runs.shared / "model of one").mkdir()
    command = ["python", DRIVER, "model of one", "/tmp/only-here", "prompts.jsonl", "2", "layout=d2", "devices=1+1"]
    done = runs.machines.run(1, command, timeout=200)
    assert done.returncode == 1
    assert re.search(r"on rank \d \(node node\d\)[^\n]*/tmp/only-here", done.stdout), done.stdout[-3000:]


# Marks of the driver; the test reads the counters of the link at each and lets it continue.
TRANSFERS = """
import sys, time
from pathlib import Path
import torch
import hybridflow as hf
from hybridflow.engine3d.layout import Box, Layout, Region
ROWS, COLUMNS = 2500, 2000  # 20 MB
class Holder(hf.Worker):
    def __init__(self, whole):
        rows = ROWS if whole else ROWS // self.context.grid.size
        self.tensor = torch.full((rows, COLUMNS), float(self.context.rank + 1))
    @classmethod
    def worker_spec(cls, settings):
        def layout(grid):
            def regions(rank):
                size = ROWS if settings["whole"] else ROWS // grid.size
                start = 0 if settings["whole"] else rank * size
                return [Region(Box("w", (start, 0), (start + size, COLUMNS)), "w", (0, 0))]
            return Layout({"w": (ROWS, COLUMNS)}, grid.size, regions)
        return hf.WorkerSpec(layout=layout)
    def weights_storage(self):
        return {"w": self.tensor}
    @hf.register(hf.DP_PROTO, reads=("row",), writes=("x",))
    def write(self, batch):
        return hf.Batch({"x": torch.ones(batch.rows, COLUMNS)})
    @hf.register(hf.DP_PROTO, reads=("x",))
    def read(self, batch):
        return float(batch["x"].sum())
    @hf.register(hf.ONE_TO_ALL)
    def nothing(self): ...
hf.init()
here, there = (hf.ResourcePool([2], nodes=[node]) for node in ("node1", "node2"))
shares, copies = hf.place(Holder, here, whole=False, name="shares"), hf.place(Holder, there, whole=True, name="copies")
parts = hf.place(Holder, there, whole=False, name="parts")
rows = hf.Batch({"row": torch.arange(ROWS)})
def mark(name):
    print("mark", name, flush=True)
    while not Path(name).exists():
        time.sleep(0.05)
for name, move in {
    "copies": lambda: hf.sync_weights(shares, copies).get(),
    "parts": lambda: hf.sync_weights(shares, parts).get(),
    "back": lambda: hf.sync_weights(copies, shares).get(),
    "rows": lambda: copies.read(shares.write(rows)).get(),
}.items():
    if name != "rows":
        move()  # what is set up once
    [group.nothing().get() for group in (shares, copies, parts)]
    mark(f"before-{name}")
    move()
    mark(f"after-{name}")
hf.shutdown()
"""
IMAGES = """
import time
from pathlib import Path
import numpy as np
from PIL import Image
import hybridflow as hf
class Reader(hf.Worker):
    @hf.register(hf.DP_PROTO, reads=("pixel_values", "image_grid_thw"))
    def see(self, batch):
        return float(sum(row.abs().sum() for row in batch["pixel_values"].rows()))
    @hf.register(hf.ONE_TO_ALL)
    def nothing(self): ...
hf.init()
here, there = (hf.ResourcePool([2], nodes=[node]) for node in ("node1", "node2"))
groups = {name: hf.place(Reader, pool, name=name) for name, pool in
          {"drawn": here, "first": there, "again": there, "other": there[0:1]}.items()}
asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w1"}]}]
drawn = [np.random.RandomState(seed).randint(0, 255, (128, 128, 3), dtype=np.uint8) for seed in range(64)]
rows = [{"prompt": asked, "images": Image.fromarray(one)} for one in drawn]
def mark(name):
    print("mark", name, flush=True)
    while not Path(name).exists():
        time.sleep(0.05)
for step, batch in enumerate(hf.PromptLoader(rows, batch_size=32, steps=2, processor="model")):
    for name, group in groups.items():
        group.nothing().get()
        mark(f"before-{name}-{step}")
        assert min(group.see(batch.repeat(4)).get()) > 0
        mark(f"after-{name}-{step}")
hf.shutdown()
"""


def counted(machines: Machines, fast: bool = False, script: str = TRANSFERS) -> dict[str, int]:
    """The larger of what machine 2 sent and received over its link in each of the driver's transfers, in bytes."""
    (machines.shared / "transfers.py").write_text(script)
    found, said = dict[str, tuple[int, int]](), ""
    command = machines.command(1, ["python", "-u", "transfers.py"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            said += line
            if line.startswith("mark"):
                found[name := line.split()[1]] = machines.bytes(2, fast)
                (machines.shared / name).touch()
    assert driver.returncode == 0, said[-4000:]
    names = [name.removeprefix("after-") for name in found if name.startswith("after-")]
    ends = {name: zip(found[f"before-{name}"], found[f"after-{name}"], strict=True) for name in names}
    return {name: max(after - before for before, after in pairs) for name, pairs in ends.items()}


MINIMUM = 20e6  # every element crosses the link once, however many ranks of the other machine need it


@pytest.mark.parametrize("fast", [False, True], ids=["one network", "two networks"])
def test_links_carry_the_minimum(tmp_path, fast):
    """Headers of packets and Ray's own messages included. Gloo uses the second network, where there is one."""
    with Machines(tmp_path, 2, fast=fast) as machines:
        sent = counted(machines, fast)
    assert list(sent) == ["copies", "parts", "back", "rows"]
    if fast:  # rows travel by Ray, over the first
        del sent["rows"]
    assert all(MINIMUM <= size <= 1.05 * MINIMUM for size in sent.values()), sent


def test_an_image_enters_a_machine_once(tmp_path):
    """Whatever ranks and groups of it read a batch, in which four responses share each image."""
    vision_models.make_vision(tmp_path / "model", "qwen3_vl")
    with Machines(tmp_path, 2) as machines:
        sent = counted(machines, script=IMAGES)
    batch = 32 * 64 * 1536 * 4  # images of 64 patches
    assert len(sent) == 8
    for name, size in sent.items():
        assert batch * name.startswith("first") <= size <= batch * (name.startswith("first") + 0.05), sent


def test_links_of_10_mbit_change_nothing_but_time(runs, one_machine):
    """Last: the links stay slow."""
    runs.machines.slow(2, "10mbit")
    runs.machines.slow(3, "10mbit")
    check_equal(runs.run("slow links", 5, layout="d2", devices="1+1", record=1), one_machine)
