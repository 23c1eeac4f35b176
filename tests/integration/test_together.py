"""`hf.together` on real hosts: an actor and a critic on two pipeline stages, against the same updates in series."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from tests import tiny_models

TRAIN = hf.Megatron(pp=2, micro_tokens=24)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    large = {"num_hidden_layers": 4, "hidden_size": 96}
    policy = tiny_models.make_policy(directory / "policy", tokenizer=False)
    return {"actor": policy, "critic": tiny_models.make_classifier(directory / "critic", **large)}


@pytest.fixture(scope="module")
def pair(pool, models) -> Iterator[Callable[..., tuple[hf.WorkerGroup, hf.WorkerGroup]]]:
    """A new actor and critic on the first two hosts."""
    placed: list[hf.WorkerGroup] = []

    def make(
        critic_train: Any = TRAIN, critic: type[hf.CriticWorker] = hf.CriticWorker, actor_train: Any = TRAIN
    ) -> tuple[hf.WorkerGroup, hf.WorkerGroup]:
        while placed:
            placed.pop().close()
        optim = hf.Adam(lr=1e-3)
        placed.append(hf.ActorWorker.on(pool[0:2], model=models["actor"], train=actor_train, optim=optim))
        placed.append(critic.on(pool[0:2], model=models["critic"], train=critic_train, optim=optim))
        return placed[0], placed[1]

    yield make
    while placed:
        placed.pop().close()


@pytest.fixture(scope="module")
def rows() -> hf.BatchRef:
    return hf.BatchRef.from_batch(tiny_models.make_rows(12))


def outputs(actor: hf.WorkerGroup, critic: hf.WorkerGroup, rows: hf.BatchRef) -> list[torch.Tensor]:
    """What both models compute now."""
    found = (actor.compute_log_prob(rows) | critic.compute_values(rows)).get()
    return [found["old_log_probs"].values, found["values"].values]


def spans(group: hf.WorkerGroup, method: str) -> tuple[float, float]:
    """Start and end of the last call of a method on the first host."""
    import ray

    events = ray.get(group.ranks.hosts[0].handle.events.remote())
    last = [event for event in events if (event.role, event.method) == (group.name, method)][-1]
    return last.start, last.end


def test_together_equals_serial_updates(pair, rows, caplog):
    actor, critic = pair()
    serial = [actor.update_actor(rows, minibatches=2).get(), critic.update_critic(rows, minibatches=3).get()]
    expected = outputs(actor, critic, rows)
    actor, critic = pair()
    before = outputs(actor, critic, rows)
    with caplog.at_level(logging.WARNING):
        found = hf.together(actor.update_actor(rows, minibatches=2), critic.update_critic(rows, minibatches=3))
        assert [future.get() for future in found] == serial
    assert not caplog.records
    after = outputs(actor, critic, rows)
    assert all(map(torch.equal, after, expected))
    assert not any(map(torch.equal, after, before))
    one, other = spans(actor, "update_actor"), spans(critic, "update_critic")
    assert max(one[0], other[0]) < min(one[1], other[1]), "they ran at the same time"
    # further calls find the groups as ever: serial, together again, one alone
    critic.update_critic(rows)
    hf.together(actor.update_actor(rows), critic.update_critic(rows))
    assert "actor/grad_norm" in actor.update_actor(rows).get()


def test_three_updates_are_one_call(place, pair, pool, models, rows):
    actor, critic = pair()
    second = place(hf.ActorWorker, pool[0:2], model=models["actor"], train=TRAIN, optim=hf.Adam(lr=1e-3), name="second")
    updates = second.update_actor(rows), actor.update_actor(rows, minibatches=2), critic.update_critic(rows)
    assert hf.together(*updates) == updates
    assert all("skipped" in str(update.get()) for update in updates)
    times = [spans(group, method) for group, method in ((second, "update_actor"), (actor, "update_actor"))]
    times.append(spans(critic, "update_critic"))
    assert max(start for start, _ in times) < min(end for _, end in times), "they ran at the same time"


def test_a_held_update_is_sent_by_any_other_use_of_the_session(pair, rows):
    actor, critic = pair()
    held = actor.session.iterations.held
    update = actor.update_actor(rows)
    assert held.accepts(critic.ranks)
    assert "actor/loss" in str(update.get())  # reading it sends it
    assert not held.accepts(critic.ranks)
    actor.update_actor(rows)
    end = time.monotonic() + 60
    while held.accepts(critic.ranks) and time.monotonic() < end:  # nothing else is done with the session
        time.sleep(0.05)
    assert not held.accepts(critic.ranks)
    actor.update_actor(rows)
    values = critic.compute_values(rows)
    assert not held.accepts(critic.ranks)
    assert "values" in values.get()


def test_other_updates_run_one_after_the_other_and_say_so(pair, rows, caplog):
    actor, critic = pair(hf.Megatron())
    actor.session.iterations.held.said.clear()  # each is said once
    found = hf.together(actor.update_actor(rows), critic.update_critic(rows))
    assert all("skipped" in str(future.get()) for future in found)
    assert "one after the other: critic at (p,t,d)=(1,1,2) has no pipeline" in caplog.text
    hf.together(actor.update_actor(rows), critic.update_critic(rows))
    assert caplog.text.count("one after the other") == 1
    actor, critic = pair()
    first = actor.update_actor(rows)
    hf.together(first, critic.update_critic(rows) if first.get() else first)
    assert "came between them" in caplog.text
    with pytest.raises(hf.errors.ConfigError, match="takes two updates"):
        hf.together(first)
    second = critic.update_critic(rows)
    critic.close()
    with pytest.raises(hf.errors.ConfigError, match="critic is closed"):
        hf.together(first, second)


def test_without_pipelines_there_is_nothing_to_say(pair, rows, caplog):
    actor, critic = pair(hf.Megatron(), actor_train=hf.Megatron(tp=2))
    found = hf.together(actor.update_actor(rows), critic.update_critic(rows))
    assert all("grad_norm" in str(future.get()) for future in found)
    assert "one after the other" not in caplog.text


def broken(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
    raise LookupError("the reward of this row is gone")


def test_a_failed_micro_batch_stops_both(pair, rows, settle):
    actor, critic = pair()
    before = outputs(actor, critic, rows)
    found = hf.together(actor.update_actor(rows, loss=broken), critic.update_critic(rows))
    for future in found:
        with pytest.raises(hf.errors.WorkerError, match="the reward of this row is gone"):
            future.get()
    settle()
    assert all(map(torch.equal, outputs(actor, critic, rows), before))


def greedy(outputs: Any, rows: Any, totals: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")


def test_memory_that_runs_out_in_a_micro_batch_is_explained(pair, rows, settle):
    actor, critic = pair()
    before = outputs(actor, critic, rows)
    first, second = hf.together(actor.update_actor(rows, loss=greedy), critic.update_critic(rows))
    with pytest.raises(hf.errors.DeviceMemoryError, match=r"actor\.update_actor ran out .* critic parameters"):
        first.get()
    with pytest.raises(hf.errors.WorkerError, match=r"actor\.update_actor failed on rank 1"):
        second.get()
    settle()
    assert all(map(torch.equal, outputs(actor, critic, rows), before))


class Scaled:
    """A loss with state."""

    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, outputs: Any, rows: Any, totals: Any) -> Any:
        return outputs["log_probs"].values.sum() * self.by


def test_an_update_has_its_arguments_as_they_were_when_it_was_issued(pair, rows):
    actor, critic = pair()
    loss = Scaled()
    first = actor.update_actor(rows, loss=loss)
    loss.by = 0.0
    first, _ = hf.together(first, critic.update_critic(rows))
    assert first.get()["actor/grad_norm"] > 0
    assert actor.update_actor(rows, loss=loss).get()["actor/grad_norm"] == 0


def test_events_are_those_of_all_updates_so_far(pair, pool, rows):
    actor, critic = pair()
    before = len(pool[0:1].events())
    actor.update_actor(rows)
    assert actor.session.iterations.held.accepts(critic.ranks)
    assert [event.method for event in pool[0:1].events()[before:]] == ["update_actor"]


def test_a_session_shares_stages_by_itself(models, warm, tmp_path):
    """`hf.init(time_sharing=True)` in a driver of its own; `shutdown` runs what is held."""
    driver = Path(__file__).with_name("sharing_driver.py")
    done = warm.run(driver, models["actor"], models["critic"], tmp_path / "ran")
    serial, shared, parted = map(json.loads, re.findall("found: (.*)", done.stdout))
    assert not serial.pop("together")
    assert shared.pop("together")
    assert parted.pop("together")  # another result was read between them
    assert serial == shared == parted
    assert (tmp_path / "ran").exists()


class Stops(hf.CriticWorker):
    """Rank 1 stops in its last step."""

    def __init__(self, **settings: Any) -> None:
        self.context.groups.timeout = 3.0
        super().__init__(**settings)

    def _step(self, last: bool) -> dict[str, float]:
        if self.context.rank == 1:
            time.sleep(10.0)
        return super()._step(last)


class Twice(hf.CriticWorker):
    """Its update makes all its steps twice."""

    def _update(self, *arguments: Any) -> dict[str, float]:
        super()._update(*arguments)
        return super()._update(*arguments)


def test_an_update_that_trains_twice_is_refused_beside_another(pair, rows, settle):
    """The passes of its second half would be in no schedule."""
    actor, critic = pair(critic=Twice)
    found = hf.together(actor.update_actor(rows), critic.update_critic(rows))
    with pytest.raises(hf.errors.WorkerError, match="announced its mini-batches twice"):
        found[1].get()
    settle()
    assert "critic/loss" in critic.update_critic(rows).get()  # alone it may


def test_an_update_that_hangs_beside_the_other_is_named(pair, rows, settle):
    actor, critic = pair(critic=Stops)
    _, second = hf.together(actor.update_actor(rows), critic.update_critic(rows))
    with pytest.raises(hf.errors.WorkerError, match=r"rank 1.* did not take part \(at .*in _step") as caught:
        second.get()
    assert caught.value.rank == 1
    settle()
