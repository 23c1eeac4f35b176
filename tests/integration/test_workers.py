"""The workers of the paper's table 4 on real hosts, against transformers.

An actor with vLLM takes seconds to start, so each placement runs one script (`observe`) whose outcome the tests read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybridflow as hf
from hybridflow.engine3d.hybrid_engine import TransitionReport
from tests import tiny_models
from tests.tiny_models import make_prompts, make_rows

TOLERANCE = 1e-3  # nats per token, between vLLM and Megatron in float32
UPDATES = 3
# training and (p_g, t_g) of generation; data parallel over what is left of four hosts
PLACEMENTS: dict[str, tuple[Any, tuple[int, int]]] = {
    "d2": (hf.Megatron(tp=2), (1, 1)),
    "p2t2": (hf.Megatron(tp=2, pp=2), (1, 1)),
    "t4": (hf.Megatron(tp=4), (1, 2)),
    "fsdp-tp": (hf.FSDP(tp=2), (1, 2)),
    "hsdp": (hf.FSDP(replicate=2), (1, 4)),
    "zero-3": (hf.ZeRO(stage=3), (2, 1)),
}
SAMPLING = hf.Sampling(max_tokens=8, seed=5)


@dataclass
class Observed:
    """What one actor did: batches as they came home, and the updated model in `saved`."""

    saved: Path
    sampled: hf.Batch
    several: hf.Batch
    figures: dict[str, float]
    pretrain_loss: float
    updates: list[dict[str, float]] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    drawn: list[hf.Batch] = field(default_factory=list)
    greedy: list[list[int]] = field(default_factory=list)
    text: hf.Batch | None = None


@pytest.fixture(scope="module")
def observe(pool, policy, tmp_path_factory) -> Callable[[str], Observed]:
    """The outcome of a placement, by its name; run when it is first asked for."""
    known: dict[str, Observed] = {}

    def observed(name: str) -> Observed:
        if name not in known:
            train, (p_g, t_g) = PLACEMENTS[name]
            actor = hf.ActorWorker.on(
                pool,
                name=f"actor-{name}",
                model=policy,
                train=train,
                optim=hf.SGD(lr=0.5, clip_grad=1.0),
                generate=hf.VLLM(tp=t_g, pp=p_g, sampling=SAMPLING),
            )
            try:
                known[name] = run(actor, tmp_path_factory.mktemp(name) / "saved")
            finally:
                actor.close()
        return known[name]

    return observed


def run(actor: hf.WorkerGroup, saved: Path) -> Observed:
    """Sample, update three times on the same tokens, sample after each update, save."""
    prompts = hf.BatchRef.from_batch(make_prompts())
    batch = actor.generate_sequences(prompts)
    batch |= actor.compute_log_prob(batch)
    several = actor.generate_sequences(prompts, n=3, max_tokens=4)
    loss = actor.compute_loss(batch).get()["actor/pretrain_loss"]
    found = Observed(saved, batch.get(), several.get(), batch.metrics().get(), loss)
    generator = torch.Generator().manual_seed(7)
    before = found.sampled["old_log_probs"].values
    for _ in range(UPDATES):
        noise = torch.randn(len(before), generator=generator)
        batch |= hf.Batch({"advantages": found.sampled["response_ids"].with_values(noise)})
        found.updates.append(actor.update_actor(batch, minibatches=2, uneven=True).get())
        batch |= actor.compute_log_prob(batch)
        after = batch["old_log_probs"].get().values
        found.moved.append(float((after - before).abs().max()))
        before = after
        for temperature in (1.0, 0.7):
            drawn = actor.generate_sequences(prompts, temperature=temperature)
            found.drawn.append((drawn | actor.compute_log_prob(drawn)).get())
    found.greedy = actor.generate_sequences(prompts, greedy=True).get()["response_ids"].tolist()
    texts = hf.Batch({"row_id": prompts.get("row_id")["row_id"], "prompt": decoded(prompts.get())})
    found.text = actor.generate_sequences(texts, greedy=True).get()
    with tiny_models.away(actor.settings["model"]):  # whoever tidies up while a run goes on
        assert actor.save(saved) == str(saved)
    return found


def decoded(prompts: hf.Batch) -> list[str]:
    return tiny_models.TEXT.tokenizer().batch_decode(prompts["prompt_ids"].tolist())


def difference(one: hf.Ragged, other: hf.Ragged) -> float:
    assert torch.equal(one.offsets, other.offsets)
    return float((one.values - other.values).abs().max())


# The actor: generation and training of one model


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_generation_has_the_weights_of_every_update(observe, name):
    """vLLM's log-probabilities of what it drew against training's, after each of three updates that really moved."""
    seen = observe(name)
    assert difference(seen.sampled["log_probs"], seen.sampled["old_log_probs"]) < TOLERANCE
    assert len(seen.drawn) == 2 * UPDATES
    for batch in seen.drawn:
        assert difference(batch["log_probs"], batch["old_log_probs"]) < TOLERANCE
    assert min(seen.moved) > 100 * TOLERANCE, seen.moved
    cold = [float(batch["temperature"].unique()) for batch in seen.drawn]
    assert cold == pytest.approx([1.0, 0.7] * UPDATES)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_drift_between_the_engines_is_a_figure_of_every_batch(observe, name):
    seen = observe(name)
    drift = seen.sampled["log_probs"].values - seen.sampled["old_log_probs"].values
    assert seen.figures["actor/rollout_log_prob_diff"] == pytest.approx(float(drift.abs().mean()), abs=1e-7)
    assert 0 < seen.figures["actor/rollout_log_prob_diff"] < TOLERANCE
    assert seen.figures["response/tokens"] == len(drift)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_log_probs_are_those_of_transformers(observe, policy, name):
    seen = observe(name)
    assert difference(tiny_models.response_log_probs(policy, seen.sampled), seen.sampled["old_log_probs"]) < 1e-4
    for batch, temperature in zip(seen.drawn[-2:], (1.0, 0.7), strict=True):
        expected = tiny_models.response_log_probs(seen.saved, batch, temperature)
        assert difference(expected, batch["old_log_probs"]) < 1e-4


def test_the_same_seed_gives_the_same_responses_at_any_placement(observe):
    first = observe("d2")
    for other in map(observe, (name for name in PLACEMENTS if name != "d2")):
        assert other.sampled["response_ids"].equal(first.sampled["response_ids"])
        assert other.several["response_ids"].equal(first.several["response_ids"])


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if name != "d2"])
def test_updates_do_not_depend_on_the_placement(observe, name):
    """Seven rows in two mini-batches over one, two and four data parallel ranks, and on every backend: equal metrics,
    equal models. Changing the backend is changing one setting."""
    one, two = observe(name), observe("d2")
    for found, expected in zip(one.updates, two.updates, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert {"actor/loss", "actor/grad_norm", "actor/lr", "actor/ppo_kl", "actor/clip_fraction"} <= set(found)
    weights = [AutoModelForCausalLM.from_pretrained(seen.saved).state_dict() for seen in (one, two)]
    assert max(float((weights[0][key] - weights[1][key]).abs().max()) for key in weights[0]) < 1e-4


def test_rows_keep_their_order_and_columns(observe):
    """Each prompt n times in a row, with its own columns, on two data parallel ranks with uneven rows."""
    prompts, several = make_prompts(), observe("d2").several
    assert several.rows == 21
    assert several["group_id"].tolist() == prompts["row_id"].repeat_interleave(3).tolist()
    assert several["row_id"].tolist() == [row * 3 + k for row in prompts["row_id"].tolist() for k in range(3)]
    assert several["answer"] == [answer for answer in prompts["answer"] for _ in range(3)]
    assert several["prompt_ids"].equal(prompts["prompt_ids"].index(torch.arange(7).repeat_interleave(3)))
    assert torch.equal(several["num_tokens"], several["prompt_ids"].lengths + several["response_ids"].lengths)
    assert several["response_mask"].values.all()
    assert several["response_ids"].lengths.max() <= 4
    for first in range(0, 21, 3):
        assert len({tuple(row) for row in several["response_ids"].tolist()[first : first + 3]}) > 1
    once = observe("d2").sampled
    assert once["row_id"].tolist() == prompts["row_id"].tolist()
    assert "group_id" not in once
    ended = [tiny_models.SIZES["eos_token_id"] in row for row in once["response_ids"].tolist()]
    assert once["finished"].tolist() == ended


def test_responses_as_text(observe):
    """`prompt` is tokenised where there are no `prompt_ids`, and responses come back as text."""
    seen = observe("d2")
    assert seen.text is not None
    assert seen.text["prompt_ids"].equal(make_prompts()["prompt_ids"])
    assert seen.text["response_ids"].tolist() == seen.greedy
    tokenizer = tiny_models.TEXT.tokenizer()
    assert seen.text["response"] == tokenizer.batch_decode(seen.greedy, skip_special_tokens=True)
    assert seen.text["prompt"] == decoded(make_prompts())


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_saved_model_is_the_one_that_generates(observe, name):
    seen = observe(name)
    assert tiny_models.greedy(seen.saved, make_prompts()["prompt_ids"].tolist(), 8) == seen.greedy


def test_a_saved_model_goes_on_in_a_new_actor(place, observe, pool):
    seen = observe("d2")
    actor = place(hf.ActorWorker, pool[1:2], name="heir", model=seen.saved, generate=hf.VLLM(sampling=SAMPLING))
    drawn = actor.generate_sequences(make_prompts(), greedy=True).get()
    assert drawn["response_ids"].tolist() == seen.greedy
    assert drawn["response"] == seen.text["response"]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_pretraining_loss_is_that_of_transformers(observe, policy, name):
    """The mean over all response tokens, not over rows or ranks."""
    seen = observe(name)
    expected = -float(tiny_models.response_log_probs(policy, seen.sampled).values.mean())
    assert seen.pretrain_loss == pytest.approx(expected, abs=1e-4)


# The transition between training and generation

TRANSITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "moved aside": {"offload": ("optimizer", "gradients", "generation"), "overlap": True},
    "buckets": {"bucket_mb": 0.01},
    "wider": {"generate": hf.VLLM(tp=4, sampling=SAMPLING)},  # than training: any sizes will do
}


@dataclass
class Moved:
    """What an actor at (1, 2, 2) drew before and after an update, and what each rank reported and held."""

    drawn: list[list[list[int]]]
    update: dict[str, float]
    reports: list[list[TransitionReport]]
    generating: list[dict[str, float]]
    training: list[dict[str, float]]


@pytest.fixture(scope="module")
def moved(pool, policy) -> dict[str, Moved]:
    found = {}
    for name, settings in TRANSITIONS.items():
        chosen = {"generate": hf.VLLM(tp=1, sampling=SAMPLING), "train": hf.Megatron(tp=2), "optim": hf.Adam(lr=1e-2)}
        actor = hf.ActorWorker.on(pool, name=f"mover-{name}", model=policy, **(chosen | settings))
        try:
            found[name] = _moved(actor)
        finally:
            actor.close()
    return found


def _moved(actor: hf.WorkerGroup) -> Moved:
    drawn, reports, prompts = [], [], make_prompts()
    update, training = {}, []
    for last in (False, True):
        drawn.append(actor.generate_sequences(prompts, greedy=True).get()["response_ids"].tolist())
        reports.append(actor.transition_report())
        generating = actor.memory()
        _ = actor.compute_log_prob(make_rows()).get()
        training = actor.memory()
        if not last:
            update = actor.update_actor(make_rows(), minibatches=2, uneven=True).get()
    drawn.append(actor.generate_sequences(prompts, greedy=True).get()["response_ids"].tolist())  # nothing changed
    reports.append(actor.transition_report())
    return Moved(drawn, update, reports, generating, training)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_every_way_to_generation_gives_the_same(moved, name):
    seen, plain = moved[name], moved["plain"]
    assert seen.drawn == plain.drawn
    assert seen.drawn[0] != seen.drawn[1] == seen.drawn[2]
    assert seen.update == plain.update  # bit by bit


@pytest.mark.parametrize("settings", [{}, TRANSITIONS["moved aside"]], ids=["plain", "moved aside"])
@pytest.mark.parametrize("train", [hf.FSDP(dtype="bfloat16"), hf.ZeRO(stage=2, dtype="bfloat16")], ids=["fsdp", "zero"])
def test_sharded_weights_travel_in_16_bits(place, pool, policy, train, settings):
    """FSDP's parameters are float32 and what generates is not; those of ZeRO-2 come back from main parameters."""
    generate = hf.VLLM(tp=2, dtype="bfloat16", sampling=SAMPLING)
    actor = place(
        hf.ActorWorker,
        pool,
        name="mover-16",
        model=policy,
        train=train,
        optim=hf.Adam(lr=1e-2),
        generate=generate,
        **settings,
    )
    seen = _moved(actor)
    assert seen.drawn[0] != seen.drawn[1] == seen.drawn[2]
    assert all(rank["memory/generation"] == 0 for rank in seen.training)


