"""Events of real hosts: each call once, with sizes and memory; and runs that are limited by one thing on purpose."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import WorkerError
from hybridflow.planner.cost.resident_memory import PlacedGroup
from hybridflow.tracking.report.chrome_trace import trace
from hybridflow.tracking.report.limits import find_limits
from hybridflow.tracking.report.record import read_events
from hybridflow.workers.worker import Worker
from tests import tiny_models
from tests.tiny_models import make_rows

STEPS, ROWS = 4, 8


class Staged(Worker):
    """Stands for the workers of a loop: calls sleep as they are asked to, `slower` times as long on the last rank."""

    def __init__(self, slower: float = 1.0) -> None:
        self._factor = slower if self.context.rank == self.context.grid.size - 1 else 1.0

    @hf.register(hf.DP_PROTO, reads=("prompt",), writes=("response_ids", "num_tokens"), kind="generation")
    def generate_sequences(self, batch: hf.Batch, tokens: int = 10, longest: int = 10) -> hf.Batch:
        """A millisecond per token of the longest response, which is the last row's."""
        lengths = [tokens] * (batch.rows - 1) + [longest]
        with self.context.stage("generation"):
            time.sleep(0.001 * max(lengths) * self._factor)
        ids = hf.Ragged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), lengths)
        return hf.Batch({"response_ids": ids, "num_tokens": torch.tensor(lengths)})

    @hf.register(hf.DP_PROTO, reads=("response_ids",), writes=("rewards",))
    def compute_reward(self, batch: hf.Batch, seconds: float = 0.005) -> hf.Batch:
        time.sleep(seconds * self._factor)
        return hf.Batch({"rewards": torch.zeros(batch.rows)})

    @hf.register(hf.DP_PROTO, reads=("rewards",))
    def update_actor(self, batch: hf.Batch, seconds: float = 0.005) -> dict[str, float]:
        time.sleep(seconds * self._factor)
        if seconds < 0:
            raise ValueError("on purpose")
        return {"actor/loss": 1.0}


def delayed(record: dict[str, Any]) -> dict[str, Any]:
    time.sleep(record["seconds"])
    return record


def prompts(seconds: float = 0.0, steps: int = STEPS) -> hf.PromptLoader:
    records = [{"prompt": f"{i}", "seconds": seconds} for i in range(ROWS)]
    return hf.PromptLoader(records, batch_size=ROWS, steps=steps, map=delayed)


@pytest.fixture
def recorded(cluster, settle, tmp_path) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """The events of a loop over `loader`."""
    settle()

    def recorded(loader: hf.PromptLoader, body: Callable[[Any], Any]) -> list[dict[str, Any]]:
        with hf.Tracker(tmp_path / "run", console=False) as tracker:
            for batch in loader:
                tracker.log(*body(batch))
        return read_events(tmp_path / "run")

    yield recorded
    settle()


def loop(group: hf.WorkerGroup, **given: dict[str, Any]) -> Callable[[Any], Any]:
    def body(batch: Any) -> Any:
        batch |= group.generate_sequences(batch, **given.get("generate", {}))
        batch |= group.compute_reward(batch, **given.get("reward", {}))
        return (group.update_actor(batch, **given.get("update", {})),)

    return body


def first(events: list[dict[str, Any]]) -> str:
    limits = find_limits(events)
    assert sum(limit.share for limit in limits) <= 1.0 + 1e-9
    return limits[0].name


