"""GroupSizes: a group whose data parallel size changes between mini-batches trains as one whose size is constant."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.errors import ConfigError, HostLostError, PlacementError, WorkerError
from hybridflow.models.hf_spec import read_spec
from hybridflow.planner.cost.resident_memory import PlacedGroup
from hybridflow.streams.elastic_devices import GroupSizes, Resized
from hybridflow.topology import RankGrid
from tests.integration import resizing_driver
from tests.integration.shown_actor import ADAM, Shown, Tensors
from tests.tiny_models import make_rows

TOLERANCE = 1e-5  # relative, of losses and gradient norms; absolute, of weights
STRATEGIES = {
    "megatron": (hf.Megatron(), (1, 2, 4)),
    "tensor-parallel": (hf.Megatron(tp=2), (1, 2)),
    "bfloat16": (hf.Megatron(dtype="bfloat16"), (1, 2)),  # with main parameters of their own
    "fsdp": (hf.FSDP(), (1, 2, 4)),
    "zero1": (hf.ZeRO(stage=1), (1, 2, 4)),
    "zero3": (hf.ZeRO(stage=3), (1, 2, 4)),
    "p and t": (hf.Megatron(), {1: hf.Megatron(), 2: hf.Megatron(tp=2), 4: hf.Megatron(tp=2, pp=2)}),
}


@pytest.fixture
def actors(place, pool, policy) -> Callable[..., hf.WorkerGroup]:
    """Actors of a strategy on the first devices of a pool, closed after the test."""

    def actor(strategy: Any = hf.Megatron(), devices: int = 1, on: Any = pool, **settings: Any) -> hf.WorkerGroup:  # noqa: B008
        return place(Shown, on[:devices], **{"model": policy, "train": strategy, "optim": ADAM} | settings)

    return actor


def reward(completions: list[str], **columns: object) -> list[float]:
    return [0.0 for _ in completions]


def batches(number: int) -> list[hf.BatchRef]:
    return [hf.BatchRef.from_batch(make_rows(8, seed=seed)) for seed in range(number)]


def check_equal(one: Tensors, other: Tensors, bound: float = 0.0) -> None:
    assert set(one) == set(other)
    for kind, tensors in one.items():
        for name, value in tensors.items():
            torch.testing.assert_close(other[kind][name], value, rtol=0, atol=bound, msg=f"{kind} of {name}")


def state_of(group: hf.WorkerGroup) -> Tensors:
    return group.whole_state().get()[0][0]


def bytes_of(group: hf.WorkerGroup) -> dict[int, list[int]]:
    """Size -> bytes of its ranks' state."""
    everyone = {group.grid.d: group.ranks, **group.sleeping}
    return {size: group.session.backend.ask(ranks, "state_bytes") for size, ranks in everyone.items()}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_in_changing_sizes_is_training(name, actors, pool):
    """1 -> 2 -> 4 -> 1 between mini-batches, and once more: then nothing is built."""
    strategy, wanted = STRATEGIES[name]
    known = tuple(wanted)
    stays, moves = (actors(strategy, getattr(strategy, "tp", 1), name=f"{name}-{who}") for who in ("stays", "moves"))
    bound = 1e-2 if name == "bfloat16" else TOLERANCE
    sizes, built = GroupSizes(moves, pool, wanted), []
    for step, batch in enumerate(batches(2 * len(known) + 1)):
        pending = moves.compute_log_prob(batch)
        expected, got = (group.update_actor(batch).get() for group in (stays, moves))
        assert {"actor/loss", "actor/grad_norm"} <= set(expected)
        # the loss is a small difference of rounded numbers
        assert got == pytest.approx(expected, rel=bound, abs=bound / 2), f"update {step} at {moves.grid}"
        before, counters = moves.whole_state().get()[0]
        to = known[(step + 1) % len(known)]
        done = sizes.resize(to)
        assert (done.from_size, done.to_size) == (known[step % len(known)], to) == (done.from_size, sizes.size)
        assert moves.members == pool.members[: moves.grid.size]
        assert not isinstance(wanted, dict) or moves.settings["train"] == wanted[to]
        after, counters_after = moves.whole_state().get()[0]
        assert {"main", "exp_avg", "exp_avg_sq", "weights"} == set(after)
        check_equal(before, after)
        assert counters == counters_after
        assert any(value.any() for value in before["exp_avg"].values())
        assert {size: sum(rank) for size, rank in bytes_of(moves).items() if size != to and any(rank)} == {}
        assert pending.get().rows == 8
        built.append((to, sum(moves.process_groups().get())))
    assert len({*built[len(known) - 1 :]}) == len(known)  # from the second visit on, no process group is made
    check_equal(state_of(stays), state_of(moves), bound)
    sizes.close()
    assert (len(moves.all_ranks), moves.update_actor(batch).get().keys()) == (1, expected.keys())


