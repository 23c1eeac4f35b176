"""The three ways to act: functions as tools, an environment, and a program of the user's own. Each is a loop around a
Conversation, run by `session_process.py`; what a loop ends with is an Ending."""

from __future__ import annotations

import asyncio
import inspect
import logging
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

from PIL import Image

from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.tokenizer import is_image
from hybridflow.environments.conversation import Answer, Conversation, Pictures
from hybridflow.environments.rendering import ContextFullError, Message
from hybridflow.environments.tool_calls import ToolCall, schema_of
from hybridflow.errors import PromptError
from hybridflow.processes.fork_server import reason_of
from hybridflow.settings import is_number

logger = logging.getLogger(__name__)

Stop = Literal["answer", "done", "turns", "length", "failure"]
"""Why a trajectory ended: the model answered without calling a tool, the environment or program was done, `max_turns`
were taken, a turn or the context had no room, or the environment failed."""
STOPS: tuple[Stop, ...] = ("answer", "done", "turns", "length", "failure")
_MOST_THREADS = 256
LARGEST_TEXT = 1 << 18
"""Characters of one answer of a tool or an environment."""


class EnvironmentCallError(Exception):
    """An environment, tool or program did not do its part: it was late, died, or answered with nonsense."""


@dataclass(frozen=True)
class Ending:
    """Of one trajectory: why it ended, its reward (None: the environment gives none), and figures to report."""

    stop: Stop
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class UserCalls:
    """Calls the user's functions with a deadline of `seconds` each: async ones on the event loop, others in threads.

    A thread cannot be ended, so a late call keeps its own; `stuck` counts them.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.stuck = seconds, 0
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="environment")

    async def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Errors: EnvironmentCallError for a call that is late; what the function raises."""
        threaded = not inspect.iscoroutinefunction(inspect.unwrap(function))
        try:
            async with asyncio.timeout(self.seconds) as clock:
                if threaded:
                    loop = asyncio.get_running_loop()
                    value = await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))
                else:
                    value = function(*args, **kwargs)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            if not clock.expired():
                raise  # the function's own
            self.stuck += threaded
            raise EnvironmentCallError(f"{what} took longer than {self.seconds:g} s") from None
        except asyncio.CancelledError:
            self.stuck += threaded
            raise


