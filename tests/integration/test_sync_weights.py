"""hf.sync_weights: weights of one group go to another one on equal, overlapping and disjoint devices and pools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.overlapped_move import OverlappedMove
from hybridflow.errors import ConfigError, LayoutError, PlacementError, WorkerError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.integration.matrix import COLUMNS, ROW_BLOCKS, ROWS, Matrix, whole
from tests.tiny_models import make_prompts, make_rows

TOLERANCE = 1e-3  # nats per token, between vLLM and Megatron in float32


class Rotated(Matrix):
    """A matrix of a model with a rotary embedding."""

    def __init__(self, theta: float = 1e4, heads: int = 1) -> None:
        super().__init__()
        self.theta, self.heads = theta, heads

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid) -> Layout:
        return Matrix.weights_layout(ROW_BLOCKS, grid)

    @classmethod
    def worker_spec(cls, settings: Mapping[str, Any]) -> hf.WorkerSpec:
        sizes = {"hidden": 8, "intermediate": 8, "layers": 1, "kv_heads": 1, "head_dim": 8, "vocab": 8}
        model = ModelSpec(family="llama", rope_theta=settings["theta"], heads=settings["heads"], **sizes)
        return replace(super().worker_spec(settings), model=lambda: model)


class Fixed(Matrix):
    """A matrix that only transfers change."""

    written: object = None

    def fixed_weights(self) -> tuple[frozenset[str], Any]:
        return frozenset({"matrix"}), self.written

    def on_weights_loaded(self) -> None:
        super().on_weights_loaded()
        self.written = object()

    @hf.register(hf.ONE_TO_ALL)
    def fill(self, factor: float) -> None:
        self.part.fill_(factor)
        self.written = object()


class HalfBuilt(hf.RolloutWorker):
    """Fails when its vLLM runs."""

    def __init__(self, *, model: str, generate: hf.VLLM) -> None:
        super().__init__(model=model, generate=generate)
        raise RuntimeError("no room for the rest")


class Plain:
    @hf.register(hf.ONE_TO_ALL)
    def nothing(self) -> None: ...


def count_words(prompts, completions):
    return [float(len(text.split())) for text in completions]


# Any placement


@pytest.mark.parametrize(
    ("here", "there"),
    [
        pytest.param(slice(0, 4), slice(0, 4), id="the same hosts"),
        pytest.param(slice(0, 3), slice(2, 4), id="overlapping"),
        pytest.param(slice(0, 1), slice(1, 4), id="disjoint"),
        pytest.param(slice(3, 4), slice(3, 4), id="one host"),
        pytest.param(slice(0, 3), None, id="another pool"),
        pytest.param(None, slice(1, 4), id="from another pool"),
    ],
)
def test_weights_arrive_wherever_the_groups_are(pool, other_pool, place, here, there):
    source = place(Matrix, other_pool if here is None else pool[here], by="rows")
    destination = place(Matrix, other_pool if there is None else pool[there], by="columns")
    for factor in (1.0, 3.0):
        source.fill(factor)
        figures = hf.sync_weights(source, destination).get()
        assert torch.equal(whole(destination), whole(source))
    shared = set(source.members) & set(destination.members) if source.pool_name == destination.pool_name else set()
    assert figures["bytes"] <= ROWS * COLUMNS * 4
    assert (figures["bytes"] == ROWS * COLUMNS * 4) == (not shared)
    assert figures["seconds"] > 0


def test_it_takes_its_turn_among_the_calls(pool, other_pool, place):
    source, destination = place(Matrix, pool[0:3]), place(Matrix, other_pool, by="columns")
    source.fill(1.0)
    first = hf.sync_weights(source, destination)
    then = destination.read()
    source.fill(2.0)
    hf.sync_weights(source, destination)
    destination.fill(0.0)
    hf.sync_weights(destination, source)
    last = source.read()
    assert first.get()["bytes"] == ROWS * COLUMNS * 4
    ranks = [torch.arange(n * COLUMNS).view(n, COLUMNS) + 1000.0 * i for i, n in enumerate((4, 4, 5))]
    assert torch.equal(torch.cat(then.get(), dim=1), torch.cat(ranks))
    assert torch.equal(torch.cat(last.get()), whole(destination))


def test_what_stays_fixed_is_sent_once(pool, other_pool, place):
    """Until it is written anew on either side, or a transfer into it fails half-way."""
    source, other, destination = (
        place(kind, at) for kind, at in ((Fixed, pool[0:2]), (Fixed, pool[2:3]), (Fixed, other_pool))
    )
    source.fill(1.0)
    other.fill(2.0)

    def sent(group: hf.WorkerGroup = source) -> float:
        return hf.sync_weights(group, destination).get()["bytes"]

    every = ROWS * COLUMNS * 4
    assert [sent() for _ in range(3)] == [every, 0, 0]
    source.fill(3.0)
    assert [sent(), sent()] == [every, 0]
    destination.fill(4.0)
    assert [sent(), sent(other), sent(other), sent(), sent()] == [every, every, 0, every, 0]
    destination.fail_once("after").get()
    with pytest.raises(WorkerError, match="cannot take them"):
        sent(other)
    assert [sent(), sent()] == [every, 0]
    assert (whole(destination) == 3.0).all()


def test_values_are_converted(pool, place):
    source, destination = place(Matrix, pool[0:2]), place(Matrix, pool[1:4], dtype="bfloat16")
    source.fill(0.37)
    hf.sync_weights(source, destination).get()
    assert torch.equal(whole(destination), whole(source).bfloat16())


def test_links_are_kept_and_go_with_their_groups(pool, other_pool, place):
    watcher = place(Matrix, pool[0:1])
    before = watcher.process_groups().get()
    source, destination = place(Matrix, pool[0:2]), place(Matrix, other_pool)
    alone = watcher.process_groups().get()
    hf.sync_weights(source, destination).get()
    linked = watcher.process_groups().get()
    asked = Matrix.asked
    hf.sync_weights(source, destination).get()
    assert Matrix.asked == asked > 0  # models are compared once
    assert watcher.process_groups().get() == linked
    assert linked[0] > alone[0]
    destination.close()
    assert watcher.process_groups().get() == alone
    source.close()
    assert watcher.process_groups().get() == before


# What is refused


def test_what_cannot_be_is_refused_on_the_driver(pool, cluster, place):
    source, destination = place(Matrix, pool[0:2]), place(Matrix, pool[1:3])
    for other, message in (
        (place(Matrix, pool[0:1], rows=ROWS + 1), r"different models.*matrix, \(13, 5\) in .* and \(14, 5\) in"),
        (place(Matrix, pool[0:1], tensor="other"), r"2 of 2 tensors.*none in"),
    ):
        with pytest.raises(LayoutError, match=message):
            hf.sync_weights(source, other)
        with pytest.raises(LayoutError, match="different models"):
            hf.sync_weights(other, source)
    rotated, plain = place(Rotated, pool[0:1], theta=5e5), place(Rotated, pool[1:2], theta=1e4)
    with pytest.raises(LayoutError, match=r"different models: rope_theta is 500000\.0 in .* and 10000\.0 in"):
        hf.sync_weights(rotated, plain)
    with pytest.raises(LayoutError, match=r"different models: heads is 1 in .* and 2 in"):
        hf.sync_weights(plain, place(Rotated, pool[0:1], heads=2))
    with pytest.raises(ConfigError, match="has its own weights already"):
        hf.sync_weights(source, source)
    with pytest.raises(ConfigError, match="Plain has no weights"):
        hf.sync_weights(source, place(Plain, pool[0:1]))
    judge = hf.RewardWorker.on(pool[0:1], function=count_words, name="judge")
    with pytest.raises(ConfigError, match="is a function"):
        hf.sync_weights(source, judge)
    judge.close()
    with pytest.raises(ConfigError, match="takes a group"):
        hf.sync_weights(source, pool)  # type: ignore[arg-type]
    destination.close()
    for pair in ((source, destination), (destination, source)):
        with pytest.raises(PlacementError, match="is closed"):
            hf.sync_weights(*pair)


# Models


def saved(group: hf.WorkerGroup, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(group.save(folder / f"{group.name}-{time.monotonic_ns()}")) / "model.safetensors")


def test_a_reference_and_another_actor_follow_the_actor(place, pool, policy, tmp_path):
    groups = [
        place(hf.ActorWorker, pool[0:4], model=policy, train=hf.Megatron(tp=2), optim=hf.SGD(lr=0.5)),
        place(hf.ReferenceWorker, pool[1:3], model=policy, train=hf.Megatron(pp=2), offload=True, name="followed"),
        place(hf.ActorWorker, pool[0:3], model=policy, train=hf.Megatron(), optim=hf.Adam(lr=1e-2), name="second"),
    ]
    actor, reference, second = groups
    rows = make_rows(8)
    batch = hf.BatchRef.from_batch(rows)
    second.update_actor(batch)
    actor.update_actor(batch)
    hf.sync_weights(actor, reference)
    hf.sync_weights(actor, second)
    assert [rank["memory/parameters"] for rank in reference.memory()] == [0.0, 0.0]  # it waits on the host again
    batch |= actor.compute_log_prob(batch)
    batch |= reference.compute_ref_log_prob(batch)
    found = batch.get(["old_log_probs", "ref_log_probs"])
    reference.compute_ref_log_prob(batch).get()
    parts = [
        (event.method.partition("/")[2], event.bytes_in, event.bytes_out)
        for event in pool[1:2].events()
        if event.role == "followed" and event.method.startswith("compute_ref_log_prob/")
    ]
    *first, away, again, last = parts  # in once for each call, out only when they have changed
    assert [name for name, *_ in first] in (["reload"], ["prefetch", "reload"])
    assert sum(came for _, came, _ in first) == again[1] > 0
    assert again[0] == "reload"
    assert away == last == ("offload", 0, 0)
    assert not any(left for *_, left in parts)
    torch.testing.assert_close(found["ref_log_probs"].values, found["old_log_probs"].values, rtol=0, atol=1e-4)
    weights, start = saved(actor, tmp_path), load_file(policy / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    for other in (reference, second):
        theirs = saved(other, tmp_path)
        assert all(torch.equal(theirs[name], weights[name]) for name in weights)
    second.update_actor(batch)  # goes on from the new weights
    moved = max(float((value - weights[name]).abs().max()) for name, value in saved(second, tmp_path).items())
    assert 0 < moved < 0.05  # a step of Adam moves by about its learning rate, 0.01


def test_a_standalone_rollout_generates_with_the_actors_weights(place, pool, other_pool, policy, outward):
    with pytest.raises(WorkerError, match="no room for the rest"):  # and leaves no engine behind
        hf.place(HalfBuilt, other_pool, model=str(policy), generate=hf.VLLM())
    actor = place(hf.ActorWorker, pool, model=policy, train=hf.Megatron(tp=2, pp=2), optim=hf.SGD(lr=0.5))
    rollout = place(
        hf.RolloutWorker, other_pool, model=policy, generate=hf.VLLM(tp=2, sampling=hf.Sampling(max_tokens=8, seed=5))
    )
    assert (rollout.grid.p, rollout.grid.t, rollout.grid.d) == (1, 2, 1)
    prompts = hf.BatchRef.from_batch(make_prompts(6))
    apart = []
    for _ in range(2):
        batch = rollout.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        noise = batch["response_ids"].get()
        advantages = noise.with_values(torch.randn(len(noise.values), generator=torch.Generator().manual_seed(3)))
        actor.update_actor(batch | hf.Batch({"advantages": advantages}))
        stale = (rollout.generate_sequences(prompts) | actor.compute_log_prob(batch)).get()
        hf.sync_weights(actor, rollout)
        fresh = rollout.generate_sequences(prompts)
        fresh = (fresh | actor.compute_log_prob(fresh)).get()
        first = batch.get()
        apart += [difference(first), difference(fresh)]
        assert difference(stale) > 10 * TOLERANCE
    assert not outward()  # with engines, links and groups of every kind
    assert max(apart) < TOLERANCE


def times(pool: hf.ResourcePool, method: str) -> list[tuple[float, float]]:
    """Of each call of a method on a pool's first host."""
    events = [event for event in pool[0:1].events() if event.method == method and event.rank == 0]
    return [(event.start, event.end) for event in events]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("train", [hf.Megatron(tp=2), hf.Megatron(pp=2), hf.FSDP(), hf.ZeRO(stage=2)], ids=str)
