"""The loaders in a driver: prompts from a table with worker processes, and texts that an actor learns."""

from __future__ import annotations

import json
from collections import Counter

import datasets
import pytest

import hybridflow as hf
from tests import tiny_models

RECORDS = [{"question": f"{word} is", "answer": word} for word in ("red", "green", "blue", "grey", "white")]


def test_prompts_of_a_dataset_come_with_workers_and_continue(pool, policy, settle, left_behind):
    settle()

    def loader(workers: int) -> hf.PromptLoader:
        return hf.PromptLoader(
            datasets.Dataset.from_list(RECORDS),
            prompt="question",
            batch_size=3,
            steps=4,
            tokenizer=policy,
            max_prompt_tokens=7,
            workers=workers,
        )

    first = loader(1)
    assert (first.filtered, len(first)) == (2, 4)
    seen = [prompts.get() for prompts in first]
    assert not left_behind()
    assert [row for batch in seen for row in batch["row_id"].tolist()] == list(range(12))
    assert {(row["prompt"], row["answer"]) for batch in seen for row in batch.to_dicts()} == {
        (f"{word} is", word) for word in ("red", "blue", "grey")
    }
    resumed = loader(0)
    resumed.load_state(first.state() | {"drawn": 2})
    assert [prompts.get().equal(batch) for prompts, batch in zip(resumed, seen[2:], strict=True)] == [True, True]


def test_an_actor_learns_texts(pool, place, policy):
    actor = place(
        hf.ActorWorker, pool[:2], name="reader", model=policy, train=hf.Megatron(tp=1), optim=hf.Adam(lr=1e-2)
    )
    texts = hf.TextLoader(
        RECORDS, tokenizer=policy, batch_size=4, max_tokens=16, prompt="question", completion="answer"
    )
    batch = next(texts)
    expected = -float(tiny_models.response_log_probs(policy, batch.get()).values.mean())
    assert actor.compute_loss(batch).get()["actor/pretrain_loss"] == pytest.approx(expected, abs=1e-4)
    for text, _ in zip(texts, range(6), strict=False):
        metrics = actor.update_actor(text, loss="pretrain")
    assert metrics.get()["actor/pretrain_loss"] < 0.7 * expected
    assert texts.state()["drawn"] == 8  # zip takes one more than it gives
    own = hf.text_batch([(record["question"], record["answer"]) for record in RECORDS[:4]], actor)
    assert actor.update_actor(own, loss="sft").get()["actor/sft_loss"] < 0.7 * expected


def test_a_prompt_longer_than_the_context_is_found_before_the_first_iteration(pool, place, policy):
    """Last of the file, and not tokenised by the loader: no batch has been drawn."""
    records = [*RECORDS, {"question": "x" * tiny_models.SIZES["max_position_embeddings"], "answer": ""}]
    given = {"prompt": "question", "batch_size": 1, "shuffle": False, "steps": 6}
    assert len(list(hf.PromptLoader(records, **given))) == 6  # no group generates
    generate = hf.VLLM(sampling=hf.Sampling(max_tokens=2))
    place(hf.RolloutWorker, pool[2:3], model=policy, generate=generate)
    loader = hf.PromptLoader(records, **given)
    with pytest.raises(hf.errors.PromptError, match=r"1 of 6 prompts .* record 5, has .*max_prompt_tokens="):
        next(iter(loader))
    assert loader.state()["drawn"] == 0
    assert len(list(hf.PromptLoader(RECORDS, **given))) == 6
    assert len(list(hf.PromptLoader(records, **given, check_context=False))) == 6
    limit = {"tokenizer": policy, "max_prompt_tokens": 20}
    assert len(list(hf.PromptLoader(records, **given, **limit))) == 6


def test_the_cure_of_a_long_prompt_continues_a_run(caplog, policy):
    """Leaving a prompt out changes the set, which a state refuses unless the loader says that it may."""
    given = {"prompt": "question", "batch_size": 2, "steps": 4, "tokenizer": policy}
    before = hf.PromptLoader(RECORDS, **given)
    state = before.state() | {"drawn": 2}
    with pytest.raises(hf.errors.ConfigError, match="allow_changed=True"):
        hf.PromptLoader(RECORDS, **given, max_prompt_tokens=7).load_state(state)
    loader = hf.PromptLoader(RECORDS, **given, max_prompt_tokens=7, allow_changed=True)
    loader.load_state(state)
    assert loader.state()["drawn"] == 2
    assert "prompts=5, this loader has 3" in caplog.text
    with pytest.raises(hf.errors.ConfigError, match="has seed=0, this loader has 1"):
        hf.PromptLoader(RECORDS, **given, seed=1, allow_changed=True).load_state(state)