def text_of(what: str, value: Any) -> str:
    """An answer as text. Errors: EnvironmentCallError for one that is too large."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > LARGEST_TEXT:
        raise EnvironmentCallError(f"{what} answered with {len(text)} characters; at most {LARGEST_TEXT} are read")
    return text


def content_of(what: str, value: Any, pictures: Pictures) -> str | list[dict[str, Any]]:
    """An answer as the content of a message: text, or texts and images in their order. Errors: EnvironmentCallError
    for one that is too large, and for images that cannot be read, or where the model reads text only."""
    several = value if isinstance(value, list | tuple) else [value]
    for one in several if pictures.most_pixels else ():  # bytes, or an array of three axes, would be read as text
        raw = isinstance(one, bytes | bytearray) and not isinstance(one, EncodedImage)
        if raw or len(getattr(one, "shape", ())) >= 3:
            raise EnvironmentCallError(f"{what} answered with {type(one).__name__}: give an image of PIL, or text")
    if not any(map(_is_image, several)):
        return text_of(what, value)
    if not pictures.most_pixels:
        raise EnvironmentCallError(f"{what} answered with an image, and the model reads text only: return text")
    parts = list[dict[str, Any]]()
    for number, one in enumerate(several):
        given = one if isinstance(one, Mapping) else {"image": one, "text": one}
        if not _is_image(one):
            parts.append({"type": "text", "text": text_of(what, given.get("text"))})
        elif is_image(one):
            parts.append({"type": "image"})
        else:
            try:
                image = pictures.encoded(f"{what}: part {number}", given.get("image"))
            except PromptError as error:
                raise EnvironmentCallError(str(error)) from None
            parts.append({"type": "image", "image": image})
    return parts


async def _beside(read: Callable[..., Any], what: str, value: Any, pictures: Pictures) -> Any:
    """`read` these; beside the loop that trajectories share where images, which take long, may be among them."""
    if not pictures.most_pixels:
        return read(what, value, pictures)
    return await asyncio.to_thread(read, what, value, pictures)


def _is_image(value: Any) -> bool:
    """Whether it is an image of PIL, or a part of a message that is one."""
    part = value.get("type") if isinstance(value, Mapping) else None
    return isinstance(value, Image.Image | EncodedImage) or (isinstance(part, str) and part.startswith("image"))


def _reward(what: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise EnvironmentCallError(f"{what} gave the reward {value!r:.200}, which is no number")
    if not is_number(number := float(value)):
        raise EnvironmentCallError(f"{what} gave the reward {number}, which is not finite")
    return number


React = Callable[[Answer, bool], Awaitable[tuple[Stop | None, list[Message]]]]
"""To a turn of the model, and whether it is the last one: why the trajectory ends, or what the model hears next."""


def _tools(functions: Mapping[str, Callable[..., Any]], session: Conversation, caller: UserCalls) -> React:
    """The answers of functions that the model calls, by name, in order; all are made at once. What a tool raises is an
    answer, too."""
    metrics = session.metrics

    async def one(number: int, call: ToolCall) -> Message:
        metrics["tool_calls"] = metrics.get("tool_calls", 0.0) + 1
        text, function = call.error, functions.get(call.name)
        if not text and function is None:
            text = f"there is no tool {call.name!r}; the tools are {', '.join(sorted(functions))}."
        elif not text and function is not None:
            try:
                inspect.signature(function).bind(**call.arguments)
            except TypeError as error:
                text = f"{call.name}: {error}."
        if not text:
            try:
                answer = await caller.call(f"tool {call.name}", functions[call.name], **call.arguments)
                return _answer(number, call, await _beside(content_of, f"tool {call.name}", answer, session.images))
            except EnvironmentCallError:
                raise
            except Exception as error:  # the tool's own
                text = f"{type(error).__name__}: {error}"
        metrics["tool_errors"] = metrics.get("tool_errors", 0.0) + 1
        return _answer(number, call, f"Error: {text}"[:LARGEST_TEXT])

    async def react(said: Answer, last: bool) -> tuple[Stop | None, list[Message]]:
        if said.turn.end == "length" or not said.calls:
            return "length" if said.turn.end == "length" else "answer", []
        calls = () if last else enumerate(said.calls)
        return None, await asyncio.gather(*(one(number, call) for number, call in calls))

    return react


def _answer(number: int, call: ToolCall, content: Any) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": call.name, "content": content}


def messages_of(row: Mapping[str, Any]) -> list[Message]:
    prompt = row.get("prompt")
    if prompt is None:
        return []
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


@dataclass(frozen=True)
class ToolLoop:
    """The model calls `tools` until it answers without a call."""

    tools: tuple[Callable[..., Any], ...]
    max_turns: int

    def __post_init__(self) -> None:
        _ = self.schemas  # sent with it: transformers imports torch to make them

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        return [schema_of(tool) for tool in self.tools]

    async def __call__(self, row: Mapping[str, Any], session: Conversation, caller: UserCalls) -> Ending:
        names = [schema["function"]["name"] for schema in self.schemas]
        react = _tools(dict(zip(names, self.tools, strict=True)), session, caller)
        return Ending(await _converse(messages_of(row), session, self.max_turns, self.schemas, react))


async def _converse(
    messages: list[Message], session: Conversation, max_turns: int, schemas: Sequence[Any], react: React
) -> Stop:
    """Turns of the model, up to the one to which `react` says why it is the last, or else what the model hears next."""
    for turn in range(1, max_turns + 1):
        try:
            said = await session.answer(messages, schemas)
        except ContextFullError:
            return "length"
        stop, heard = await react(said, turn == max_turns)
        if stop is not None:
            return stop
        messages = [*messages, said.message, *heard]
    return "turns"


@dataclass(frozen=True)
class EnvironmentLoop:
    """The model acts in an environment that `make()` builds for each trajectory, see `hf.Environment`."""

    make: Callable[[], Any]
    max_turns: int

    def __post_init__(self) -> None:
        _ = self.schemas

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """Those of the tools; none where the class of the environments is not known."""
        return [schema_of(types.MethodType(one, object())) for one in self._functions]

    @property
    def _functions(self) -> list[types.FunctionType]:
        """The functions that are the tools of its class."""
        made = getattr(self.make, "environment", self.make)
        while isinstance(made, partial):
            made = made.func
        known = isinstance(made, type) and not hasattr(made, "step")
        return [one for one in public_methods(made).values() if isinstance(one, types.FunctionType)] if known else []

    async def __call__(self, row: Mapping[str, Any], session: Conversation, caller: UserCalls) -> Ending:
        name = getattr(self.make, "__name__", type(self.make).__name__)
        one = await caller.call(name, self.make)
        try:
            parameters = inspect.signature(one.reset).parameters.values()
            everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            wanted = row if everything else {p.name: row[p.name] for p in parameters if p.name in row}
            begun = await caller.call(f"{name}.reset", one.reset, **wanted)
            begin = partial(_begin, messages_of(row))
            messages = await _beside(begin, f"{name}.reset", begun, session.images)
            total, schemas = 0.0, list[dict[str, Any]]()

            async def step(said: Answer, last: bool) -> tuple[Stop | None, list[Message]]:
                nonlocal total
                found = await caller.call(f"{name}.step", one.step, said.message["content"])
                if not isinstance(found, tuple) or len(found) != 3:
                    raise EnvironmentCallError(
                        f"{name}.step returned {found!r:.200}; it must be (observation, reward, done)"
                    )
                observation, reward, done = found
                total += _reward(f"{name}.step", reward)
                if done or said.turn.end == "length":
                    return "done" if done else "length", []
                return None, await _beside(_observed, f"{name}.step", observation, session.images)

            react, steps = step, hasattr(one, "step")
            if not steps:
                methods = public_methods(one)
                known: dict[Any, dict[str, Any]] = dict(zip(self._functions, self.schemas, strict=True))
                schemas = [known.get(getattr(m, "__func__", None)) or schema_of(m) for m in methods.values()]
                react = _tools(methods, session, caller)
            stop = await _converse(messages, session, self.max_turns, schemas, react)
            if not steps or hasattr(one, "get_reward"):
                total = _reward(name, await caller.call(f"{name}.get_reward", one.get_reward))
            return Ending(stop, total)
        finally:
            if hasattr(one, "close"):
                try:
                    await caller.call(f"{name}.close", one.close)
                except Exception:  # whatever it raises: the trajectory, or the error that ended it, stands
                    logger.warning("%s.close failed; its trajectory is kept", name, exc_info=True)


@dataclass(frozen=True)
class Program:
    """`solve(row, model)` of the user's own; it returns the reward, or {"reward": ..., figure: number}."""

    solve: Callable[[Mapping[str, Any], Conversation], Any]

    async def __call__(self, row: Mapping[str, Any], session: Conversation, caller: UserCalls) -> Ending:
        name = getattr(self.solve, "__name__", type(self.solve).__name__)
        try:
            async with asyncio.timeout(caller.seconds) as clock:
                session.limited(clock, caller.seconds)
                found = await self.solve(row, session)
        except ContextFullError:
            return Ending("length")
        except TimeoutError:
            if not clock.expired():
                raise  # the program's own
            raise EnvironmentCallError(
                f"{name} took longer than {caller.seconds:g} s between turns of the model"
            ) from None
        if isinstance(found, Mapping):
            figures = {str(key): _reward(f"{name} ({key})", value) for key, value in found.items()}
            return Ending("done", figures.pop("reward", None), figures)
        return Ending("done", None if found is None else _reward(name, found))


