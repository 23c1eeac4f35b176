"""Notebooks: the quickstart in a real kernel, twice from top to bottom, with an error and an interrupt between; texts
and tables of running calls, groups and pools, which show what the driver knows and wait for nothing.
"""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from recipes import arithmetic

manager = pytest.importorskip("jupyter_client.manager", reason="jupyter_client and ipykernel are not installed")
ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    "".join(cell["source"])
    for cell in json.loads((ROOT / "docs" / "notebooks" / "quickstart.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]
LOOP = next(cell for cell in CELLS if "tracker.log(" in cell)
SECONDS = 200.0


@dataclass
class Run:
    """What the run of a cell has printed, shown and raised."""

    text: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    updates: int = 0


class Kernel:
    def __init__(self, environment: dict[str, str], directory: Path) -> None:
        self.manager, self.client = manager.start_new_kernel(env=environment, cwd=str(directory))

    def run(self, code: str, meanwhile: Callable[[], object] | None = None) -> Run:
        """Run a cell to its end; `meanwhile` is called until it returns something true."""
        asked, found, end = self.client.execute(code), Run(), time.monotonic() + SECONDS
        while time.monotonic() < end:
            if meanwhile is not None and meanwhile():
                meanwhile = None
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                found.text += content["text"]
            elif kind in ("display_data", "execute_result"):
                found.data.append(content["data"])
            elif kind == "update_display_data":
                found.updates += 1
            elif kind == "error":
                found.error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return found
        raise AssertionError(f"a cell did not end: {code}\n{found}")

    def interrupt(self) -> bool:
        self.manager.interrupt_kernel()
        return True


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    arithmetic.make(ROOT / ".cache")
    home = tmp_path_factory.mktemp("notebook")
    (home / ".cache").symlink_to(ROOT / ".cache")
    return home


@pytest.fixture(scope="module")
def kernel(home, warm) -> Iterator[Kernel]:
    environment = os.environ | warm.environment | {"PYTHONPATH": str(ROOT)}
    kernel = Kernel(environment, home)
    yield kernel
    kernel.run("hf.shutdown()")
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel()


def steps(home: Path) -> list[int]:
    path = home / "runs" / "quickstart" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_the_notebook_runs_twice_with_an_error_and_an_interrupt_between(kernel, home):
    for number in range(2):
        for cell in CELLS:
            found = kernel.run(cell)
            assert not found.error, (cell, found)
            if "pool" in cell and "ResourcePool" in cell:
                assert ("of an earlier run" in found.text) == (number > 0), found.text
                assert "<table>" in found.data[-1]["text/html"]
            if cell is LOOP:
                assert found.updates  # of the curves above
        assert steps(home) == list(range(1, 9))
        assert "image/png" in found.data[-1]
        if number:
            continue
        assert not kernel.run("tracker = hf.Tracker('runs/quickstart', console=False)").error
        stop = "    if tracker._step == 2:\n        raise ValueError('mine')\n"
        broken = LOOP.replace("    metrics =", f"{stop}    metrics =")
        assert kernel.run(broken).error == "ValueError"
        endless = LOOP.replace("steps=8", "steps=1000")
        assert kernel.run(endless, lambda: len(steps(home)) >= 4 and kernel.interrupt()).error == "KeyboardInterrupt"
        logged = int(kernel.run("tracker.flush(); print('steps', tracker._step)").text.split("steps")[1])
        assert steps(home) == list(range(1, logged + 1))  # none is lost
        assert not kernel.run("actor.compute_log_prob(actor.generate_sequences(batch[:4])).get()").error
        assert "pending" in kernel.run("actor.generate_sequences(batch[:4])").data[-1]["text/html"]


@pytest.mark.slow
def test_interrupts_at_any_moment_leave_groups_usable(kernel):
    """Interrupts in quick succession, also while calls are being issued."""
    setup = "two = hf.ResourcePool([1])\nother = hf.ActorWorker.on(two, model=files.model, train=hf.Megatron())"
    assert not kernel.run(setup).error
    loop = "while True:\n    found = other.compute_log_prob(rows)"
    assert not kernel.run("rows = hf.text_batch([('1+1=', '2')] * 8, actor)").error
    for wait in (0.05, 0.2, 0.3):
        begun = time.monotonic()
        found = kernel.run(loop, lambda: time.monotonic() > begun + wait and kernel.interrupt())  # noqa: B023
        assert found.error == "KeyboardInterrupt"
        assert not kernel.run("assert len(other.compute_log_prob(rows).get()) == 8").error
    edited = kernel.run("two = hf.ResourcePool([1])  # in another cell")
    assert "earlier run" not in edited.text
    named = "named = hf.RewardWorker.on(two, name='mine', function=arithmetic.exact_match)"
    assert not kernel.run(named).error
    assert "the group mine of an earlier run" in kernel.run(named).text
    assert kernel.run(f"{named}\n{named}").error == "ConfigError"  # within one run it is a mistake


class Gate:
    """Its calls wait for a file."""

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("y", "<i>"))
    def double(self, batch, path: Path):
        _wait(path)
        return hf.Batch({"y": batch["x"] * 2, "<i>": ["<script>"] * len(batch)})

    @hf.register(hf.DP_PROTO, reads=("x",))
    def measure(self, batch, path: Path):
        _wait(path)
        return {"gate/<b>": float(batch["x"].sum())}

    @hf.register(hf.ONE_TO_ONE)
    def large(self):
        return torch.zeros(100_000)

    @hf.register(hf.ONE_TO_ONE)
    def fails(self):
        raise ValueError("<script>")


def _wait(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _until(shown, text: str) -> None:
    end = time.monotonic() + 60
    while text not in repr(shown):
        assert time.monotonic() < end, repr(shown)
        time.sleep(0.02)


def test_calls_are_pending_then_done(pool, place, tmp_path):
    gate, path = place(Gate, pool[:2], name="gate"), tmp_path / "open"
    rows = gate.double(hf.Batch({"x": [1, 2, 3]}), path=path)
    metrics = gate.measure(hf.Batch({"x": [1, 2, 3]}), path=path)
    assert repr(metrics) == "Future(gate.measure: pending)"
    assert repr(rows["y"]) == "y: 3 rows by reference, gate.double: pending; .get() brings them here"
    for page in (rows._repr_html_(), rows["y"]._repr_html_(), metrics._repr_html_()):
        assert "pending" in page
        assert "<i>" not in page
    path.touch()
    _until(metrics, "{'gate/<b>': 3")
    _until(rows["y"], "done")
    assert "gate/&lt;b&gt;" in metrics._repr_html_()
    assert "pending" not in rows._repr_html_()
    assert metrics.get() == {"gate/<b>": 3.0}
    table = gate._repr_html_()
    assert ".double(...)" in table
    assert "1 calls" in table
    assert "gate" in pool[:2]._repr_html_()


def test_failed_and_large_results_are_not_fetched(pool, place, settle):
    gate = place(Gate, pool[:2], name="failing")
    large, failed = gate.large(), gate.fails()
    _until(large, "done")
    assert "tensor" not in repr(large)
    _until(failed, "failed: failing.fails failed on rank 0")
    assert "<script>" not in failed._repr_html_()
    with pytest.raises(hf.errors.WorkerError):
        failed.get()
    settle()
    gate.close()
    assert "closed by close()" in gate._repr_html_()