def length(completions: list[str], answer: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


def none(completions: list[str]) -> list[float]:
    return [-1.0] * len(completions)


def test_a_mixture_trains_in_a_run_that_is_stopped_and_continues(cluster, pool, place, policy, tmp_path):
    """Rewards, metrics and held-out means by source, and the rows of a run that was never stopped."""
    cluster.parts.clear()
    actor = place(hf.ActorWorker, pool[:1], model=policy, train=hf.Megatron(), generate=hf.VLLM(), optim=hf.Adam(lr=0))
    reward = place(hf.RewardWorker, pool[:1], function={"colour": length, "word": none}, by="source")

    def mixture() -> hf.Mixture:
        sources = {"colour": RECORDS, "word": [record | {"question": "a"} for record in RECORDS]}
        loaders = {
            name: hf.PromptLoader(rows, prompt="question", batch_size=4, steps=5) for name, rows in sources.items()
        }
        return hf.Mixture(loaders, weights=lambda step: {"colour": 3, "word": 1 + step}, seed=2)

    whole, seen = [batch["prompt"] for batch in mixture().drawn()], []

    def train(until: int) -> dict[str, float]:
        held_out = hf.HeldOut(actor, reward, mixture(), every=5, by="source", column="rewards")
        run = hf.Run(tmp_path / "run", every=1, console=False, held_out=held_out)
        for prompts in run.loop(mixture()):
            batch = actor.generate_sequences(prompts, max_tokens=3)
            batch |= reward.compute_reward(batch)
            seen.append(list(batch.get("prompt")["prompt"]))
            run.step(batch)
            if run.checkpoints.done == until:
                run.checkpoints.save()
                run.finish()
                cluster.parts.clear()
                cluster.iterations.done_before = 0
                return {}
        run.finish()
        return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()][-1]

    train(until=2)
    last = train(until=99)
    cluster.parts.clear()
    cluster.iterations.done_before = 0
    assert seen == [list(prompts) for prompts in whole]
    assert last["source/word/reward_mean"] == last["reward/word/mean"] == last["held_out/reward/word"] == -1.0
    assert last["source/colour/reward_mean"] == last["reward/colour/mean"] >= 0
    assert last["source/colour/share"] + last["source/word/share"] == 1.0
    assert last["held_out/reward"] == pytest.approx((last["held_out/reward/colour"] - 1.0) / 2)


def mixture(steps: int = 6) -> hf.Mixture:
    rows = {"a": [f"a{i}" for i in range(7)], "b": [f"b{i}" for i in range(5)]}
    loaders = {
        name: hf.PromptLoader([{"prompt": text} for text in texts], batch_size=4, steps=steps)
        for name, texts in rows.items()
    }
    return hf.Mixture(loaders, weights={"a": 3, "b": 1}, seed=1)


def sources(batch: hf.BatchRef) -> list[tuple[str, str]]:
    found = batch.get(["source", "prompt"])
    return list(zip(found["source"], found["prompt"], strict=True))


def test_a_stream_draws_from_a_mixture_and_continues(pool, place, policy, settle):
    settle()
    rollout = place(hf.RolloutWorker, pool[2:4], model=policy, generate=hf.VLLM(sampling=hf.Sampling(max_tokens=3)))
    wanted = [pair for prompts in mixture().drawn() for pair in zip(prompts["source"], prompts["prompt"], strict=True)]
    first = hf.stream(mixture(), rollout, rows=8, n=2, max_staleness=10)
    seen = [pair for _, batch in zip(range(1), first, strict=False) for pair in sources(batch)]
    state = first.state()
    second = hf.stream(mixture(), rollout, rows=8, n=2, max_staleness=10)
    second.load_state(state)
    seen += [pair for batch in second for pair in sources(batch)]
    assert Counter(seen) == Counter({pair: 2 * count for pair, count in Counter(wanted).items()})


def test_dynamic_sampling_draws_from_a_mixture(pool, place, policy, settle):
    settle()
    reward = place(hf.RewardWorker, pool[:1], function=lambda completions: [float(len(text)) for text in completions])

    def sample(prompts: hf.BatchRef) -> hf.BatchRef:
        rows = prompts.get()
        texts = ["x" * (i % 2) for i in range(2 * rows.rows)]
        batch = hf.BatchRef.from_batch(
            rows.repeat(2).with_columns(response=texts, group_id=[i // 2 for i in range(len(texts))])
        )
        return batch | reward.compute_reward(batch)

    batches = list(hf.dynamic_sampling(mixture(), sample, rows=8, steps=2))
    assert [Counter(name for name, _ in sources(batch)) for batch in batches] == [Counter(a=6, b=2)] * 2
