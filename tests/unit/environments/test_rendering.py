"""Conversations as token ids: extensions leave sampled tokens alone, calls are read as the template writes them."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.environments.rendering import ChatRenderer
from hybridflow.errors import ConfigError, PromptError
from tests.example_templates import TEMPLATES, tokenizer_of

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "most": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
WITH_TOOLS = ("qwen3", "llama3", "mistral", "marked", "named_json")
CALLS = {
    "qwen3": '<tool_call>\n{"name": "search", "arguments": {"query": "a b", "most": 3}}\n</tool_call>',
    "llama3": '{"name": "search", "parameters": {"query": "a b", "most": 3}}',
    "mistral": '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a b", "most": 3}, "id": "abcdefghi"}]',
    "marked": "<tool_call>\n<function=search>\n<parameter=query>\na b\n</parameter>\n<parameter=most>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "named_json": '<call>function<sep>search\n```json\n{"query": "a b", "most": 3}\n```</call>',
}


def renderer(template: str, tools=(), **options) -> ChatRenderer:
    tokenizer, stop = tokenizer_of(template)
    return ChatRenderer(tokenizer, [stop], tools, options)


def sampled(one: ChatRenderer, text: str, stop: bool = True) -> list[int]:
    return one.tokenizer.raw.encode(text, add_special_tokens=False) + list(one._stops.values()) * stop


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_calls_are_read_in_the_format_of_the_template(template: str):
    one = renderer(template, [SEARCH])
    message, calls = one.answer(sampled(one, CALLS[template]))
    assert [(call.name, call.arguments, call.error) for call in calls] == [("search", {"query": "a b", "most": 3}, "")]
    assert message["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "a b", "most": 3}}
    assert not message["content"]


@pytest.mark.parametrize("template", ["qwen3", "marked"])
def test_several_calls_and_what_is_said_between_them(template: str):
    one = renderer(template, [SEARCH])
    message, calls = one.answer(sampled(one, f"first {CALLS[template]} then {CALLS[template]}"))
    assert [call.name for call in calls] == ["search", "search"]
    assert message["content"].split() == ["first", "then"]


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"query": "a b\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"nam": "search"}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": [1]}\n</tool_call>'),
        ("qwen3", "<tool_call>"),
        ("mistral", "[TOOL_CALLS] search"),
        ("marked", "<tool_call>\n<function=search"),
        ("named_json", "<call>function<sep>search ```json nothing"),
    ],
)
def test_a_damaged_call_has_an_error_and_stays_visible(template: str, written: str):
    one = renderer(template, [SEARCH])
    message, calls = one.answer(sampled(one, written))
    assert len(calls) == 1
    assert calls[0].error
    assert "tool_calls" not in message
    assert message["content"] == written


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_text_without_a_call_is_text(template: str):
    one = renderer(template, [SEARCH])
    message, calls = one.answer(sampled(one, "The answer is {42}."))
    assert (message, calls) == ({"role": "assistant", "content": "The answer is {42}."}, [])


def test_extensions_follow_the_sampled_tokens():
    one = renderer("qwen3", [SEARCH])
    asked = [{"role": "user", "content": "Q"}]
    # not as the template would write it: the ids stay as they are
    turn = sampled(one, '<think>\nhm\n</think>\n\n<tool_call>{"arguments":{"query":"x"},  "name":"search"}</tool_call>')
    message, _ = one.answer(turn)
    answer = {"role": "tool", "content": "42", "tool_call_id": "call00000"}
    added = one.extension([*asked, message], [answer], turn)
    assert added is not None
    assert one.tokenizer.raw.decode(added) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    cut = turn[:-1]  # ended by its length
    added = one.extension([*asked, message], [answer], cut)
    assert added is not None
    assert one.tokenizer.raw.decode(added).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("template", "text", "new", "extends"),
    [
        ("qwen3", "<think>\nhm\n</think>\n\nyes", "tool", True),
        ("qwen3", "<think>\nhm\n</think>\n\nyes", "user", False),  # thinking leaves past turns
        ("qwen3", "yes", "user", True),
        ("qwen3", "yes", "tool", True),  # although a last turn is given an empty thought
        ("llama3", " yes ", "user", True),
        ("llama3", "yes", "tool", True),
        ("mistral", "yes", "tool", True),
        ("thinking_removed", "hm</think>yes", "user", False),
        ("plain", "yes", "user", True),
    ],
)
def test_what_extends_a_conversation(template: str, text: str, new: str, extends: bool):
    one = renderer(template)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": text}]
    answer = {"role": new, "content": "more", "tool_call_id": "call00000"}
    assert (one.extension(messages, [answer], sampled(one, text)) is not None) == extends


def test_tools_that_move_start_a_new_row():
    one = renderer("mistral", [SEARCH])
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "yes"}]
    assert one.extension(messages, [{"role": "user", "content": "more"}], sampled(one, "yes")) is None


def test_options_reach_the_template():
    one = renderer("qwen3", enable_thinking=False)
    text = one.tokenizer.raw.decode(one.prompt([{"role": "user", "content": "Q"}]))
    assert text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", ["plain", "thinking_removed"])
def test_a_template_without_tools_is_refused(template: str):
    with pytest.raises(ConfigError, match="no place for tools"):
        renderer(template, [SEARCH])


def test_a_tokenizer_without_template_is_refused():
    tokenizer, stop = tokenizer_of("plain")
    tokenizer.raw.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(tokenizer, [stop])


def test_messages_that_the_template_refuses():
    one = renderer("llama3", [SEARCH])
    call = {"type": "function", "id": "1", "function": {"name": "search", "arguments": {}}}
    with pytest.raises(PromptError, match="one tool call at once"):
        one.prompt([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call, call]}])


words = st.text(alphabet="ab {}\"'\\\n<>", max_size=12)


@given(
    template=st.sampled_from(sorted(TEMPLATES)), turns=st.lists(st.tuples(words, words), max_size=4), seed=st.integers()
)
def test_ids_of_a_conversation_keep_every_sampled_token(template: str, turns: list[tuple[str, str]], seed: int):
    """Random conversations: the ids of the last row hold the sampled turns of that row bit for bit, and their text is
    what the template writes wherever the model wrote in the template's manner."""
    one, draw = renderer(template), random.Random(seed)
    messages = [{"role": "user", "content": "Q"}]
    ids, own = one.prompt(messages), []
    for said, heard in turns:
        turn = sampled(one, said, stop=draw.random() < 0.8)
        message, calls = one.answer(turn)
        assert not calls
        messages.append(message)
        own.append((len(ids), turn))
        ids = ids + turn
        new = {"role": "user", "content": heard or "?"}
        added = one.extension(messages, [new], turn)
        messages.append(new)
        if added is None:
            ids, own = one.prompt(messages), []
        else:
            ids = ids + added
        for start, sampled_ids in own:
            assert ids[start : start + len(sampled_ids)] == sampled_ids
    assert one.tokenizer.raw.decode(ids).endswith(one.tokenizer.raw.decode(one.prompt(messages))[-3:])