def test_transitions_report_what_they_cost(moved):
    received = {name: [rank.received_bytes for rank in seen.reports[1]] for name, seen in moved.items()}
    assert received["moved aside"] == received["plain"] == received["buckets"]
    for rank in moved["moved aside"].reports[1]:
        assert 0 <= rank.hidden_seconds <= rank.moved_seconds != 0
    for name, seen in moved.items():
        again = [rank.received_bytes for rank in seen.reports[2]]
        assert again == ([0] * 4 if name == "moved aside" else received[name])  # it came back from host memory


def test_memory_is_held_by_one_side_at_a_time(moved):
    for name in ("plain", "moved aside"):
        for generating, training in zip(moved[name].generating, moved[name].training, strict=True):
            assert generating["memory/kv_cache"] > 0
            assert generating["memory/generation"] > training["memory/parameters"] > generating["memory/parameters"]
            assert training["memory/kv_cache"] == training["memory/generation"] == 0


# Critic, reference, reward model


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_values_are_those_of_the_value_head(pool, classifier, pp, tp):
    critic = hf.CriticWorker.on(pool, model=classifier, train=hf.Megatron(tp=tp, pp=pp))
    rows = make_rows()
    found = critic.compute_values(hf.BatchRef.from_batch(rows)).get()["values"]
    critic.close()
    assert difference(tiny_models.response_values(classifier, rows), found) < 1e-4


