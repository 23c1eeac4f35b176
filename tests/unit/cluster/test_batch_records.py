"""Files of recorded batches, and what a replay refuses before and while it answers calls from them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.batch.batch import Batch
from hybridflow.cluster.recorded_calls import (
    BatchRecord,
    BatchRecords,
    RecordedProgram,
    Recorder,
    Replay,
    differing_rows,
)
from hybridflow.cluster.session import Session
from hybridflow.errors import ConfigError
from hybridflow.run.replay import ReplayedStep, replay


def make_record(role: str = "actor", rows: int = 3) -> BatchRecord:
    prompts = Batch({"row_id": torch.arange(rows), "prompt": [f"text {i}" for i in range(rows)]})
    ids = hf.Ragged.from_rows([[1] * i for i in range(rows)], torch.int64)
    answers = Batch(
        {"response_ids": ids, "log_probs": ids.with_values(ids.values.bfloat16()), "response": ["a"] * rows}
    )
    return BatchRecord(role, "generate_sequences", 1, prompts, answers)


def make_run(run: Path, steps: range, driver: str = "") -> BatchRecords:
    """A run with records of these steps and without checkpoints."""
    records = BatchRecords(run / "checkpoints" / "batches")
    RecordedProgram(driver, ["steps=3"], str(run)).write(records)
    for step in steps:
        make_record().write(records.path(step, 0))
    return records


def no_program(driver: str, arguments: Any) -> Any:
    raise AssertionError("nothing may start")


def test_a_record_comes_back_as_it_was(tmp_path):
    """Views are written without the memory around them."""
    record, path = make_record(), tmp_path / "new" / "step-00000001.0.pt"
    big = torch.zeros(1_000_000)
    record = BatchRecord("actor", "draw", 2, record.prompts, record.rows.with_columns(view=big[:3]))
    record.write(path)
    found = BatchRecord.read(path)
    assert (found.role, found.method, found.factor) == ("actor", "draw", 2)
    assert found.prompts.equal(record.prompts)
    assert found.rows.equal(record.rows)
    assert path.stat().st_size < 100_000
    assert [one.name for one in path.parent.iterdir()] == [path.name]


class Hostile:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("content", [b"", b"nothing", pickle.dumps(Hostile(), 2), pickle.dumps({"role": 1}, 2)])
def test_a_damaged_record_is_named(tmp_path, content):
    path = tmp_path / "step-00000001.0.pt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"step-00000001\.0\.pt cannot be read"):
        BatchRecord.read(path)


@settings(max_examples=50, deadline=None)
@given(st.sets(st.integers(1, 12)), st.integers(0, 12), st.integers(0, 12))
def test_records_are_dropped_by_step(tmp_path_factory, steps, after, until):
    records = BatchRecords(tmp_path_factory.mktemp("records"))
    for step in steps:
        records.path(step, 0).touch()
    records.drop(after, until)
    assert records.steps == sorted(step for step in steps if not after < step <= until)
    records.drop(after)
    assert all(step <= after for step in records.steps)


def test_steps_read_as_ranges(tmp_path):
    records = BatchRecords(tmp_path)
    assert str(records) == "no steps"
    for step, index in ((0, 0), (1, 0), (2, 0), (2, 1), (5, 0)):
        records.path(step, index).touch()
    assert (str(records), records.steps) == ("steps 1-2, 5", [1, 2, 5])
    with pytest.raises(ConfigError, match=r"call 3 that generates of step 2 .* step 2 has 2 calls"):
        records.read(2, 2)


def test_differing_rows_are_counted_from_zero():
    one = make_record().prompts
    assert differing_rows(one, one) == []
    assert differing_rows(one, one.with_columns(prompt=["text 0", "other", "text 2"])) == [1]
    assert differing_rows(one, one[:2]) == [2]


@pytest.mark.parametrize(
    ("steps", "step", "message"),
    [
        (None, 1, "no recorded batches.*batches=True.*record_batches=true"),
        (range(1, 4), 9, "step 9 .* not recorded: its records have steps 1-3"),
        (range(3, 6), 4, "the steps before it, from 1, are not recorded any more.*steps 3-5"),
        (range(1, 4), 2, "program of this run, .*gone.py, is gone.*--driver"),
    ],
)
def test_a_replay_is_refused_before_anything_starts(tmp_path, steps, step, message):
    if steps is not None:
        make_run(tmp_path, steps, driver="" if "gone" not in message else str(tmp_path / "gone.py"))
        own = Path(__file__) if "gone" not in message else None
        with pytest.raises(ConfigError, match=message):
            replay(tmp_path, step, no_program, driver=own and str(own))
        return
    with pytest.raises(ConfigError, match=message):
        replay(tmp_path, step, no_program)


def test_a_driver_that_never_reaches_the_step_is_named(tmp_path):
    make_run(tmp_path, range(1, 4))
    asked = []

    def load(driver: str, arguments: Any) -> Any:
        asked.append((driver, list(arguments)))
        return lambda: None

    with pytest.raises(ConfigError, match="ended after step 0: does its loop call checkpoints"):
        replay(tmp_path, 2, load, driver=__file__, settings=["lr=0"])
    assert asked == [(__file__, ["steps=3", "lr=0"])]


class Turns:
    """A loop in which each iteration also goes through a loader of its own."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.checkpoints = hf.Checkpoints(directory / "checkpoints", batches=True, **settings)
        self.loader, self.seen = loader_of(3), list[tuple[int, int]]()

    def call(self) -> None:
        self.seen.append(Session.current().recorded.order.next())

    def run(self) -> None:
        for step, _ in enumerate(self.checkpoints.resume(self.loader), 1):
            self.call()
            for _ in loader_of(2):
                self.call()
            self.call()
            self.checkpoints._step = step