def test_one_size_has_memory(place, actors, pool, policy):
    """The sum over all sizes is that of a group without others; an offloaded model sleeps and wakes up as well."""
    plain, moves = (actors(devices=2, name=f"memory-{who}") for who in ("stays", "moves"))
    batch = batches(1)[0]
    sizes = GroupSizes(moves, pool, (1, 2, 4))
    for group in (plain, moves):
        group.update_actor(batch).get()
    assert bytes_of(moves) == {2: bytes_of(plain)[2], 1: [0], 4: [0] * 4}
    assert moves.memory() == plain.memory()
    sizes.resize(4)
    sizes.resize(2)
    assert bytes_of(moves) == {2: bytes_of(plain)[2], 1: [0], 4: [0] * 4}
    assert moves.memory() == plain.memory()
    critic = place(hf.CriticWorker, pool[:1], model=policy, train=hf.ZeRO(stage=2), optim=ADAM, offload=True)
    known = GroupSizes(critic, pool, (1, 2))
    values = critic.compute_values(batch)
    for size in (2, 1, 2):
        known.resize(size)
        assert all(found == 0 for rank in critic.memory() for found in rank.values())
    torch.testing.assert_close(critic.compute_values(batch).get()["values"].values, values.get()["values"].values)
    assert {"critic/loss", "critic/grad_norm"} <= set(critic.update_critic(batch).get())


@pytest.mark.parametrize("offload", [False, True])
def test_a_frozen_model_receives_its_weights_once_for_each_size(place, pool, policy, actors, offload):
    actor = actors(hf.FSDP(), name="source")
    reference = place(hf.ReferenceWorker, pool[:1], model=policy, train=hf.Megatron(), offload=offload)
    batch = batches(1)[0]

    def log_probs(group: hf.WorkerGroup) -> torch.Tensor:
        if group is reference:
            return reference.compute_ref_log_prob(batch).get()["ref_log_probs"].values
        return actor.compute_log_prob(batch).get()["old_log_probs"].values

    before = log_probs(reference)
    sizes = GroupSizes(reference, pool, (1, 2))
    assert sizes.resize(2).bytes > 0
    torch.testing.assert_close(log_probs(reference), before)
    assert [sizes.resize(size).bytes for size in (1, 2, 1)] == [0, 0, 0]
    actor.update_actor(batch)
    hf.sync_weights(actor, reference)
    assert sizes.resize(2).bytes > 0
    torch.testing.assert_close(log_probs(reference), log_probs(actor))
    assert not torch.equal(log_probs(reference), before)
    sizes.resize(1)
    torch.testing.assert_close(log_probs(reference), log_probs(actor))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wake_up-1-of-2: 0", "no wake_up here"),  # a new rank has no memory
        ("storage-0-of-1: 1", "no storage here"),  # the old rank cannot send, and another kind later
        ("storage-0-of-1: 2", "no storage here"),
        ("storage-1-of-2: 3", "no storage here"),  # a new rank cannot receive the last kind
        ("arrived-1-of-2: 0", "no arrived here"),
    ],
)
def test_a_switch_that_fails_changes_nothing(fault, reason, actors, pool, policy, settle):
    stays, moves = (actors(hf.FSDP(), name=f"failing-{who}") for who in ("stays", "moves"))
    first, second, third = batches(3)
    sizes = GroupSizes(moves, pool, (1, 2))
    for group in (stays, moves):
        group.update_actor(first).get()
    name, passes = fault.split(": ")
    (policy / name).write_text(f"{passes} fail")
    with pytest.raises(WorkerError, match=rf"{reason}\nfailing-moves was not resized: it is still at .*\(1,1,1\)"):
        sizes.resize(2)
    assert (sizes.size, moves.members, moves.grid.d) == (1, pool.members[:1], 1)
    assert bytes_of(moves)[2] == [0, 0]
    settle()  # no error is left for a later call
    assert stays.update_actor(second).get() == moves.update_actor(second).get()
    check_equal(state_of(stays), state_of(moves))
    sizes.resize(2)
    check_equal(state_of(stays), state_of(moves))
    assert moves.update_actor(third).get() == pytest.approx(stays.update_actor(third).get(), rel=TOLERANCE)