def test_a_critic_learns_the_same_at_any_data_parallel_size(pool, classifier, policy):
    """One host against four as (2, 1, 2): seven rows, two mini-batches, two epochs."""
    rows, found, values = make_rows(), [], []
    for devices, pp in ((1, 1), (4, 2)):
        critic = hf.CriticWorker.on(
            pool[:devices], model=classifier, train=hf.Megatron(pp=pp), optim=hf.SGD(lr=0.05, clip_grad=0.0)
        )
        batch = hf.BatchRef.from_batch(rows)
        found.append([critic.update_critic(batch, minibatches=2, epochs=2, uneven=True).get() for _ in range(2)])
        values.append(critic.compute_values(batch).get()["values"])
        critic.close()
    assert found[0] == [pytest.approx(metrics, rel=1e-4, abs=1e-6) for metrics in found[1]]
    assert difference(*values) < 1e-4
    assert difference(values[0], tiny_models.response_values(classifier, rows)) > 100 * 1e-4
    assert found[0][1]["critic/squared_error"] < found[0][0]["critic/squared_error"]


def test_idle_models_wait_in_host_memory(pool, classifier, policy):
    """Nothing of them has device memory between calls, and their results are those of models that stay."""
    rows, results = make_rows(), []
    for offload in (False, True):
        settings = {"train": hf.Megatron(tp=2), "offload": offload}
        critic = hf.CriticWorker.on(pool[:2], model=classifier, optim=hf.Adam(lr=0.05), **settings)
        reference = hf.ReferenceWorker.on(pool[2:], model=policy, **settings)
        reward = hf.RewardWorker.on(pool[:2], model=classifier, **settings)
        groups = (critic, reference, reward)
        metrics = [critic.update_critic(rows, minibatches=2, uneven=True).get() for _ in range(2)]
        out = [critic.compute_values(rows).get()["values"].values, reward.compute_reward(rows).get()["rewards"]]
        out.append(reference.compute_ref_log_prob(rows).get()["ref_log_probs"].values)
        held = [rank["memory/parameters"] for group in groups for rank in group.memory()]
        assert [size == 0 for size in held] == [offload] * 6
        results.append((metrics, out))
        for group in groups:
            group.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_a_critic_from_a_language_model_starts_at_zero(pool, policy):
    critic = hf.CriticWorker.on(pool[:2], model=policy, train=hf.Megatron(tp=2))
    found = critic.compute_values(make_rows()).get()["values"]
    critic.close()
    assert torch.count_nonzero(found.values) == 0


