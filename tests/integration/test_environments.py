"""Tools, environments and programs over several turns, on real hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError, PromptError, WorkerError
from tests import tiny_models
from tests.example_agents import Broken, Echo, Here, Silent, asks_anew, elsewhere, speak, twice, unhinted, where

SAMPLING = hf.Sampling(max_tokens=60, seed=5, n=2, stop=tuple("abcdefghijklmnopqrstuvwxyz0123456789 .,:;"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    return tiny_models.make_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp=1", "tp=2"])
def rollout(hosts, chat, request) -> Iterator[hf.WorkerGroup]:
    generate = hf.VLLM(tp=request.param, sampling=SAMPLING)
    group = hf.place(hf.RolloutWorker, hosts[0:2], name=f"agents{request.param}", model=chat, generate=generate)
    yield group
    group.close()  # before the other


@pytest.fixture(scope="module")
def prompts() -> hf.Batch:
    return hf.Batch({"row_id": torch.tensor([3, 8, 9]), "prompt": ["a?", "bb?", "ccc?"], "answer": ["x", "y", "z"]})


def test_an_environment_acts_over_several_turns(rollout, prompts):
    found = rollout.generate_sequences(prompts, environment=Echo, max_turns=5).get()
    assert sorted(set(found["trajectory_id"].tolist())) == [6, 7, 16, 17, 18, 19]
    assert found["group_id"].tolist() == [number // 2 for number in found["trajectory_id"].tolist()]
    assert found["row_id"].unique().numel() == found.rows
    assert set(found["stop"]) == {"done"}
    assert set(found["turns"].tolist()) == {3}
    assert set(found["environment_failure"]) == {None}
    assert found["rewards"].tolist() == found["rewards/environment"].tolist()
    assert found["answer"] == [{3: "x", 8: "y", 9: "z"}[number] for number in found["group_id"].tolist()]
    for mask, turns, logged in zip(
        *(found[n].tolist() for n in ("response_mask", "turn_ids", "log_probs")), strict=True
    ):
        assert [turn >= 0 for turn in turns] == mask
        assert all(value == 0 for value, kept in zip(logged, mask, strict=True) if not kept)
    again = rollout.generate_sequences(prompts, environment=Echo, max_turns=5).get()
    assert again["response_ids"].tolist() == found["response_ids"].tolist()


def test_log_probs_are_those_of_the_model(rollout, prompts, chat):
    found = rollout.generate_sequences(prompts, environment=Echo, max_turns=3).get()
    wanted = tiny_models.response_log_probs(chat, found)
    kept = found["response_mask"].values
    assert torch.allclose(found["log_probs"].values[kept], wanted.values[kept], atol=1e-3)


def test_a_turn_computes_its_new_tokens(rollout):
    """The prompt, what the environment wrote, and the last token of each turn but the last, which follows nothing."""
    own = hf.Batch({"row_id": torch.tensor([1]), "prompt": ["a" * 300]})
    found = rollout.generate_sequences(own, environment=Echo, max_turns=3, n=1).get()
    assert found.rows == 1
    written = int((~found["response_mask"].values).sum())
    assert written > 0
    assert found["prefill_tokens"].item() == len(found["prompt_ids"].values) + written + 2


@pytest.fixture(scope="module")
def encoded(prompts) -> hf.Batch:
    return prompts.with_columns(prompt_ids=Ragged.from_rows([[65, 66], [67], [68, 69, 70]], torch.int64))


def test_one_turn_is_plain_generation(rollout, encoded):
    plain = rollout.generate_sequences(encoded).get()
    found = rollout.run(encoded, speak).get()
    for name in ("prompt_ids", "response_ids", "policy_version", "response_mask", "finished", "num_tokens", "row_id"):
        assert found[name].tolist() == plain[name].tolist(), name
    assert found["group_id"].tolist() == plain["group_id"].tolist()
    assert found["response"] == plain["response"]
    assert torch.allclose(found["log_probs"].values, plain["log_probs"].values, atol=1e-5)
    assert found["environment_metrics"] == [{"tokens": len(ids)} for ids in found["response_ids"].tolist()]


def test_a_run_with_tools_that_are_not_called_is_plain_generation(rollout, prompts):
    found = rollout.generate_sequences(prompts, tools=[twice], max_turns=3).get()
    assert found["stop"].count("answer") + found["stop"].count("length") == 6
    assert "rewards" not in found
    first = list(range(0, found.rows, 2))
    own = prompts.with_columns(prompt_ids=found[first]["prompt_ids"])
    plain = rollout.generate_sequences(own).get()
    assert found["response_ids"].tolist() == plain["response_ids"].tolist()


@pytest.mark.thinned(1)
def test_failures_of_an_environment(rollout, prompts):
    found = rollout.generate_sequences(prompts, environment=Broken).get()
    (reason,) = set(found["environment_failure"])
    assert reason.startswith("raised KeyError: 'lost'")
    assert set(found["stop"]) == {"failure"}
    assert not found["response_mask"].values.any()
    assert found["rewards/environment"].isnan().all()
    with pytest.raises(WorkerError, match=r"row [389]: raised KeyError.*on_failure"):
        rollout.generate_sequences(prompts, environment=Broken, on_failure="raise")
    assert rollout.generate_sequences(prompts, environment=Echo).get()["stop"] == ["done"] * 6


@pytest.mark.thinned(1)
def test_two_agents_keep_their_processes_between_calls(rollout, encoded):
    calls = [rollout.run(encoded, solve, n=1).get() for solve in (where, elsewhere, where, elsewhere)]
    first, second, again, last = ({one["process"] for one in call["environment_metrics"]} for call in calls)
    assert (first, second) == (again, last)
    assert first.isdisjoint(second)


def test_an_agent_that_cannot_be_sent_on_is_an_error_of_all_ranks(rollout, prompts):
    with pytest.raises(WorkerError, match="it stays here"):
        rollout.generate_sequences(prompts, environment=Here(os.getpid()))
    assert rollout.generate_sequences(prompts, environment=Echo).get()["stop"] == ["done"] * 6


def test_a_trajectory_without_a_turn_is_a_masked_token(rollout, encoded):
    found = rollout.generate_sequences(encoded, environment=Silent, on_failure="retry").get()
    assert found["prompt_ids"].tolist() == [ids for ids in encoded["prompt_ids"].tolist() for _ in range(2)]
    assert found["response_mask"].tolist() == [[False]] * 6
    assert set(found["turns"].tolist()) == {0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [unhinted]}, "unhinted cannot be described"),
        ({"tools": [twice, twice]}, "two tools named twice"),
        ({"tools": [twice], "max_turns": 0}, "max_turns=0"),
        ({"tools": [twice], "environment": Echo}, "together"),
        ({"tools": twice}, "list of functions"),
        ({"environment": Echo()}, "give a class"),
        ({"environment": str}, "no reset"),
        ({"max_turns": 4}, "without tools="),
        ({"environment": Echo, "timeout": 0}, "timeout=0"),
        ({"environment": Echo, "on_failure": "zero"}, "on_failure='zero'"),
        ({"environment": Echo, "max_turn": 3}, "no setting 'max_turn'"),
    ],
)
def test_bad_settings_are_refused_before_the_call(rollout, prompts, settings, message):
    with pytest.raises(ConfigError, match=message):
        rollout.generate_sequences(prompts, **settings)


def test_tools_need_prompts_as_text(rollout, encoded):
    with pytest.raises(PromptError, match="needs the column 'prompt'"):
        rollout.generate_sequences(encoded.without("prompt"), tools=[twice])
    with pytest.raises(ConfigError, match="async def solve"):
        rollout.run(encoded, twice)


def learned(actor: hf.WorkerGroup, batch: hf.BatchRef, loss: str = "gspo") -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages and figures of an update (GRPO), each response rewarded by its tokens."""
    ids = batch.get("response_ids")["response_ids"]
    batch |= hf.Batch({"rewards": torch.tensor([float(row.sum() % 7) for row in ids.rows()])})
    batch |= actor.compute_log_prob(batch)
    batch |= hf.compute_advantage(batch, "grpo")
    figures = actor.update_actor(batch, loss=loss, minibatches=1).get()
    return batch.get("advantages")["advantages"].values, figures


