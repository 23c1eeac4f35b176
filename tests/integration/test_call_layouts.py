"""Groups whose calls have different layouts: one group to the driver, with the results of one layout for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ConfigError, PlacementError, WorkerError
from hybridflow.placement import CallPlacement, GroupPlacement, Placement
from hybridflow.topology import RankGrid
from tests.integration.matrix import Matrix
from tests.tiny_models import make_prompts

NODES = (8,)
TOLERANCE = 2e-5


class Followed(Matrix):
    """A matrix that other ranks may have, too."""

    def __init__(self, broken: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        if self.context.grid.size == broken:
            raise RuntimeError(f"no group of {broken}")

    @classmethod
    def weights_layout(cls, settings: Mapping[str, Any], grid: RankGrid):
        return super().weights_layout({"by": "rows", "rows": 13, "tensor": "matrix"}, grid)

    @classmethod
    def worker_spec(cls, settings: Mapping[str, Any]) -> hf.WorkerSpec:
        kinds = ("generation", "inference", "function")
        return replace(super().worker_spec(settings), replicas=dict.fromkeys(kinds, (cls, settings)))

    @hf.register(hf.ONE_TO_ALL, kind="training")
    def update(self, value: float) -> None:
        self.part.fill_(value)

    @hf.register(hf.ONE_TO_ONE)
    def look(self) -> torch.Tensor:
        return self.part.clone()

    @hf.register(hf.ONE_TO_ONE)
    def glance(self) -> torch.Tensor:
        return self.part.clone()


@contextmanager
def placed(worker_class: type, where: GroupPlacement, **settings: Any) -> Iterator[hf.WorkerGroup]:
    group = hf.place(worker_class, where, **settings)
    try:
        yield group
    finally:
        group.close()


def exchanges(pool: hf.ResourcePool) -> int:
    return len({event.seq for event in pool.events() if event.method == "sync_weights"})


def matrix(*elsewhere: CallPlacement) -> GroupPlacement:
    return GroupPlacement((0, 1), NODES, None, None, elsewhere)


def test_replicas_have_current_weights_and_get_them_only_when_they_changed(hosts):
    where = matrix(CallPlacement("look", (1, 2, 3), (1, 1, 3)), CallPlacement("glance", (3,), (1, 1, 1)))
    with placed(Followed, where, name="shown") as group:
        before = exchanges(hosts)
        assert group.look().get().shape == (4, 5)
        assert exchanges(hosts) == before, "both start with the same weights"
        for value in (1.0, 2.0):
            group.update(value)
            seen = [group.look(), group.look(), group.glance()]
            assert [(len(one), float(one.mean())) for one in (s.get() for s in seen)] == [
                (4, value),
                (4, value),
                (13, value),
            ]
        assert exchanges(hosts) == before + 4
        assert [len(part) for part in group.read().get()] == [6, 7, 4, 4, 5, 13], "all ranks of the group answer"
        with placed(Matrix, GroupPlacement((2,), NODES)) as source:
            source.fill(1.0)
            hf.sync_weights(source, group)
            assert torch.equal(group.glance().get(), source.read().get()[0])
        moved = hf.reallocate(group, pool=hosts[2:4])
        assert moved is group
        assert group.members == (2, 3)
        group.update(5.0)
        assert float(group.look().get().mean()) == 5.0
        assert group.look().get().shape == (4, 5)


def test_each_call_of_an_iteration_has_its_own_layout(hosts, settle):
    settle()
    where = matrix(CallPlacement("look", (3,), (1, 1, 1)), CallPlacement("look", (0, 1), (1, 1, 2)))
    with placed(Followed, where) as group:
        assert [len(group.look().get()) for _ in range(4)] == [13, 6, 13, 6]
        group.session.iterations.begin()
        assert len(group.look().get()) == 13
        group.session.iterations.begin()
        assert len(group.look().get()) == 13, "an iteration begins with the first"
    group.session.iterations.drain()


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_did_not_arrive_are_never_used(hosts, settle, when):
    with placed(Followed, matrix(CallPlacement("look", (2, 3), (1, 1, 2))), name="shown") as group:
        group.update(1.0)
        assert float(group.look().get().mean()) == 1.0
        group.fail_once(when).get()
        group.update(3.0)
        with pytest.raises(WorkerError, match=r"shown.*(not ready|cannot take them)"):
            group.look().get()
        settle()
        assert float(group.look().get().mean()) == 3.0, "the next call asks for them again"


def test_it_is_built_and_closed_as_one_group(hosts):
    with placed(Matrix, GroupPlacement((2,), NODES)) as watcher:
        before = watcher.process_groups().get()
        where = matrix(CallPlacement("look", (2, 3), (1, 1, 2)))
        with pytest.raises(WorkerError, match=r"no group of 2"):
            hf.place(Followed, GroupPlacement((0,), NODES, elsewhere=where.elsewhere), name="shown", broken=2)
        assert "shown" not in hosts.session.groups
        assert watcher.process_groups().get() == before
        with placed(Followed, where, name="shown") as group:
            group.update(1.0)
            group.look().get()
            assert watcher.process_groups().get() > before
            assert hosts.session.groups["shown"] is group
        assert "shown" not in hosts.session.groups
        assert watcher.process_groups().get() == before
        with pytest.raises(PlacementError, match="shown is closed"):
            group.look()


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (
            CallPlacement("update", (2,), (1, 1, 1)),
            r"update is placed with a layout of its own, 1-1-1.*steps the weights",
        ),
        (CallPlacement("lok", (2,), (1, 1, 1)), r"no such method.*Did you mean 'look'"),
        (CallPlacement("look", (2, 3), (1, 1, 1)), r"asks for p\*t\*d = 1 devices, and has 2"),
    ],
)
def test_what_cannot_be_is_refused(hosts, one, message):
    with pytest.raises(PlacementError, match=message):
        hf.place(Followed, matrix(one))
    with pytest.raises(PlacementError, match=r"gives its weights to no other ranks.*OneLayout\('plain'\)"):
        hf.place(Matrix, matrix(CallPlacement("read", (2,), (1, 1, 1))), name="plain")


# Models


def test_generation_of_a_sharded_actor_follows_it(hosts, policy, tmp_path):
    """Updates, a move to another layout and saving are the actor's; others compute with what it is then."""
    away = (
        CallPlacement("compute_log_prob", (1, 2, 3), (1, 1, 3)),
        CallPlacement("generate_sequences", (2, 3), (1, 2, 1)),
    )
    settings = {
        "model": policy,
        "train": hf.FSDP(),
        "optim": hf.SGD(lr=0.5),
        "generate": hf.VLLM(sampling=hf.Sampling(max_tokens=6, seed=1)),
    }
    prompts = make_prompts(6)
    with placed(hf.ActorWorker, where((0, 1), (1, 1, 2), *away, generate=(1, 1)), **settings) as actor:

        def drawn() -> hf.Batch:
            batch = actor.generate_sequences(prompts)
            found = (batch | actor.compute_log_prob(batch)).get()
            assert float((found["log_probs"].values - found["old_log_probs"].values).abs().max()) < 1e-3
            return found

        batch = drawn()
        noise = torch.randn(len(batch["response_ids"].values), generator=torch.Generator().manual_seed(1))
        actor.update_actor(batch.with_columns(advantages=batch["response_ids"].with_values(noise)))
        after = drawn()
        sums = [float(one["log_probs"].values.sum()) for one in (batch, after)]
        assert sums[0] != pytest.approx(sums[1], rel=1e-2), "the policy has moved"
        with pytest.raises(ConfigError, match="generates where its placement says"):
            hf.reallocate(actor, strategy=hf.Megatron(), generate=None)
        hf.reallocate(actor, strategy=hf.Megatron(tp=2), pool=hosts[2:4])
        assert torch.equal(drawn()["response_ids"].values, after["response_ids"].values)
        assert Path(actor.save(tmp_path / "saved"), "model.safetensors").exists()


