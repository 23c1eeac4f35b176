"""Agent: how the responses of a call come about over several turns, as the driver gives it and a model's host runs it.

driver: generate_sequences(batch, tools=...) -> Agent -> checked
host:   Agent -> Sessions (a RowSource) -> engine.serve -> Sessions.take, the trajectories that have ended
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from hybridflow.batch.batch import Batch
from hybridflow.config import Until
from hybridflow.data.encoded_image import MOST_PIXELS
from hybridflow.data.tokenizer import end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.environments.acting import Act, EnvironmentLoop, Program, ToolLoop
from hybridflow.environments.rendering import ChatRenderer
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import RecentProcesses, Sessions
from hybridflow.environments.trajectory import Acted
from hybridflow.environments.turn_images import TurnImages
from hybridflow.errors import ConfigError, PromptError, RewardError
from hybridflow.models.hf_spec import image_tokens, read_spec
from hybridflow.processes.supervisor import Supervisor
from hybridflow.settings import Check, Fraction, Size, require, settings

if TYPE_CHECKING:
    from hybridflow.engines.vllm.engine import VLLMEngine

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""With on_failure="retry"."""
_ENOUGH = 8
"""Trajectories of which the share that failed says something."""


_Tools = Annotated[tuple[Callable[..., Any], ...], Check("a list of functions", lambda t: isinstance(t, list | tuple))]
_Seconds = Annotated[
    float, Check("a number of seconds above 0", lambda s: isinstance(s, int | float) and s is not True and s > 0)
]


