"""A run that continues: `Tracker.state` and `load_state`, what is kept, what is set aside, and damaged states."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, MissingColumnError
from hybridflow.tracking.kept_files import KeptFiles, as_line
from hybridflow.tracking.tracker import Tracker


def lines(directory: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def steps(directory: Path, name: str = "metrics.jsonl") -> list[int]:
    return [line["step"] for line in lines(directory, name)]


def run(tracker: Tracker, first: int, last: int, part: int = 1) -> None:
    for step in range(first, last + 1):
        tracker.log({"reward/mean": step / 10, "part": part})
        tracker.samples([{"response": f"{part}/{step}"}])


KILLED = """
import json, os, signal, sys
from hybridflow.tracking.tracker import Tracker
tracker = Tracker(sys.argv[1], console=False)
tracker.note(before=0.25)
for step in range(1, 8):
    tracker.log({"reward/mean": step / 10, "part": 1})
    tracker.samples([{"response": f"1/{step}"}])
    if step == 4:
        print(json.dumps(tracker.state()))
tracker.note(after="lost")
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_continues_in_the_same_files(tmp_path, monkeypatch):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    state, drawn = json.loads(killed.stdout), []
    monkeypatch.setattr("hybridflow.tracking.tracker.drawn_curve", lambda points: drawn.extend(points) or b"png")
    with Tracker(tmp_path, console=False) as tracker:
        assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]  # nothing is renamed before the first write
        tracker.load_state(state)
        assert steps(tmp_path) == [1, 2, 3, 4]
        run(tracker, 5, 8, part=2)
    found = lines(tmp_path)
    assert [(line["step"], line["part"]) for line in found] == [(i, 1 if i < 5 else 2) for i in range(1, 9)]
    assert steps(tmp_path, "metrics.1.jsonl") == [5, 6]
    assert [line["response"] for line in lines(tmp_path, "samples.1.jsonl")] == ["1/5", "1/6", "1/7"]
    assert [line["response"][0] for line in lines(tmp_path, "samples.jsonl")] == ["1"] * 4 + ["2"] * 4
    totals = [line["time/total"] for line in found]
    assert totals == sorted(totals)
    assert totals[4] >= state["seconds"]
    assert drawn == [(i, i / 10) for i in range(1, 9)]
    assert json.loads((tmp_path / "notes.json").read_text()) == {"before": 0.25}
    assert json.loads((tmp_path / "notes.1.json").read_text()) == {"before": 0.25, "after": "lost"}
    assert not list(tmp_path.glob("*.2.*"))


def test_a_run_restarts_several_times_in_one_process(tmp_path):
    """The iteration that is pending is discarded; a finished tracker continues, too."""

    class Lost:
        def get(self):
            raise AssertionError("a discarded iteration was waited for")

    tracker = Tracker(tmp_path, console=False)
    run(tracker, 1, 2)
    state = tracker.state()
    run(tracker, 3, 4)
    tracker.log(Lost())
    tracker.load_state(state)
    run(tracker, 3, 4, part=2)
    tracker.finish()
    tracker.load_state(state)
    run(tracker, 3, 3, part=3)
    assert tracker.state()["step"] == 3
    tracker.finish()
    assert [(line["step"], line["part"]) for line in lines(tmp_path)] == [(1, 1), (2, 1), (3, 3)]
    assert [(line["step"], line["part"]) for line in lines(tmp_path, "metrics.1.jsonl")] == [(3, 1), (4, 1)]
    assert [(line["step"], line["part"]) for line in lines(tmp_path, "metrics.2.jsonl")] == [(3, 2), (4, 2)]
    assert (tmp_path / "reward.2.png").exists()
    assert (tmp_path / "reward.png").exists()
    with pytest.raises(ConfigError, match="finished"):
        tracker.log({})


