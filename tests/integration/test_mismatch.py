"""hf.Mismatch: log-probabilities of generation and training are compared where both have the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybridflow as hf
from hybridflow.errors import ConfigError, DivergenceError, MismatchError
from tests import tiny_models
from tests.tiny_models import make_prompts

SAMPLING = hf.Sampling(max_tokens=6, seed=1, top_p=0.7, temperature=0.8)


@pytest.fixture
def policy(tmp_path) -> Path:
    return tiny_models.make_policy(tmp_path / "policy")


@pytest.fixture
def groups(pool, place) -> Any:
    """An actor, and after `change` of the weights' file a rollout of the same directory."""

    def build(policy: Path, change: Any = None, **settings: Any) -> tuple[hf.WorkerGroup, hf.WorkerGroup]:
        actor = place(hf.ActorWorker, pool[0:2], model=policy, train=hf.FSDP(), optim=hf.Adam(lr=1e-2), **settings)
        if change is not None:
            weights = load_file(policy / "model.safetensors")
            change(weights)
            save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
        return actor, place(hf.RolloutWorker, pool[2:3], model=policy, generate=hf.VLLM(sampling=SAMPLING))

    return build


def other_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] += torch.randn(
        weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(1)
    )


def compared(actor: hf.WorkerGroup, batch: Any) -> bool:
    """Whether a call of compute_log_prob would compare these rows."""
    before = set(actor._compared)
    compares = actor._bind(actor.operations["compute_log_prob"], (batch,), {}).compares
    actor._compared = before
    return compares


def trained(actor: hf.WorkerGroup, batch: Any, own: bool = True) -> None:
    if own:
        batch |= actor.compute_log_prob(batch)
    batch |= {"advantages": batch["log_probs"].get()}
    actor.update_actor(batch, loss="ppo").get()