def test_the_reference_divides_by_the_temperature_of_the_actor(pool, policy):
    reference = hf.ReferenceWorker.on(pool, model=policy, train=hf.Megatron(tp=2, pp=2))
    rows = make_rows()
    plain = reference.compute_ref_log_prob(rows).get()["ref_log_probs"]
    cooler = reference.compute_ref_log_prob(rows.with_columns(temperature=torch.full((7,), 0.7)))
    cooler = cooler.get()["ref_log_probs"]
    reference.close()
    assert difference(tiny_models.response_log_probs(policy, rows), plain) < 1e-4
    assert difference(tiny_models.response_log_probs(policy, rows, 0.7), cooler) < 1e-4


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_scores_are_those_of_the_classifier(pool, classifier, pp, tp):
    """The head at the last token of rows of different length; transformers pads them on the right."""
    reward = hf.RewardWorker.on(pool, model=classifier, train=hf.Megatron(tp=tp, pp=pp))
    rows = make_rows()
    found = reward.compute_reward(hf.BatchRef.from_batch(rows)).get()["rewards"]
    reward.close()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, tiny_models.scores(classifier, rows), atol=1e-4, rtol=0)
    assert len(found.unique()) == len(rows)


def length_reward(prompts, completions, answer, **columns):
    """Ends of the answers and lengths: shows that every row met its own columns."""
    assert set(columns) >= {"row_id", "num_tokens"}
    return [len(text) + int(name.split()[1]) / 100 for text, name in zip(completions, answer, strict=True)]


