"""Options that change draws: tokens are those of the definition on Hugging Face's logits, log-probabilities are the
policy's, and neither interruptions nor neighbours make a difference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.algorithms.masked import batch_temperature
from hybridflow.engines.contract import Row
from hybridflow.errors import ConfigError, PromptError, WorkerError
from tests import tiny_models

TOKENS = 10
LETTER = "e"
PENALTIES = {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": -0.4}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return tiny_models.make_chat(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def model(policy) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy).float().eval()


@pytest.fixture(scope="module")
def rollout(keep, pool, policy) -> hf.WorkerGroup:
    """Two replicas."""
    sampling = hf.Sampling(max_tokens=TOKENS, ignore_eos=True, seed=3)
    return keep(hf.RolloutWorker, pool[2:4], model=policy, generate=hf.VLLM(sampling=sampling))


@pytest.fixture(scope="module")
def prompts() -> hf.Batch:
    return hf.Batch({"row_id": torch.tensor([4, 5, 9]), "prompt": ["the sea", "a tree", "we see"]})


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, -1].float()


def edited(logits: torch.Tensor, prompt: list[int], response: list[int], options: dict[str, Any]) -> torch.Tensor:
    """vLLM's documentation, written out."""
    out = logits.clone()
    for token, bias in options.get("logit_bias", {}).items():
        out[token] += bias
    for token in set(prompt) | set(response):
        penalty = options.get("repetition_penalty", 1.0)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(response):
        out[token] -= options.get("frequency_penalty", 0.0) * response.count(token) + options.get(
            "presence_penalty", 0.0
        )
    return out


@pytest.mark.parametrize(
    "options", [{}, PENALTIES, {"logit_bias": {70: 4.0, 80: 4.5}}], ids=["none", "penalties", "bias"]
)
def test_greedy_tokens_follow_the_definition_and_log_probs_are_the_policys(rollout, model, prompts, options):
    found = rollout.generate_sequences(prompts, greedy=True, **options).get()
    plain = rollout.generate_sequences(prompts, greedy=True).get()
    for row in range(prompts.rows):
        prompt, response = found["prompt_ids"].row(row).tolist(), list[int]()
        for token, log_prob in zip(found["response_ids"].row(row).tolist(), found["log_probs"].row(row), strict=True):
            logits = next_logits(model, prompt + response)
            assert token == int(edited(logits, prompt, response, options).argmax())
            assert log_prob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
            response.append(token)
    assert (found["response_ids"].equal(plain["response_ids"])) == (not options)


