"""Agents in processes of their own: what they ask for, how they end, and what becomes of the others when one dies."""

import asyncio
import json
import math
import os
import sys
import time
from functools import partial
from typing import Any

import pytest
from PIL import Image

from hybridflow.config import Sampling
from hybridflow.environments.acting import EnvironmentLoop, Program, ToolLoop
from tests.example_templates import tokenizer_of
from tests.session_runs import call, run


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def misbehave(how: str) -> str:
    """Do something.

    Args:
        how: What to do.
    """
    if how == "hang":
        time.sleep(1000)
    if how == "die":
        os._exit(3)
    if how == "large":
        return "x" * 10_000_000
    if how == "picture":
        return Image.new("RGB", (8, 8))  # type: ignore[return-value]
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "raise":
        raise KeyError(how)
    return how


class Guess:
    """Higher or lower."""

    def reset(self, number: int) -> str:
        self.number, self.closed = number, False
        return "Guess a number."

    def step(self, text: str) -> tuple[str, float, bool]:
        guess = int(text)
        return ("higher" if guess < self.number else "lower"), float(guess == self.number), guess == self.number


def test_tools_are_called_until_the_model_answers(checkpoint):
    def says(row, turn, heard):
        return call("add", a=row["a"], b=1) if turn == 0 else f"It is {heard.count('tool_response>')}."

    rows = [{"prompt": "Add.", "a": number} for number in range(5)]
    tokenizer, _ = tokenizer_of("qwen3")
    for number, one in enumerate(run(ToolLoop((add,), 4), checkpoint, rows, says)):
        assert (one.ending.stop, one.failure, one.trajectory.turns) == ("answer", None, 2)
        assert one.ending.metrics == {"tool_calls": 1.0}
        (row,) = one.trajectory.rows
        masked = [token for token, mine in zip(row.token_ids, row.response_mask, strict=True) if not mine]
        assert tokenizer.raw.decode(masked) == (
            f"\n<|im_start|>user\n<tool_response>\n{number + 1}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        assert set(row.turn_ids) == {0, 1, -1}


def test_tools_that_raise_answer_the_model_and_others_fail_alone(checkpoint):
    ways = ("raise", "die", "hang", "large", "picture", "fine", "fine", "unknown", "cancel")
    rows = [{"prompt": "Go.", "how": how} for how in ways]

    def says(row, turn, heard):
        if turn > 0:
            return "ok"
        return call("nothing") if row["how"] == "unknown" else call("misbehave", how=row["how"])

    found = run(ToolLoop((misbehave,), 4), checkpoint, rows, says, seconds=5.0)
    raised, died, hung, large, picture, *fine, unknown, cancelled = found
    assert raised.failure is None
    assert raised.ending.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert unknown.failure is None
    assert unknown.ending.metrics["tool_errors"] == 1.0
    assert died.failure == "its process exited with code 3, with nothing else in it"
    assert hung.failure == "tool misbehave took longer than 5 s"
    assert large.failure == "tool misbehave answered with 10000000 characters; at most 262144 are read"
    assert picture.failure == "tool misbehave answered with an image, and the model reads text only: return text"
    assert cancelled.failure is not None
    assert "CancelledError" in cancelled.failure
    assert [one.failure for one in fine] == [None, None]
    assert [one.trajectory.turns for one in fine] == [2, 2]


def loaded(name: str) -> bool:
    """Whether a module is imported.

    Args:
        name: The module.
    """
    return name in sys.modules


class Laboratory:
    """Its tool is a method."""

    def reset(self, prompt: str) -> str:
        return prompt

    def loaded(self, name: str) -> bool:
        """Whether a module is imported.

        Args:
            name: The module.
        """
        return loaded(name)

    def get_reward(self) -> float:
        return float(loaded("torch"))


def test_processes_import_no_torch(checkpoint):
    def says(row, turn, heard):
        return call("loaded", name=row["name"]) if turn == 0 else heard.rpartition("<tool_response>\n")[2][:5]

    rows = [{"prompt": "Look.", "name": name} for name in ("torch", "asyncio")]
    tokenizer, _ = tokenizer_of("qwen3")
    acts = ToolLoop((loaded,), 2), EnvironmentLoop(Laboratory, 2), EnvironmentLoop(partial(Laboratory), 2)
    for act in acts:
        found = run(act, checkpoint, rows, says)
        assert not any(one.ending.reward for one in found)
        assert [one.failure for one in found] == [None, None]
        texts = [tokenizer.raw.decode(one.trajectory.rows[0].token_ids) for one in found]
        assert [("False" in text, "True" in text) for text in texts] == [(True, False), (False, True)]


def test_an_environment_of_text(checkpoint):
    def says(row, turn, heard):
        return str(turn)

    rows = [{"number": number} for number in (0, 2, 9)]
    found = run(EnvironmentLoop(Guess, 4), checkpoint, rows, says)
    assert [(one.ending.stop, one.ending.reward, one.trajectory.turns) for one in found] == [
        ("done", 1.0, 1), ("done", 1.0, 3), ("turns", 0.0, 4),
    ]  # fmt: skip


class Wrong:
    """Does not keep the contract, in the way that the row says."""

    def reset(self, how: str, value: Any) -> Any:
        self.how, self.value = how, value
        return value if how == "reset" else "Begin."

    def step(self, text: str) -> Any:
        answers = {"step": self.value, "observation": (self.value, 0.0, False), "reward": ("on", self.value, True)}
        return answers[self.how]


def test_an_environment_that_returns_nothing_or_a_wrong_type_is_named(checkpoint):
    wrong = {
        ("reset", None): "Wrong.reset returned nothing, and the row has no prompt to ask the model",
        ("reset", 3): "Wrong.reset returned 3; it must be text or a list of messages",
        ("reset", ("text", ())): "Wrong.reset returned ('text', ()); it must be text or a list of messages",
        ("step", None): "Wrong.step returned None; it must be (observation, reward, done)",
        ("step", ("text", 1.0)): "Wrong.step returned ('text', 1.0); it must be (observation, reward, done)",
        ("observation", None): "Wrong.step returned None; it must be text or a list of messages",
        ("observation", ()): "Wrong.step returned (); it must be text or a list of messages",
        ("reward", None): "Wrong.step gave the reward None, which is no number",
        ("reward", "1"): "Wrong.step gave the reward '1', which is no number",
        ("reward", math.nan): "Wrong.step gave the reward nan, which is not finite",
    }
    rows = [{"how": how, "value": value} for how, value in wrong]
    contents = [{"type": "image"}], "x" * 1_000_000
    rows += [{"how": "reset", "value": [{"role": "user", "content": content}]} for content in contents]
    *found, seen, last = run(EnvironmentLoop(Wrong, 4), checkpoint, rows, lambda *_: "x")
    assert [one.failure for one in found] == list(wrong.values())
    assert seen.failure == "Wrong.reset answered with an image, and the model reads text only: return text"
    assert last.failure == "Wrong.reset answered with 1000000 characters; at most 262144 are read"


class Closes:
    """Fails when it is closed, after a good reward or after an error of its own."""

    def reset(self, good: bool) -> str:
        self.good = good
        return "Begin."

    def step(self, text: str) -> tuple[str, float, bool]:
        if not self.good:
            raise KeyError("its own error")
        return "", 0.5, True

    def close(self) -> None:
        raise OSError("it is closed already")


class Paid:
    """Its tool is never called, and its reward is that of the row."""

    def reset(self, good: bool) -> str:
        self.reward = 0.75 if good else None
        return "Begin."

    def get_reward(self) -> float | None:
        return self.reward

    def close(self) -> None:
        raise OSError("it is closed already")


@pytest.mark.parametrize(
    ("made", "reward", "failure"),
    [(Closes, 0.5, "its own error"), (Paid, 0.75, "Paid gave the reward None, which is no")],
)
def test_what_fails_when_it_is_closed_keeps_its_reward(checkpoint, made, reward, failure):
    one, other = run(EnvironmentLoop(made, 2), checkpoint, [{"good": True}, {"good": False}], lambda *_: "x")
    assert (one.failure, one.ending.reward) == (None, reward)
    assert failure in str(other.failure)


async def ask_deeply(row, model):
    """Requests that JSON and templates cannot take."""
    import aiohttp

    said = []
    headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
    deep = "[" * 100_000 + "]" * 100_000
    bodies = (deep, '{"messages": ' + deep + "}", '{"messages": [{"role": "user", "content": ' + deep + "}]}")
    async with aiohttp.ClientSession(headers=headers) as client:
        for body in bodies:
            async with client.post(f"{model.base_url}/chat/completions", data=body) as answer:
                said.append((answer.status, (await answer.json())["error"]["code"]))
    return {"reward": float(said == [(400, "invalid_request")] * len(bodies))}


def test_deep_json_is_a_bad_request(checkpoint):
    (one,) = run(Program(ask_deeply), checkpoint, [{}], lambda *_: "x")
    assert (one.failure, one.ending.reward) == (None, 1.0)


async def ask_in_a_thread(row, model):
    """A blocking agent, which alone reads where the endpoint is."""
    import urllib.request

    def agent() -> str:
        body = json.dumps({"messages": [{"role": "user", "content": row["prompt"]}]}).encode()
        headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    return float(await asyncio.to_thread(agent) == "x")


def test_an_agent_in_a_thread_finds_the_endpoint(checkpoint):
    found = run(Program(ask_in_a_thread), checkpoint, [{"prompt": "a"}, {"prompt": "b"}], lambda *_: "x", seconds=60.0)
    assert [(one.failure, one.ending.reward) for one in found] == [(None, 1.0)] * 2


async def solve(row, model):
    messages = [{"role": "user", "content": row["prompt"]}]
    answers = [await model.chat(messages) for _ in range(2)]
    if row.get("late"):
        await asyncio.sleep(100)
    return {"reward": len(answers), "length": len(answers[0]["content"])}


def test_a_program_of_the_users_own(checkpoint):
    found = run(Program(solve), checkpoint, [{"prompt": "a"}, {"prompt": "b", "late": 1}], lambda *_: "x", seconds=5.0)
    assert (found[0].ending.reward, found[0].ending.metrics) == (2.0, {"length": 1.0})
    assert len(found[0].trajectory.rows) == 2  # the same question twice: neither continues the other
    assert found[1].failure == "solve took longer than 5 s between turns of the model"


class Fragile(Guess):
    def step(self, text: str) -> tuple[str, float, bool]:
        if self.number == 5 and text == "1":
            os._exit(1)
        return super().step(text)


def test_trajectories_of_a_process_that_died_go_on_with_what_the_model_said(checkpoint):
    asked = []

    def says(row, turn, heard):
        asked.append((row["number"], heard))
        return str(heard.count("<|im_start|>assistant") - 1)

    rows = [{"number": number} for number in (5, *([3] * 40))]
    died, *others = run(EnvironmentLoop(Fragile, 6), checkpoint, rows, says)
    assert died.failure is not None
    assert "exited with code 1" in died.failure
    assert all((one.ending.reward, one.trajectory.turns) == (1.0, 4) for one in others)
    assert sum(number == 3 for number, _ in asked) == 40 * 4  # nothing was sampled twice


def test_a_process_that_does_not_answer_is_killed(checkpoint, monkeypatch):
    monkeypatch.setattr("hybridflow.environments.sessions._SILENT", 9.0)
    monkeypatch.setattr("hybridflow.environments.sessions._TOGETHER", (2, 1))

    async def block(row, model):
        if row["prompt"] == "block":
            time.sleep(1000)
        await model.chat([{"role": "user", "content": row["prompt"]}])
        return 1.0

    blocked, fine = run(Program(block), checkpoint, [{"prompt": "block"}, {"prompt": "a"}], lambda *_: "x", seconds=1.0)
    assert blocked.failure == "its process did not answer for 10 s, with nothing else in it"
    assert fine.ending.reward == 1.0


def test_a_process_that_says_nonsense_fails_alone(checkpoint):
    async def forge(row, model):
        if row["prompt"] == "ids":
            await model.generate(["no id"])
        return 1.0

    forged, fine = run(Program(forge), checkpoint, [{"prompt": "ids"}, {"prompt": "a"}], lambda *_: "x")
    assert forged.failure is not None
    assert "with nothing else in it" in forged.failure
    assert fine.ending.reward == 1.0


async def ask(row, model):
    """An agent that knows an OpenAI-compatible URL only."""
    import openai

    def client(key):
        return openai.AsyncOpenAI(base_url=model.base_url, api_key=key, max_retries=0)

    if row["how"] == "wrong":
        await client("sk-wrong").chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
    messages = [{"role": "user", "content": "Add."}]
    async with client(model.api_key) as model_client:
        create = partial(model_client.chat.completions.create, model="any", messages=messages, tools=row["tools"])
        said = await create(max_tokens=50, stop="never")
        (made,) = said.choices[0].message.tool_calls
        assert said.choices[0].finish_reason == "tool_calls"
        numbers = json.loads(made.function.arguments)
        answer = {"role": "tool", "tool_call_id": made.id, "content": str(add(**numbers))}
        messages += [said.choices[0].message.model_dump(exclude_none=True), answer]
        text = ""
        async for piece in await create(stream=True):
            text += piece.choices[0].delta.content or ""
    return {"reward": float(text == "It is 5.")}


def test_an_agent_that_knows_a_url_is_recorded(checkpoint):
    from transformers.utils import get_json_schema

    def says(row, turn, heard):
        return call("add", a=2, b=3) if turn == 0 else "It is 5."

    tools = [get_json_schema(add)]
    rows = [{"how": "right", "tools": tools}, {"how": "wrong", "tools": tools}, {"how": "right", "tools": tools}]
    right, wrong, other = run(Program(ask), checkpoint, rows, says)
    for one in (right, other):
        assert (one.failure, one.ending.reward, one.trajectory.turns) == (None, 1.0, 2)
        assert len(one.trajectory.rows) == 1
    assert wrong.failure is not None
    assert "key is of no trajectory" in wrong.failure


OWN = {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.25, "presence_penalty": -0.5, "logit_bias": {"7": -3}}


async def ask_as_it_likes(row, model):
    """An agent with settings of its own, and labels that change no answer."""
    import openai

    messages = [{"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": "!"}]}]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        create = partial(client.chat.completions.create, model="any", messages=messages)
        extra = {"top_k": 20, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [5]}
        await create(**OWN, max_completion_tokens=9, stop=["a", "b"], user="me", metadata={"a": "b"}, extra_body=extra)
        usual = {"n": 1, "logprobs": False, "parallel_tool_calls": True, "response_format": {"type": "text"}}
        await create(temperature=0, max_tokens=7, stop="x", tool_choice="none", extra_body={"top_k": -1}, **usual)
        pieces = await create(stream=True, stream_options={"include_usage": True})
        usage = [piece.usage async for piece in pieces]
    return float(usage[:-1] == [None, None] and usage[-1].completion_tokens > 0)


