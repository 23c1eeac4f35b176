"""Sessions of generation over calls of a group: replicas advance on their own, weights arrive in between, rows move."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.batch_ref import LaterBatch
from hybridflow.errors import BatchError, ConfigError, HostLostError, MissingColumnError, ProtocolError, WorkerError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests.integration.resuming_driver import process_of
from tests.tiny_models import make_prompts, make_rows

SAMPLING = hf.Sampling(max_tokens=12, seed=5, n=2, ignore_eos=True)
COLUMNS = ("response_ids", "log_probs", "policy_version", "num_tokens", "finished", "temperature", "response")
Rows = dict[tuple[int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def actor(keep, pool, policy) -> hf.WorkerGroup:
    return keep(
        hf.ActorWorker,
        pool[0:2],
        model=policy,
        train=hf.Megatron(tp=2),
        optim=hf.SGD(lr=0.5),
        generate=hf.VLLM(sampling=SAMPLING),
    )


@pytest.fixture(scope="module")
def rollout(keep, pool, policy) -> hf.WorkerGroup:
    """Two replicas."""
    return keep(hf.RolloutWorker, pool[2:4], model=policy, generate=hf.VLLM(sampling=SAMPLING))


@pytest.fixture(scope="module")
def prompts() -> hf.Batch:
    return make_prompts(4).with_columns(row_id=torch.tensor([7, 8, 20, 21]))


def rows_of(batch: hf.Batch) -> Rows:
    names = zip(batch["row_id"].tolist(), batch["response_index"].tolist(), strict=True)
    columns = {name: batch[name] if isinstance(batch[name], list) else batch[name].tolist() for name in COLUMNS}
    return {name: {column: values[i] for column, values in columns.items()} for i, name in enumerate(names)}


def whole(group: hf.WorkerGroup, prompts: hf.Batch) -> Rows:
    found = group.generate_sequences(prompts).get()
    index = torch.arange(found.rows) % SAMPLING.n
    return rows_of(found.with_columns(row_id=prompts["row_id"].repeat_interleave(SAMPLING.n), response_index=index))


def drained(group: hf.WorkerGroup, replica: int | None, **more: Any) -> Rows:
    out: Rows = {}
    for _ in range(100):
        batch = group.advance_rows(until=hf.Until(steps=5), replica=replica, **more).get().get()
        more.pop("rows", None)
        out |= rows_of(batch)
        if not batch.rows and out:
            return out
    raise AssertionError("the session does not end")


def same(found: Rows, wanted: Rows) -> bool:
    """Log-probabilities may differ in their last bits: they depend on how many rows a step computes together."""
    close = all(
        torch.allclose(torch.tensor(found[name]["log_probs"]), torch.tensor(row["log_probs"]), rtol=0, atol=1e-5)
        for name, row in wanted.items()
    )
    return close and without(found, "log_probs") == without(wanted, "log_probs")


def without(rows: Rows, *columns: str) -> Rows:
    return {name: {key: row[key] for key in row if key not in columns} for name, row in rows.items()}


def test_a_session_gives_the_rows_of_one_call(rollout, prompts):
    later = rollout.advance_rows(prompts, until=hf.Until(steps=3), replica=1)
    assert isinstance(later, LaterBatch)
    first = later.get()
    assert (first.rows, first.get().rows, later.done()) == (0, 0, True)
    assert {"row_id", "response_index", "spans", "recomputed_tokens", *COLUMNS} <= set(first.columns)
    assert same(drained(rollout, 1), whole(rollout, prompts))


def test_rows_move_to_another_replica_while_both_work(rollout, prompts):
    calls = [rollout.advance_rows(prompts, until=hf.Until(steps=4), replica=0)]
    calls.append(rollout.advance_rows(prompts, until=hf.Until(steps=2), replica=1, greedy=True))
    kept = rollout.withdraw_rows(replica=0, keep=True)
    state = rollout.withdraw_rows(replica=0).get()
    assert kept.get() == state
    assert [len(row["token_ids"]) for row in state] == [4] * 8
    assert [len(row["token_ids"]) for row in rollout.withdraw_rows(replica=1).get()] == [2] * 8
    moved = drained(rollout, 1, rows=state)
    assert same(moved, whole(rollout, prompts))
    assert rollout.withdraw_rows().get() == [[], []]
    assert all(call.get().rows == 0 for call in calls)


def test_weights_arrive_between_two_calls(actor, rollout, prompts):
    hf.sync_weights(actor, rollout).get()
    rollout.advance_rows(prompts, until=hf.Until(steps=5), replica=0, version=3).get()
    hf.sync_weights(actor, rollout)  # rows are decoded on until the actor is there
    found = rollout.advance_rows(until=hf.Until(rows=8), replica=0, version=4).get().get()
    wanted = whole(rollout, prompts)
    assert without(rows_of(found), "policy_version", "log_probs") == without(wanted, "policy_version", "log_probs")
    before = found["policy_version"].tolist()[0].count(3)
    assert before >= 5
    moved = before < 12  # not when the actor is that late
    assert found["policy_version"].tolist() == [[3] * before + [4] * (12 - before)] * 8
    assert found["spans"].tolist() == [1 + moved] * 8
    assert found["recomputed_tokens"].tolist() == [(len(i) + before) * moved for i in found["prompt_ids"].tolist()]


class Busy(hf.ActorWorker):
    """An actor that is late for a transfer."""

    @register(ONE_TO_ALL)
    def work(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("tp", [2, 1])
def test_rows_are_decoded_until_the_weights_arrive(place, hosts, policy, prompts, tp):
    longer = replace(SAMPLING, max_tokens=50)
    actor = place(Busy, hosts[4:5], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.5))
    rollout = place(hf.RolloutWorker, hosts[6:8], name="late", model=policy, generate=hf.VLLM(tp=tp, sampling=longer))
    hf.sync_weights(actor, rollout).get()
    replicas = range(2 // tp)
    for replica in replicas:
        rollout.advance_rows(prompts, until=hf.Until(steps=1), replica=replica, version=3).get()
    actor.work(1.0)
    moved = hf.sync_weights(actor, rollout)
    finished = [rollout.advance_rows(until=hf.Until(rows=8), replica=replica, version=4) for replica in replicas]
    for batch in finished:
        rows = batch.get().get()
        assert rows.rows == 8
        versions = rows["policy_version"].tolist()
        assert all(row == sorted(row) and len(row) == 50 for row in versions)
        assert sum(version == 3 for row in versions for version in row) > 8  # more than what one step made
    assert 0 < moved.get()["pause"] < 60
    assert moved.get()["pause"] >= moved.get()["seconds"]


def test_an_actor_continues_rows_after_training(actor, rollout, prompts):
    wanted = whole(actor, prompts)
    first = actor.advance_rows(prompts, until=hf.Until(steps=6))
    scored = actor.compute_log_prob(rollout.generate_sequences(prompts))  # in the training layout
    with pytest.raises(WorkerError, match=r"call advance_rows\(replica=None\) first"):
        actor.advance_rows(until=hf.Until(steps=1), replica=0).get()
    assert first.get().rows == 0
    assert "old_log_probs" in scored.columns
    found = drained(actor, None)
    assert without(found, "log_probs") == without(wanted, "log_probs")  # and equal versions


def test_wrong_calls_are_refused(rollout, prompts, settle):
    with pytest.raises(ConfigError, match="give when the call ends"):
        rollout.advance_rows(prompts, until=hf.Until())
    with pytest.raises(ProtocolError, match=r"replicas 0\.\.1"):
        rollout.advance_rows(prompts, until=hf.Until(steps=1), replica=2)
    with pytest.raises(ConfigError, match="every replica would continue"):
        rollout.advance_rows(until=hf.Until(steps=1), rows=[{}])
    unnamed = hf.BatchRef.from_batch(hf.Batch({"prompt_ids": prompts["prompt_ids"]}), number=False)
    with pytest.raises(ConfigError, match="row_id"):
        rollout.advance_rows(unnamed, until=hf.Until(steps=1), replica=0)
    rollout.advance_rows(prompts, until=hf.Until(steps=1), replica=0)
    with pytest.raises(WorkerError, match=r"row 7\.0 was submitted twice"):
        rollout.advance_rows(prompts, until=hf.Until(steps=1), replica=0).get()
    settle()
    assert len(rollout.withdraw_rows(replica=0).get()) == 8


def test_a_replica_gives_its_kv_cache_back_when_its_rows_have_left(rollout, prompts):
    """An actor may train on its devices; it gets the cache again with the next rows."""

    def caches() -> list[float]:
        return [rank["memory/kv_cache"] for rank in rollout.memory()]

    rollout.advance_rows(prompts, until=hf.Until(steps=1), replica=1).get()
    assert caches()[0] == 0.0
    assert (before := caches()[1]) > 0
    rows = rollout.withdraw_rows(replica=1, row_ids=[7]).get()
    assert caches()[1] == before  # others are left
    rollout.withdraw_rows(replica=1, keep=True).get()
    assert caches()[1] == before
    rows += rollout.withdraw_rows(replica=1).get()
    assert len(rows) == len(prompts) * SAMPLING.n
    assert caches() == [0.0, 0.0]
    found, wanted = drained(rollout, 1, rows=rows), whole(rollout, prompts)
    assert {name: row["response_ids"] for name, row in found.items()} == {
        name: row["response_ids"] for name, row in wanted.items()
    }


KINDS: tuple[Any, ...] = ("recompute", "keep", "offload", "auto")


@pytest.mark.thinned(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_rows_under_way_through_updates_have_the_tokens_of_each_kind(place, hosts, policy, prompts, tp):
    """Of two replicas, and of one on both devices. An update between two parts of a session: without effect on the
    weights all kinds give the rows of one call; with one, keys and values that stayed give the same wherever they
    waited. Rows of less than a block are computed again by "auto"."""
    found: dict[tuple[Any, float, bool], Rows] = {}
    cases = [(lr, greedy) for lr in (0.0, 0.5) for greedy in (False, True)]
    given = {"model": policy, "train": hf.Megatron(tp=2), "optim": hf.SGD(lr=0.0)}
    for kv in KINDS:
        generate = hf.VLLM(tp=tp, sampling=SAMPLING, kv=kv)
        group = place(hf.ActorWorker, hosts[4:6], name="waits", **given, generate=generate)
        for lr, greedy in cases:
            group.set_optimizer(lr=lr).get()
            group.advance_rows(prompts, until=hf.Until(steps=6), greedy=greedy).get()
            _ = group.update_actor(make_rows(4)).get()
            assert any(rank["memory/kv_cache"] for rank in group.memory()) == (kv == "keep")
            rows = group.advance_rows(until=hf.Until(rows=100)).get().get()
            again = [len(ids) + 6 for ids in rows["prompt_ids"].tolist()]
            assert rows["recomputed_tokens"].tolist() == (again if kv in ("recompute", "auto") else [0] * 8)
            found[kv, lr, greedy] = rows_of(rows)
            if not lr:
                drawn = group.generate_sequences(prompts, greedy=greedy).get()["response_ids"].tolist()
                names = [(row, index) for row in prompts["row_id"].tolist() for index in range(SAMPLING.n)]
                assert {name: row["response_ids"] for name, row in rows_of(rows).items()} == dict(zip(names, drawn))
        group.close()  # a host generates for one actor
    for case in cases:
        assert found["keep", *case] == found["offload", *case]  # bit for bit
        assert found["auto", *case] == found["recompute", *case]
        assert same(found["recompute", *case], found["keep", *case]) == (case[0] == 0.0)
    assert {len(set(row["policy_version"])) for row in found["keep", 0.5, True].values()} == {2}


@pytest.mark.parametrize(("tp", "kv"), [(1, "offload"), (2, "keep")])
def test_rows_continue_from_copies_after_a_lost_host(place, hosts, policy, prompts, settle, tp, kv):
    """What waited for them is lost with it: keys and values of all tokens are computed again, and the tokens are those
    of rows that were not interrupted."""
    given: dict[str, Any] = {"model": policy, "train": hf.Megatron(tp=2), "optim": hf.SGD(lr=0.0)}
    given["generate"] = hf.VLLM(tp=tp, sampling=SAMPLING, kv=kv)
    with hf.ResourcePool([2]) as pool:
        group = place(hf.ActorWorker, pool, name="lost", **given)
        group.advance_rows(prompts, until=hf.Until(steps=6)).get()
        _ = group.update_actor(make_rows(4)).get()
        copies = [row for rows in group.withdraw_rows(keep=True).get() for row in rows]
        os.kill(process_of(pool.hosts[1]), signal.SIGKILL)
        with pytest.raises(HostLostError):
            group.advance_rows(until=hf.Until(rows=100)).get().get()
        settle()
    group = place(hf.ActorWorker, hosts[4:6], name="found", **given)
    wanted = whole(group, prompts)
    assert len(copies) == len(prompts) * SAMPLING.n
    rows = group.advance_rows(rows=copies, replica=0, until=hf.Until(rows=100)).get().get()
    assert rows["recomputed_tokens"].tolist() == [len(ids) + 6 for ids in rows["prompt_ids"].tolist()]
    assert same(rows_of(rows), wanted)


@pytest.mark.parametrize("kv", ["recompute", "offload"])
def test_an_offloaded_rollout_computes_the_rows_of_its_session_once(place, hosts, policy, prompts, kv):
    """Though its KV cache goes after every call; those of rows that were handed over go with them."""
    group = place(
        hf.RolloutWorker,
        hosts[4:6],
        name="away",
        model=policy,
        generate=hf.VLLM(tp=2, sampling=SAMPLING, kv=kv),
        offload=True,
    )
    group.advance_rows(prompts, until=hf.Until(steps=1), replica=0).get()
    out: Rows = {}
    for _ in range(20):
        assert [rank["memory/kv_cache"] for rank in group.memory()] == [0.0, 0.0]
        rows = group.advance_rows(until=hf.Until(steps=1), replica=0).get().get()
        assert set(rows["recomputed_tokens"].tolist()) <= {0}
        out |= rows_of(rows)
    assert same(out, whole(group, prompts))


def test_prompts_have_numbers_of_responses_of_their_own(rollout, prompts):
    """As a list, or in a column; also copies of a row, which differ though the seed is one."""
    ref = hf.BatchRef.from_batch(prompts.with_columns(many=torch.tensor([1, 3, 2, 1])))
    found = rollout.generate_sequences(ref, n=[1, 3, 2, 1]).get()
    assert found["group_id"].tolist() == [7, 8, 8, 8, 20, 20, 21]
    assert len(found["row_id"].unique()) == len({tuple(row) for row in found["response_ids"].tolist()}) == 7
    assert rollout.generate_sequences(ref, n="many").get().equal(found)
    copies = rollout.generate_sequences(prompts[[0, 0, 1]], n=1).get()
    assert len({tuple(row) for row in copies["response_ids"].tolist()}) == 3
    assert copies["group_id"].tolist() == [7, 7, 8]
    for wrong in ([1, 2], [1, 1, 1, 0], [1, 1, 1, 1.5], "most"):
        with pytest.raises((BatchError, MissingColumnError), match=r"one for each of the 4 rows|no column 'most'"):
            rollout.generate_sequences(ref, n=wrong)


def test_a_value_of_the_sampling_is_given_by_its_settings(rollout, prompts):
    for name in ("sampling", "agent"):
        with pytest.raises(ConfigError, match=f"Sampling has no setting '{name}'"):
            rollout.generate_sequences(prompts, **{name: hf.Sampling()})


def test_a_missing_response_is_asked_of_the_operation_that_people_use(actor, prompts):
    with pytest.raises(
        MissingColumnError, match=rf"reads 'response_ids'.*: call {actor.name}.generate_sequences\(batch\) first"
    ):
        actor.compute_log_prob(prompts)
