"""Dynamic sampling on a cluster: batches of the right size and kind, whatever the rounds brought."""

from __future__ import annotations

import logging

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import BatchError, ConfigError, MissingColumnError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import DP_PROTO


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