def test_a_host_that_dies_in_a_switch(cluster, actors, policy, settle):
    """After the state has arrived, the group continues in its new size; before, in its old one."""
    with hf.ResourcePool([3]) as pool:
        stays, moves = actors(name="dying-stays", on=pool), actors(name="dying-moves", on=pool, devices=3)
        sizes, rows = GroupSizes(moves, pool, (1, 2, 3)), iter(batches(4))
        learned = [group.update_actor(batch).get() for batch in [next(rows)] for group in (stays, moves)]
        (policy / "sleep-2-of-3").write_text("0 die")
        assert sizes.resize(2).to_size == sizes.size == 2
        assert set(moves.sleeping) == {1}
        learned += [group.update_actor(batch).get() for batch in [next(rows)] for group in (stays, moves)]
        for _ in range(2):
            with pytest.raises(HostLostError, match=r"dying-moves.*on rank 2 .* was lost"):
                sizes.resize(3)
        assert sizes.resize(1).to_size == 1
        learned += [group.update_actor(batch).get() for batch in [next(rows)] for group in (stays, moves)]
        (policy / "storage-1-of-2").write_text("2 die")  # while a kind of state travels
        with pytest.raises(HostLostError, match=r"dying-moves.*on rank 1 .*was lost(?s:.*)not resized: it is still"):
            sizes.resize(2)
        assert sizes.size == 1
        settle()
        learned += [group.update_actor(batch).get() for batch in [next(rows)] for group in (stays, moves)]
        for expected, got in zip(learned[::2], learned[1::2], strict=True):
            assert got == pytest.approx(expected, rel=TOLERANCE)
        check_equal(state_of(stays), state_of(moves), TOLERANCE)


@pytest.mark.slow
def test_a_run_whose_host_dies_in_a_switch_continues(place, tmp_path, actors, pool, policy, warm):
    """From its checkpoint, in new hosts, where sizes are built again; the end is that of a run of constant size."""
    done = warm.run(resizing_driver.__file__, tmp_path, policy, "arrived-1-of-2")
    [caught] = re.findall("caught: (.*)", done.stdout)
    assert re.match(r"HostLostError: actor\..* on rank 1 .*was lost", caught)
    stays = actors(hf.FSDP(), name="undisturbed")
    reference = place(hf.ReferenceWorker, pool[:1], model=policy)
    for seed in range(2 * resizing_driver.STEPS):
        resizing_driver.train(seed, stays, reference)
    stays.save(tmp_path / "expected")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "expected"))
    check_equal({"weights": expected}, {"weights": found}, TOLERANCE)


