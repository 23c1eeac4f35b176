"""events.jsonl: how records are made, once per iteration, and read; Chrome traces of it, and utilization."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cli.commands import main
from hybridflow.cluster.iterations import Incident, Iterations
from hybridflow.engines.call_events import CallWork, Event, Stage, bytes_of, events_of, memory_used, work_of
from hybridflow.errors import ConfigError
from hybridflow.planner.describe.cluster_spec import peak_flops
from hybridflow.topology import RankGrid
from hybridflow.tracking.report.chrome_trace import trace, write_timeline
from hybridflow.tracking.report.record import EventRecorder, as_record, mfu, read_events


def event(step: int | None, end: float, flops: float = 0.0) -> Event:
    return Event("call", step, 1, "actor", "go", "pool", 0, 0.0, 0.0, end, work=CallWork(flops=flops))


@pytest.fixture
def session() -> Any:
    own = {"pool": "pool", "rank": 0, "node": "n", "device": "cuda:0", "name": "NVIDIA H100 NVL", "memory": 1}
    pool = SimpleNamespace(name="pool", hosts=(None,), devices_of_nodes=(1,), devices=lambda: [own])
    parts = {"groups": {}, "pools": [pool], "controller_pool": None, "assignment": None}
    return SimpleNamespace(iterations=Iterations(1.0), **parts)


def steps(records: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in records]


def test_events_get_the_step_of_their_iteration_without_a_loader(session):
    recorder = EventRecorder(session)
    session.iterations.events.extend([(6, event(None, 3.0)), (5, event(None, 2.0)), (5, event(None, 1.0))])
    records, _ = recorder.take(step=2, iteration=5, seconds=1.0)
    assert steps(records) == [("run", 1), ("call", 2), ("call", 2), ("call", 3)]
    assert recorder.take(step=3, iteration=6, seconds=1.0) == ([], {})


def test_dropped_events_are_noted_once(session, monkeypatch):
    monkeypatch.setattr("hybridflow.cluster.iterations._MOST_EVENTS", 3)
    recorder = EventRecorder(session)
    for number in range(5):
        session.iterations.note("wait", str(number), 0.0)
    records = recorder.take(1, 1, 1.0)[0]
    assert [record["what"] for record in records if record["kind"] == "wait"] == ["2", "3", "4"]
    assert [record["what"].partition(" older")[0] for record in records if record["kind"] == "note"] == ["2"]
    session.iterations.note("wait", "5", 0.0)
    assert [record["kind"] for record in recorder.take(2, 2, 1.0)[0]] == ["wait"]


def test_events_are_of_who_listened_then(session):
    first = EventRecorder(session)
    session.iterations.events.append((1, event(1, 1.0)))
    second = EventRecorder(session)
    session.iterations.events.append((2, event(2, 2.0)))
    assert steps(second.take(2, 2, 1.0)[0][1:]) == [("call", 2)]
    first.close()
    assert session.iterations.events is not None
    assert steps(first.take(1, 1, 1.0)[0][1:]) == [("call", 1)]


def test_calls_beside_a_loop_are_of_step_zero(session):
    recorder = EventRecorder(session)
    session.iterations.looped = True
    session.iterations.events.extend([(1, event(None, 1.0)), (1, event(1, 2.0))])
    assert steps(recorder.take(1, 1, 1.0)[0][1:]) == [("call", 0), ("call", 1)]


def test_mfu_is_that_of_the_steps_own_calls(session):
    recorder = EventRecorder(session)
    session.iterations.looped = True
    session.iterations.events.extend([(1, event(1, 2.0, 835e12)), (2, event(2, 3.0, 835e12))])
    assert recorder.take(1, 1, 10.0)[1] == {"perf/mfu": pytest.approx(0.1), "perf/mfu/actor.go": pytest.approx(0.5)}


def test_iterations_that_are_done_again_are_forgotten(session):
    recorder = EventRecorder(session)
    session.iterations.events.extend([(1, event(1, 1.0)), (2, event(2, 2.0))])
    session.iterations.note("restart", "new hosts", 0.5)
    recorder.forget(1)
    assert sorted(steps(recorder.take(1, 1, 1.0)[0])) == [("call", 1), ("restart", 0), ("run", 0)]
    recorder.close()
    session.iterations.note("note", "unseen", 0.0)
    assert recorder.take(2) == ([], {})


def test_waits_for_a_loader_are_of_the_next_iteration(session):
    session.iterations.listen()
    assert list(session.iterations.timed(iter("ab"), "loader", ahead=1)) == ["a", "b"]
    assert [(one.kind, one.step, one.what) for _, one in session.iterations.events] == [("wait", 1, "loader")] * 2


class Model:
    def forward_flops(self, tokens: torch.Tensor) -> float:
        return float(tokens.sum())


def test_work_counts_tokens_flops_and_the_tail():
    def ragged(*lengths: int) -> hf.Ragged:
        return hf.Ragged.from_lengths(torch.zeros(sum(lengths)), list(lengths))

    grid = RankGrid(p=2, t=2, d=1)
    batch = hf.Batch({"prompt_ids": ragged(2, 2, 2, 2)})
    result = batch.with_columns(response_ids=ragged(10, 20, 30, 100))
    generated = work_of(Model(), "generation", grid, {"batch": batch}, result)
    assert generated == CallWork(rows=4, tokens=168, flops=168 / 4, longest=100, tail=0.7)
    trained = work_of(Model(), "training", grid, {"batch": result, "epochs": 2}, {})
    assert trained == CallWork(rows=4, tokens=168, flops=3 * 2 * 168 / 4, minibatches=2)
    assert work_of(Model(), "inference", grid, {"batch": result}, None).flops == 168 / 4
    assert work_of(object(), "inference", grid, {"seconds": 1}, None) == CallWork()
    odd = hf.Batch({"response_ids": ["a", "b"], "num_tokens": [{}, {}]})
    assert work_of(Model(), "generation", grid, {"batch": odd}, odd) == CallWork(rows=2)
    assert bytes_of([result, 1, None]) == result.nbytes


def test_parts_of_a_call_are_events():
    own = Event("call", 1, 7, "actor", "go", "pool", 3, 0.0, 1.0, 5.0)
    stages = [Stage("transition", 1.0, 2.0, 10, 20), Stage("generation", 2.0, 5.0, 20, 30)]
    found = events_of(stages, own)
    told = [(e.kind, e.method, e.rank, e.seconds) for e in found]
    assert told == [("switch", "go/transition", 3, 1.0), ("stage", "go/generation", 3, 3.0)]
    assert (found[1].memory_before, found[1].memory_after) == (20, 30)
    assert memory_used(torch.device("cpu")) > 1 << 20


def made(kind: str = "call", method: str = "update_actor", rank: int = 0, at: float = 100.0, **more: Any) -> Event:
    times = (at, at + 0.25, at + 1.0)
    return Event(kind, 1, 7, "actor", method, "pool", rank, *times, 10, 20, 1000, 2000, phase="training", **more)


def written(directory: Path, *records: dict[str, Any], tail: str = "") -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "events.jsonl").write_text(text + tail)
    return directory


DEVICE = {"pool": "pool", "rank": 0, "node": "n7", "device": "cpu", "name": "x", "memory": None}
RUN = {"kind": "run", "step": 0, "time": 99.0, "plan": None, "roles": {}, "devices": [DEVICE]}


def test_events_are_read_as_they_were_written(tmp_path):
    waited = Incident("wait", 3, "loader", 90.0, 91.0)
    records = [RUN, as_record(made(work=CallWork(4, 40, 1e6, 2)), 3), as_record(waited, 3)]
    found = read_events(written(tmp_path, *records, tail='{"kind": "ca'))
    assert found == [records[2], RUN, records[1]]  # by their ends, without the half line
    assert (found[2]["rows"], found[2]["flops"], found[2]["minibatches"], found[2]["step"]) == (4, 1e6, 2, 3)
    assert "longest" not in found[2]


@pytest.mark.parametrize(
    "line", ["[]", '{"kind": 1}', '{"kind": "call", "start": 1, "end": 2}', '{"kind": "wait", "start": null, "end": 1}']
)
def test_lines_that_are_no_events_are_named(tmp_path, line: str):
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 2 is not an event"):
        read_events(written(tmp_path, RUN, tail=line + "\n"))


def test_a_trace_has_each_event_once(tmp_path):
    parts = [made("switch", "generate_sequences/transition"), made("transfer", "sync_weights", rank=1)]
    records = [RUN, *(as_record(one, 1) for one in (made(), made(rank=1), *parts))]
    records += [as_record(Incident(kind, 1, "x", 100.0, 101.0), 1) for kind in ("wait", "restart", "note")]
    path = write_timeline(written(tmp_path, *records), tmp_path / "out.json")
    found = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in found if e["ph"] == "X" and e["cat"] != "inputs"]
    assert sorted(e["cat"] for e in spans) == ["call", "call", "note", "restart", "switch", "transfer", "wait"]
    call = next(e for e in spans if e["cat"] == "call")
    assert (call["name"], call["ts"], call["dur"]) == ("actor.update_actor", 250000.0, 750000.0)
    assert {e["pid"] for e in spans if e["cat"] in ("call", "transfer")} == {1, 2}
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {0: "driver", 1: "pool rank 0 (n7)", 2: "pool rank 1"}
    assert [e["dur"] for e in found if e.get("cat") == "inputs"] == [250000.0] * 3
    assert {e["args"]["bytes"] for e in found if e["ph"] == "C"} == {1000, 2000}


def test_a_run_without_calls_has_a_trace():
    assert [e["ph"] for e in trace([RUN])["traceEvents"]] == ["M", "M"]


def test_the_command_writes_the_trace_and_names_the_limit(tmp_path, capsys):
    run = written(tmp_path, RUN, *(as_record(made(rank=rank), 1) for rank in (0, 1)))
    assert main(["timeline", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"{run / 'timeline.json'}" in shown
    assert "update: use more devices" in shown
    assert json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert main(["timeline", str(tmp_path / "none")]) == 2
    assert main(["timeline", str(run), "--output", str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_utilization_is_the_share_of_the_peak():
    """Two devices of 100 FLOP/s: 60 of the 800 FLOP of 4 s, and 60 of those of their calls' 2 x 0.75 s."""
    done = [made(rank=rank, work=CallWork(flops=30.0)) for rank in (0, 1)]
    peaks = {("pool", 0): 100.0, ("pool", 1): 100.0}
    found = mfu([*done, made(work=CallWork())], 4.0, peaks)
    assert found == {"perf/mfu": pytest.approx(60 / 800), "perf/mfu/actor.update_actor": pytest.approx(60 / 150)}
    assert mfu(done, 4.0, {}) == {}
    assert mfu([], 4.0, peaks) == {}


def test_peaks_are_of_whole_devices():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_flops("x86_64") is None
