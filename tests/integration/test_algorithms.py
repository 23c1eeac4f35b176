"""Loops of single algorithms on real hosts: state of advantages, dynamic sampling, preferences, distillation."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import hybridflow as hf
from hybridflow.errors import BatchError, ConfigError, MissingColumnError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO
from tests import tiny_models
from tests.contracts.example_models import load_model
from tests.tiny_models import make_rows

pytestmark = pytest.mark.usefixtures("pool")


def rollout() -> hf.Batch:
    tokens = hf.Ragged.from_lengths(torch.zeros(4), [1, 2, 0, 1])
    columns = ("values", "cost_values", "old_log_probs")
    return hf.Batch(
        {
            "response_mask": tokens.map(lambda t: torch.ones_like(t, dtype=torch.bool)),
            "rewards": torch.ones(4),
            "costs": torch.tensor([1.0, 1.0, 1.0, 0.25]),  # 0.75 on average: one response is empty
            "group_id": torch.tensor([0, 0, 1, 1]),
            "rewards/a": torch.tensor([1.0, 0.0, 0.0, 1.0]),
            "ref_log_probs": tokens.map(lambda t: t - 1.0),
            **dict.fromkeys(columns, tokens),
        }
    )


def test_a_multiplier_and_a_coefficient_go_on_from_call_to_call():
    lagrange, other = hf.algorithms.Lagrange(limit=0.25, lr=0.2), hf.algorithms.Lagrange(limit=0.25, lr=0.2)
    kl = hf.algorithms.AdaptiveKL(init=0.1, target=100.0, horizon=40)
    multiplier = 1.0
    for step in range(3):
        out = hf.compute_advantage(rollout(), "safe_rlhf", lagrange=lagrange, kl_coef=kl)
        assert {"cost_advantages", "cost_returns", "lagrange", "kl", "kl_coef"} <= set(out.columns)
        multiplier *= math.exp(0.2 * multiplier * 0.5)
        got = out.get(["lagrange", "kl_coef"])
        assert got["lagrange"].tolist() == pytest.approx([multiplier] * 4)
        assert got["kl_coef"].tolist() == pytest.approx([0.1 * (1 - 0.2 * 4 / 40) ** step] * 4)
    fresh = hf.compute_advantage(rollout(), "safe_rlhf", lagrange=other).get("lagrange")["lagrange"]
    assert fresh.tolist() == pytest.approx([math.exp(0.2 * 0.5)] * 4)


def test_the_statistics_of_rewards_continue_with_a_checkpoint(cluster, tmp_path):
    def step(norm: hf.algorithms.RunningNorm, rewards: list[float]) -> tuple[float, float]:
        batch = rollout().with_columns(rewards=torch.tensor(rewards))
        metrics = (hf.compute_advantage(batch, "reinforce", reward_norm=norm) | batch).metrics().get()
        return metrics["reward/norm_mean"], metrics["reward/norm_std"]

    norm, valid = hf.algorithms.RunningNorm(), [1.0, 2.0, 4.0]  # the third response is empty
    assert step(norm, [1.0, 2.0, 9.0, 4.0]) == pytest.approx((np.mean(valid), np.std(valid, ddof=1)))
    saved = hf.save(tmp_path / "saved", parts=[cluster.controller])
    after = step(norm, [0.0, 7.0, 9.0, 1.0])
    everything = [*valid, 0.0, 7.0, 1.0]
    assert after == pytest.approx((np.mean(everything), np.std(everything, ddof=1)))
    hf.load(saved, parts=[cluster.controller])
    assert step(norm, [0.0, 7.0, 9.0, 1.0]) == after
    fresh = step(hf.algorithms.RunningNorm(), [0.0, 7.0, 9.0, 1.0])
    assert fresh == pytest.approx((8 / 3, np.std([0.0, 7.0, 1.0], ddof=1)))


def test_figures_of_components_reach_the_driver():
    batch = hf.compute_advantage(rollout(), "gdpo", components=("a",)) | rollout()
    figures = batch.metrics().get()
    assert figures["reward/a/mean"] == pytest.approx(2 / 3)  # an empty response counts in no mean
    assert figures["cost/mean"] == pytest.approx(0.75)


def test_a_call_is_checked_before_it_is_sent():
    with pytest.raises(ConfigError, match="SafeRLHF needs lagrange="):
        hf.compute_advantage(rollout(), "safe_rlhf")
    with pytest.raises(MissingColumnError, match="rewards/b"):
        hf.compute_advantage(rollout(), "gdpo", components=("a", "b"))
    with pytest.raises(ConfigError, match="no setting 'components'"):
        hf.compute_advantage(rollout(), "grpo", components=("a",))


class Scorer:
    """Rewards of the groups whose prompt is in `mixed` differ; those of the others are 1."""

    @register(DP_PROTO, reads=("prompt", "row_id"), writes=("rewards", "rewards/length"))
    def score(self, batch, n):
        differs = torch.tensor([prompt.startswith("mixed") for prompt in batch["prompt"]])
        odd = batch["row_id"] % n != 0
        return hf.Batch({"rewards": (~differs | odd).float(), "rewards/length": batch["row_id"].float()})


PROMPTS = [{"prompt": f"{'mixed' if i % 4 == 1 else 'easy'} {i}"} for i in range(16)]
N = 3


@pytest.fixture
def scorer(pool, place):
    return place(Scorer, pool[:2])


def sampler(scorer, n=N):
    def sample(prompts):
        batch = prompts.repeat(n)
        return batch | scorer.score(batch, n=n)

    return sample


def loader(**settings) -> hf.PromptLoader:
    return hf.PromptLoader(PROMPTS, batch_size=4, seed=1, **settings)


def test_batches_have_the_rows_asked_for_and_only_groups_that_differ(scorer):
    batches = hf.dynamic_sampling(loader(), sampler(scorer), rows=3 * N, steps=4)
    seen = []
    for batch in batches:
        found = batch.get()
        assert len(batch) == len(found) == 3 * N
        assert all(prompt.startswith("mixed") for prompt in found["prompt"])
        assert found["rewards"].reshape(3, N).tolist() == [[0.0, 1.0, 1.0]] * 3
        assert found["group_id"].reshape(3, N).unique(dim=1).shape == (3, 1)
        seen += found["row_id"].tolist()
        figures = batches.metrics()
        assert figures["sampling/rounds"] >= 1
        assert figures["sampling/filled"] == 0
        rounds = figures["sampling/rounds"]
        # three quarters of the prompts give 1, a quarter gives (N - 1) / N
        assert figures["sampling/reward"] == pytest.approx(1 - figures["sampling/kept"] / N)
        assert figures["sampling/kept"] * rounds * 4 >= 3
    assert len(set(seen)) == len(seen) == 4 * 3 * N


def test_what_never_differs_is_filled_up_with_a_warning(scorer, caplog):
    easy = hf.PromptLoader([p for p in PROMPTS if p["prompt"].startswith("easy")], batch_size=2)
    batches = hf.dynamic_sampling(easy, sampler(scorer), rows=2 * N, steps=2, max_rounds=3)
    with caplog.at_level(logging.WARNING):
        found = [batch.get(["rewards"]) for batch in batches]
    assert [len(batch) for batch in found] == [2 * N] * 2
    assert all(bool((batch["rewards"] == 1).all()) for batch in found)
    assert batches.metrics() == {
        "sampling/rounds": 3.0,
        "sampling/kept": 0.0,
        "sampling/filled": 1.0,
        "sampling/reward": 1.0,
    }
    assert "after 3 rounds 0 of 6 rows are in groups whose rewards differ" in caplog.text


def test_the_column_that_decides_can_be_chosen(scorer):
    """Where other rewards always differ, such as those for length, a component decides."""
    (batch,) = hf.dynamic_sampling(loader(), sampler(scorer), rows=4 * N, steps=1, by="rewards/length")
    assert any(prompt.startswith("easy") for prompt in batch.get()["prompt"])


def test_a_state_continues_with_the_next_batch(scorer):
    first = loader()
    batches = iter(hf.dynamic_sampling(first, sampler(scorer), rows=2 * N))
    _ = next(batches)
    state = first.state()
    expected = next(batches).get(["row_id"])["row_id"]
    again = loader()
    again.load_state(state)
    (batch,) = hf.dynamic_sampling(again, sampler(scorer), rows=2 * N, steps=1)
    assert torch.equal(batch.get(["row_id"])["row_id"], expected)


def test_it_ends_with_the_prompts(scorer, caplog):
    with caplog.at_level(logging.WARNING):
        batches = list(hf.dynamic_sampling(loader(steps=5), sampler(scorer), rows=4 * 4 * N, max_rounds=4))
    assert [len(batch) for batch in batches] == [48]
    assert "the prompts ended after 1 batches; 12 rows" in caplog.text


def test_samples_that_cannot_be_used_are_refused(scorer):
    def run(sample, rows=2 * N, **settings):
        return list(hf.dynamic_sampling(loader(), sample, rows=rows, steps=1, **settings))

    good = sampler(scorer)
    with pytest.raises(BatchError, match="groups have 3 rows, which does not divide"):
        run(good, rows=7)
    with pytest.raises(BatchError, match=r"sizes \[2, 3\]"):
        run(lambda prompts: good(prompts)[1:])
    with pytest.raises(BatchError, match=r"2 rounds gave 24 rows in all. Raise the loader's batch_size"):
        run(good, rows=30, max_rounds=2)
    with pytest.raises(MissingColumnError, match="'rewards'"):
        run(lambda prompts: prompts.repeat(2))
    with pytest.raises(MissingColumnError, match="'group_id'; no call has written it: generate n >= 2"):
        run(lambda prompts: prompts | scorer.score(prompts, n=1))
    with pytest.raises(ConfigError, match="must return the batch with its rewards, got NoneType"):
        run(lambda prompts: None)


RECORDS = [
    {"prompt": f"{word} is", "chosen": word, "rejected": "not " + word} for word in ("red", "green", "blue", "grey")
]


def pairs(policy: Path, **options) -> hf.TextLoader:
    return hf.TextLoader(
        RECORDS,
        tokenizer=policy,
        batch_size=4,
        max_tokens=24,
        prompt="prompt",
        completion=("chosen", "rejected"),
        **options,
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_critic_learns_pairs_and_is_saved_as_a_reward_model(pool, place, policy, tmp_path, minibatches):
    critic = place(hf.CriticWorker, pool[:2], model=policy, train=hf.Megatron(micro_tokens=48), optim=hf.Adam(lr=3e-3))
    loader = pairs(policy, scored=True)
    held_out = hf.HeldOutLoss(critic.compute_values, loader, "bradley_terry", every=1)
    before = held_out.after(1).get()
    assert before["held_out/loss"] == pytest.approx(math.log(2))  # the head begins with zeros
    for batch, _ in zip(loader, range(8), strict=False):
        critic.update_critic(batch, loss="bradley_terry", minibatches=minibatches)
    found = held_out.after(2).get()
    assert found["held_out/loss"] < 0.5
    assert found["held_out/accuracy"] == 1.0
    critic.save(tmp_path / "model")
    batch = loader.whole()
    values = critic.compute_values(hf.BatchRef.from_batch(batch)).get("values")["values"]
    reward = place(hf.RewardWorker, pool[:1], model=tmp_path / "model", train=hf.Megatron())
    plain = pairs(policy).whole().without("trajectory_id", "preference")
    scores = reward.compute_reward(hf.BatchRef.from_batch(plain)).get("rewards")["rewards"]
    assert torch.allclose(scores, torch.stack([row[-1] for row in values.rows()]), atol=1e-5)
    assert bool((scores[::2] > scores[1::2]).all())


def test_dpo_prefers_and_its_held_out_loss_is_that_of_the_update(pool, place, policy):
    options = {"model": policy, "train": hf.Megatron()}
    actor = place(hf.ActorWorker, pool[:2], **options, optim=hf.Adam(lr=1e-3))
    reference = place(hf.ReferenceWorker, pool[:2], **options)
    batch = hf.BatchRef.from_batch(pairs(policy).whole())
    batch |= reference.compute_ref_log_prob(batch)
    held_out = hf.HeldOutLoss(actor.compute_log_prob, batch, "dpo", beta=0.5, every=1)
    assert held_out.best == "-held_out/loss"
    for step in range(4):
        measured = held_out.after(step).get()
        trained = actor.update_actor(batch, loss="dpo", beta=0.5).get()
        assert measured["held_out/loss"] == pytest.approx(trained["actor/loss"], abs=1e-5)
        assert measured["held_out/margin"] == pytest.approx(trained["actor/margin"], abs=1e-5)
    assert trained["actor/loss"] < 0.6
    assert trained["actor/accuracy"] == 1.0


def test_texts_with_steps_are_the_loader_of_a_run(cluster, pool, place, policy, tmp_path):
    cluster.parts.clear()
    actor = place(hf.ActorWorker, pool[:1], model=policy, train=hf.Megatron(), optim=hf.Adam(lr=1e-2))

    def loader(steps: int | None) -> hf.TextLoader:
        return hf.TextLoader(
            RECORDS, tokenizer=policy, batch_size=4, max_tokens=24, prompt="prompt", completion="chosen", steps=steps
        )

    texts = loader(None).whole()
    held_out = hf.HeldOutLoss(actor.compute_log_prob, texts, "sft", every=2)
    run = hf.Run(tmp_path / "run", every=2, console=False, held_out=held_out)
    done = 0
    for batch in run.loop(loader(4)):
        run.step(batch, actor.update_actor(batch, loss="sft"))
        done += 1
    run.finish()
    cluster.parts.clear()
    cluster.iterations.done_before = 0
    assert done == 4
    exact = actor.compute_loss(hf.BatchRef.from_batch(texts)).get()["actor/pretrain_loss"]
    assert held_out.after(2).get() == {"held_out/loss": pytest.approx(exact, abs=1e-5)}
    assert run.checkpoints.best_checkpoint is not None
    assert run.checkpoints.best_checkpoint[1] == pytest.approx(exact, abs=1e-5)


ROWS = 9


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def student(directory) -> Path:
    return tiny_models.make_policy(directory / "student", tokenizer=False)


@pytest.fixture(scope="module")
def teacher(directory) -> Path:
    """Another model over the same vocabulary, with other sizes and weights."""
    return tiny_models.make_policy(directory / "teacher", seed=7, tokenizer=False, hidden_size=96)


def mean_divergence(student: Path, teacher: Path, rows: hf.Batch, temperature: float) -> float:
    """KL(student || teacher) over the vocabulary, in transformers and float64."""
    own, other = load_model(student).double(), load_model(teacher).double()
    total, columns = 0.0, ("prompt_ids", "response_ids", "response_mask")
    for prompt, response, mask in zip(*(rows[name].rows() for name in columns), strict=True):
        ids = torch.cat([prompt, response]).long()[None]
        at = slice(len(prompt) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            p, q = ((m(ids).logits[0, at] / temperature).log_softmax(-1) for m in (own, other))
        total += float(((p.exp() * (p - q)).sum(-1) * mask).sum())
    return total / float(rows["response_mask"].values.sum())


def test_a_student_learns_from_a_teacher_in_another_layout(place, pool, student, teacher):
    """One rank's teacher in FSDP, a student in Megatron on two: the divergence falls, over the vocabulary and top k."""
    rows = make_rows(ROWS).with_columns(temperature=torch.full((ROWS,), 0.7))
    reference = place(hf.ReferenceWorker, pool[:1], name="teacher", model=teacher, train=hf.FSDP())
    actor = place(
        hf.ActorWorker,
        pool[:2],
        name="student",
        model=student,
        train=hf.Megatron(tp=2, micro_tokens=40),
        optim=hf.Adam(lr=3e-3),
        teacher=teacher,
    )
    batch = hf.BatchRef.from_batch(rows)
    batch |= reference.compute_ref_hidden_states(batch)
    batch |= reference.compute_ref_top_k(batch, k=4)
    found = [actor.update_actor(batch, loss="gkd", beta=1.0).get() for _ in range(6)]
    want = mean_divergence(student, teacher, rows, 0.7)
    assert found[0]["actor/divergence"] == pytest.approx(want, rel=1e-5)
    assert all(metrics["actor/skipped"] == 0 for metrics in found)
    assert found[-1]["actor/divergence"] < 0.9 * want
    top = [actor.update_actor(batch, loss=hf.algorithms.GKD(over="top_k", beta=1.0)).get() for _ in range(3)]
    assert top[-1]["actor/divergence"] < top[0]["actor/divergence"] < found[-1]["actor/divergence"]
    memory = actor.memory()
    assert all("memory/teacher" not in held for held in memory)
    broken = batch.get()
    broken["ref_hidden_states"].values[5] = float("nan")
    skipped = actor.update_actor(hf.BatchRef.from_batch(broken), loss="gkd", minibatches=1).get()
    assert skipped["actor/skipped"] == 1
    half = rows.with_columns(ref_hidden_states=batch.get()["ref_hidden_states"].to(torch.bfloat16))
    assert actor.update_actor(hf.BatchRef.from_batch(half), loss="gkd").get()["actor/skipped"] == 0