def where(
    devices: tuple[int, ...], sizes: tuple[int, int, int], *elsewhere: CallPlacement, **how: Any
) -> GroupPlacement:
    p, t, d = sizes
    return GroupPlacement(devices, NODES, hf.Megatron(pp=p, tp=t, dp=d), how.get("generate"), elsewhere)


ALL = (0, 1, 2, 3)
FIXED = {
    "actor": where(ALL, (2, 2, 1), generate=(2, 2)),
    "critic": where(ALL, (2, 2, 1)),
    "reference": where(ALL, (2, 2, 1)),
}
HYBRID = {
    "actor": where(ALL, (2, 2, 1), CallPlacement("compute_log_prob", (0, 1), (1, 2, 1)), generate=(1, 1)),
    "critic": where((2, 3), (1, 2, 1), CallPlacement("compute_values", (0, 1), (1, 1, 2))),
    "reference": where((3,), (1, 1, 1)),
}
APART = {
    "actor": where((0, 1), (1, 2, 1), CallPlacement("generate_sequences", (2, 3), (1, 1, 2)), generate=(1, 1)),
    "critic": where((1, 2), (2, 1, 1), CallPlacement("compute_values", (1, 2), (1, 2, 1))),
    "reference": where(ALL, (1, 1, 4)),
}


