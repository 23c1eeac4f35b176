"""Events of a session become records once per iteration; the session here has no processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.iterations import Iterations
from hybridflow.engines.call_events import CallWork, Event, Stage, bytes_of, events_of, memory_used, work_of
from hybridflow.topology import RankGrid
from hybridflow.tracking.report.record import EventRecorder


def event(step: int | None, end: float, flops: float = 0.0) -> Event:
    return Event("call", step, 1, "actor", "go", "pool", 0, 0.0, 0.0, end, work=CallWork(flops=flops))


def device(name: str) -> dict[str, Any]:
    return {"pool": "pool", "rank": 0, "node": "n", "device": "cuda:0", "name": name, "memory": 1}


@pytest.fixture
def session() -> Any:
    pool = SimpleNamespace(
        name="pool", hosts=(None,), devices_of_nodes=(1,), devices=lambda: [device("NVIDIA H100 NVL")]
    )
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
    session.iterations.events = None
    recorder = EventRecorder(session)
    for number in range(5):
        session.iterations.note("wait", str(number), 0.0)
    records = recorder.take(1, 1, 1.0)[0]
    assert [record["what"] for record in records if record["kind"] == "wait"] == ["2", "3", "4"]
    assert [record["what"].partition(" older")[0] for record in records if record["kind"] == "note"] == ["2"]
    session.iterations.note("wait", "5", 0.0)
    assert [record["kind"] for record in recorder.take(2, 2, 1.0)[0]] == ["wait"]


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
    assert [(e.kind, e.method, e.rank, e.seconds) for e in found] == [
        ("switch", "go/transition", 3, 1.0),
        ("stage", "go/generation", 3, 3.0),
    ]
    assert (found[1].memory_before, found[1].memory_after) == (20, 30)
    assert memory_used(torch.device("cpu")) > 1 << 20
