"""Reward and cost workers and the critic of costs on real hosts: models with other tokenizers, tokens, failed rows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import hybridflow as hf
from hybridflow import errors
from recipes.small_model import SmallModel
from tests import tiny_models
from tests.tiny_models import make_rows

OTHER = SmallModel(characters=tiny_models.TEXT.characters[::-1])  # the same letters under other ids
CHAT = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
ENDED, CUT = 3, 4  # rows of `answered`: with the end token, and without


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A tokenizer is all that is read of it here."""
    home = tmp_path_factory.mktemp("policy")
    tiny_models.TEXT.tokenizer().save_pretrained(home)
    return home


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    home = tiny_models.make_classifier(tmp_path_factory.mktemp("classifier"))
    tiny_models.TEXT.tokenizer().save_pretrained(home)
    return home


@pytest.fixture(scope="module")
def other(classifier, tmp_path_factory) -> Path:
    """The same model with the letters under other ids: it scores a text as `classifier` does."""
    return renumbered(classifier, tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def chatty(classifier, tmp_path_factory) -> Path:
    return renumbered(classifier, tmp_path_factory.mktemp("chatty"), CHAT)


def renumbered(classifier: Path, home: Path, template: str | None = None) -> Path:
    shutil.copy(classifier / "config.json", home)
    tensors = load_file(classifier / "model.safetensors")
    rows = [tiny_models.TEXT.vocabulary[token] for token in OTHER.vocabulary]
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][rows].clone()
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    tokenizer = OTHER.tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(home)
    return home


@pytest.fixture
def on(place, pool) -> Callable[..., hf.WorkerGroup]:
    """Places a worker on two hosts, and closes it after the test."""
    return lambda worker, devices=2, **settings: place(worker, pool[:devices], **settings)


def answered() -> hf.Batch:
    """Rows of which one ends with the actor's end token."""
    rows = make_rows()
    responses = rows["response_ids"].tolist()
    responses[ENDED][-1] = tiny_models.TEXT.vocabulary["</s>"]
    return rows.with_columns(response_ids=hf.Ragged.from_rows(responses))


def texts(rows: hf.Batch, name: str) -> list[str]:
    return tiny_models.TEXT.tokenizer().batch_decode(rows[f"{name}_ids"].tolist(), skip_special_tokens=True)


def score_texts(classifier: Path, whole: Sequence[str]) -> torch.Tensor:
    """What the classifier's head says after each text."""
    ids = tiny_models.TEXT.tokenizer()(list(whole), add_special_tokens=False)["input_ids"]
    firsts = hf.Batch({"prompt_ids": hf.Ragged.from_rows(ids), "response_ids": hf.Ragged.from_rows([[]] * len(ids))})
    return tiny_models.scores(classifier, firsts)


# Models with a tokenizer of their own


def test_a_model_with_another_tokenizer_scores_the_same_texts(on, policy, classifier, other):
    """The end of a response stays its end: in the other vocabulary too it is a token that the model reads."""
    rows = answered()
    reward = on(hf.RewardWorker, model=other, tokenizer=policy, train=hf.Megatron(tp=2))
    found = reward.compute_reward(rows).get()
    assert found.columns == ("rewards",)
    torch.testing.assert_close(found["rewards"], tiny_models.scores(classifier, rows), atol=1e-4, rtol=0)
    assert (found["rewards"] - tiny_models.scores(other, rows)).abs().max() > 0.01  # its own ids are other letters
    prompts = rows.without("prompt_ids").with_columns(prompt=texts(rows, "prompt"), response=texts(rows, "response"))
    again = reward.compute_reward(prompts).get()["rewards"]
    assert torch.equal(again, found["rewards"])


def test_the_same_tokenizer_takes_ids_as_they_are(on, policy, classifier):
    """Even such as no text encodes to: here a padding token in the middle."""
    rows = answered()
    ids = rows["prompt_ids"].tolist()
    ids[0][1] = tiny_models.TEXT.vocabulary["<pad>"]
    rows = rows.with_columns(prompt_ids=hf.Ragged.from_rows(ids))
    reward = on(hf.RewardWorker, model=classifier, tokenizer=policy)
    found = reward.compute_reward(rows).get()["rewards"]
    torch.testing.assert_close(found, tiny_models.scores(classifier, rows), atol=1e-4, rtol=0)