def test_what_cannot_work_is_refused_on_the_driver(place, pool, student, teacher, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    settings = {"model": student, "train": hf.Megatron(), "optim": hf.SGD(lr=0.1)}
    with pytest.raises(ConfigError, match=f"has a vocabulary of {config['vocab_size'] + 1} tokens"):
        hf.ActorWorker.on(pool[:1], **settings, teacher=other)
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    with pytest.raises(ConfigError, match=r"may scale or cap its logits.*over='top_k'"):
        hf.ActorWorker.on(pool[:1], **settings, teacher=other)
    (other / "config.json").write_text(json.dumps(config))
    own = tmp_path / "student"
    shutil.copytree(student, own)
    for home, table in ((own, {"a": 0, "b": 1}), (other, {"a": 1, "b": 0})):
        (home / "tokenizer.json").write_text(json.dumps({"model": {"vocab": table}}))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        hf.ActorWorker.on(pool[:1], **{**settings, "model": own}, teacher=other)
    actor = place(hf.ActorWorker, pool[:1], name="lonely", **settings)
    reference = place(hf.ReferenceWorker, pool[:1], name="teaches", model=teacher, train=hf.Megatron())
    batch = hf.BatchRef.from_batch(make_rows(4))
    with pytest.raises(ConfigError, match=r"give ActorWorker.on\(..., teacher=\)"):
        actor.update_actor(batch, loss="gkd")
    with pytest.raises(MissingColumnError, match="ref_top_ids"):
        actor.update_actor(batch, loss="gkd", over="top_k")
    for k in (0, config["vocab_size"] + 1, 2.0):
        with pytest.raises(ConfigError, match="give a whole number from 1 to"):
            reference.compute_ref_top_k(batch, k=k)
