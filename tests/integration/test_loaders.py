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
