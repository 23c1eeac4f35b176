"""Chat prompts: which messages are refused and where, and what the chat template is given."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridflow.data.lm_dataset import TextSource
from hybridflow.data.prompts import PromptSource
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, PromptError
from recipes.small_model import SmallModel
from tests.example_templates import TEMPLATES, byte_tokenizer, tokenizer_of

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<' + m.role[0] + m.content }}{% if m.name is defined %}{{ '@' + m.name }}{% endif %}{{ '>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a' }}{% endif %}"
)
USER = {"role": "user", "content": "hi"}
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    raw = SmallModel(characters="abcdefghijklmnopqrstuvwxyz<>@ ").tokenizer()
    raw.chat_template = TEMPLATE
    return Tokenizer(raw)


def test_messages_go_through_the_chat_template(tokenizer):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chats = [
        [USER],
        [{"role": "system", "content": "be good"}, {"role": "user", "content": parts}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [{}], "name": None}, USER | {"name": "bob"}],
    ]
    records = [{"prompt": chat} for chat in chats]
    (batch,) = PromptSource(records, batch_size=3, steps=1, shuffle=False, tokenizer=tokenizer)
    texts = tokenizer.decode(batch["prompt_ids"].tolist())
    assert texts == ["<uhi><a", "<sbe good><uone two><a", "<uhi><a><uhi@bob><a"]
    assert batch["prompt"] == chats


def test_messages_that_end_with_the_assistant_are_continued(tokenizer):
    """The turn that the prompt began stays open, whatever stands elsewhere in the rendered text."""
    parts = [{"type": "text", "text": "so "}, {"type": "text", "text": "it is "}]
    begun = ["so ", parts, "a", ""]
    chats = [[USER, {"role": "assistant", "content": content, "tool_calls": []}] for content in begun]
    chats.append([USER, {"role": "assistant", "content": "yes"}, USER, {"role": "assistant", "content": "no"}])
    kept = json.dumps(chats)
    ids = tokenizer.encode(chats)
    assert tokenizer.decode(ids) == ["<uhi><aso ", "<uhi><aso it is ", "<uhi><aa", "<uhi><a", "<uhi><ayes><uhi><ano"]
    assert json.dumps(chats) == kept
    called = [USER, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    with pytest.raises(PromptError, match="record 1 ends with a call of a tool, which only the tool can answer"):
        PromptSource([{"prompt": [USER]}, {"prompt": called}], batch_size=1, tokenizer=tokenizer, max_prompt_tokens=9)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "column 'prompt' is an empty list"),
        (["hi"], "message 0 is a str; it needs 'role' and 'content'"),
        ([{"content": "hi"}], "message 0 has no 'role'"),
        ([USER, {"role": "user"}], r"message 1 \(user\) has no content; it needs 'role' and 'content'"),
        ([USER, {"role": "asistant", "content": "a"}], "unknown role 'asistant'. Did you mean 'assistant'"),
        ([{"role": "human", "content": "a"}], "message 0 has the unknown role 'human'"),
        ([{"role": "user", "content": ""}], r"message 0 \(user\) has empty content"),
        ([{"role": "user", "content": 3}], r"message 0 \(user\) has content that is a int; it must be text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a part of type 'image'; only text is read"),
        ([{"role": "user", "content": ["hi"]}], "a part of type 'str'; only text is read"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_messages_that_no_template_reads(tokenizer, messages, message):
    with pytest.raises(PromptError, match=f"record 1: column 'prompt'.*{message}|record 1: {message}"):
        PromptSource([{"prompt": [USER]}, {"prompt": messages}], batch_size=1)
    if messages:
        with pytest.raises(PromptError, match=f"prompt 1.*{message}"):
            tokenizer.encode([[USER], messages])


def test_what_a_template_refuses_is_named(tokenizer):
    records = [{"question": [USER, {"role": "tool", "content": "3"}]}]
    with pytest.raises(PromptError, match=r"record 0: .* chat template refuses the messages: no tools here"):
        next(iter(PromptSource(records, prompt="question", batch_size=1, tokenizer=tokenizer)))
    with pytest.raises(PromptError, match="record 0: the tokenizer's chat template refuses"):
        PromptSource(records, prompt="question", batch_size=1, tokenizer=tokenizer, max_prompt_tokens=9)
    bare = Tokenizer(SmallModel().tokenizer())
    with pytest.raises(PromptError, match="prompt 0 is a list of messages and the tokenizer has no chat template"):
        bare.encode([[USER]])
    with pytest.raises(PromptError, match="prompt 0 is int: give text or a list of chat messages"):
        bare.encode([3])


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    """In the main thread and in others, and what runs afterwards is not disturbed."""
    monkeypatch.setattr("hybridflow.data.tokenizer.TEMPLATE_SECONDS", 0.2)
    tokenizer, _ = tokenizer_of("plain")
    expected = tokenizer.encode([[USER]])
    tokenizer.raw.chat_template = ENDLESS

    def refused() -> bool:
        with pytest.raises(PromptError, match=r"prompt 0: .*refuses the messages: it did not end within 0.2 s"):
            tokenizer.encode([[USER]])
        return True

    assert refused()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(refused).result()
    tokenizer.raw.chat_template = TEMPLATES["plain"][0]
    assert [tokenizer.encode([[USER]]) for _ in range(50)] == [expected] * 50


def test_arguments_of_the_chat_template_reach_prompts(tmp_path):
    tokenizer = byte_tokenizer("qwen3")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}<none>{% endif %}"
    tokenizer.chat_template = template
    records = [{"prompt": [USER]}, {"prompt": "text"}]
    options = {"batch_size": 2, "shuffle": False, "steps": 1, "tokenizer": tokenizer}

    def texts(**more: Any) -> list[str]:
        (batch,) = PromptSource(records, **options, **more)
        return [tokenizer.decode(ids) for ids in batch["prompt_ids"].rows()]

    assert texts(chat_template_kwargs={"enable_thinking": True}) == ["hi", "text"]
    assert texts(chat_template_kwargs={"enable_thinking": False}) == texts() == ["hi<none>", "text"]
    pairs = [{"prompt": records[0]["prompt"], "completion": "x"}]
    given = {"batch_size": 1, "max_tokens": 30, "tokenizer": tokenizer, "prompt": "prompt", "completion": "completion"}
    batch = TextSource(pairs, **given, chat_template_kwargs={"enable_thinking": True}).whole()
    assert tokenizer.decode(batch["prompt_ids"].row(0)) == "hi"
    first, other = (PromptSource(records, **options, chat_template_kwargs={"a": a}) for a in (1, 2))
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        other.load_state(first.state())
    for wrong, message in (
        ({"tokenizer": None, "chat_template_kwargs": {"a": 1}}, "no tokenizer= is given"),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "follows from the prompt"),
        ({"chat_template_kwargs": "enable_thinking"}, "give {'enable_thinking': False}"),
    ):
        with pytest.raises(ConfigError, match=message):
            PromptSource(records, **(options | wrong))