def test_weights_are_sent_while_the_step_that_makes_them_runs(place, pool, other_pool, policy, tmp_path, train):
    """Each part once it is final: bit by bit what is sent after a whole step, and only right behind an update."""
    settings = {"model": policy, "optim": hf.Adam(lr=1e-2)}
    rows, found = hf.BatchRef.from_batch(make_rows(8)), {}
    for overlap in (False, True):
        source = place(hf.ActorWorker, pool[0:2], train=train, overlap=overlap, name=f"source-{overlap}", **settings)
        follower = place(
            hf.ActorWorker, other_pool[0:2], train=hf.Megatron(tp=2), name=f"follower-{overlap}", **settings
        )
        known, metrics = len(times(pool, "sync_weights")), []
        for iteration in range(4):
            metrics.append(source.update_actor(rows, minibatches=2))
            if iteration == 2:
                metrics[-1].get()  # the update is sent without its transfer
            moved = hf.sync_weights(source, follower)
        assert moved.get()["bytes"] > 0
        weights, theirs = saved(source, tmp_path), saved(follower, tmp_path)
        assert all(torch.equal(theirs[name], weights[name]) for name in weights)
        updates = times(pool, "update_actor")[-4:]
        transfers = times(pool, "sync_weights")[known:]
        within = [start < update[1] for (start, _), update in zip(transfers, updates, strict=True)]
        assert within == ([False, True, False, True] if overlap else [False] * 4)  # the first plans
        found[overlap] = weights, [each.get() for each in metrics]
    (weights, metrics), (others, other_metrics) = found.values()
    assert metrics == other_metrics
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def broken(log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
    raise LookupError("the reward of this row is gone")


def test_an_update_that_fails_before_its_step_sends_what_there_is(place, pool, other_pool, policy, tmp_path, settle):
    source = place(
        hf.ActorWorker, pool[0:2], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.5), overlap=True, name="s"
    )
    follower = place(hf.ReferenceWorker, other_pool[0:1], model=policy, train=hf.FSDP(), name="f")
    rows = hf.BatchRef.from_batch(make_rows(8))
    source.update_actor(rows)
    hf.sync_weights(source, follower).get()
    failed = source.update_actor(rows, loss=broken)
    assert hf.sync_weights(source, follower).get()["bytes"] > 0
    with pytest.raises(WorkerError, match="the reward of this row is gone"):
        failed.get()
    settle()
    source.update_actor(rows)
    hf.sync_weights(source, follower).get()
    weights, theirs = saved(source, tmp_path), saved(follower, tmp_path)
    assert all(torch.equal(theirs[name], weights[name]) for name in weights)