def test_what_a_client_asks_of_the_sampling_reaches_the_model(checkpoint):
    sampling: list[Sampling] = []
    (one,) = run(Program(ask_as_it_likes), checkpoint, [{}], lambda *_: "x", sampling=sampling)
    assert (one.failure, one.ending.reward) == (None, 1.0)
    own, usual, streamed = sampling
    more: dict[str, Any] = {"max_tokens": 9, "stop": ["a", "b"], "top_k": 20, "min_p": 0.1, "ignore_eos": True}
    assert own == Sampling(**OWN, **more, stop_token_ids=(5,))
    assert usual == Sampling(greedy=True, max_tokens=7, stop=("x",), top_k=0)
    assert streamed == Sampling()


REFUSED = {
    "n": 2,
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 5,
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "modalities": ["audio"],
    "stream_options": {"include_obfuscation": True},
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "high",
    "tempreature": 0.5,
}


async def ask_too_much(row, model):
    """One request for each setting that would change the answer and cannot."""
    import aiohttp

    headers = {"Authorization": f"Bearer {model.api_key}"}
    said = {}
    bad = {name: {name: value} for name, value in REFUSED.items()}
    bad |= {"number": {"n": True}, "both": {"max_tokens": 3, "max_completion_tokens": 4}}
    bad |= {"image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}}
    bad |= {"streaming": {"stream": "no"}, "options": {"stream_options": 7}}
    async with aiohttp.ClientSession(headers=headers) as client:
        for name, given in bad.items():
            body = {"messages": [{"role": "user", "content": "Go."}]} | given
            async with client.post(f"{model.base_url}/chat/completions", json=body) as answer:
                said[name] = [answer.status, (await answer.json())["error"]]
    with open(row["path"], "w") as file:
        json.dump(said, file)
    return 1.0


def test_what_would_be_dropped_is_refused_by_name(checkpoint, tmp_path):
    sampling: list[Sampling] = []
    rows = [{"path": str(tmp_path / "said.json")}]
    (one,) = run(Program(ask_too_much), checkpoint, rows, lambda *_: "x", sampling=sampling)
    assert one.failure is None
    assert sampling == []  # the model was asked for nothing
    said = json.loads((tmp_path / "said.json").read_text())
    assert {status for status, _ in said.values()} == {400}
    for name in REFUSED:
        error = said[name][1]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter"), error
        assert error["message"].startswith(f"{name}={REFUSED[name]!r}: ")
    assert "Did you mean 'temperature'?" in said["tempreature"][1]["message"]
    assert said["number"][1]["param"] == "n"
    assert "max_tokens" in said["both"][1]["message"]
    assert "image_url" in said["image"][1]["message"]
    assert said["streaming"][1]["param"] == "stream"
    assert said["options"][1]["param"] == "stream_options"


def test_processes_of_a_recent_call_are_as_many_as_this_one_may_have(checkpoint):
    from hybridflow.environments.session_process import SessionProcess
    from hybridflow.environments.sessions import RecentProcesses  # not in the processes: it imports torch

    given = SessionProcess(EnvironmentLoop(Guess, 4), checkpoint, (0,), 10.0, {}, 0)
    recent = RecentProcesses(1)
    try:
        _, processes = recent.of(given, None, 4)
        first = [processes.fork() for _ in range(4)]
        first[0].retiring = True
        assert recent.of(given, None, 2)[1] is processes
        assert len(processes.workers) == 2
        assert first[0] not in processes.workers
    finally:
        recent.close()
