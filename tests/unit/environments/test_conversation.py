"""Token in, token out: random conversations with tools, thinking and text, through the templates of the field."""

import asyncio
import json
import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.environments.conversation import Conversation, Turn
from hybridflow.environments.rendering import ChatRenderer
from hybridflow.environments.trajectory import NO_TURN, Trajectory
from tests.example_templates import tokenizer_of
from tests.unit.environments.test_rendering import CALLS, SEARCH

CALLING = ("qwen3", "llama3", "mistral", "marked", "named_json")
SILENT = ("thinking_removed", "plain")
said = st.sampled_from(["yes", " a  b ", "é {x}\n", "<think>\nhm\n</think>\n\nyes", "hm</think>yes", "", "call"])
steps = st.lists(st.tuples(said, st.booleans(), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None, max_examples=150)
@given(template=st.sampled_from(CALLING + SILENT), steps=steps, seed=st.integers(0, 1 << 30))
def test_the_rows_of_random_conversations(template: str, steps: list[tuple[str, bool, bool]], seed: int):
    """`steps`: what the model says, whether its turn ends by itself, whether the answer to it is a tool's."""
    tokenizer, stop = tokenizer_of(template)
    tools = [SEARCH] if template in CALLING else []
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