def loader_of(steps: int) -> hf.PromptLoader:
    return hf.PromptLoader([{"prompt": "a"}] * 2, batch_size=1, steps=steps, tokenizer=None)


@pytest.fixture
def session():
    yield
    hf.shutdown()


def test_calls_keep_their_numbers_in_loops_inside_an_iteration(tmp_path, session):
    turns = Turns(tmp_path)
    turns.run()
    assert turns.seen == [(step, index) for step in (1, 2, 3) for index in range(4)]


def test_batches_of_another_run_are_set_aside(tmp_path, session):
    """Whole, with their program; a replay takes only those of the present run."""
    (tmp_path / "mine.py").touch()
    make_run(tmp_path, range(1, 4), driver=str(tmp_path / "mine.py"))
    checkpoints = hf.Checkpoints(tmp_path / "checkpoints", resume="never")
    next(checkpoints.resume(loader_of(2)))
    aside = BatchRecords(tmp_path / "checkpoints.1" / "batches")
    assert aside.steps == [1, 2, 3]
    assert RecordedProgram.read(aside).arguments == ["steps=3"]
    with pytest.raises(ConfigError, match="has no recorded batches"):
        replay(tmp_path, 1, no_program)


def test_a_driver_that_is_a_function_is_recorded_as_one(tmp_path, session, monkeypatch):
    driver = tmp_path / "mine.py"
    driver.touch()
    records = BatchRecords(tmp_path / "batches")
    for name, known in ((f"{driver}:go", f"{driver}:go"), (str(driver), str(driver)), (f"{driver}x:go", "")):
        monkeypatch.setattr("sys.argv", [name, "a=1"])
        Recorder.start(records, 0)
        assert RecordedProgram.read(records).driver == known


def test_recording_needs_checkpoints(tmp_path):
    with pytest.raises(ConfigError, match="batches=True, every=None"):
        hf.Checkpoints(tmp_path, every=None, batches=True)


def test_the_program_ends_after_the_step(tmp_path):
    state = Replay(BatchRecords(tmp_path), 2, None, tmp_path)
    state.ended(1)
    with pytest.raises(SystemExit, match="0"):
        state.ended(2)
    assert state.directory_of(tmp_path) == tmp_path / "replay-2"
    assert state.directory_of("elsewhere/second") == tmp_path / "replay-2" / "second"


def test_the_table_marks_what_differs(tmp_path):
    shown = str(ReplayedStep(tmp_path, 2, {"a": 1.0, "b": None, "c": 1.0}, {"a": 1.0, "b": None, "c": 1.0000001}))
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert [name for name, line in lines.items() if "  differs" in line] == ["c"]
    assert "not finite" in lines["b"]
    assert "1 of 3 metrics differ" in shown
    assert "wrote no metrics of step 2" in str(ReplayedStep(tmp_path, 2, {}, {"a": 1.0}))


def test_a_damaged_program_is_named(tmp_path):
    records = make_run(tmp_path, range(1, 3))
    (records.directory / "program.json").write_text(json.dumps({"driver": 3}))
    with pytest.raises(ConfigError, match=r"program\.json .* damaged"):
        RecordedProgram.read(records)
