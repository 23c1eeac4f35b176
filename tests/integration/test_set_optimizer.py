"""set_optimizer: settings that change in the middle of a run, in metrics, checkpoints and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.errors import ConfigError
from tests.tiny_models import make_rows

pytestmark = pytest.mark.usefixtures("no_parts")
ADAM = hf.Adam(lr=0.02, eps=1e-3, schedule="linear", total_steps=10, min_lr=0.002)
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "megatron": (hf.Megatron(tp=2), ADAM),
    "zero1": (hf.ZeRO(stage=1, dtype="bfloat16"), ADAM),
    "lora": (hf.FSDP(lora=hf.LoRA(rank=2)), ADAM),
    "sgd": (hf.FSDP(), hf.SGD(lr=0.02, momentum=0.5, schedule="linear", total_steps=10, min_lr=0.002)),
}


def update(actor: hf.WorkerGroup, seed: int) -> float:
    return actor.update_actor(make_rows(4, seed=seed)).get()["actor/lr"]


def weights(actor: hf.WorkerGroup, path: Path) -> dict[str, torch.Tensor]:
    found = Path(actor.save(path, dtype="float32")).glob("*.safetensors")
    return {name: tensor for file in found for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_continues_with_the_changed_settings(pool, place, policy, tmp_path, layout):
    """The schedule scales the new lr as it did the old one: 1, 0.9, 0.8, ... of what is above min_lr."""
    strategy, optim = LAYOUTS[layout]
    actor = place(hf.ActorWorker, pool[0:2], name="one", model=policy, train=strategy, optim=optim)
    rates = [update(actor, 0)]
    before = hf.save(tmp_path / "before", parts=[actor])
    actor.set_optimizer(lr=0.01)
    rates.append(update(actor, 1))
    after = hf.save(tmp_path / "after", parts=[actor])
    rates.append(update(actor, 2))
    assert rates == pytest.approx([0.02, 0.002 + 0.008 * 0.9, 0.002 + 0.008 * 0.8])
    changed = weights(actor, tmp_path / "changed")
    hf.load(before, parts=[actor])
    assert update(actor, 1) == pytest.approx(0.002 + 0.018 * 0.9)  # what was changed later is forgotten
    actor.close()
    resumed = place(hf.ActorWorker, pool[0:2], name="one", model=policy, train=strategy, optim=optim)
    hf.load(after, parts=[resumed])
    assert update(resumed, 2) == rates[2]
    found = weights(resumed, tmp_path / "resumed")
    assert all(tensor.equal(found[name]) for name, tensor in changed.items())


def test_changed_settings_move_to_another_layout(pool, place, policy):
    critic = place(hf.CriticWorker, pool[0:2], model=policy, train=hf.Megatron(), optim=ADAM)
    rows = make_rows(4)
    critic.set_optimizer(lr=0.005, betas=[0.5, 0.6])
    assert critic.update_critic(rows).get()["critic/lr"] == 0.005
    hf.reallocate(critic, strategy=hf.ZeRO(stage=1))
    assert critic.update_critic(rows).get()["critic/lr"] == pytest.approx(0.002 + 0.003 * 0.9)


def test_an_lr_below_the_lowest_of_the_schedule_stays(pool, place, policy):
    actor = place(hf.ActorWorker, pool[0:1], model=policy, train=hf.FSDP(), optim=ADAM)
    update(actor, 0)
    actor.set_optimizer(lr=1e-4)
    assert update(actor, 1) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"lrr": 1.0}, "no setting 'lrr'. Did you mean 'lr'"),
        ({"schedule": "linear"}, "set_optimizer: no setting 'schedule'"),
        ({"lr": -1.0}, r"Adam\(lr=-1.0\): must be at least 0"),
        ({"lr": "1e-6"}, "this is a text"),
        ({"betas": (0.9, 1.0)}, r"two numbers in \[0, 1\)"),
        ({}, "changes nothing"),
    ],
)
def test_what_cannot_be_set_is_refused_on_the_driver(pool, place, policy, call, says):
    actor = place(hf.ActorWorker, pool[0:1], model=policy, optim=ADAM)
    with pytest.raises(ConfigError, match=says):
        actor.set_optimizer(**call)


def test_groups_without_such_an_optimizer_refuse(pool, place, policy):
    reference = place(hf.ReferenceWorker, pool[0:1], model=policy)
    with pytest.raises(ConfigError, match="does not train"):
        reference.set_optimizer(lr=0.1)
    actor = place(hf.ActorWorker, pool[0:1], model=policy, optim=hf.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="SGD has no setting 'betas'"):
        actor.set_optimizer(betas=(0.9, 0.9))


def test_groups_are_checked_before_a_model_is_built(pool, place, policy):
    """With adapters the names are theirs."""
    for strategy, pattern, says in (
        (hf.Megatron(), "v_proj", "are one tensor of this backend"),
        (hf.FSDP(lora=hf.LoRA(rank=2, targets=("q_proj",))), "embed", "no trained tensor has 'embed' in its name"),
    ):
        with pytest.raises(ConfigError, match=says):
            hf.ActorWorker.on(pool[0:1], model=policy, train=strategy, optim=hf.Adam(lr=0.1, groups={pattern: 0.0}))


@pytest.mark.parametrize(
    ("strategy", "frozen", "free"),
    [
        (hf.FSDP(lora=hf.LoRA(rank=2)), "layers.0.", "layers.1."),
        (hf.Megatron(tp=2), "embed", "layers"),
    ],
    ids=["lora", "megatron"],
)
def test_a_group_without_a_learning_rate_stays(pool, place, policy, tmp_path, strategy, frozen, free):
    optim = hf.Adam(lr=0.1, groups={frozen: 0.0})
    actor = place(hf.ActorWorker, pool[0:2], name="grouped", model=policy, train=strategy, optim=optim)
    before = weights(actor, tmp_path / "before")
    update(actor, 0)
    actor.set_optimizer(lr=0.05)
    update(actor, 1)
    after = weights(actor, tmp_path / "after")
    assert all(after[name].equal(tensor) for name, tensor in before.items() if frozen in name)
    assert not any(after[name].equal(tensor) for name, tensor in before.items() if free in name)