def test_chat_goes_through_the_models_own_template(on, policy, classifier, chatty):
    """Messages by themselves, texts where it is asked for; a turn that the prompt began is continued."""
    rows = make_rows(4)
    said, asked = texts(rows, "response"), texts(rows, "prompt")
    messages: list[Any] = [[{"role": "user", "content": text}] for text in asked[:2]]
    parts = [{"type": "text", "text": "so"}, {"type": "text", "text": " "}]
    messages[1][0]["content"] = [{"type": "text", "text": asked[1]}]
    messages += [[{"role": "user", "content": asked[2]}, {"role": "assistant", "content": parts}], asked[3]]
    # the responses were cut, so their turns stay open; the template closes them with a blank
    expected = [f"user {asked[i]} assistant {said[i]}" for i in range(2)]
    expected += [f"user {asked[2]} assistant so {said[2]}", asked[3] + said[3]]
    mixed = rows.with_columns(prompt=messages)
    automatic = on(hf.RewardWorker, model=chatty, tokenizer=policy)
    found = automatic.compute_reward(mixed).get()["rewards"]
    torch.testing.assert_close(found, score_texts(classifier, expected), atol=1e-4, rtol=0)
    chat = on(hf.CostWorker, model=chatty, tokenizer=policy, template="chat")
    found = chat.compute_cost(rows).get()
    expected = [f"user {prompt} assistant {text}" for prompt, text in zip(asked, said, strict=True)]
    torch.testing.assert_close(found["costs"], score_texts(classifier, expected), atol=1e-4, rtol=0)


def test_rows_that_the_reward_model_cannot_read(on, settle, policy, other, chatty):
    rows = make_rows(4)
    plain = on(hf.RewardWorker, model=other, tokenizer=policy)
    chat = on(hf.RewardWorker, model=chatty, tokenizer=policy)
    long = rows.with_columns(response=["a", "b", "c" * 80, "d"])
    cases = [
        (plain, long, r"row 102 has \d\d tokens in the reward model's tokenizer, its context is 64"),
        (plain, rows.with_columns(prompt=["", "a", "b", "c"], response=["", "x", "y", "z"]), "row 100 is empty text"),
        (plain, rows.with_columns(prompt=[*"abc", [{"role": "user", "content": "d"}]]), "row 103.*no chat template"),
        (chat, rows.with_columns(prompt=[*"abc", ["d"]]), "row 103: column 'prompt', message 0 is a str; it needs"),
        (chat, rows.with_columns(prompt=[*"abc", 3]), "row 103: the prompt is int, neither text nor chat messages"),
    ]
    for group, batch, says in cases:
        with pytest.raises(errors.RewardError, match=says):
            group.compute_reward(batch).get()
        settle()
    assert len(plain.compute_reward(rows).get()) == 4  # the ranks agreed, and none is left behind


def test_settings_that_the_driver_refuses(pool, policy, classifier, other, chatty, tmp_path):
    bare = tiny_models.make_classifier(tmp_path / "bare")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": bare, "tokenizer": policy}, "bare has no tokenizer of its own"),
        ({"model": bare, "template": "chat"}, "bare has no tokenizer of its own"),
        ({"model": other, "template": "chat"}, "has no chat template. Use template='plain'"),
        ({"model": chatty, "template": "chatt"}, "template='chatt'. is unknown. Did you mean 'chat'"),
        ({"model": chatty, "template": "chat", "level": "token"}, "rows are re-tokenised"),
        ({"model": other, "tokenizer": policy, "level": "token"}, "its tokens are not those of the response"),
        ({"model": classifier, "level": "row"}, "level='row'"),
        ({"model": classifier, "on_failure": "mask"}, "on_failure='mask'.: a model has no use for it"),
        ({"model": classifier, "timeout": 3.0}, "timeout=3.0.: a model has no use for it"),
        ({"function": len, "model": classifier}, "give either model= "),
    ]
    before = len(pool.events())
    for worker in (hf.RewardWorker, hf.CostWorker):
        for settings, says in cases:
            with pytest.raises(errors.ConfigError, match=rf"{worker.__name__}.*{says}"):
                worker.on(pool[:2], **settings)
    with pytest.raises(errors.ConfigError, match=r"CriticWorker.of='cost'. is unknown. Did you mean 'costs'"):
        hf.CriticWorker.on(pool[:2], model=classifier, of="cost")
    assert len(pool.events()) == before


# Scores per token


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_token_rewards_are_read_at_the_token(on, classifier, pp, tp):
    rows = answered()
    reward = on(hf.RewardWorker, model=classifier, train=hf.Megatron(tp=tp, pp=pp), level="token")
    found = reward.compute_reward(rows).get()["rewards"]
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    for prompt, response, scores in zip(
        rows["prompt_ids"].rows(), rows["response_ids"].rows(), found.rows(), strict=True
    ):
        with torch.no_grad():
            hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state
            expected = model.score(hidden)[0, len(prompt) :, 0]
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    last = torch.stack([row[-1] for row in found.rows()])
    torch.testing.assert_close(last, tiny_models.scores(classifier, rows), atol=1e-4, rtol=0)


# Functions


def long(prompts, completions, **columns):
    return [len(text) / 10 for text in completions]


