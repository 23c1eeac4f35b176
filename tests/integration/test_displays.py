"""Texts and tables of running calls, groups and pools: they show what the driver knows and wait for nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import hybridflow as hf


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
