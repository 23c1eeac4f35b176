"""events.jsonl as it is read, Chrome traces of it, and utilization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.commands import main
from hybridflow.cluster.iterations import Incident
from hybridflow.engines.call_events import CallWork, Event
from hybridflow.errors import ConfigError
from hybridflow.tracking.report.chrome_trace import trace, write_timeline
from hybridflow.tracking.report.record import as_record, mfu, peak_flops, read_events


def event(kind: str = "call", method: str = "update_actor", rank: int = 0, at: float = 100.0, **more: Any) -> Event:
    times = (at, at + 0.25, at + 1.0)
    return Event(kind, 1, 7, "actor", method, "pool", rank, *times, 10, 20, 1000, 2000, phase="training", **more)


def written(directory: Path, *records: dict[str, Any], tail: str = "") -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "events.jsonl").write_text(text + tail)
    return directory


RUN = {
    "kind": "run",
    "step": 0,
    "time": 99.0,
    "plan": None,
    "roles": {},
    "devices": [{"pool": "pool", "rank": 0, "node": "n7", "device": "cpu", "name": "x", "memory": None}],
}


def test_events_are_read_as_they_were_written(tmp_path):
    records = [
        RUN,
        as_record(event(work=CallWork(4, 40, 1e6, 2)), 3),
        as_record(Incident("wait", 3, "loader", 90.0, 91.0), 3),
    ]
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
    parts = [event("switch", "generate_sequences/transition"), event("transfer", "sync_weights", rank=1)]
    records = [RUN, *(as_record(one, 1) for one in (event(), event(rank=1), *parts))]
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
    run = written(tmp_path, RUN, *(as_record(event(rank=rank), 1) for rank in (0, 1)))
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
    done = [event(rank=rank, work=CallWork(flops=30.0)) for rank in (0, 1)]
    peaks = {("pool", 0): 100.0, ("pool", 1): 100.0}
    found = mfu([*done, event(work=CallWork())], 4.0, peaks)
    assert found == {"perf/mfu": pytest.approx(60 / 800), "perf/mfu/actor.update_actor": pytest.approx(60 / 150)}
    assert mfu(done, 4.0, {}) == {}
    assert mfu([], 4.0, peaks) == {}


def test_peaks_are_of_whole_devices():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None
    assert peak_flops("x86_64") is None