def test_the_settings_of_a_run_and_of_the_one_that_continues_it_are_kept(tmp_path):
    first = Tracker(tmp_path, console=False, config={"steps": 3, "actor": {"lr": 0.1}})
    assert not (tmp_path / "config.yaml").exists()  # the run may still continue another
    run(first, 1, 3)
    state = first.state()
    first.finish()
    assert (tmp_path / "config.yaml").read_text() == "steps: 3\nactor:\n  lr: 0.1\n"
    for _ in range(2):
        again = Tracker(tmp_path, console=False, config={"steps": 5})
        again.load_state(state)
        again.load_state(state)
        assert (tmp_path / "config.yaml").read_text() == "steps: 5\n"
        assert (tmp_path / "config.1.yaml").read_text().startswith("steps: 3")
        again.finish()
    assert sorted(path.name for path in tmp_path.glob("config*")) == ["config.1.yaml", "config.yaml"]
    with Tracker(tmp_path, console=False, config={"steps": 7}) as anew:
        anew.note(more=1)
    texts = sorted(path.read_text() for path in tmp_path.glob("config*.yaml"))
    assert [text.splitlines()[0] for text in texts] == ["steps: 3", "steps: 5", "steps: 7"]


def test_flush_writes_the_pending_iteration(tmp_path):
    tracker = Tracker(tmp_path, console=False)
    tracker.flush()
    run(tracker, 1, 2)
    assert steps(tmp_path) == [1]
    tracker.flush()
    tracker.flush()
    assert steps(tmp_path) == [1, 2]
    run(tracker, 3, 3)
    state = tracker.state()  # flushes
    assert (state["step"], steps(tmp_path)) == (3, [1, 2, 3])
    assert json.loads(json.dumps(state, allow_nan=False)) == state
    tracker.finish()


def test_lines_that_could_not_be_written_are_written_later(tmp_path):
    tracker = Tracker(tmp_path / "run", console=False)
    run(tracker, 1, 2)
    (tmp_path / "run").rename(tmp_path / "gone")
    run(tracker, 3, 4)
    tracker.flush()
    assert steps(tmp_path / "gone") == [1]
    (tmp_path / "gone").rename(tmp_path / "run")
    tracker.flush()
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


def test_lines_that_could_not_be_written_keep_their_side_of_a_restart(tmp_path):
    tracker = Tracker(tmp_path / "run", console=False)
    run(tracker, 1, 1)
    (tmp_path / "run").rename(tmp_path / "gone")
    run(tracker, 2, 3)
    state = tracker.state()
    run(tracker, 4, 5)
    tracker.flush()
    tracker.load_state(state)
    run(tracker, 4, 5, part=2)
    (tmp_path / "gone").rename(tmp_path / "run")
    tracker.finish()
    assert [(line["step"], line["part"]) for line in lines(tmp_path / "run")] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
    ]
    assert [(line["step"], line["part"]) for line in lines(tmp_path / "run", "metrics.1.jsonl")] == [(4, 1), (5, 1)]


def test_a_missing_and_a_torn_line_warn_once(tmp_path, caplog):
    with Tracker(tmp_path, console=False) as tracker:
        run(tracker, 1, 5)
        state = tracker.state()
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(kept[:3]) + kept[3][:20])
    with Tracker(tmp_path, console=False) as tracker:
        tracker.load_state(state)
        run(tracker, 6, 7)
    assert steps(tmp_path) == [1, 2, 3, 6, 7]
    assert [record.message.partition(" ends ")[2][:14] for record in caplog.records] == [
        "in half a line",
        "at step 3, the",
    ]
    assert not (tmp_path / "metrics.1.jsonl").exists()


def test_a_state_continues_in_an_empty_directory(tmp_path, caplog):
    with Tracker(tmp_path / "a", console=False) as tracker:
        run(tracker, 1, 2)
        state = tracker.state()
    with Tracker(tmp_path / "b", console=False) as tracker:
        tracker.load_state(state)
        run(tracker, 3, 3)
    assert steps(tmp_path / "b") == [3]
    assert "ends at step 0, the saved state is of step 2" in caplog.text


GOOD = {"run": "0" * 32, "step": 2, "seconds": 1.5, "notes": {"a": 1}}
BAD = [
    *({"run": run} for run in (None, 7, "", "../../x", "0" * 31 + "\n", "0" * 33)),
    *({"step": step} for step in (None, -1, 1.0, True, "2", 2**62, math.nan)),
    *({"seconds": seconds} for seconds in (None, -1.0, math.nan, math.inf, "1", True, 10**400)),
    *({"notes": notes} for notes in (None, [], "x", {1: 2})),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, bad):
    with Tracker(tmp_path, console=False) as tracker:
        run(tracker, 1, 3)
        with pytest.raises(ConfigError, match=rf"has {next(iter(bad))}="):
            tracker.load_state(GOOD | bad)
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("bad", [None, [], "state", 3])
def test_what_is_no_state_is_refused(tmp_path, bad):
    with pytest.raises(ConfigError, match=r"give what Tracker.state\(\) has given"):
        Tracker(tmp_path, console=False).load_state(bad)