def test_what_cannot_change_its_size_is_refused(pool, policy, actors):
    actor = actors(devices=2, name="refusing")
    wrong: list[Any] = [(), (1, 0, 2), (1.0, 2), (True, 2), 2, ([1], 2)]
    for sizes in wrong:
        with pytest.raises(PlacementError, match="give data parallel sizes"):
            GroupSizes(actor, pool, sizes)
    with pytest.raises(PlacementError, match=r"has the data parallel size 2: it must be one of its sizes \[1, 4\]"):
        GroupSizes(actor, pool, (1, 4))
    with pytest.raises(PlacementError, match=r"asks for p\*t\*d = 1\*1\*5 devices, the pool has 4"):
        GroupSizes(actor, pool, (2, 5))
    with pytest.raises(PlacementError, match="must lie on the first devices"):
        GroupSizes(actor, pool[1:], (1, 2))
    with pytest.raises(ConfigError, match="give the ResourcePool"):
        GroupSizes(actor, pool.members, (1, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes a group"):
        GroupSizes(pool, pool, (1, 2))  # type: ignore[arg-type]
    judge = hf.RewardWorker.on(pool[:1], function=reward)
    with pytest.raises(ConfigError, match="no model whose data parallel size could change"):
        GroupSizes(judge, pool, (1, 2))
    judge.close()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"train": hf.Megatron(dp=1)}, "fixes its size"),
        ({"train": hf.FSDP(lora=hf.LoRA(rank=2))}, "trains adapters"),
    ]
    for settings, reason in refused:
        other = hf.ActorWorker.on(pool[:1], model=policy, optim=ADAM, **settings)
        with pytest.raises((PlacementError, ConfigError), match=reason):
            GroupSizes(other, pool, (1, 2))
        other.close()
    copies = actors(hf.FSDP(replicate=2), devices=2, name="copies")
    with pytest.raises(PlacementError, match="replicate"):
        GroupSizes(copies, pool, (1, 2))
    assert not actor.sleeping
    sizes = GroupSizes(actor, pool, (1, 2))
    wrong = [0, 3, True, "2", None]
    for size in wrong:
        with pytest.raises(PlacementError, match=r"has the data parallel sizes \[1, 2\], asked for"):
            sizes.resize(size)
    assert sizes.resize(2) == Resized(2, 2)
    with pytest.raises(PlacementError, match="GroupSizes already"):
        GroupSizes(actor, pool, (1, 2))
    with pytest.raises(PlacementError, match="close its GroupSizes first"):
        hf.reallocate(actor, strategy=hf.FSDP())
    sizes.close()
    sizes.close()
    hf.reallocate(actor, strategy=hf.Megatron(tp=2))
    with pytest.raises(PlacementError, match="moved by other means"):
        sizes.resize(1)
    actor.close()
    with pytest.raises(PlacementError, match="is closed"):
        sizes.resize(1)


def test_sizes_that_their_devices_cannot_hold_are_refused(pool, policy, actors, monkeypatch):
    """By the account that placement makes; a switch needs memory for both sizes."""
    actor = actors(name="large")
    placed = PlacedGroup.of("large", read_spec(policy, "lm"), actor.settings, actor.grid)
    assert placed is not None
    bytes_ = sum(placed.resident("updates", 0).values())
    memory = [1.5 * bytes_]
    monkeypatch.setattr(hf.ResourcePool, "device_memory", lambda _: int(memory[0]))
    refusal = "large does not fit on its devices: while large moves, .*large in its old layout"
    with pytest.raises(PlacementError, match=refusal):
        GroupSizes(actor, pool, (1, 2))
    assert not actor.sleeping
    memory[0] = 2.1 * bytes_
    sizes = GroupSizes(actor, pool, (1, 2))
    memory[0] = 1.5 * bytes_  # as if another group had been placed since
    with pytest.raises(PlacementError, match=refusal):
        sizes.resize(2)
    assert (sizes.size, set(actor.sleeping)) == (1, {2})
    assert actor.update_actor(batches(1)[0]).get()["actor/grad_norm"] > 0
    sizes.close()


def test_a_closed_group_leaves_nothing_of_its_sizes(pool, policy):
    own = hf.place(Shown, pool[:2], model=policy, optim=ADAM, grid=RankGrid(1, 2, 1))
    shows = Shown.on(pool, model=policy, train=hf.Megatron(), name="shows")
    before = shows.process_groups().get()
    sizes = GroupSizes(own, pool, (1, 2))
    assert sizes.resize(2).to_size == 2
    assert own.grid == RankGrid(1, 2, 2)
    assert sum(shows.process_groups().get()) > sum(before)
    own.close()
    assert sum(shows.process_groups().get()) < sum(before)  # not even the first size's
    assert (own.sleeping, own.session.backend.channels._channels.keys() & {own.ranks.key}) == ({}, set())
    sizes.close()
    shows.close()