@settings
class Agent:
    """`tools`, an `environment` or `solve` of the user's own, and how they are run.

    The agents run in `workers` processes per generation replica, `concurrency` trajectories at once. A call of a tool,
    an environment or `solve` (between two turns of the model) may take `timeout` seconds. A trajectory whose
    environment failed is masked ("mask"), begun anew up to two times and then masked ("retry"), or an error ("raise").
    Where more than the share `max_failed` of a replica's trajectories failed, or all of them, that is an error, too (of
    at least eight, so that chance decides nothing). `processor` and `max_image_pixels` are those of a PromptLoader, for
    images that agents show; by default the processor is the model's own.
    """

    tools: _Tools = ()
    environment: Callable[[], Any] | None = None
    solve: Callable[..., Any] | None = None
    max_turns: Size = 8
    workers: Size = 1
    concurrency: Size = 256
    timeout: _Seconds = 60.0
    on_failure: Literal["mask", "retry", "raise"] = "mask"
    max_failed: Fraction = 1.0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    processor: Any = None
    max_image_pixels: Size = MOST_PIXELS

    @classmethod
    def of(cls, call: Mapping[str, Any]) -> Self | None:
        """That of a call with these settings; None for plain generation. Errors: ConfigError."""
        own = {name: call[name] for name in AGENT_SETTINGS if name in call}
        if not own.get("tools") and own.get("environment") is None and own.get("solve") is None:
            given = [name for name in own if name not in ("tools", "environment", "solve")]
            require(
                not given, f"{', '.join(given)} without tools= or environment=: nothing would use it. Leave it out."
            )
            return None
        return cls(**own)

    def __post_init__(self) -> None:
        require(
            not (self.tools and self.environment is not None),
            "tools= and environment= together: make the tools methods of the environment.",
        )
        if self.solve is not None:
            require(
                inspect.iscoroutinefunction(inspect.unwrap(self.solve)),
                f"run(solve={self.solve!r}): give a function `async def solve(row, model)`.",
            )
        given = self.environment
        require(
            given is None or callable(given),
            f"environment={given!r}: give a class, or a function that makes an environment.",
        )
        if isinstance(given, type):
            require(hasattr(given, "reset"), f"environment={given.__name__}: it has no reset(**row).")
            require(
                hasattr(given, "step") or hasattr(given, "get_reward"),
                f"environment={given.__name__}: it needs step(text) -> (observation, reward, done), or get_reward() "
                f"beside public methods, which are tools.",
            )

    @property
    def rewards(self) -> bool:
        """Whether its trajectories have rewards."""
        return not self.tools

    @property
    def act(self) -> Act:
        if self.solve is not None:
            return Program(self.solve)
        if self.environment is not None:
            return EnvironmentLoop(self.environment, self.max_turns)
        return ToolLoop(self.tools, self.max_turns)

    def check(self, checkpoint: str, columns: Sequence[str]) -> None:
        """Errors: ConfigError and PromptError for what no trajectory could begin with."""
        what = "tools=" if self.tools else "environment=" if self.environment is not None else "run(...)"
        if not has_tokenizer(checkpoint):
            raise ConfigError(f"{what} talks with the model in texts, and {checkpoint} has no tokenizer. Add one.")
        schemas = list(getattr(self.act, "schemas", ()))
        names = [schema["function"]["name"] for schema in schemas]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, f"tools= has two tools named {', '.join(twice)}. The model calls tools by name: rename one.")
        if "row_id" not in columns:
            raise PromptError(f"{what} names trajectories by 'row_id', which this batch lacks. Add the column.")
        if self.tools and "prompt" not in columns:
            raise PromptError(
                "tools= needs the column 'prompt' (a text or chat messages), because the prompt and the tools are "
                "rendered together. This batch has none."
            )
        if self.processor is not None:
            images = self._images(checkpoint)
            require(images is not None, f"processor= is for images, and {checkpoint} reads text only. Leave it out.")
            _ = images and images.loaded
        if self.solve is None:
            _check_template(checkpoint, json.dumps(schemas), json.dumps(dict(self.chat_template_kwargs)))

    def sessions(self, checkpoint: str, processes: RecentProcesses, numbers: Iterator[int]) -> Sessions:
        """Its trajectories, in `processes` that start when they are needed."""

        def begin() -> tuple[SessionProcess, TurnImages | None, Supervisor]:
            stop_ids, images = end_token_ids(checkpoint), self._images(checkpoint)
            options, pixels = dict(self.chat_template_kwargs), 0 if images is None else images.most_pixels
            process = SessionProcess(self.act, checkpoint, stop_ids, self.timeout, options, pixels)
            return process, *processes.of(process, images, self.workers)

        attempts = _ATTEMPTS if self.on_failure == "retry" else 1
        return Sessions(begin, numbers, workers=self.workers, concurrency=self.concurrency, attempts=attempts)

    def _images(self, checkpoint: str) -> TurnImages | None:
        if (tokens := image_tokens(checkpoint)) is None:
            return None
        context = read_spec(checkpoint, "lm").context
        return TurnImages(tokens, checkpoint, context, self.processor, self.max_image_pixels)

    @property
    def described(self) -> tuple[Any, ...]:
        """Its settings in plain values, equal on all ranks of a replica."""
        given = [*self.tools, self.environment, self.solve]
        names = [getattr(one, "__qualname__", type(one).__qualname__) for one in given]
        others = [one.name for one in fields(self) if one.name not in ("tools", "environment", "solve", "processor")]
        return (*names, *(getattr(self, name) for name in others), repr(self.processor))


AGENT_SETTINGS = tuple(Agent.__dataclass_fields__)
"""Settings of a call that are not those of the sampling."""


@lru_cache(maxsize=32)
def _check_template(checkpoint: str, schemas: str, options: str) -> None:
    _ = ChatRenderer(load_tokenizer(checkpoint), end_token_ids(checkpoint), json.loads(schemas), json.loads(options))


def report_failures(ended: Collection[Acted], agent: Agent) -> None:
    """Logs a warning with the first trajectories whose environment failed. Errors: RewardError instead, where the
    agent says so, and where too many failed."""
    failed = [(one.begun.row_id, one.failure) for one in ended if one.failure is not None]
    if not failed:
        return
    named = "; ".join(f"row {row_id}: {why}" for row_id, why in failed[:3])
    text = f"the environments of {len(failed)} of {len(ended)} trajectories failed: {named}."
    if agent.on_failure == "raise":
        raise RewardError(f'{text} on_failure="mask" or "retry" would train on the others.')
    if len(ended) >= _ENOUGH and (len(failed) == len(ended) or len(failed) > agent.max_failed * len(ended)):
        raise RewardError(f"{text} The limit is max_failed={agent.max_failed:g}, and all of them are always too many.")
    logger.warning("%s They are masked.", text)