def test_a_reward_function_gets_every_row_with_its_columns(pool, policy):
    """Token ids become texts where the batch has none; the rows are uneven over four hosts."""
    reward = hf.RewardWorker.on(pool, function=length_reward, tokenizer=policy)
    rows = make_rows()
    found = reward.compute_reward(rows).get()["rewards"]
    with pytest.raises(hf.errors.ConfigError, match="this worker calls a function: there is nothing to save"):
        reward.save("somewhere")
    reward.close()
    texts = tiny_models.TEXT.tokenizer().batch_decode(rows["response_ids"].tolist(), skip_special_tokens=True)
    assert found.tolist() == pytest.approx([len(text) + i / 100 for i, text in enumerate(texts)])
    assert all(math.isfinite(value) for value in found.tolist())


ADAM = hf.Adam(lr=0.02, eps=1e-3)

SETUPS: dict[str, tuple[Any, Any, Any, Any]] = {  # of actor, critic, reference, reward
    "mixed": (hf.Megatron(tp=2), hf.FSDP(), hf.ZeRO(stage=3), hf.FSDP(tp=2)),
    "exchanged": (hf.FSDP(), hf.ZeRO(stage=2), hf.Megatron(tp=2), hf.ZeRO(stage=1)),
}


def ppo(place: Any, pool: hf.ResourcePool, name: str, policy: Path, classifier: Path) -> list[dict[str, float]]:
    """Two steps of PPO with four models, each on its own backend, on the devices of one pool."""
    train = dict(zip(("actor", "critic", "reference", "reward"), SETUPS[name], strict=True))
    generate = hf.VLLM(tp=1, sampling=SAMPLING)
    actor = place(
        hf.ActorWorker, pool, name=f"{name}-actor", model=policy, train=train["actor"], optim=ADAM, generate=generate
    )
    critic = place(hf.CriticWorker, pool, name=f"{name}-critic", model=classifier, train=train["critic"], optim=ADAM)
    reference = place(hf.ReferenceWorker, pool, name=f"{name}-reference", model=policy, train=train["reference"])
    reward = place(hf.RewardWorker, pool, name=f"{name}-reward", model=classifier, train=train["reward"])
    figures = []
    for seed in range(2):
        batch = actor.generate_sequences(hf.BatchRef.from_batch(make_prompts(seed=seed)))
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= critic.compute_values(batch)
        batch |= reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", gamma=1.0, lam=0.95, kl_coef=0.05)
        learned = [update(batch, minibatches=2, uneven=True) for update in (critic.update_critic, actor.update_actor)]
        figures.append({name: value for metrics in learned for name, value in metrics.get().items()})
    actor.close()  # a host generates for one actor
    return figures


def test_a_loop_does_not_notice_its_backends(place, pool, policy, classifier):
    mixed, exchanged = (ppo(place, pool, name, policy, classifier) for name in SETUPS)
    for found, expected in zip(mixed, exchanged, strict=True):
        assert {"actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm"} <= set(found)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert mixed[0] != mixed[1]
