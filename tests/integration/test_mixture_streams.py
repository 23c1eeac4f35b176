"""A mixture where loops take a loader: streams, dynamic sampling and traces."""

from __future__ import annotations

from collections import Counter

import hybridflow as hf


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