whole = st.one_of(
    st.integers(0, 9).map(lambda step: json.dumps({"step": step}).encode()),
    st.sampled_from([b"", b"{", b"[]", b'{"step": "x"}', b'{"step": NaN}', b"\xff", b'{"step": 3.5}', b"[" * 5000]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(whole, max_size=12), half=st.sampled_from([b"", b'{"st']), step=st.integers(0, 9))
def test_every_line_is_kept_on_one_side(tmp_path_factory, content, half, step):
    directory = tmp_path_factory.mktemp("run")
    (directory / "metrics.jsonl").write_bytes(b"".join(line + b"\n" for line in content) + half)
    KeptFiles(directory, ("metrics.jsonl",)).rewind(step, {})
    kept = [line for line in content if line in [json.dumps({"step": i}).encode() for i in range(step + 1)]]
    aside = directory / "metrics.1.jsonl"
    later = aside.read_bytes().split(b"\n")[:-1] if aside.exists() else []
    assert (directory / "metrics.jsonl").read_bytes() == b"".join(line + b"\n" for line in kept)
    assert later == [line for line in content if line not in kept]
    assert not list(directory.glob(".*.partial"))


def test_threads_write_each_line_once(tmp_path):
    files = KeptFiles(tmp_path)
    written = [[as_line({"step": step, "thread": thread}) for step in range(200)] for thread in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda own: [files.append("samples.jsonl", [line]) for line in own], written))
    found = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert sorted(found) == sorted(line for own in written for line in own)


class Letters:
    """A tokenizer of three letters."""

    def decode(self, ids):
        return "".join("xyz"[one] for one in ids)


def sample_lines(directory, name):
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled_batch():
    """Two prompts with two responses each."""
    ids = Ragged.from_rows([[0, 1], [2], [0, 1, 2], [1]], torch.int64)
    columns = {"prompt": list("aabb"), "response": ["xy", "z", "xyz", "y"], "group_id": torch.tensor([7, 7, 9, 9])}
    versions = Ragged.from_lengths(torch.arange(7, dtype=torch.int32), ids.lengths)
    tokens = {"log_probs": ids.map(lambda v: -v.float() / 3), "policy_version": versions, "response_ids": ids}
    return Batch({**columns, **tokens, "rewards": torch.tensor([0.0, 1.0, 0.5, 0.1]), "mark": ["p", "q", "r", "s"]})


@pytest.mark.parametrize("of", [lambda batch: batch, BatchRef.from_batch], ids=["Batch", "BatchRef"])
def test_samples_of_a_batch_have_fields_per_token(tmp_path, of):
    letters = Tokenizer(Letters())
    with Tracker(tmp_path, console=False) as tracker:
        for _ in range(4):
            tracker.log({})
            tracker.samples(of(sampled_batch()), rows=3, every=2, tokenizer=letters, columns=["mark"])
            assert max((row["step"] for row in sample_lines(tmp_path, "samples.jsonl")), default=0) < tracker._step
    rows = sample_lines(tmp_path, "samples.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(s, g) for s in (1, 2, 4) for g in (0, 0, 1)]
    assert rows[5] == {
        "step": 2,
        "title": "samples",
        "group": 1,
        "prompt": "b",
        "response": "xyz",
        "rewards": 0.5,
        "mark": "r",
        "tokens": ["x", "y", "z"],
        "log_probs": [0.0, -0.333333, -0.666667],
        "policy_version": [3, 4, 5],
    }


def test_samples_of_a_lost_part_of_the_run_are_not_written(tmp_path):
    tracker = Tracker(tmp_path, console=False)
    tracker.log({})
    state = tracker.state()
    tracker.log({})
    tracker.samples(sampled_batch(), rows=1)
    tracker.load_state(state)
    tracker.log({})
    tracker.samples(sampled_batch(), rows=2)
    tracker.finish()
    assert [row["step"] for row in sample_lines(tmp_path, "samples.jsonl")] == [2, 2]


def test_samples_name_a_column_that_is_missing(tmp_path):
    with pytest.raises(MissingColumnError, match=r"no column 'marks'\. Did you mean 'mark'"):
        Tracker(tmp_path, console=False).samples(sampled_batch(), columns=["marks"])