class Twice(hf.ActorWorker):
    """Its update makes all its steps twice."""

    def _update(self, *arguments: Any) -> dict[str, float]:
        super()._update(*arguments)
        return super()._update(*arguments)


def test_an_update_that_steps_again_after_its_weights_left_is_refused(place, pool, other_pool, policy, settle):
    source = place(Twice, pool[0:2], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.5), overlap=True, name="twice")
    follower = place(hf.ReferenceWorker, other_pool[0:1], model=policy, train=hf.FSDP(), name="f")
    rows = hf.BatchRef.from_batch(make_rows(8))
    source.update_actor(rows).get()
    hf.sync_weights(source, follower).get()
    failed = source.update_actor(rows)
    hf.sync_weights(source, follower)
    with pytest.raises(WorkerError, match="an update stepped again after its weights had left"):
        failed.get()
    settle()


class Counts(hf.ReferenceWorker):
    """Counts the weights that it has taken; the next transfer after `spoil` fails on rank 1, when all has arrived."""

    taken = 0

    def on_weights_loaded(self) -> None:
        super().on_weights_loaded()
        self.taken += 1

    @hf.register(hf.ONE_TO_ALL)
    def times(self) -> int:
        return self.taken

    @hf.register(hf.ONE_TO_ALL)
    def spoil(self) -> None:
        move = OverlappedMove.move

        def fails(*arguments: Any) -> None:
            OverlappedMove.move = move
            move(*arguments)
            raise OSError("the last part did not arrive")

        if self.context.rank == 1:
            OverlappedMove.move = fails