class ActingSession:
    """Trajectories that live across the calls of one rank of a replica, as a session of rows does.

    Between two calls their agents wait in their processes, beside the first rank, and turns under way in the engine.
    `under_way` is an upper bound of the trajectories that have not ended. `_untaken`: trajectories may have ended
    during a weight transfer and wait for `advance`. Both are equal on all ranks.
    """

    def __init__(self, engine: VLLMEngine, checkpoint: str, numbers: Iterator[int]) -> None:
        self._engine, self._checkpoint, self._numbers = engine, checkpoint, numbers
        self.under_way, self._untaken = 0, False
        self._kept: set[str] = set()  # turns under way
        self._agent: Agent | None = None
        self._processes = RecentProcesses(1)
        self._turns: Sessions | None = None  # those of the first rank do something
        self._failed: Exception | None = None  # of turns during a weight transfer

    def check(self, agent: Agent | None) -> None:
        """Errors: ConfigError for a call that mixes trajectories with others or with rows; what failed meanwhile."""
        if (failed := self._failed) is not None:
            self._failed = None
            raise failed
        if agent is not None and any(row.row_id >= 0 for row in self._engine.unfinished):
            raise ConfigError(
                "this session has unfinished rows, and trajectories have one of their own: withdraw_rows()."
            )
        same = agent is not None and self._agent is not None and agent.described == self._agent.described
        if (self.under_way or self._untaken) and not same:
            raise ConfigError(
                "this session has trajectories under way: give the same tools=, environment= or solve= with the same "
                "settings until they were returned, or withdraw_rows() first."
            )

    def start(self, agent: Agent, begun: Sequence[Row], batch: Batch, n: int) -> None:
        """Begin `n` trajectories per row of `batch`."""
        if not self.under_way:
            same = self._agent is not None and self._agent.described == agent.described
            if self._turns is None or not (same and self._turns.ended):
                self._turns = agent.sessions(self._checkpoint, self._processes, self._numbers)
            self._agent = agent
        self.under_way += len(begun)
        if self._engine.is_first:
            assert self._turns is not None
            self._turns.start(begun, [row for row in batch.to_dicts() for _ in range(n)])

    def advance(self, until: Until) -> list[Acted] | None:
        """Go on until `until`; the trajectories that have ended, in the order in which they began. None on other ranks.

        Errors: RewardError for one that failed, where the agent says so, on the first rank.
        """
        start, turns, self._untaken = 0.0, self._turns, False

        def reached() -> bool:
            nonlocal start
            assert turns is not None
            start = start or time.monotonic()  # the first poll is in time
            return (
                (until.rows is not None and len(turns.ended) >= until.rows)
                or (until.groups is not None and turns.groups() >= until.groups)
                or (until.seconds is not None and time.monotonic() - start >= until.seconds)
            )

        if self.under_way:
            self._serve(reached)
        if not self._engine.is_first:
            return None
        acted = [] if turns is None else turns.take()
        if self._agent is not None:
            report_failures(acted, self._agent)
        return acted

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Go on as long as `going()` on the first rank. What the agents raise is raised by the next call."""
        self._untaken = self._untaken or self.under_way > 0
        try:
            self._serve(lambda: not going())
        except Exception as error:
            self._failed = error

    def _serve(self, reached: Callable[[], bool]) -> None:
        try:
            if self._turns is not None:
                self._turns.reached = reached
            self.under_way = self._engine.serve(self._turns if self._engine.is_first else None, self._kept)
        except BaseException:
            self.close()
            raise

    def withdraw(self, row_ids: Sequence[int] | None, keep: bool) -> list[dict[str, Any]]:
        """See `Sessions.withdraw`; on the first rank."""
        found = [] if self._turns is None else self._turns.withdraw(row_ids, keep)
        if row_ids is None and not keep:
            self._engine.abandon(self._kept)
            self.under_way, self._untaken = 0, False
            if self._turns is not None:
                _ = self._turns.take()  # those that ended, too
        return found

    def close(self) -> None:
        """End all trajectories and their processes. May be called twice."""
        self.under_way, self._untaken, self._turns = 0, False, None
        self._processes.close()
