"""Tools of an MCP server, as functions that the model calls (https://modelcontextprotocol.io)."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.function_adapters import run_async

_STARTING = 60.0


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
