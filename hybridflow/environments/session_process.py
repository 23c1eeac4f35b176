"""The process that runs agents: an event loop, one task for each trajectory, and threads only while a call of the
user's functions lasts. Forked from a template (`processes/fork_server.py`), it can be killed at any time.

Messages to the host are JSON lists, so that what an agent says stays data: ["turn", key, number, ids, sampling, names
of images], ["image", key, file], ["end", key, ending], ["failed", key, why], ["stuck", threads], ["beat"]. From the
host come pickles of its own: ("start", key, row, images), ("turn", key, number, token_ids, log_probs, end), ("full",
key, number, why), ("refused", key, number, why), ("cancel", key).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any

from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.environments.acting import Act, Ending, UserCalls, failure_of
from hybridflow.environments.conversation import Conversation, Pictures, Turn
from hybridflow.environments.endpoint import Endpoint
from hybridflow.environments.rendering import ChatRenderer, ContextFullError
from hybridflow.errors import PromptError
from hybridflow.processes.channel import Incoming, framed

BEAT = 1.0  # seconds between two signs of life


@dataclass(frozen=True)
class SessionProcess:
    """What a process needs: `act` for each row, the tokenizer of `checkpoint`, and `seconds` for each call of the
    user's functions. `options` go to the chat template."""

    act: Act
    checkpoint: str
    stop_ids: tuple[int, ...]
    seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)
    most_pixels: int = 0  # of an image; 0: the model reads text only

    @property
    def main(self) -> Callable[[socket.socket], None]:
        """What the process runs, with the tokenizer: to load it there would import torch."""
        return partial(serve_agents, self, _tokenizer(self.checkpoint))


_tokenizer = lru_cache(maxsize=1)(load_tokenizer)


def serve_agents(given: SessionProcess, tokenizer: Tokenizer, connection: socket.socket) -> None:
    """Serve the host at the other end of `connection` until it closes it."""
    connection.setblocking(False)
    asyncio.run(_Running(given, tokenizer).serve(connection))


class _Running:
    def __init__(self, given: SessionProcess, tokenizer: Tokenizer) -> None:
        self._given, self._caller = given, UserCalls(given.seconds)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[tuple[int, int], asyncio.Future[Turn]] = {}
        self._asked = 0
        self._renderers = lru_cache(maxsize=64)(
            lambda tools: ChatRenderer(tokenizer, given.stop_ids, json.loads(tools), given.options)
        )

    async def serve(self, connection: socket.socket) -> None:
        self._endpoint = Endpoint(asyncio.get_running_loop())
        reader, self._writer = await asyncio.open_connection(sock=connection)
        beats = asyncio.create_task(self._beat())
        incoming = Incoming()
        try:
            while piece := await reader.read(1 << 20):  # else the host is gone, or wants no more
                for message in incoming.add(piece):
                    self._take(*pickle.loads(message))
        finally:
            beats.cancel()
            for task in self._tasks.values():
                task.cancel()

    def _take(self, what: str, key: int, *rest: Any) -> None:
        if what == "start":
            self._tasks[key] = asyncio.create_task(self._run(key, *rest))
        elif what == "cancel":
            if (task := self._tasks.get(key)) is not None:
                task.cancel()
        elif (asked := self._turns.pop((key, rest[0]), None)) is not None and not asked.done():
            if what == "turn":
                asked.set_result(Turn(*rest[1:]))
            else:
                asked.set_exception((ContextFullError if what == "full" else PromptError)(rest[1]))

    async def _run(self, key: int, row: Mapping[str, Any], images: int) -> None:
        """One trajectory, to its end."""

        async def sample(ids: Sequence[int], sampling: Mapping[str, Any], shown: Sequence[str]) -> Turn:
            self._asked += 1
            name = key, self._asked
            self._turns[name] = asked = asyncio.get_running_loop().create_future()
            self._say("turn", *name, list(ids), dict(sampling), list(shown))
            try:
                return await asked
            finally:
                self._turns.pop(name, None)

        def show(file: bytes) -> None:
            self._say("image", key, b64encode(file).decode())

        seen = Pictures(images, self._given.most_pixels, show)
        session = Conversation(
            sample, lambda tools: self._renderers(json.dumps(list(tools))), images=seen, _endpoint=self._endpoint
        )
        stuck = self._caller.stuck
        try:
            ending: Ending = await self._given.act(row, session, self._caller)
            metrics = session.metrics | dict(ending.metrics)
            self._say("end", key, asdict(ending) | {"metrics": metrics})
        except BaseException as error:  # the user's code, whose SystemExit or CancelledError ends nothing else either
            self._say("failed", key, failure_of(error))
        finally:
            session.close()
            self._tasks.pop(key, None)
            if self._caller.stuck > stuck:
                self._say("stuck", self._caller.stuck)

    def _say(self, *message: Any) -> None:
        self._writer.write(framed(json.dumps(message).encode()))

    async def _beat(self) -> None:
        while True:
            self._say("beat")
            await asyncio.sleep(BEAT)
