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
from hybridflow.errors import HybridFlowError, PromptError

if TYPE_CHECKING:
    from aiohttp.web import Request, StreamResponse

_SAMPLING = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words")
_SAMPLING += ("stop_token_ids", "logit_bias")
_LARGEST_REQUEST = 1 << 26  # bytes


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
        except PromptError as error:
            full = isinstance(error, ContextFullError)
            return _refusal(400, str(error), "context_length_exceeded" if full else "invalid_prompt")
        except (HybridFlowError, ValueError, TypeError, KeyError, RecursionError) as error:
            return _refusal(400, f"{type(error).__name__}: {error}", "invalid_request")
        reason = "tool_calls" if answer.message.get("tool_calls") else "stop"
        if answer.turn.end == "length":
            reason = "length"
        tokens = answer.prompt_tokens, len(answer.turn.token_ids)
        return await _completed(request, asked, _message(answer.message), reason, tokens)


def _refusal(status: int, message: str, code: str) -> StreamResponse:
    from aiohttp import web

    error = {"message": message, "type": "invalid_request_error", "code": code}
    return web.json_response({"error": error}, status=status)


def _asked(request: Any) -> tuple[list[Message], list[Any], dict[str, Any]]:
    """Messages, tools and sampling of a request. Errors: PromptError."""
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list) or not request["messages"]:
        raise PromptError("the request has no messages: give a list of them.")
    if request.get("n") not in (None, 1):
        raise PromptError(f"n={request['n']!r}: a turn of a trajectory is one choice. Leave n out.")
    sampling: dict[str, Any] = {}
    if (most := request.get("max_completion_tokens") or request.get("max_tokens")) is not None:
        sampling["max_tokens"] = most
    if (stop := request.get("stop")) is not None:
        sampling["stop"] = [stop] if isinstance(stop, str) else stop
    sampling |= {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    return [_heard(message) for message in request["messages"]], request.get("tools") or [], sampling


def _heard(message: Any) -> Message:
    """A client's message as templates want it: text as text, arguments of calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"a message needs 'role' and 'content', got {message!r}.")
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content", "")
    if isinstance(content, list):
        out["content"] = "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    else:
        out["content"] = content
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [{**call, "function": _as_object(call["function"])} for call in calls]
    return out


def _as_object(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    return {**function, "arguments": json.loads(given) if isinstance(given, str) else given}


def _message(said: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant's message as clients want it: arguments of calls as text."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.get("tool_calls", ())
    ]
    return {"role": "assistant", "content": said["content"], **({"tool_calls": calls} if calls else {})}


async def _completed(
    request: Request, asked: Mapping[str, Any], message: dict[str, Any], reason: str, tokens: tuple[int, int]
) -> StreamResponse:
    """The whole answer, or with `stream` its pieces: one with everything, and its end."""
    from aiohttp import web

    name = str(asked.get("model") or "policy")
    common = {"id": f"chatcmpl-{secrets.token_hex(8)}", "created": int(time.time()), "model": name}
    if not asked.get("stream"):
        usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({**common, "object": "chat.completion", "choices": [choice], "usage": usage})
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece, end in ((delta, None), ({}, reason)):
        choice = {"index": 0, "delta": piece, "finish_reason": end}
        text = json.dumps({**common, "object": "chat.completion.chunk", "choices": [choice]})
        await response.write(f"data: {text}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