def weights(actor: hf.WorkerGroup, path: Path) -> torch.Tensor:
    return torch.cat(
        [one.flatten() for _, one in sorted(load_file(Path(actor.save(path)) / "model.safetensors").items())]
    )


def test_an_actor_trains_on_trajectories(place, hosts, chat, prompts, tmp_path):
    actor = place(
        hf.ActorWorker,
        hosts[2:4],
        name="acting",
        model=chat,
        train=hf.FSDP(),
        optim=hf.SGD(lr=0.1),
        generate=hf.VLLM(sampling=SAMPLING),
    )
    tools = actor.generate_sequences(prompts, tools=[twice], max_turns=3)
    own = prompts.with_columns(prompt_ids=tools.get()[list(range(0, tools.rows, tools.rows // 3))]["prompt_ids"])
    ways = [actor.generate_sequences(own), tools, actor.run(own, speak)]
    begin = hf.save(tmp_path / "begin", [actor])
    before = weights(actor, tmp_path / "before")
    for loss in ("ppo", "gspo"):
        found = []
        for number, batch in enumerate(ways):
            hf.load(begin, [actor])
            figures = learned(actor, batch, loss)
            after = weights(actor, tmp_path / f"after{number}") if loss == "ppo" else before
            found.append((*figures, after - before))
        (advantages, figures, step), *others = found
        assert figures["actor/grad_norm"] > 0
        assert loss != "ppo" or step.abs().max() > 1e-4
        for same, its, its_step in others:
            assert advantages.equal(same)
            assert torch.allclose(its_step, step, rtol=1e-3, atol=1e-6)
            for name in ("actor/loss", "actor/grad_norm"):
                assert its[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-7), name
    batch = actor.generate_sequences(prompts, environment=Echo, max_turns=3)
    batch |= actor.compute_log_prob(batch)
    batch |= hf.compute_advantage(batch, "grpo")
    metrics = actor.update_actor(batch).get() | batch.metrics().get()
    found = batch.get()
    kept = found["response_mask"].values
    assert torch.allclose(found["log_probs"].values[kept], found["old_log_probs"].values[kept], atol=1e-3)
    assert (found["advantages"].values[~kept] == 0).all()
    assert found["advantages"].values[kept].any()
    assert metrics["environment/turns"] == 3
    assert metrics["environment/failed"] == 0
    forked = actor.run(prompts, asks_anew)
    assert forked.rows == 18
    forked |= actor.compute_log_prob(forked)
    found = forked.get()
    assert found["turns"].tolist() == [3] * 18
    assert torch.allclose(found["log_probs"].values, found["old_log_probs"].values, atol=1e-3)
    _, figures = learned(actor, forked)
    assert figures["actor/grad_norm"] > 0
    assert forked.metrics().get()["response/length_mean"] == len(found["response_ids"].values) / 6
    with pytest.raises(ConfigError, match="6 trajectories"):
        actor.update_actor(forked | hf.compute_advantage(forked, "grpo"), minibatches=4)
    with pytest.raises(ConfigError, match="may wait for a tool"):
        actor.advance_rows(prompts, until=hf.Until(steps=1), environment=Echo)