def test_other_weights_are_refused_before_an_update_applies(groups, policy, tmp_path):
    actor, rollout = groups(policy, other_head)
    before = load_file(Path(actor.save(tmp_path / "before")) / "model.safetensors")
    batch = rollout.generate_sequences(make_prompts())
    batch |= {"advantages": batch["log_probs"].get()}
    batch |= actor.compute_log_prob(batch)
    update = actor.update_actor(batch, loss="ppo")
    with pytest.raises(MismatchError, match=r"differ by [0-9.]+ nats per token .*most in the rows \d+ \([0-9.]+\)"):
        update.get()
    with pytest.raises(MismatchError):
        batch["old_log_probs"].get()
    after = load_file(Path(actor.save(tmp_path / "after")) / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_update_without_compute_log_prob_compares_by_itself(groups, policy, tmp_path):
    actor, rollout = groups(policy, other_head)
    before = load_file(Path(actor.save(tmp_path / "before")) / "model.safetensors")
    with pytest.raises(MismatchError, match=r"differ by [0-9.]+ nats per token .*most in the rows \d+ \([0-9.]+\)"):
        trained(actor, rollout.generate_sequences(make_prompts()), own=False)
    after = load_file(Path(actor.save(tmp_path / "after")) / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_mean_is_that_of_the_batch(groups, policy):
    """Of the rows of two ranks one differs: above the limit for its rank, below it for the batch."""
    prompts = make_prompts()
    first, *others = prompts["prompt_ids"].tolist()
    token = next(token for token in first if not any(token in other for other in others))

    def one_token(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][token] *= -3

    actor, rollout = groups(policy, one_token, mismatch=hf.Mismatch(refuse=0.3))
    batch = rollout.generate_sequences(prompts)
    assert compared(actor, batch)
    found = (batch | actor.compute_log_prob(batch)).get()
    drift = (found["log_probs"].values - found["old_log_probs"].values).abs()
    of_first_rank = drift[: sum(map(len, found["log_probs"].tolist()[:4]))]
    assert drift.mean() < 0.3 < of_first_rank.mean()


def test_the_limits_are_settings(groups, policy, pool, place):
    actor, rollout = groups(policy, other_head, mismatch=hf.Mismatch(refuse=None))
    batch = rollout.generate_sequences(make_prompts())
    assert compared(actor, batch)
    batch |= actor.compute_log_prob(batch)
    assert batch.metrics().get()["actor/rollout_log_prob_diff"] > 0.2
    with pytest.raises(ConfigError, match=r"give hf\.Mismatch"):
        place(hf.ActorWorker, pool[0:1], model=policy, mismatch=0.1)


def test_rows_of_the_present_weights_are_compared_once_at_the_start_and_once_trained(groups, policy):
    actor, rollout = groups(policy)
    batch = rollout.generate_sequences(make_prompts())
    assert compared(actor, batch)
    trained(actor, batch)
    stale = rollout.generate_sequences(make_prompts())
    assert not compared(actor, batch)
    assert not compared(actor, stale)
    actor.compute_log_prob(stale).get()  # off policy, and no error
    hf.sync_weights(actor, rollout)
    fresh = rollout.generate_sequences(make_prompts())
    assert compared(actor, fresh)
    assert not compared(actor, hf.BatchRef.concat([stale, fresh]))
    assert not compared(actor, fresh | {"response_ids": fresh["response_ids"].get()})
    assert not compared(actor, fresh.without("temperature"))
    trained(actor, fresh)
    hf.sync_weights(actor, rollout)
    assert not compared(actor, rollout.generate_sequences(make_prompts()))


def test_updates_alone_compare_at_the_start_and_once_trained(groups, policy):
    actor, rollout = groups(policy)
    for expected in (True, True, False):
        batch = rollout.generate_sequences(make_prompts())
        assert compared(actor, batch) is expected
        trained(actor, batch, own=False)
        assert not compared(actor, batch)
        hf.sync_weights(actor, rollout)


def test_a_load_is_compared_again(groups, policy, tmp_path):
    actor, rollout = groups(policy)
    for _ in range(2):
        trained(actor, rollout.generate_sequences(make_prompts()))
        hf.sync_weights(actor, rollout)
    assert not compared(actor, rollout.generate_sequences(make_prompts()))
    hf.save(tmp_path / "state", [actor, rollout])
    hf.load(tmp_path / "state", [actor, rollout])
    batch = rollout.generate_sequences(make_prompts())
    assert compared(actor, batch)
    actor.compute_log_prob(batch).get()


def test_an_actor_that_generates_is_compared_with_itself(pool, place, policy):
    generate = hf.VLLM(tp=2, sampling=SAMPLING)
    actor = place(hf.ActorWorker, pool[0:2], model=policy, optim=hf.Adam(lr=1e-2), generate=generate)
    for expected in (True, True, False):
        batch = actor.generate_sequences(make_prompts())
        assert compared(actor, batch) is expected
        trained(actor, batch)


def test_nan_weights_of_a_rollout_are_an_error(groups, policy):
    def broken(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"][0] = torch.nan

    _, rollout = groups(policy, broken)
    with pytest.raises(DivergenceError, match="weights that it was given are nan or infinite"):
        rollout.generate_sequences(make_prompts()).get()


def test_tokens_without_a_finite_log_probability_are_masked_and_counted(groups, policy):
    def one_token(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][make_prompts()["prompt_ids"].tolist()[0][-1]] = torch.nan

    actor, rollout = groups(policy, one_token)
    batch = rollout.generate_sequences(make_prompts(), n=2)
    found = batch.get()
    lost = ~found["log_probs"].values.isfinite()
    assert 0 < int(lost.sum()) < len(lost)
    assert torch.equal(found["response_mask"].values, ~lost)
    assert batch.metrics().get()["response/not_finite"] == int(lost.sum())
    trained(actor, batch)
    batch |= actor.compute_log_prob(batch) | {"advantages": found["log_probs"]}
    assert actor.update_actor(batch, loss="ppo").get()["actor/skipped"] == 0


@pytest.mark.parametrize("sampling", [{"greedy": True}, {}, {"top_k": 3}])
def test_ids_beyond_the_tokenizer_are_never_sampled(pool, place, tmp_path, sampling):
    """The head prefers them, as one may whose vocabulary is padded; log-probabilities are those of all ids."""
    policy = tiny_models.make_policy(tmp_path / "padded", vocab_size=tiny_models.VOCABULARY + 8)
    weights = load_file(policy / "model.safetensors")
    weights["lm_head.weight"][tiny_models.VOCABULARY :] = weights["lm_head.weight"][:8] * 3
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    actor = place(hf.ActorWorker, pool[0:1], model=policy, train=hf.FSDP(), generate=hf.VLLM(sampling=SAMPLING))
    batch = actor.generate_sequences(make_prompts(), **{"max_tokens": 30, "ignore_eos": True, "top_p": 1.0, **sampling})
    batch |= actor.compute_log_prob(batch)
    found = batch.get()
    assert int(found["response_ids"].values.max()) < tiny_models.VOCABULARY
    assert float((found["log_probs"].values - found["old_log_probs"].values).abs().max()) < 1e-3
