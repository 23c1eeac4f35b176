"""The loaders in a driver: prompts from a table with worker processes, and texts that an actor learns."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

import hybridflow as hf
from tests import tiny_models

RECORDS = [{"question": f"{word} is", "answer": word} for word in ("red", "green", "blue", "grey", "white")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("models") / "policy")


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
