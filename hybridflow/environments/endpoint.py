"""Endpoint: the model of a process's trajectories as OpenAI-compatible chat completions on loopback, so that agents
which know nothing of this library are recorded.

    client -> POST /v1/chat/completions, a trajectory's key -> Conversation.answer -> the message as JSON, or streamed
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.environments.rendering import ContextFullError, Message
from hybridflow.errors import HybridFlowError, PromptError, nearest

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse

_SAMPLING = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words")
_SAMPLING += ("stop_token_ids", "logit_bias", "ignore_eos")  # as in `hf.Sampling`
_READ = ("messages", "model", "tools", "tool_choice", "stream", "stream_options", "temperature", "top_k", "stop")
_READ += ("max_tokens", "max_completion_tokens")
_LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # change no answer
_USUAL = {"n": 1, "logprobs": False, "top_logprobs": 0, "parallel_tool_calls": True}  # what an answer is without them
_USUAL |= {"response_format": {"type": "text"}, "modalities": ["text"]}
_WHY = {
    "n": "a turn of a trajectory is one choice. Give n= to the call that runs the agents",
    "seed": "draws follow from the trajectory, so that those of one prompt differ. Give seed= to the call",
    "chat_template_kwargs": "one template writes all turns. Give chat_template_kwargs= to the call",
    "stream_options": "only include_usage, and stream as true or false, are served",
    "tool_choice": "the model decides whether it calls tools. Leave it out, or the tools",
}
_LARGEST_REQUEST = 1 << 26  # bytes


class _UnsupportedError(PromptError):
    """A client asks for what would not be done."""

    def __init__(self, name: str, value: Any) -> None:
        known = {*_SAMPLING, *_READ, *_LABELS, *_USUAL}
        advice = _WHY.get(name) or (
            f"only {_USUAL[name]!r} is served. Leave it out"
            if name in _USUAL
            else f"this endpoint does not know it.{nearest(name, known)} Leave it out"
        )
        super().__init__(f"{name}={value!r}: {advice}.")
        self.parameter = name


class _Answering(Protocol):
    async def answer(self, messages: Sequence[Message], tools: Sequence[Any] = (), **sampling: Any) -> Any: ...


class Endpoint:
    """Serves the conversations that are open, each by a key of its own, in `loop`; begins with the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock = loop, threading.Lock()
        self._open: dict[str, _Answering] = {}
        self._socket: socket.socket | None = None
        self._serving: Future[None] | None = None

    def open(self, conversation: _Answering) -> tuple[str, str]:
        """The base URL, and the key of this conversation; from any thread."""
        with self._lock:
            if self._socket is None:
                self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
                self._serving = asyncio.run_coroutine_threadsafe(self._serve(self._socket), self._loop)
        key = secrets.token_urlsafe(24)
        self._open[key] = conversation
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1", key

    def close(self, key: str) -> None:
        """Answer this conversation no more."""
        self._open.pop(key, None)

    async def _serve(self, listening: socket.socket) -> None:
        from aiohttp import web

        application = web.Application(client_max_size=_LARGEST_REQUEST)
        application.router.add_post("/v1/chat/completions", self._completion)
        application.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening).start()

    async def _models(self, request: Request) -> StreamResponse:
        from aiohttp import web

        del request
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _completion(self, request: Request) -> StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (conversation := self._open.get(key)) is None:
            return _refusal(
                401, "this key is of no trajectory under way: give api_key=model.api_key.", "invalid_api_key"
            )
        try:
            asked = await request.json()
            messages, tools, sampling = _asked(asked)
            answer = await conversation.answer(messages, tools, **sampling)
        except _UnsupportedError as error:
            return _refusal(400, str(error), "unsupported_parameter", error.parameter)
        except PromptError as error:
            full = isinstance(error, ContextFullError)
            return _refusal(400, str(error), "context_length_exceeded" if full else "invalid_prompt")
        except (HybridFlowError, ValueError, TypeError, KeyError, RecursionError) as error:
            return _refusal(400, f"{type(error).__name__}: {error}", "invalid_request")
        reason = "tool_calls" if answer.message.get("tool_calls") else "stop"
        if answer.turn.end == "length":
            reason = "length"
        tokens = answer.prompt_tokens, len(answer.turn.token_ids)
        return await _completed(request, asked, answer.message, reason, tokens)