def public_methods(environment: Any) -> dict[str, Callable[..., Any]]:
    """The methods of an environment, or of its class, that are tools: public ones without those of the contract."""
    kind = environment if isinstance(environment, type) else type(environment)
    contract = {"reset", "step", "get_reward", "close"}
    names = [name for name in dir(kind) if not name.startswith("_") and name not in contract]
    return {name: value for name in names if callable(value := getattr(environment, name))}


def _begin(messages: list[Message], what: str, begun: Any, pictures: Pictures) -> list[Message]:
    """The conversation after `reset`: its text joins the last question, or is one; its messages follow."""
    if begun is None or begun == "":
        if not messages:
            raise EnvironmentCallError(f"{what} returned nothing, and the row has no prompt to ask the model")
        return messages
    seen = _observed(what, begun, pictures)
    last = messages[-1] if messages else None
    if isinstance(begun, str) and last is not None and last["role"] == "user" and isinstance(last["content"], str):
        return [*messages[:-1], {**last, "content": last["content"] + "\n\n" + begun}]
    return [*messages, *seen]


def _observed(what: str, found: Any, pictures: Pictures) -> list[Message]:
    if isinstance(found, list) and found and all(isinstance(one, str) for one in found):
        found = "".join(found)  # as parts beside images are
    if isinstance(found, str) or any(map(_is_image, found if isinstance(found, list | tuple) else [found])):
        return [{"role": "user", "content": content_of(what, found, pictures)}]
    good = isinstance(found, list) and found and all(isinstance(one, Mapping) and "role" in one for one in found)
    if not good:
        raise EnvironmentCallError(f"{what} returned {found!r:.200}; it must be text or a list of messages")
    out = list[Message]()
    for message in found:
        content = content_of(what, message.get("content", ""), pictures)
        out.append({**message, "content": content} if isinstance(content, list) else message)
    return out


Act = Callable[[Mapping[str, Any], Conversation, UserCalls], Any]
"""One trajectory, to its Ending."""


def failure_of(error: BaseException) -> str:
    """Why a trajectory failed, in words."""
    return str(error) if isinstance(error, EnvironmentCallError) else reason_of(error)
