"""hf.reallocate: a group goes on in another layout, on the same or on other devices, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import hybridflow as hf
from hybridflow.errors import ConfigError, ModelError, PlacementError, WorkerError
from hybridflow.models.hf_spec import read_spec
from hybridflow.planner.cost.resident_memory import PlacedGroup
from hybridflow.topology import RankGrid
from tests import tiny_models
from tests.integration.shown_actor import ADAM, Shown
from tests.tiny_models import make_prompts, make_rows

# (p, t, d), and how many of the eight devices
JOURNEY = [((1, 4, 2), 8), ((4, 1, 2), 8), ((1, 1, 4), 4), ((2, 2, 2), 8)]
TOLERANCE = 1e-5  # relative, of losses and gradient norms
SAMPLING_TOLERANCE = 1e-3  # nats per token, between vLLM and Megatron in float32
FRAGILE = "fragile"


remembered: list[StorageWeakRef] = []
"""Of this process; see `Watched.remember`."""


class Watched(Shown):
    """It shows what it keeps, and cannot generate at t = 2 while its checkpoint is marked so."""

    def open_generation(self) -> None:
        if self.context.grid.t == 2 and (self.checkpoint / FRAGILE).exists():
            raise RuntimeError("no generation here")
        super().open_generation()

    @hf.register(hf.ONE_TO_ALL)
    def remember(self) -> int:
        """Remember the storages of all training state; their bytes."""
        with self.resident():
            gradients = self.engine._shards.gradients.buffers  # `engine.gradients()` are copies
            kinds = [self.engine.storage(), gradients, *self.engine.optimizer_storage().values()]
            tensors = [tensor for kind in kinds for tensor in kind.values()]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        remembered[:] = map(StorageWeakRef, storages.values())
        return sum(storage.nbytes() for storage in storages.values())

    @hf.register(hf.ONE_TO_ALL)
    def remembered_bytes(self) -> int | None:
        """What the remembered storages have now; None where none was."""
        if not remembered:
            return None
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in remembered]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    @hf.register(hf.ONE_TO_ALL)
    def where(self) -> tuple[int, int, int]:
        return tuple(self.context.coords)


class Plain:
    @hf.register(hf.ONE_TO_ALL)
    def nothing(self) -> None: ...


def strategy(p: int, t: int) -> hf.Megatron:
    return hf.Megatron(pp=p, tp=t)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("policy"), num_hidden_layers=4)


@pytest.mark.slow
def test_training_goes_on_in_every_layout(place, hosts, policy, other_pool):
    """Issue 3, acceptance 6, and then to devices that share no torch world with the first ones."""
    settings = {"model": policy, "train": strategy(2, 2), "optim": ADAM}
    stays = place(hf.ActorWorker, hosts, name="stays", **settings)
    moves = place(Watched, hosts, name="moves", **settings)
    batches = [hf.BatchRef.from_batch(make_rows(8, seed=seed)) for seed in range(6)]
    for step, batch in enumerate(batches):
        expected, got = (group.update_actor(batch, minibatches=2).get() for group in (stays, moves))
        assert {"actor/loss", "actor/grad_norm", "actor/lr"} <= set(expected)
        assert got == pytest.approx(expected, rel=TOLERANCE), f"update {step} at {moves.grid}"
        if step < len(JOURNEY):
            (p, t, d), devices = JOURNEY[step]
            to = {"strategy": strategy(p, t), "pool": hosts[:devices] if devices < 8 else hosts}
        elif step == len(JOURNEY):
            (p, t, d), to = (1, 2, 1), {"strategy": strategy(1, 2), "pool": other_pool}
        else:
            break
        pending = moves.compute_log_prob(batch)
        before, counters = moves.whole_state().get()[0]
        assert hf.reallocate(moves, **to) is moves
        after, counters_after = moves.whole_state().get()[0]
        assert (moves.grid.p, moves.grid.t, moves.grid.d) == (p, t, d)
        assert len(moves.where().get()) == p * t * d
        assert set(before) == {"main", "exp_avg", "exp_avg_sq", "weights"}
        for kind, tensors in before.items():
            assert all(torch.equal(after[kind][name], value) for name, value in tensors.items()), kind
        assert any(value.any() for value in before["exp_avg"].values())
        assert counters_after == counters
        here = moves.compute_log_prob(batch).get()["old_log_probs"]
        torch.testing.assert_close(here.values, pending.get()["old_log_probs"].values, rtol=0, atol=1e-4)


def test_an_actor_changes_its_backend_while_it_trains(place, pool, policy):
    """Weights, moments and step counts come along; updates are those of an actor that stayed."""
    settings = {"model": policy, "train": hf.Megatron(tp=2), "optim": ADAM}
    stays, moves = (place(hf.ActorWorker, pool, name=name, **settings) for name in ("unmoved", "moved"))
    for seed, to in enumerate([hf.FSDP(), hf.ZeRO(stage=2), hf.Megatron(pp=2, tp=2), None]):
        batch = hf.BatchRef.from_batch(make_rows(8, seed=seed))
        expected, got = (group.update_actor(batch, minibatches=2).get() for group in (stays, moves))
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6), f"update {seed}"
        if to is not None:
            assert hf.reallocate(moves, strategy=to) is moves


def test_an_actor_generates_before_and_after(place, pool, policy):
    """Its vLLM is closed and built again; when that fails, the old layout has one again."""
    fragile = policy / FRAGILE
    fragile.touch()
    sampling = hf.Sampling(max_tokens=8, seed=5)
    actor = place(
        Watched,
        pool[0:2],
        name="generating",
        model=policy,
        train=hf.Megatron(),
        optim=hf.SGD(lr=0.5, momentum=0.9),
        generate=hf.VLLM(sampling=sampling),
        offload=("optimizer",),
    )
    prompts = hf.BatchRef.from_batch(make_prompts(6))
    actor.update_actor(hf.BatchRef.from_batch(make_rows(8)))
    drawn = [actor.generate_sequences(prompts)]
    before = actor.whole_state().get()[0]
    with pytest.raises(
        WorkerError, match=r"no generation here\ngenerating was not moved: it is still at \(p,t,d\)=\(1,1,2\), "
    ):
        hf.reallocate(actor, strategy=hf.Megatron(tp=2), generate=hf.VLLM(tp=2, sampling=sampling))
    assert (actor.grid.t, actor.grid.d) == (1, 2)
    drawn.append(actor.generate_sequences(prompts))
    fragile.unlink()
    held = actor.remember().get()
    assert actor.remembered_bytes().get() == held
    assert min(held) > 0
    hf.reallocate(actor, strategy=hf.Megatron(tp=2), pool=pool[1:3], generate=hf.VLLM(tp=2, sampling=sampling))
    drawn.append(actor.generate_sequences(prompts))
    assert actor.members == (1, 2)
    assert actor.remembered_bytes().get() == [0, None]  # although vLLM has frozen what Python would collect
    assert (actor.grid.t, actor.grid.t_g, actor.settings["generate"].tp) == (2, 2, 2)
    after = actor.whole_state().get()[0]
    assert set(after[0]) == {"main", "momentum_buffer", "weights"}
    for kind in after[0]:
        assert all(torch.equal(after[0][kind][name], value) for name, value in before[0][kind].items())
    for batch in drawn:
        found = (batch | actor.compute_log_prob(batch)).get()
        assert float((found["log_probs"].values - found["old_log_probs"].values).abs().max()) < SAMPLING_TOLERANCE
    responses = [batch.get()["response_ids"].tolist() for batch in drawn]
    assert responses[0] == responses[1] == responses[2]
    hf.reallocate(actor, strategy=hf.Megatron(), generate=None)
    assert (actor.settings["generate"], actor.settings["offload"]) == (None, ())
    assert actor.compute_log_prob(drawn[0]).get().rows == 6


def test_a_model_that_does_not_train_moves_too(place, pool, policy, settle):
    reference = place(hf.ReferenceWorker, pool[0:2], model=policy, train=hf.Megatron(tp=2), offload=True)
    batch = hf.BatchRef.from_batch(make_rows(5))
    before = reference.compute_ref_log_prob(batch)
    hf.reallocate(reference, pool=pool[2:4])
    assert reference.grid == RankGrid(1, 2, 1)
    hf.reallocate(reference, strategy=hf.Megatron(pp=2))
    after = reference.compute_ref_log_prob(batch).get()["ref_log_probs"]
    torch.testing.assert_close(after.values, before.get()["ref_log_probs"].values, rtol=0, atol=1e-4)
    refuse_what_cannot_be(reference, pool)
    assert hf.reallocate(reference, pool=pool[2:4]) is reference  # it is there
    reference.close()
    with pytest.raises(PlacementError, match="is closed"):
        hf.reallocate(reference, pool=pool[0:2])
    settle()


def test_a_layout_that_its_devices_cannot_hold_is_refused(place, pool, policy, monkeypatch):
    """By the account that placement makes; until the state has moved, both layouts have memory."""
    actor = place(hf.ActorWorker, pool[:2], model=policy, train=hf.Megatron(tp=2), optim=ADAM, name="moved")
    half = PlacedGroup.of("moved", read_spec(policy, "lm"), actor.settings, actor.grid)
    assert half is not None
    bytes_ = sum(half.resident("updates", 0).values())
    place(hf.ReferenceWorker, pool[2:3], model=policy, name="reference")
    monkeypatch.setattr(hf.ResourcePool, "device_memory", lambda _: int(1.5 * bytes_))
    with pytest.raises(PlacementError, match=r"moved does not fit on its devices: while reference .*moved optim"):
        hf.reallocate(actor, pool=pool[2:3], strategy=hf.Megatron())
    with pytest.raises(PlacementError, match=r"while moved moves.*moved optimizer.*moved in its old layout weights"):
        hf.reallocate(actor, pool=pool[1:3])
    assert (actor.members, actor.grid.t) == (pool.members[:2], 2)
    assert actor.update_actor(make_rows(4)).get()["actor/grad_norm"] > 0
    hf.reallocate(actor, pool=pool[2:4])
    assert actor.members == pool.members[2:4]


def test_a_grid_of_its_own_stays(place, pool, policy):
    reference = place(hf.ReferenceWorker, pool[0:2], model=policy, grid=RankGrid(1, 2, 1))
    hf.reallocate(reference, pool=pool)
    assert reference.grid == RankGrid(1, 2, 2)
    with pytest.raises(PlacementError, match=r"grid of its own, p=1 and t=2.*multiple of 2 devices \(found 3\)"):
        hf.reallocate(reference, pool=pool[0:3])
    hf.reallocate(reference, strategy=hf.Megatron(pp=2), pool=pool[0:2])
    assert reference.grid == RankGrid(2, 1, 1)


def refuse_what_cannot_be(group: hf.WorkerGroup, pool: hf.ResourcePool) -> None:
    """Issue 3, acceptance 9: before anything is built."""
    where = (group.members, group.grid, group.settings)
    with pytest.raises(PlacementError, match=r"p\*t\*d = 2\*4\*1 = 8 devices, the pool has 4"):
        hf.reallocate(group, strategy=hf.Megatron(tp=4, pp=2), pool=pool)
    with pytest.raises(ModelError, match="divisible"):
        hf.reallocate(group, strategy=hf.Megatron(tp=3), pool=pool[0:3])
    for strategy in (hf.VLLM(), hf.Megatron, group, 3, pool):
        with pytest.raises(ConfigError, match=r"reallocate\(.*strategy="):
            hf.reallocate(group, strategy=strategy)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"strategy=.*pool="):
        hf.reallocate(group)
    with pytest.raises(ConfigError, match=r"pool=hf\.KEEP"):
        hf.reallocate(group, pool=hf.KEEP)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot generate"):
        hf.reallocate(group, pool=pool, generate=hf.VLLM())
    plain = hf.place(Plain, pool[0:1])
    with pytest.raises(ConfigError, match="no weights"):
        hf.reallocate(plain, pool=pool[1:2])
    plain.close()
    with pytest.raises(ConfigError, match="takes a group"):
        hf.reallocate(pool, strategy=hf.Megatron())  # type: ignore[arg-type]
    assert where == (group.members, group.grid, group.settings)
