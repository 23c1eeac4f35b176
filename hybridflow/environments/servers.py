"""Environments and tools of servers: OpenEnv's (`reset(**row)`, `step(text)`, as any environment), and functions that
the model calls of MCP's (https://modelcontextprotocol.io)."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from hybridflow.environments.acting import LARGEST_TEXT, EnvironmentCallError
from hybridflow.errors import ConfigError
from hybridflow.rewards.function_adapters import run_async

_REACHING, _STARTING = 10.0, 60.0  # seconds in which a server must answer, on the driver: OpenEnv's, and MCP's


class OpenEnvGame:
    """One episode of an OpenEnv server, over its WebSocket, where a connection is an episode (the messages are those of
    openenv-core 0.3, which is not needed here)."""

    def __init__(self, url: str, action: str, observation: str | None) -> None:
        self._url, self._action, self._observation = url, action, observation
        self._session: Any = None

    async def reset(self, **row: Any) -> str:
        import aiohttp

        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(self._url, max_msg_size=16 * LARGEST_TEXT)
        except aiohttp.ClientError as error:
            raise EnvironmentCallError(f"the OpenEnv server at {self._url} cannot be reached: {error}") from None
        seed = row.get("seed", row.get("row_id"))
        found = await self._ask("reset", {} if seed is None else {"seed": int(seed)})
        return self._seen(found)

    async def step(self, text: str) -> tuple[str, float, bool]:
        found = await self._ask("step", {self._action: text})
        return self._seen(found), found.get("reward") or 0.0, bool(found.get("done"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._socket.send_json({"type": what, "data": data})
        told = await self._socket.receive()
        try:
            answer = json.loads(told.data)
            kind, found = answer["type"], answer["data"]
        except (TypeError, ValueError, KeyError):
            raise EnvironmentCallError(
                f"the OpenEnv server at {self._url} answered {what} with {str(told.data)[:200]!r} ({told.type.name})"
            ) from None
        if kind != "observation":
            raise EnvironmentCallError(f"the OpenEnv server at {self._url} answered {what}: {json.dumps(found)[:500]}")
        return found

    def _seen(self, found: Mapping[str, Any]) -> str:
        whole = found.get("observation")
        if self._observation is None:
            return whole if isinstance(whole, str) else json.dumps(whole)
        if not isinstance(whole, Mapping) or self._observation not in whole:
            raise EnvironmentCallError(
                f"the OpenEnv server at {self._url} has no field {self._observation!r} in its observation {whole!r}"
            )
        return str(whole[self._observation])


def openenv(url: str, *, action: str = "message", observation: str | None = None) -> Callable[[], Any]:
    """An environment of the OpenEnv server at `url`, such as "http://127.0.0.1:8000".

    What the model says is the field `action` of the server's actions. It sees the field `observation` of the
    observations; None: all of them, as JSON. The row's column `seed` (otherwise `row_id`) seeds the episode.
    Errors: ConfigError when no server is at `url`.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise ConfigError(f'environments.openenv({url!r}): give a URL, such as "http://127.0.0.1:8000".')
    secure = parts.scheme in ("https", "wss")
    try:
        socket.create_connection((parts.hostname, parts.port or (443 if secure else 80)), _REACHING).close()
    except OSError as error:
        raise ConfigError(f"environments.openenv({url!r}): no server answers there ({error}). Start it.") from None
    scheme = "wss" if secure else "ws"
    return partial(OpenEnvGame, f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}/ws", action, observation)


@dataclass(frozen=True)
class McpTool:
    """One tool of the server that `command` starts, or that listens at the URL `command`."""

    command: tuple[str, ...]
    json_schema: Mapping[str, Any] = field(hash=False)

    @property
    def __name__(self) -> str:
        return self.json_schema["function"]["name"]

    async def __call__(self, **arguments: Any) -> str:
        """Errors: McpToolError with what the server says."""
        if (server := _SERVERS.get(self.command)) is None or server.task.done():
            server = _SERVERS[self.command] = _Server(self.command)
        return await server.call(self.__name__, arguments)


class McpToolError(Exception):
    """The server says that the tool failed."""


def mcp(server: str | Sequence[str], *, timeout: float = _STARTING) -> list[McpTool]:
    """The tools of an MCP server, for `tools=`: `tools=hf.environments.mcp(["python", "server.py"])`.

    `server` is a command, which each process that runs agents starts once, or the URL of a server ("http://...", by
    streamable HTTP). It is asked for its tools here, within `timeout` seconds. All trajectories share it.
    Errors: ConfigError when the package `mcp` is missing, or the server does not answer.
    """
    command = (server,) if isinstance(server, str) else tuple(server)
    try:
        listed = run_async(asyncio.wait_for(_listed(command), timeout))
    except ModuleNotFoundError as error:
        raise ConfigError(f"environments.mcp({server!r}): {error}. Install the package mcp.") from None
    except BaseException as error:  # those of the server's transport come in groups
        if isinstance(error, KeyboardInterrupt):
            raise
        why = f"it did not answer within {timeout:g} s" if isinstance(error, TimeoutError) else _words(error)
        raise ConfigError(f"environments.mcp({server!r}): the server cannot be asked for its tools: {why}.") from error
    return [McpTool(command, schema) for schema in listed]


def _words(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _client(command: tuple[str, ...]) -> Any:
    package = importlib.import_module("mcp")
    if len(command) == 1 and command[0].startswith(("http://", "https://")):
        return package.Client(command[0])
    return package.Client(package.StdioServerParameters(command=command[0], args=list(command[1:])))


async def _listed(command: tuple[str, ...]) -> list[dict[str, Any]]:
    async with _client(command) as client:
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if not (cursor := page.next_cursor):
                break
    return [
        {
            "type": "function",
            "function": {"name": one.name, "description": one.description or "", "parameters": one.input_schema},
        }
        for one in tools
    ]


class _Server:
    """A connection of this process. One task holds it, because its context must end where it began."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._hold(command))

    async def _hold(self, command: tuple[str, ...]) -> None:
        try:
            async with _client(command) as client:
                self._ready.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(McpToolError(f"the MCP server cannot be reached: {_words(error)}"))
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        client = await asyncio.shield(self._ready)
        found = await client.call_tool(name, dict(arguments))
        text = "\n".join(getattr(one, "text", f"[{one.type}]") for one in found.content)
        if found.is_error:
            raise McpToolError(text)
        return text


_SERVERS: dict[tuple[str, ...], _Server] = {}
"""Connections of this process."""