def test_every_call_is_recorded_once_with_its_sizes(pool, place, recorded, cluster):
    group = place(Staged, pool[0:2], name="actor")
    events = recorded(prompts(), loop(group))
    calls = [e for e in events if e["kind"] == "call"]
    counts = Counter((e["step"], e["method"], e["rank"]) for e in calls)
    assert set(counts.values()) == {1}
    assert len(counts) == STEPS * 3 * 2
    own = {(e.seq, e.method): e for e in pool[0:1].events() if e.rank == 0}
    for call in [call for call in calls if call["rank"] == 0]:
        seen = own[call["seq"], call["method"]]
        assert (seen.role, seen.start, seen.end) == ("actor", call["start"], call["end"])
        assert call["start"] <= call["ready"] <= call["end"]
        assert call["memory_before"] > 1 << 20
        assert not call["failed"]
    generated = next(call for call in calls if call["method"] == "generate_sequences")
    rows = ROWS // 2
    assert generated["bytes_out"] == 8 * (10 * rows + rows + 1) + 8 * rows
    assert (generated["rows"], generated["tokens"], generated["longest"]) == (rows, 10 * rows, 10)
    rewarded = next(call for call in calls if call["method"] == "compute_reward")
    assert rewarded["bytes_in"] == 8 * (10 * rows + rows + 1)
    assert sum(e["kind"] == "stage" for e in events) == STEPS * 2
    assert sum(e["kind"] == "wait" for e in events) == STEPS
    run = next(e for e in events if e["kind"] == "run")
    assert run["roles"]["actor"] == {
        "pool": group.pool_name,
        "ranks": [0, 1],
        "class": "Staged",
        "layout": "(p,t,d)=(1,1,2)",
    }
    assert {(d["pool"], d["rank"]) for d in run["devices"]} >= {(group.pool_name, 0), (group.pool_name, 1)}
    shown = [e for e in trace(events)["traceEvents"] if e["ph"] == "X"]
    assert sum(e["cat"] == "call" for e in shown) == len(calls)


def test_a_failed_call_is_recorded(pool, place, recorded, tmp_path):
    group = place(Staged, pool[0:1], name="actor")
    with pytest.raises(WorkerError, match="sleep length must be non-negative"):
        recorded(prompts(), loop(group, update={"seconds": -1.0}))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    calls = [event for event in map(json.loads, lines) if event["kind"] == "call"]
    assert {e["method"] for e in calls if e["failed"]} == {"update_actor"}


def test_the_newest_tracker_records(pool, place, settle, tmp_path):
    """A notebook's cell that made a tracker runs again."""
    settle()
    group = place(Staged, pool[0:1], name="actor")
    trackers = []
    for name in ("one", "other"):
        trackers.append(hf.Tracker(tmp_path / name, console=False))
        for batch in prompts(steps=2):
            trackers[-1].log(*loop(group)(batch))
    for tracker in trackers:
        tracker.finish()
    for name in ("one", "other"):
        calls = [e for e in read_events(tmp_path / name) if e["kind"] == "call"]
        assert {e["step"] for e in calls} == {1, 2}
        assert len({(e["seq"], e["method"]) for e in calls}) == len(calls)
    seqs = [{e["seq"] for e in read_events(tmp_path / name) if e["kind"] == "call"} for name in ("one", "other")]
    assert not seqs[0] & seqs[1]


def test_a_slow_reward_limits(pool, place, recorded):
    assert first(recorded(prompts(), loop(place(Staged, pool[0:2]), reward={"seconds": 0.1}))) == "reward"


def test_one_slow_host_limits(pool, place, recorded):
    given = {"generate": {"tokens": 60, "longest": 60}, "reward": {"seconds": 0.06}}
    events = recorded(prompts(), loop(place(Staged, pool[0:4], slower=3.0), **given))
    limit = find_limits(events)[0]
    assert limit.name == "slow host"
    assert "rank 3 " in limit.advice


def test_a_long_tail_limits(pool, place, recorded):
    given = {"generate": {"tokens": 10, "longest": 200}}
    assert first(recorded(prompts(), loop(place(Staged, pool[0:2]), **given))) == "generation tail"


def test_the_loader_limits(pool, place, recorded):
    assert first(recorded(prompts(seconds=0.02), loop(place(Staged, pool[0:2])))) == "data"