def even(prompts, completions, row_id):
    """Applies to even rows only."""
    return [None if row % 2 else 1.0 for row in row_id]


@hf.rewards.per_row
def refuses(prompt, response, row_id):
    """Cannot judge two rows of seven."""
    return hf.rewards.RowFailure(f"no reason for {row_id}") if row_id in (101, 105) else 0.5


@hf.rewards.per_row
def stuck(prompt, response, row_id):
    if row_id == 103:
        time.sleep(600)
    return 1.0


def per_token(prompts, completions, completion_ids):
    return [[float(token) for token in ids] for ids in completion_ids]


def test_several_functions_write_what_each_of_them_said(on, policy):
    rows = make_rows()
    lengths = [len(text) / 10 for text in texts(rows, "response")]
    applies = [row % 2 == 0 for row in rows["row_id"].tolist()]
    settings = {"function": [long, even], "weights": [2.0, 1.0], "tokenizer": policy}
    reward, cost = on(hf.RewardWorker, devices=3, **settings), on(hf.CostWorker, devices=3, **settings)
    batch = hf.BatchRef.from_batch(rows)
    batch |= reward.compute_reward(batch)
    batch |= cost.compute_cost(batch)
    found = batch.get()
    for name in ("rewards", "costs"):
        expected = [2 * length + one for length, one in zip(lengths, applies, strict=True)]
        assert found[name].tolist() == pytest.approx(expected)
        assert found[f"{name}/long"].tolist() == pytest.approx(lengths)
        assert found[f"{name}/even"].isnan().tolist() == [not one for one in applies]
    assert "reward_failure" not in found
    assert found["response_mask"].values.all()


@pytest.mark.parametrize("on_failure", ["zero", "mask"])
@pytest.mark.parametrize(("worker", "role"), [(hf.RewardWorker, "reward"), (hf.CostWorker, "cost")])
def test_rows_that_failed_are_named_and_can_leave_training(on, policy, worker, role, on_failure):
    rows = make_rows()
    mask = rows["response_mask"].map(lambda mask: torch.arange(len(mask)) % 3 != 1)
    rows, failed = rows.with_columns(response_mask=mask), [row in (101, 105) for row in rows["row_id"].tolist()]
    group = on(worker, function=refuses, tokenizer=policy, on_failure=on_failure)
    batch = hf.BatchRef.from_batch(rows)
    batch |= getattr(group, f"compute_{role}")(batch)
    found = batch.get()
    assert found[f"{role}s"].tolist() == [0.0 if row else 0.5 for row in failed]
    reasons = found[f"{role}_failure"]
    assert [reason is not None for reason in reasons] == failed
    assert "refuses" in reasons[1]
    assert "no reason for 101" in reasons[1]
    assert found["response_mask"].dtype == torch.bool
    if on_failure == "zero":
        assert found["response_mask"].equal(mask)
        return
    kept = torch.tensor(failed).logical_not()
    assert found["response_mask"].equal(mask.with_values(mask.values & mask.expand(kept)))


def test_a_masked_row_trains_nothing(on, policy, classifier):
    """The critic's steps with it are those without it; a batch without a mask gets one."""
    rows = make_rows()
    reward = on(hf.RewardWorker, function=refuses, tokenizer=policy, on_failure="mask")
    alone = reward.compute_reward(rows.without("response_mask")).get()
    assert [bool(row.any()) for row in alone["response_mask"].rows()] == [row not in (1, 5) for row in range(7)]
    kept = rows[[0, 2, 3, 4, 6]]
    steps = []
    for some in (rows | alone, kept, rows):
        critic = on(hf.CriticWorker, model=classifier, optim=hf.SGD(lr=0.1))
        _ = critic.update_critic(some).get()
        steps.append(critic.compute_values(kept).get()["values"].values)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-5, rtol=0)
    assert (steps[0] - steps[2]).abs().max() > 1e-2


@hf.rewards.per_row
def by_turn(prompt, response, turn):
    return hf.rewards.RowFailure("nothing to grade") if turn == 9 else float(turn)


def test_the_last_row_of_a_trajectory_is_scored_for_all_of_them(on, policy):
    turns, ids = [4, 1, 5, 3, 9], [1, 1, 3, 2, 2]
    reward = on(hf.RewardWorker, function=by_turn, tokenizer=policy, on_failure="mask")
    rows = make_rows(5).with_columns(trajectory_id=torch.tensor(ids), turn=torch.tensor(turns))
    rows = rows.with_columns(row_id=torch.tensor([7, 3, 4, 5, 6]))  # the first row is the last of its trajectory
    found = reward.compute_reward(rows).get()
    assert found["rewards"].tolist() == [4.0, 4.0, 5.0, 0.0, 0.0]
    assert [bool(row.any()) for row in found["response_mask"].rows()] == [True, True, True, False, False]