def _refusal(status: int, message: str, code: str, parameter: str | None = None) -> StreamResponse:
    from aiohttp import web

    error = {"message": message, "type": "invalid_request_error", "code": code, "param": parameter}
    return web.json_response({"error": error}, status=status)


def _asked(request: Any) -> tuple[list[Message], list[Any], dict[str, Any]]:
    """Messages, tools and sampling of a request. Errors: PromptError for what would be dropped, too."""
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise PromptError("the request has no messages: give a list of them.")
    given = {name: value for name, value in request.items() if value is not None}
    for name, value in given.items():
        if name not in (*_SAMPLING, *_READ, *_LABELS) and not (name in _USUAL and _equal(value, _USUAL[name])):
            raise _UnsupportedError(name, value)
    if not _equal(choice := given.get("tool_choice", "auto"), "auto") and (choice != "none" or given.get("tools")):
        raise _UnsupportedError("tool_choice", choice)
    stream, options = given.get("stream", False), given.get("stream_options", {})
    if not isinstance(stream, bool):
        raise _UnsupportedError("stream", stream)
    if not isinstance(options, Mapping) or {*options} - {"include_usage"}:
        raise _UnsupportedError("stream_options", options)
    sampling = {name: given[name] for name in _SAMPLING if name in given}
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len({json.dumps(one) for one in limits.values()}) > 1:
        raise PromptError(f"{limits} differ, and name the same limit: give one of them.")
    if limits:
        sampling["max_tokens"] = next(iter(limits.values()))
    if "temperature" in given:
        greedy = _equal(given["temperature"], 0) or _equal(given["temperature"], 0.0)
        sampling |= {"greedy": True} if greedy else {"temperature": given["temperature"]}
    if "top_k" in given:
        sampling["top_k"] = 0 if _equal(given["top_k"], -1) else given["top_k"]  # vLLM's word for all
    if "stop" in given:
        sampling["stop"] = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
    return [_heard(message) for message in request["messages"]], given.get("tools", []), sampling


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other  # True is no 1


def _heard(message: Any) -> Message:
    """A client's message as templates want it: text as text, arguments of calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message needs 'role' and 'content', got {message!r}.")
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise PromptError(f"a message has a part that is no text: {str(part)[:200]}. The model reads texts.")
        out["content"] = "".join(part["text"] for part in content)
    else:
        out["content"] = content
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [{**call, "function": _as_object(call["function"])} for call in calls]
    return out


def _as_object(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    return {**function, "arguments": json.loads(given) if isinstance(given, str) else given}


async def _completed(
    request: Request, asked: Mapping[str, Any], said: Mapping[str, Any], reason: str, tokens: tuple[int, int]
) -> StreamResponse:
    """The whole answer, or with `stream` its pieces: one with everything, and its end."""
    from aiohttp import web

    calls = [  # arguments as text
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.get("tool_calls", ())
    ]
    message = {"role": "assistant", "content": said["content"], **({"tool_calls": calls} if calls else {})}
    name = str(asked.get("model") or "policy")
    common = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": name}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
    numbered = [{"index": number, **call} for number, call in enumerate(calls)]
    delta = message | ({"tool_calls": numbered} if calls else {})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choices = [{"index": 0, "delta": delta, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": reason}]
    pieces: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
    if (asked.get("stream_options") or {}).get("include_usage"):
        pieces.append({"choices": [], "usage": usage})
    for piece in pieces:
        text = json.dumps({**common, "object": "chat.completion.chunk", **piece})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
