"""Drivers on CUDA devices: groups of every engine on real hosts, moves between layouts and pools, streams, lost hosts.

The device computes in bfloat16, as users' models do. On one device what needs two is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow import FSDP, VLLM, LoRA, Megatron, ZeRO
from hybridflow.streams.elastic_devices import GroupSizes
from hybridflow.tracking.report.record import read_events
from tests.tiny_models import make_classifier, make_policy, make_prompts, make_rows

pytestmark = pytest.mark.gpu
DEVICES = torch.cuda.device_count()
FRACTION = 0.1
ADAM = hf.Adam(lr=1e-3)
two = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


def vllm(**settings: Any) -> VLLM:
    return VLLM(**{"memory_fraction": FRACTION, "max_sequences": 16, "sampling": hf.Sampling(max_tokens=6), **settings})


ACTORS: dict[str, dict[str, Any]] = {
    "fsdp": {"train": FSDP(), "generate": vllm(eager=True)},
    "fsdp-offload": {
        "train": FSDP(offload=True, recompute=True),
        "generate": vllm(eager=True),
        "offload": ("generation",),
    },
    "fsdp-optimizer": {"train": FSDP(), "generate": vllm(), "offload": ("optimizer", "gradients")},
    "fsdp-overlap": {"train": FSDP(), "generate": vllm(eager=True), "overlap": True},
    "fsdp-lora": {"train": FSDP(lora=LoRA(rank=4)), "generate": vllm()},
    "zero-1": {"train": ZeRO(stage=1), "generate": vllm(eager=True)},
    "zero-2-offload": {
        "train": ZeRO(stage=2, offload=True),
        "generate": vllm(eager=True),
        "offload": ("generation",),
    },
    "zero-3": {"train": ZeRO(stage=3), "generate": vllm()},
    "megatron": {"train": Megatron(), "generate": vllm()},
    "megatron-tp": {
        "train": Megatron(tp=2, sequence_parallel=True),
        "generate": vllm(eager=True),
        "overlap": True,
    },
    "megatron-lora": {
        "train": Megatron(tp=2, sequence_parallel=True, recompute=True, lora=LoRA(rank=4)),
        "generate": vllm(eager=True),
        "offload": ("generation",),
    },
    "megatron-pp": {"train": Megatron(pp=2), "generate": vllm(), "offload": ("optimizer",)},
    "vllm-tp": {"train": Megatron(tp=2), "generate": vllm(tp=2)},
    "vllm-pp": {"train": Megatron(pp=2), "generate": vllm(pp=2, eager=True)},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    return make_policy(directory / "policy"), make_classifier(directory / "critic")


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    hf.init(peer_timeout=200.0, collective_timeout=60.0)
    yield
    hf.shutdown()


@pytest.fixture(scope="module")
def pool(session) -> hf.ResourcePool:
    return hf.ResourcePool([min(DEVICES, 2)])


@pytest.fixture
def place(request) -> Any:
    """Groups that end with the test."""

    def on(worker: Any, pool: Any, **settings: Any) -> hf.WorkerGroup:
        group = worker.on(pool, **settings)
        request.addfinalizer(group.close)
        return group

    return on


def iteration(actor: hf.WorkerGroup, critic: hf.WorkerGroup | None = None, seed: int = 0) -> dict[str, float]:
    prompts = make_prompts(8, seed=seed).with_columns(rewards=torch.arange(8.0))
    batch = actor.generate_sequences(prompts)
    batch |= actor.compute_log_prob(batch)
    found = {}
    if critic is None:
        batch |= hf.compute_advantage(batch, "reinforce_plus_plus")
    else:
        batch |= critic.compute_values(batch)
        batch |= hf.compute_advantage(batch, "gae", gamma=1.0, lam=0.95)
        found |= critic.update_critic(batch, minibatches=2).get()
    return found | actor.update_actor(batch, minibatches=2).get()


def check_learns(metrics: dict[str, float]) -> None:
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped"] == 0


@pytest.mark.parametrize("name", ACTORS)
def test_an_actor_and_a_critic_share_their_devices(pool, models, place, tmp_path, name):
    """Two iterations; then the state is saved, and the actor generates again after it was loaded."""
    settings = ACTORS[name]
    if DEVICES < 2 and max(settings["train"].grid(2).t, settings["train"].grid(2).p) > 1:
        pytest.skip("needs two CUDA devices")
    train = FSDP() if isinstance(settings["train"], FSDP) else settings["train"]
    actor = place(hf.ActorWorker, pool, model=models[0], optim=ADAM, **settings)
    critic = place(hf.CriticWorker, pool, model=models[1], train=train, optim=ADAM)
    for seed in range(2):
        metrics = iteration(actor, critic, seed)
        check_learns(metrics)
        assert metrics["critic/grad_norm"] > 0
    hf.save(tmp_path / "state", [actor, critic])
    hf.load(tmp_path / "state", [actor, critic])
    actor.save(tmp_path / "saved")
    assert actor.generate_sequences(make_prompts(4)).rows == 4
    assert list((tmp_path / "saved").glob("*config.json"))


@pytest.mark.parametrize("name", ["fsdp-optimizer", "zero-1", "megatron"])
def test_the_account_is_what_is_allocated(pool, models, place, tmp_path, name):
    """To 1 % after every call, and 0.2 MB of batches and small things, which count for models of this size."""
    actor = place(hf.ActorWorker, pool, model=models[0], optim=ADAM, **ACTORS[name])
    critic = place(hf.CriticWorker, pool, model=models[1], train=ACTORS[name]["train"], optim=ADAM)
    reference = place(hf.ReferenceWorker, pool, model=models[0], train=ACTORS[name]["train"], offload=True)
    with hf.Tracker(tmp_path / "run", console=False) as tracker:
        for step in range(2):
            reference.compute_ref_log_prob(hf.BatchRef.from_batch(make_rows(8))).get()
            tracker.log(iteration(actor, critic, step))
    found = [event for event in read_events(tmp_path / "run") if event.get("held")]
    assert {event["role"] for event in found} >= {"actor", "critic", "reference"}
    for event in found:
        on_device = {k: v for k, v in event["held"].items() if k != "activations" and not k.endswith(" image")}
        assert sum(on_device.values()) == pytest.approx(event["memory_after"], rel=0.01, abs=0.2e6), event
        assert event["memory_after"] + event["held"].get("activations", 0) <= event["peak"] * 1.01


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_is_the_average_of_an_actor(pool, models, place, tmp_path, offload):
    """In bfloat16, whose rounding is larger than a step; saved, loaded and moved on the way."""
    target, decay = make_policy(tmp_path / "target", seed=5), 0.999
    actor = place(hf.ActorWorker, pool, model=target, train=Megatron())
    settings = {"model": models[0], "offload": offload, "ema_decay": decay}
    reference = place(hf.ReferenceWorker, pool, train=FSDP(), **settings)

    def weights(group: hf.WorkerGroup, name: str) -> dict[str, torch.Tensor]:
        return load_file(Path(group.save(tmp_path / name, dtype="float32")) / "model.safetensors")

    start, end = weights(reference, "start"), weights(actor, "end")
    for _ in range(20):
        hf.sync_weights(actor, reference)
    hf.save(tmp_path / "state", [reference])
    hf.sync_weights(actor, reference)
    hf.load(tmp_path / "state", [reference])
    hf.reallocate(reference, strategy=ZeRO(stage=1))
    for _ in range(20):
        hf.sync_weights(actor, reference)
    kept, found = decay**40, weights(reference, "found")
    assert max(float((kept * start[n] + (1 - kept) * end[n] - found[n]).abs().max()) for n in found) < 1e-6
    assert max(float((start[n] - found[n]).abs().max()) for n in found) > 1e-2
    assert reference.compute_ref_log_prob(make_rows(4)).get()["ref_log_probs"].values.isfinite().all()


@two
def test_an_actor_moves_between_layouts_and_generates_in_each(pool, models, place):
    """Each move closes the generation engine and builds another one in the same processes."""
    actor = place(hf.ActorWorker, pool, model=models[0], train=Megatron(tp=2), generate=vllm(), optim=ADAM)
    check_learns(iteration(actor))
    for strategy, generate in ((Megatron(pp=2), vllm()), (FSDP(), vllm(tp=2)), (Megatron(tp=2), vllm(eager=True))):
        hf.reallocate(actor, strategy=strategy, generate=generate)
        check_learns(iteration(actor))


@two
def test_weights_travel_to_a_rollout_on_another_device(pool, models, place, tmp_path):
    """A rollout answers as the actor does, before and after an update; a stream of its responses trains the actor."""
    greedy = vllm(sampling=hf.Sampling(max_tokens=6, greedy=True), dtype="float32", eager=True)
    train = Megatron(dtype="float32")
    actor = place(hf.ActorWorker, pool[:1], model=models[0], train=train, generate=greedy, optim=hf.Adam(lr=0.05))
    rollout = place(hf.RolloutWorker, pool[1:], model=models[0], generate=greedy)
    before = rollout.generate_sequences(make_prompts(8)).get()["response_ids"]
    check_learns(iteration(actor))
    moved = hf.sync_weights(actor, rollout).get()
    assert moved["bytes"] > 0
    after = rollout.generate_sequences(make_prompts(8)).get()["response_ids"]
    assert not torch.equal(before.values, after.values)
    assert torch.equal(actor.generate_sequences(make_prompts(8)).get()["response_ids"].values, after.values)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdefgh"))
    loader = hf.PromptLoader(prompts, batch_size=4, steps=2)
    for batch in hf.stream(loader, rollout, rows=8, n=2, max_staleness=1):
        batch |= actor.compute_log_prob(batch)
        batch = hf.BatchRef.from_batch(batch.get().with_columns(rewards=torch.arange(8.0)))
        batch |= hf.compute_advantage(batch, "reinforce_plus_plus")
        check_learns(actor.update_actor(batch).get())
        hf.sync_weights(actor, rollout)


@two
@pytest.mark.parametrize("strategy", [Megatron(dtype="float32"), FSDP(dtype="float32")], ids=["megatron", "fsdp"])
def test_a_group_whose_size_changes_trains_as_one_whose_size_does_not(pool, models, place, strategy):
    elastic = place(hf.ActorWorker, pool[:1], model=models[0], train=strategy, optim=ADAM, name="elastic")
    constant = place(hf.ActorWorker, pool[:1], model=models[0], train=strategy, optim=ADAM, name="constant")
    sizes = GroupSizes(elastic, pool, (1, 2))
    for seed, size in enumerate((2, 1, 2)):
        sizes.resize(size)
        one, other = (actor.update_actor(make_rows(8, seed=seed)).get() for actor in (elastic, constant))
        assert one["actor/loss"] == pytest.approx(other["actor/loss"], rel=1e-5)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-4)


@two
def test_updates_share_stages(pool, models, place):
    """Bit by bit what one update after the other gives, also of a second actor beside them."""
    rows, found = hf.BatchRef.from_batch(make_rows(8)), []
    for shared in (False, True):
        settings: dict[str, Any] = {"train": Megatron(pp=2, micro_tokens=24), "optim": ADAM}
        actor, second = (
            place(hf.ActorWorker, pool, model=models[0], name=f"{name}-{shared}", **settings) for name in ("one", "two")
        )
        critic = place(hf.CriticWorker, pool, model=models[1], name=f"critic-{shared}", **settings)
        updates = actor.update_actor(rows, minibatches=2), critic.update_critic(rows, minibatches=2)
        updates += (second.update_actor(rows),)
        if shared:
            held = actor.session.iterations.held
            hf.together(*updates)
            assert len(held._together) == 3
        metrics = [update.get() for update in updates]
        computed = (actor.compute_log_prob(rows) | critic.compute_values(rows)).get()
        found.append(([*map(dict.values, metrics)], computed["old_log_probs"].values, computed["values"].values))
    (metrics, *outputs), (others, *other_outputs) = found
    assert [list(each) for each in metrics] == [list(each) for each in others]
    assert all(map(torch.equal, outputs, other_outputs))


@two
@pytest.mark.parametrize("train", [FSDP(), Megatron()], ids=["fsdp", "megatron"])
def test_weights_are_sent_while_the_step_that_makes_them_runs(pool, models, place, train, tmp_path):
    rows = hf.BatchRef.from_batch(make_rows(8))
    source = place(hf.ActorWorker, pool[:1], model=models[0], train=train, optim=ADAM, overlap=True, name="source")
    follower = place(hf.ReferenceWorker, pool[1:2], model=models[0], train=FSDP(), name="follower")
    for _ in range(3):
        source.update_actor(rows, minibatches=2)
        hf.sync_weights(source, follower).get()
    events = {
        name: [e for e in pool[:1].events() if e.method == name and e.role == "source"][-2:]
        for name in ("update_actor", "sync_weights")
    }
    for update, transfer in zip(*events.values(), strict=True):
        assert update.start < transfer.start < update.end
    theirs, weights = (
        load_file(Path(group.save(tmp_path / group.name)) / "model.safetensors") for group in (follower, source)
    )
    assert all(torch.equal(theirs[name].bfloat16(), weights[name].bfloat16()) for name in weights)  # as they compute