def ppo(policy: Path, classifier: Path, made: dict[str, Any], steps: int = 3) -> list[dict[str, float]]:
    """Figures of each iteration, and the responses of the last."""
    pool = hf.ResourcePool([4])
    optim, generate = hf.Adam(lr=5e-3), hf.VLLM(sampling=hf.Sampling(max_tokens=8, seed=3))
    made["actor"] = actor = hf.ActorWorker.on(pool, model=policy, optim=optim, generate=generate)
    made["critic"] = critic = hf.CriticWorker.on(pool, model=classifier, optim=optim)
    made["reference"] = reference = hf.ReferenceWorker.on(pool, model=policy)
    variety = lambda completions: [len(set(text)) / 8 for text in completions]  # noqa: E731
    reward = hf.RewardWorker.on(pool, function=variety, tokenizer=policy)
    prompts, figures = make_prompts(8), []
    for _ in range(steps):
        batch = actor.generate_sequences(prompts)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
        of_critic = critic.update_critic(batch, minibatches=2)
        figures.append((actor.update_actor(batch, minibatches=2), of_critic, batch["log_probs"]))
    made["saved"] = [actor.memory(), critic.memory()]
    return [a.get() | c.get() | {"sampled": float(column.get().values.sum())} for a, c, column in figures]


@pytest.fixture(scope="module")
def run(hosts, settle, policy, classifier) -> Callable[[Mapping[str, GroupPlacement]], tuple[list, dict]]:
    def run(groups: Mapping[str, GroupPlacement]) -> tuple[list, dict]:
        made: dict[str, Any] = {}
        earlier = set(hosts.session.groups)
        settle()
        try:
            groups = {**groups, "reward": GroupPlacement((0,), NODES)}
            return hf.auto(placement=Placement(NODES, groups))(ppo)(policy, classifier, made), made
        finally:
            for name in set(hosts.session.groups) - earlier:
                hosts.session.groups[name].close()

    return run


@pytest.fixture(scope="module")
def fixed(run) -> list[dict[str, float]]:
    return run(FIXED)[0]


@pytest.mark.parametrize("groups", [HYBRID, APART], ids=["hybrid", "apart"])
def test_losses_are_those_of_one_layout(run, fixed, groups):
    found, made = run(groups)
    for ours, theirs in zip(found, fixed, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "sampled"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=TOLERANCE), name
    assert fixed[0]["sampled"] != pytest.approx(fixed[2]["sampled"], rel=1e-2), "the policy has moved"
    actor, critic = made["actor"], made["critic"]
    assert (critic.members, critic.grid.p, critic.grid.t) == (
        groups["critic"].devices,
        groups["critic"].train.pp,
        groups["critic"].train.tp,
    )
    assert "compute_values at" in repr(critic)
    of_actor, of_critic = made["saved"]
    waiting = of_critic[critic.grid.size :]
    assert [rank["memory/parameters"] for rank in waiting] == [0.0] * len(waiting), "replicas wait in host memory"
    assert len(of_actor) == actor.grid.size + 2
    assert not any(sum(rank.values()) for rank in of_actor[actor.grid.size :])
