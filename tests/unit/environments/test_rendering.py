"""Conversations as token ids: sampled tokens stay as they are in the rows of their trajectory, calls are read as the
template writes them."""

import asyncio
import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.environments.conversation import Conversation, Turn
from hybridflow.environments.rendering import ChatRenderer
from hybridflow.environments.trajectory import NO_TURN, Trajectory
from hybridflow.errors import ConfigError, PromptError
from tests.example_templates import TEMPLATES, tokenizer_of

ARGUMENTS = {"query": {"type": "string"}, "most": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": ARGUMENTS, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}
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


said = st.sampled_from(["yes", " a  b ", "é {x}\n", "<think>\nhm\n</think>\n\nyes", "hm</think>yes", "", "call"])
said |= st.text(alphabet="ab {}\"'\\\n<>", max_size=12)
steps = st.lists(st.tuples(said, st.booleans(), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(template=st.sampled_from(sorted(TEMPLATES)), steps=steps, seed=st.integers(0, 1 << 30))
def test_the_rows_of_random_conversations(template: str, steps: list[tuple[str, bool, bool]], seed: int):
    """`steps`: what the model says, whether its turn ends by itself, whether the answer to it is a tool's."""
    tokenizer, stop = tokenizer_of(template)
    tools = [SEARCH] if template in WITH_TOOLS else []
    raw, chance, trajectory = tokenizer.raw, random.Random(seed), Trajectory()
    prompts, sampled, heard = [], [], []

    async def sample(ids, *_):
        text, closed, _ = steps[len(sampled)]
        text = CALLS[template] if text == "call" and tools else text
        turn = raw.encode(text, add_special_tokens=False)
        turn = [*turn, chance.randrange(256)] if chance.random() < 0.3 else turn  # what no text is written as
        turn = [*turn, stop] if closed or not turn else turn
        prompts.append(list(ids))
        sampled.append(turn)
        trajectory.add(ids, turn, [-1.0 - n for n in range(len(turn))], [0] * len(turn))
        return Turn(turn, [-1.0 - n for n in range(len(turn))], "stop" if closed else "length")

    def renderer(schemas):
        return ChatRenderer(tokenizer, [stop], schemas)

    async def converse():
        one = Conversation(sample, renderer)
        messages = [{"role": "user", "content": "Q0"}]
        for number, (_, _, by_tool) in enumerate(steps):
            found = await one.answer(messages, tools)
            role = "tool" if by_tool and found.calls and not found.calls[0].error else "user"
            heard.append({"role": role, "content": f"heard{number}", "tool_call_id": "call00000", "name": "search"})
            messages = json.loads(json.dumps([*messages, found.message, heard[-1]]))

    asyncio.run(converse())
    turns = [turn for row in trajectory.rows for turn in sorted(set(row.turn_ids) - {NO_TURN})]
    assert sorted(turns) == list(range(len(steps)))  # each turn is trained once
    for row in trajectory.rows:
        assert row.response_mask == [turn != NO_TURN for turn in row.turn_ids]
        at, whole = len(row.prompt_ids), row.prompt_ids + row.token_ids
        for turn in sorted(set(row.turn_ids) - {NO_TURN}):
            begin = at + row.turn_ids.index(turn)
            end = begin + len(sampled[turn])
            assert whole[begin:end] == sampled[turn]  # bit for bit
            assert row.turn_ids[begin - at : end - at] == [turn] * len(sampled[turn])
            assert whole[:begin] == prompts[turn]  # what the model saw
            assert row.log_probs[begin - at : end - at] == [-1.0 - n for n in range(len(sampled[turn]))]
        for logged, mine in zip(row.log_probs, row.response_mask, strict=True):
            assert (logged == 0) == (not mine)
        inside = [(turn, at + row.turn_ids.index(turn)) for turn in sorted(set(row.turn_ids) - {NO_TURN})]
        for (turn, begin), (_, following) in pairwise(inside):
            # what the environment wrote, as the template writes it after any other turn
            plain = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "qzsaid"}, heard[turn]]
            text = raw.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, tools=tools or None)
            written = text.partition("qzsaid")[2]
            closed = sampled[turn][-1] == stop
            end = begin + len(sampled[turn])
            assert raw.decode(whole[end:following]) == written.removeprefix(raw.decode([stop]) if closed else "")
            assert f"heard{turn}" in written


few_ids = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def conversations(draw):
    """Turns of an agent that continues, goes back to an earlier prompt, or begins anew."""
    past, turns = [[*draw(few_ids), 0]], []
    for number in range(draw(st.integers(1, 6))):
        given_ids = [*draw(st.sampled_from(past)), *draw(few_ids)]
        said = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        turns.append((given_ids, said, [-1.0 - number] * len(said), [number] * len(said)))
        past += [given_ids, given_ids + said]
    return turns


@given(conversations())
def test_each_sampled_token_is_in_one_row_after_the_ids_that_the_model_saw(turns):
    one = Trajectory()
    for turn in turns:
        one.add(*turn)
    assert one.turns == len(turns)
    found = {}
    for row in one.rows:
        columns = (row.token_ids, row.response_mask, row.log_probs, row.policy_version, row.turn_ids)
        assert len({*map(len, columns)}) == 1
        for at, turn in enumerate(row.turn_ids):
            assert row.response_mask[at] == (turn != NO_TURN)
            if turn == NO_TURN:
                assert row.log_probs[at] == 0.0
                continue
            if turn not in found:
                found[turn] = ([*row.prompt_ids, *row.token_ids[:at]], [], [], [])
            for values, value in zip(found[turn][1:], (row.token_ids, row.log_probs, row.policy_version), strict=True):
                values.append(value[at])
    assert [found[number] for number in range(len(turns))] == [(g, list(s), lp, v) for g, s, lp, v in turns]


@given(conversations())
def test_a_conversation_that_only_continues_is_one_row(turns):
    one, seen = Trajectory(), []
    for given_ids, said, *rest in turns:
        seen = seen + given_ids
        one.add(seen, said, *rest)
        seen = seen + said
    (row,) = one.rows
    assert [*row.prompt_ids, *row.token_ids] == seen
    assert row.prompt_ids == turns[0][0]


def test_a_turn_at_another_temperature_begins_a_row():
    one = Trajectory()
    one.add([1], [2], [-1.0], [0], temperature=0.5)
    one.add([1, 2, 3], [4], [-1.0], [0], temperature=0.0625)
    one.add([1, 2, 5], [6], [-1.0], [0], temperature=0.5)
    found = [(row.prompt_ids, row.token_ids, row.temperature) for row in one.rows]
    assert found == [([1], [2, 5, 6], 0.5), ([1, 2, 3], [4], 0.0625)]
