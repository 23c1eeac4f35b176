"""LoRA in the workers, on real hosts: generation with merged weights, both ways to save, and going on from adapters.

transformers loads a directory of adapters through peft, on the model that it names: that is what actors are held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from tests import tiny_models
from tests.tiny_models import make_prompts, make_rows

LORA = hf.LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj", "up_proj", "down_proj"))
# training, t_g of generation and what waits in host memory: cut as training is, and not; copied and shared weights
PLACEMENTS: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "fsdp-parked": (hf.FSDP(lora=LORA), 2, ("generation", "optimizer")),
    "hsdp": (hf.FSDP(replicate=2, lora=LORA), 4, ("generation",)),
    "shared": (hf.FSDP(replicate=4, lora=LORA), 1, ("generation",)),  # every rank trains and generates the whole model
    "megatron": (hf.Megatron(tp=2, sequence_parallel=True, lora=LORA), 2, ("generation",)),  # shares all but fused rows
    "megatron-stages": (hf.Megatron(tp=2, pp=2, recompute=True, lora=LORA), 4, ("generation", "optimizer")),
}


@dataclass
class Observed:
    adapters: Path
    merged: Path
    base: hf.Batch
    drawn: list[hf.Batch]
    greedy: hf.Batch
    reference: hf.Batch


def apart(one: hf.Ragged, other: hf.Ragged) -> float:
    assert torch.equal(one.offsets, other.offsets)
    return float((one.values - other.values).abs().max())


@pytest.fixture(scope="module", params=PLACEMENTS)
def observed(request, pool, policy, tmp_path_factory) -> Observed:
    train, tp, offload = PLACEMENTS[request.param]
    actor = hf.ActorWorker.on(
        pool,
        name=f"lora-{request.param}",
        model=policy,
        train=train,
        optim=hf.SGD(lr=0.5, clip_grad=1.0),
        generate=hf.VLLM(tp=tp, sampling=hf.Sampling(max_tokens=8, seed=5)),
        offload=offload,
    )
    try:
        return run(actor, tmp_path_factory.mktemp("saved"))
    finally:
        actor.close()


def run(actor: hf.WorkerGroup, directory: Path) -> Observed:
    """Sample, update, sample again without and with training in between, save in both ways."""
    prompts = hf.BatchRef.from_batch(make_prompts())
    batch = actor.generate_sequences(prompts)
    batch |= actor.compute_log_prob(batch)
    base, drawn = batch.get(), []
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        noise = torch.randn(len(base["response_ids"].values), generator=generator)
        batch |= hf.Batch({"advantages": base["response_ids"].with_values(noise)})
        actor.update_actor(batch, minibatches=2, uneven=True).get()
        for _ in range(2):  # the second time weights are current already
            sample = actor.generate_sequences(prompts)
            drawn.append((sample | actor.compute_log_prob(sample)).get())
    greedy = actor.generate_sequences(prompts, greedy=True).get()
    adapters, merged = directory / "adapters", directory / "merged"
    with tiny_models.away(actor.settings["model"]):
        assert actor.save(adapters) == str(adapters)
        actor.generate_sequences(prompts).get()
        assert actor.save(merged, merged=True) == str(merged)
    reference = (sample | actor.compute_ref_log_prob(sample) | actor.compute_log_prob(sample)).get()
    return Observed(adapters, merged, base, drawn, greedy, reference)


@pytest.mark.thinned(1)
def test_generation_has_the_merged_weights(observed):
    """vLLM's kernels differ from transformers' by rounding; updates moved log-probabilities by far more."""
    moved = apart(observed.base["old_log_probs"], tiny_models.response_log_probs(observed.adapters, observed.base))
    assert moved > 0.05
    for batch in observed.drawn:
        assert apart(batch["log_probs"], batch["old_log_probs"]) < 1e-5
    expected = tiny_models.response_log_probs(observed.adapters, observed.drawn[-1])
    assert apart(expected, observed.drawn[-1]["old_log_probs"]) < 1e-5
    assert apart(expected, observed.drawn[-1]["log_probs"]) < 1e-5


def test_greedy_responses_are_those_of_transformers_and_peft(observed, policy):
    prompts = make_prompts()["prompt_ids"].tolist()
    expected = tiny_models.greedy(observed.adapters, prompts, 8)
    assert observed.greedy["response_ids"].tolist() == expected
    assert tiny_models.greedy(policy, prompts, 8) != expected


def test_a_merged_model_computes_what_its_adapters_do(observed, policy):
    one, other = (tiny_models.response_log_probs(path, observed.base) for path in (observed.merged, observed.adapters))
    assert apart(one, other) < 1e-5
    weights = load_file(observed.merged / "model.safetensors")
    frozen = load_file(policy / "model.safetensors")
    assert weights.keys() == frozen.keys()
    changed = {name.split(".")[-2] for name in weights if not weights[name].equal(frozen[name])}
    assert changed == set(LORA.targets)


def test_the_model_without_its_adapters_is_the_reference(observed, policy):
    expected = tiny_models.response_log_probs(policy, observed.reference)
    assert apart(observed.reference["ref_log_probs"], expected) < 1e-5
    assert apart(observed.reference["old_log_probs"], expected) > 0.01


@pytest.fixture(scope="module")
def adapters(pool, policy, tmp_path_factory) -> Path:
    """Adapters saved after one update."""
    actor = hf.ActorWorker.on(
        pool, name="lora-first", model=policy, train=hf.FSDP(lora=LORA), optim=hf.SGD(lr=0.5, clip_grad=1.0)
    )
    try:
        actor.update_actor(hf.BatchRef.from_batch(make_rows())).get()
        return Path(actor.save(tmp_path_factory.mktemp("first") / "adapters"))
    finally:
        actor.close()


@pytest.mark.parametrize("train", [hf.FSDP(), hf.Megatron(tp=2, pp=2)], ids=["fsdp", "megatron"])
def test_training_goes_on_from_saved_adapters(place, pool, adapters, tmp_path, train):
    again = place(hf.ActorWorker, pool, name="lora-again", model=adapters, train=train, optim=hf.SGD(lr=0.5))
    frozen = place(hf.ReferenceWorker, pool, name="lora-frozen", model=adapters, train=hf.FSDP(replicate=2))
    rows = hf.BatchRef.from_batch(make_rows())
    expected = tiny_models.response_log_probs(adapters, make_rows())
    assert apart(again.compute_log_prob(rows).get()["old_log_probs"], expected) < 1e-5
    assert apart(frozen.compute_ref_log_prob(rows).get()["ref_log_probs"], expected) < 1e-5
    again.update_actor(rows).get()
    saved = Path(again.save(tmp_path / "further"))
    after = tiny_models.response_log_probs(saved, make_rows())
    assert apart(again.compute_log_prob(rows).get()["old_log_probs"], after) < 1e-5
    assert apart(after, expected) > 1e-3


def test_merged_weights_move_to_other_groups_and_none_move_in(place, pool, policy, adapters):
    actor = place(hf.ActorWorker, pool, name="lora-source", model=adapters, train=hf.FSDP(), optim=hf.SGD(lr=0.5))
    other = place(hf.ReferenceWorker, pool, name="lora-other", model=policy, train=hf.Megatron(tp=2))
    rows = hf.BatchRef.from_batch(make_rows())
    before = actor.compute_log_prob(rows).get()["old_log_probs"]
    hf.sync_weights(actor, other).get()
    assert apart(other.compute_ref_log_prob(rows).get()["ref_log_probs"], before) < 1e-5
    assert actor.compute_log_prob(rows).get()["old_log_probs"].equal(before)
    for wrong in (
        lambda: hf.sync_weights(other, actor),
        lambda: hf.reallocate(actor, strategy=hf.FSDP(replicate=2)),
    ):
        with pytest.raises(hf.errors.ConfigError, match="trains adapters of the weights in"):
            wrong()


@pytest.mark.parametrize("trains", [(hf.FSDP, hf.Megatron), (hf.Megatron, hf.FSDP)], ids=["fsdp", "megatron"])
def test_a_critic_trains_its_head_too(place, pool, policy, tmp_path, trains):
    """Another backend continues from what it saved."""
    critic = place(
        hf.CriticWorker,
        pool,
        name="lora-critic",
        model=policy,
        train=trains[0](lora=LORA),
        optim=hf.SGD(lr=0.5),
        offload=True,
    )
    rows = hf.BatchRef.from_batch(make_rows())
    for _ in range(2):
        critic.update_critic(rows).get()
    values = critic.compute_values(rows).get()["values"]
    assert values.values.abs().max() > 1e-3
    adapters, merged = (Path(critic.save(tmp_path / str(kind), merged=kind)) for kind in (False, True))
    assert apart(tiny_models.response_values(merged, make_rows()), values) < 1e-5
    again = place(hf.CriticWorker, pool, name="lora-critic-again", model=adapters, train=trains[1]())
    assert apart(again.compute_values(rows).get()["values"], values) < 1e-5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"train": hf.FSDP(lora=hf.LoRA(targets=("query",)))}, "ConfigError", "'query' matches no linear layer"),
        ({"model": "adapters", "train": hf.ZeRO(stage=2)}, "ConfigError", "does not compute"),
        ({"model": "adapters", "train": hf.Megatron(lora=hf.LoRA(rank=3))}, "ConfigError", "have rank=4"),
        ({"train": hf.Megatron(lora=hf.LoRA(targets=("query",)))}, "ConfigError", "'query' matches no linear layer"),
        ({"model": "adapters", "train": hf.FSDP(lora=hf.LoRA(rank=3))}, "ConfigError", "have rank=4"),
        ({"model": "adapters", "train": hf.FSDP(tp=2)}, "ConfigError", "not cut by tensor parallelism"),
        ({"train": hf.FSDP(lora=hf.LoRA(start="nowhere"))}, "CheckpointError", "adapter_config"),
    ],
)
def test_bad_settings_are_found_on_the_driver(pool, policy, adapters, settings, error, message):
    settings = {"model": policy, **settings}
    if settings["model"] == "adapters":
        settings["model"] = adapters
    with pytest.raises(getattr(hf.errors, error), match=message):
        hf.ActorWorker.on(pool, optim=hf.SGD(lr=0.1), **settings)


def test_what_lora_cannot_do_is_said_on_the_driver(place, pool, policy):
    settings = {"model": policy, "optim": hf.SGD(lr=0.1)}
    with pytest.raises(hf.errors.ConfigError, match="use overlap=False"):
        hf.ActorWorker.on(pool, train=hf.FSDP(lora=LORA), generate=hf.VLLM(), overlap=True, **settings)
    actor = place(hf.ActorWorker, pool, name="no-lora", train=hf.FSDP(), **settings)
    with pytest.raises(hf.errors.ConfigError, match="place a ReferenceWorker"):
        actor.compute_ref_log_prob(hf.BatchRef.from_batch(make_rows()))