def continued(rollout: hf.WorkerGroup, state: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    found = dict[tuple[int, int], list[int]]()
    call = rollout.advance_rows(rows=json.loads(json.dumps(state)), until=hf.Until(steps=50), replica=1).get().get()
    for row_id, index, ids in zip(call["row_id"], call["response_index"], call["response_ids"].rows(), strict=True):
        found.setdefault((int(row_id), int(index)), ids.tolist())
    return found


def of_call(whole: hf.Batch, prompts: hf.Batch) -> dict[tuple[int, int], list[int]]:
    names = [(row_id, k) for row_id in prompts["row_id"].tolist() for k in range(2)]
    return {name: ids.tolist() for name, ids in zip(names, whole["response_ids"].rows(), strict=True)}


@pytest.mark.parametrize("options", [PENALTIES, {"min_p": 0.3}, {"bad_words": (LETTER,)}, {"logit_bias": {70: 5.0}}])
def test_interrupted_rows_and_rows_with_neighbours_draw_the_same(rollout, prompts, options):
    whole = rollout.generate_sequences(prompts, n=2, **options).get()
    neighbours = prompts.with_columns(row_id=prompts["row_id"] + 100)
    _ = rollout.advance_rows(prompts, until=hf.Until(steps=4), replica=0, n=2, **options)
    _ = rollout.advance_rows(neighbours, until=hf.Until(steps=1), replica=1, n=3)  # without options
    state = rollout.withdraw_rows(replica=0).get()
    assert [len(row["token_ids"]) for row in state] == [4] * 6
    found, wanted = continued(rollout, state), of_call(whole, prompts)
    assert {name: found[name] for name in wanted} == wanted
    assert rollout.withdraw_rows().get() == [[], []]


def test_min_p_and_bad_words_forbid_tokens(rollout, model, prompts, policy):
    found = rollout.generate_sequences(prompts, n=4, min_p=0.5, temperature=1.5).get()
    free = rollout.generate_sequences(prompts, n=4, temperature=1.5).get()
    for row in range(found.rows):
        ids, size = found["prompt_ids"].row(row).tolist(), len(found["prompt_ids"].row(row))
        ids += found["response_ids"].row(row).tolist()
        for at in range(size, len(ids)):
            logits = next_logits(model, ids[:at]) / 1.5
            p = logits.softmax(-1)
            assert p[ids[at]] >= 0.5 * p.max() - 1e-6
            assert found["log_probs"].row(row)[at - size] == pytest.approx(
                float(logits.log_softmax(-1)[ids[at]]), abs=1e-4
            )
    assert not found["response_ids"].equal(free["response_ids"])
    letters = sorted({letter for text in free["response"] for letter in text if letter.isascii() and letter.isalnum()})
    banned = rollout.generate_sequences(prompts, n=4, temperature=1.5, bad_words=letters[:3]).get()
    assert letters
    assert not any(letter in text for text in banned["response"] for letter in letters[:3])


def test_the_ratio_starts_at_one_with_every_option(pool, place, policy, prompts):
    """compute_log_prob compares the sampling engine's log-probabilities with its own, and would refuse a difference."""
    options = {**PENALTIES, "min_p": 0.1, "logit_bias": {70: 3.0}, "bad_words": (LETTER,)}
    actor = place(
        hf.ActorWorker,
        pool[:1],
        model=policy,
        train=hf.Megatron(),
        generate=hf.VLLM(),
        mismatch=hf.Mismatch(refuse=1e-3),
    )
    batch = actor.generate_sequences(prompts, max_tokens=TOKENS, **options)
    batch |= actor.compute_log_prob(batch)
    found = batch.get(["log_probs", "old_log_probs"])
    assert torch.allclose(found["log_probs"].values, found["old_log_probs"].values, atol=1e-4)


def test_wrong_options_are_refused(rollout, prompts):
    for wrong, message in (
        ({"min_p": 1.5}, r"min_p=1.5\): must be a number from 0 to 1"),
        ({"presence_penalty": 3}, "must be a number from -2 to 2"),
        ({"repetition_penalty": 0}, "must be a finite number above 0"),
        ({"bad_words": ("",)}, "give words; ids of tokens go into logit_bias"),
        ({"logit_bias": {"a": 1}}, "give numbers by ids of tokens"),
        ({"logit_bias": {-1: 1}}, "give numbers by ids of tokens"),
        ({"minp": 0.1}, "Did you mean 'min_p'"),
    ):
        with pytest.raises(ConfigError, match=message):
            rollout.generate_sequences(prompts, **wrong)
    with pytest.raises((ConfigError, WorkerError), match=r"logit_bias=.*the vocabulary is"):
        rollout.generate_sequences(prompts, logit_bias={100_000: 1.0}).get()
    sampling = hf.Sampling(logit_bias={"7": 1, 3: -2}, bad_words=["x"])  # type: ignore[dict-item, arg-type]
    assert sampling.logit_bias == ((3, -2.0), (7, 1.0))
    row = Row(1, 0, [1], sampling, 5)
    assert Row(**json.loads(json.dumps(asdict(row)))) == row


async def answer(row: dict[str, Any], model: Any) -> float:
    first = await model.chat([{"role": "user", "content": row["prompt"]}], max_tokens=6, bad_words=[LETTER, "a"])
    messages = [{"role": "user", "content": row["prompt"]}, first, {"role": "user", "content": "again"}]
    second = await model.chat(messages, logit_bias={ord("Z") - 33: 50.0}, max_tokens=3)
    assert LETTER not in first["content"]
    return float(len(set(second["content"])) == 1)


async def through_a_client(row: dict[str, Any], model: Any) -> float:
    import aiohttp

    body = {"messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 4, "logit_bias": {"57": 50.0}}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{model.base_url}/chat/completions", json=body) as asked:
            found = await asked.json()
        async with session.post(f"{model.base_url}/chat/completions", json=body | {"min_p": 7}) as refused:
            assert refused.status == 400, await refused.text()
    return float(len(set(found["choices"][0]["message"]["content"])) == 1)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("agent", [answer, through_a_client])
def test_turns_of_agents_have_options_of_their_own(rollout, prompts, agent):
    found = rollout.run(prompts, agent, presence_penalty=0.5).get()
    last = {int(name): float(value) for name, value in zip(found["trajectory_id"], found["rewards"], strict=True)}
    assert set(last.values()) == {1.0}


async def at_temperatures(row: dict[str, Any], model: Any) -> float:
    """Three turns of one conversation by a client, of which the last is greedy, at a temperature of its own each."""
    import aiohttp

    messages = [{"role": "user", "content": row["prompt"]}]
    headers = {"Authorization": f"Bearer {model.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for own in ({"temperature": 0.25, "top_p": 0.5}, {"temperature": 1.5}, {"temperature": 0}):
            body = {"messages": messages, "max_completion_tokens": 4} | own
            async with session.post(f"{model.base_url}/chat/completions", json=body) as asked:
                messages += [(await asked.json())["choices"][0]["message"], {"role": "user", "content": "go"}]
    with pytest.raises(PromptError, match="Leave seed out"):
        await model.chat(messages, seed=5)
    with pytest.raises(PromptError, match="Leave n out"):
        await model.chat(messages, n=2)
    with pytest.raises(PromptError, match="Did you mean 'temperature'"):
        await model.chat(messages, temperatur=2)
    return 1.0


@pytest.mark.thinned(1)
@pytest.mark.parametrize("greedy", [False, True])
def test_turns_at_temperatures_of_their_own_are_rows_at_them(rollout, model, prompts, greedy):
    """The row says what its tokens were divided by, which training repeats."""
    found = rollout.run(prompts, at_temperatures, greedy=greedy).get().to_dicts()
    assert [row["environment_failure"] for row in found] == [None] * 9
    assert [row["temperature"] for row in found] == [0.25, 1.5, 1.0] * 3
    assert len({row["trajectory_id"] for row in found}) == 3
    for row in found:
        assert len(row["response_ids"]) == 4
        for at, (token, log_prob) in enumerate(zip(row["response_ids"], row["log_probs"], strict=True)):
            logits = next_logits(model, [*row["prompt_ids"], *row["response_ids"][:at]])
            assert abs(log_prob - (logits / row["temperature"]).log_softmax(-1)[token]) < 1e-3
            if row["temperature"] == 1.0:
                assert token == logits.argmax()
                assert row["response_mask"][at] is greedy  # in a call that samples nothing was drawn
            if row["temperature"] == 0.25:  # top_p
                above = (logits / 0.25).softmax(-1)
                assert above[above > above[token]].sum() < 0.5


async def at_one_temperature(row: dict[str, Any], model: Any) -> float:
    """The first prompt's agents fail before their first turn; others draw a turn, then have a greedy one."""
    if row["prompt"] == "a tree":
        raise RuntimeError("no turn")
    first = await model.chat([{"role": "user", "content": row["prompt"]}], temperature=0.75, max_tokens=4)
    asked = [{"role": "user", "content": row["prompt"]}, first, {"role": "user", "content": "go"}]
    await model.chat(asked, greedy=True, max_tokens=4)
    return 1.0


def test_rows_without_a_draw_have_no_say_in_the_temperature(rollout, prompts):
    """Training computes at the temperature of the tokens that count."""
    found = rollout.run(prompts, at_one_temperature, on_failure="mask").get()
    counted = [any(row) for row in found["response_mask"].tolist()]
    assert counted.count(False) >= 1
    assert counted.count(True) >= 1
    assert {t for t, kept in zip(found["temperature"].tolist(), counted, strict=True) if kept} == {0.75}
    assert batch_temperature(found) == 0.75


async def twice(row: dict[str, Any], model: Any) -> float:
    first = await model.chat([{"role": "user", "content": row["prompt"]}], max_tokens=7)
    await model.chat(
        [{"role": "user", "content": row["prompt"]}, first, {"role": "user", "content": "go"}], max_tokens=7
    )
    return 0.0


def test_a_turn_that_continues_a_cache_has_its_whole_past_as_prompt(rollout, model, prompts):
    found = rollout.run(prompts, twice, greedy=True, **PENALTIES).get()
    seen = 0
    for row in found.to_dicts():
        ids, start = [*row["prompt_ids"], *row["response_ids"]], len(row["prompt_ids"])
        for at in range(start, len(ids)):
            turn = row["turn_ids"][at - start]
            if turn < 0:
                continue
            begun = start + row["turn_ids"].index(turn)
            logits = next_logits(model, ids[:at])
            assert ids[at] == int(edited(logits, ids[:begun], ids[begun:at], PENALTIES).argmax()), (turn, at - begun)
            seen += 1
    assert seen == 3 * 2 * 7