def test_tiny_minibatches_limit(place, pool, policy, recorded):
    """The actor is real: 32 steps over the rows that it infers in one pass."""
    rows = hf.BatchRef.from_batch(make_rows(64))
    actor = place(hf.ActorWorker, pool[0:1], model=policy, train=hf.FSDP(), optim=hf.Adam(lr=1e-5))

    def body(_: Any) -> Any:
        actor.compute_log_prob(rows)
        return (actor.update_actor(rows, loss="pretrain", minibatches=32),)

    events = recorded(prompts(), body)
    assert first(events) == "tiny mini-batches"
    update = next(e for e in events if e.get("method") == "update_actor")
    inference = next(e for e in events if e.get("method") == "compute_log_prob")
    assert update["minibatches"] == 32
    assert update["tokens"] == inference["tokens"]
    assert update["flops"] == pytest.approx(3 * inference["flops"])
    assert update["flops"] > 0


def test_the_account_is_what_the_planner_says(pool, policy, recorded):
    """Weights, gradients and optimizer state by owner when a call ends, up to the padding of shares; a frozen model
    that waits in host memory has an image there."""
    rows, trains = hf.BatchRef.from_batch(make_rows(8)), {"optim": hf.Adam(lr=1e-5), "model": policy}
    own: dict[str, Any] = {"dtype": "float32"}
    groups = {
        "actor": hf.ActorWorker.on(pool[0:2], train=hf.Megatron(tp=2, **own), **trains),
        "zero": hf.ActorWorker.on(pool[0:2], train=hf.ZeRO(stage=2, **own), name="zero", **trains),
        "fsdp": hf.ActorWorker.on(pool[0:2], train=hf.FSDP(**own), name="fsdp", **trains),
        "away": hf.ReferenceWorker.on(
            pool[0:2], model=policy, train=hf.ZeRO(stage=1, **own), offload=True, name="away"
        ),
    }
    still = {}
    for name, group in groups.items():
        read = group.ranks.spec.model
        assert read is not None
        placed = PlacedGroup.of(name, read(), {**group.settings, "offload": False}, group.ranks.grid)
        assert placed is not None
        still[name] = placed.still

    def body(_: Any) -> Any:
        groups["away"].compute_ref_log_prob(rows)
        return [groups[name].update_actor(rows, loss="pretrain") for name in ("fsdp", "zero", "actor")]

    try:
        events = recorded(prompts(steps=2), body)
    finally:
        for group in groups.values():
            group.close()
    after = [e for e in events if e.get("method") == "update_actor" and e["role"] == "actor" and e["step"] == 2]
    assert len(after) == 2
    for held in (event["held"] for event in after):
        assert held.pop("away image") == pytest.approx(still["away"].parameters, rel=0.01)
        planned = {owner: size for name in ("actor", "zero", "fsdp") for owner, size in still[name].owned(name).items()}
        del planned["fsdp gradients"]  # every step frees them
        assert held == pytest.approx(planned, rel=0.01)


def test_weight_transfers_limit(pool, place, recorded, tmp_path_factory):
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = tiny_models.make_policy(tmp_path_factory.mktemp("larger"), **sizes)
    source = place(hf.ActorWorker, pool[0:1], model=model, train=hf.FSDP(), optim=hf.SGD(lr=0.1), name="source")
    target = place(hf.ReferenceWorker, pool[1:2], model=model, train=hf.FSDP(), name="target")
    group = place(Staged, pool[0:2])

    def body(batch: Any) -> Any:
        for _ in range(4):
            hf.sync_weights(source, target)
        return loop(group, generate={"tokens": 2, "longest": 2}, reward={"seconds": 0.0}, update={"seconds": 0.0})(
            batch
        )

    events = recorded(prompts(), body)
    transfers = [e for e in events if e["kind"] == "transfer"]
    assert first(events) == "weight transfer"
    assert len(transfers) == STEPS * 4 * 2
    assert sum(e["bytes_in"] for e in transfers) > STEPS * 4 * 1e6