class Perturbed(hf.ReferenceWorker):
    """Writes into its weights itself."""

    @hf.register(hf.ONE_TO_ALL)
    def perturb(self) -> None:
        for tensor in self.engine.storage().values():
            tensor.add_(1.0)


def test_weights_that_a_users_class_writes_are_sent_again(place, pool, other_pool, policy, tmp_path):
    settings = {"model": policy, "train": hf.FSDP()}
    source = place(Perturbed, pool[0:1], name="source", **settings)
    follower = place(Perturbed, other_pool[0:1], name="follower", **settings)
    own = place(Counts, other_pool[1:2], name="own", **settings)
    first, again = (hf.sync_weights(source, follower).get()["bytes"] for _ in range(2))
    assert first > again == 0
    for written in (source, follower):
        written.perturb().get()
        assert hf.sync_weights(source, follower).get()["bytes"] == first
        weights, theirs = saved(source, tmp_path), saved(follower, tmp_path)
        assert all(torch.equal(theirs[name], weights[name]) for name in weights)
    assert [hf.sync_weights(source, own).get()["bytes"] for _ in range(2)] == [first, first]  # it may change them


def test_weights_that_did_not_arrive_everywhere_are_taken_nowhere(place, pool, other_pool, policy, tmp_path, settle):
    """An average of all earlier weights would differ between the ranks of one model."""
    source = place(hf.ActorWorker, pool[0:1], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.5), name="s")
    follower = place(Counts, other_pool[0:2], model=policy, train=hf.FSDP(), ema_decay=0.5, name="counts")
    hf.sync_weights(source, follower).get()
    follower.spoil().get()
    with pytest.raises(WorkerError, match="the last part did not arrive"):
        hf.sync_weights(source, follower).get()
    settle()
    hf.sync_weights(source, follower).get()
    assert follower.times().get() == [2, 2]


def difference(batch: hf.Batch) -> float:
    return float((batch["log_probs"].values - batch["old_log_probs"].values).abs().max())


def test_rollouts_that_do_not_fit_are_refused(pool, other_pool, policy):
    with pytest.raises(PlacementError, match="makes engines of 3 devices, the pool has 4"):
        hf.RolloutWorker.on(pool, model=policy, generate=hf.VLLM(tp=3))
    with pytest.raises(ConfigError, match=r"give hf\.VLLM"):
        hf.RolloutWorker.on(pool, model=policy, generate=None)