@hf.rewards.whole_batch
def longest(completions, group_id):
    """1 for the longest of a group, and how many rows the call has."""
    groups = {group: [len(c) for c, g in zip(completions, group_id) if g == group] for group in group_id}
    return [float(len(c) == max(groups[g])) + 10 * len(completions) for c, g in zip(completions, group_id)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_of_whole_batches_gets_all_rows_on_one_of_several_ranks(on, policy, workers):
    reward = on(hf.RewardWorker, 3, function={"longest": longest, "even": even}, tokenizer=policy, workers=workers)
    rows = answered()
    groups = rows.with_columns(group_id=torch.arange(7) % 2)
    found = reward.compute_reward(groups).get()
    sizes = [len(text) for text in texts(rows, "response")]
    most = [max(sizes[i % 2 :: 2]) for i in range(7)]
    assert found["rewards/longest"].tolist() == [70.0 + (sizes[i] == most[i]) for i in range(7)]
    with pytest.raises(errors.MissingColumnError, match="group_id"):
        reward.compute_reward(rows)


def test_failures_raise_unless_a_setting_says_otherwise(on, settle, policy):
    reward = on(hf.RewardWorker, function=refuses, tokenizer=policy)
    with pytest.raises(errors.RewardError, match=r"refuses.* row 10[15]"):
        reward.compute_reward(make_rows()).get()
    settle()


def test_a_row_that_never_ends_is_cut_off(on, policy):
    """In a child process that is killed; its neighbours keep their rewards."""
    reward = on(hf.RewardWorker, function=stuck, tokenizer=policy, workers=1, timeout=1.0, on_failure="zero")
    found = reward.compute_reward(make_rows()).get()
    assert found["rewards"].tolist() == [1, 1, 1, 0, 1, 1, 1]
    assert "took longer than 1 s" in found["reward_failure"][3]


def test_rewards_per_token_of_a_function(on, policy):
    rows = make_rows()
    reward = on(hf.RewardWorker, function=per_token, tokenizer=policy, level="token")
    found = reward.compute_reward(rows).get()["rewards"]
    assert found.equal(rows["response_ids"].map(torch.Tensor.float))


def test_settings_of_functions_that_the_driver_refuses(pool):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"function": long, "template": "chat"}, "template='chat'.*a function has no use for it"),
        ({"function": long, "offload": True}, "a function has nothing to move"),
        ({"function": [long, even], "weights": [1.0]}, "weights"),
        ({"function": long, "on_failure": "skip"}, "on_failure"),
        ({"function": long, "workers": -1}, "workers"),
        ({"function": long, "timeout": 0}, "timeout"),
        ({"function": []}, "function"),
    ]
    before = len(pool.events())
    for worker in (hf.RewardWorker, hf.CostWorker):
        for settings, says in cases:
            with pytest.raises(errors.ConfigError, match=says):
                worker.on(pool[:2], **settings)
    assert len(pool.events()) == before


# The critic of costs


def test_a_critic_of_costs_is_a_critic_under_other_names(on, classifier):
    """Equal values and equal steps on equal numbers; what the reward's critic wrote does not matter to it."""
    rows, sgd = make_rows(), hf.SGD(lr=0.1)
    wrong = {"values": rows["values"].map(torch.neg), "returns": rows["returns"].map(torch.neg)}
    costs = rows.rename(values="cost_values", returns="cost_returns").with_columns(**wrong)
    plain = on(hf.CriticWorker, model=classifier, optim=sgd)
    critic = on(hf.CriticWorker, model=classifier, optim=sgd, of="costs", name="cost critic")
    assert torch.equal(
        critic.compute_values(rows).get()["cost_values"].values, plain.compute_values(rows).get()["values"].values
    )
    for loss in ("value", absolute_error, every_column):
        expected = plain.update_critic(rows, minibatches=2, loss=loss, uneven=True).get()
        found = critic.update_critic(costs, minibatches=2, loss=loss, uneven=True).get()
        assert found == {name.replace("critic/", "cost_critic/"): value for name, value in expected.items()}
        assert found["cost_critic/grad_norm"] > 0
    with pytest.raises(errors.MissingColumnError, match=r"cost critic\.update_critic reads 'cost_values'"):
        critic.update_critic(rows)
    with pytest.raises(errors.ConfigError, match="no setting 'clp'"):
        critic.update_critic(costs, clp=0.1)


def absolute_error(outputs, rows, totals):
    error = (outputs["values"].values - rows["returns"].values).abs().sum() / totals.tokens
    return error, {"critic/error": error.detach()}


def every_column(outputs, rows, totals):
    return absolute_error(outputs, rows, totals)


absolute_error.reads = ("returns",)
