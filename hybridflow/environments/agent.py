"""Agent: how the responses of a call come about over several turns, as the driver gives it and a model's host runs it.

driver: generate_sequences(batch, tools=...) -> Agent -> checked
host:   Agent -> AgentTurns (a RowSource) -> engine.serve -> AgentTurns.ended, one EndedTrajectory for each
"""

from __future__ import annotations

import inspect
import json
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

from hybridflow.config import Sampling
from hybridflow.data.tokenizer import has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.requests import stop_token_ids
from hybridflow.engines.vllm.seeds import derived_seed
from hybridflow.environments.acting import Act, EnvironmentLoop, Program, ToolLoop, public_methods
from hybridflow.environments.rendering import ChatRenderer
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import Asked, EndedTrajectory, Sessions
from hybridflow.environments.tools import schema_of
from hybridflow.errors import ConfigError, HybridFlowError, PromptError, RewardError
from hybridflow.settings import require

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""With on_failure="retry"."""
_CONVERSATIONS = 4
"""Of one trajectory that have their KV cache."""


@dataclass(frozen=True)
class Agent:
    """`tools`, an `environment` or `solve` of the user's own, and how they are run.

    The agents run in `workers` processes per generation replica, `concurrency` trajectories at once. A call of a tool,
    an environment or `solve` (between two turns of the model) may take `timeout` seconds. A trajectory whose
    environment failed is masked ("mask"), begun anew up to two times and then masked ("retry"), or an error ("raise").
    """

    tools: Sequence[Callable[..., Any]] = ()
    environment: Callable[[], Any] | None = None
    solve: Callable[..., Any] | None = None
    max_turns: int = 8
    workers: int = 1
    concurrency: int = 256
    timeout: float = 60.0
    on_failure: Literal["mask", "retry", "raise"] = "mask"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

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
        def whole(name: str) -> None:
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name}={value!r}: give a whole number of at least 1.")

        for name in ("max_turns", "workers", "concurrency"):
            whole(name)
        good = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool) and self.timeout > 0
        require(good, f"timeout={self.timeout!r}: give seconds, above 0.")
        choices = ("mask", "retry", "raise")
        require(self.on_failure in choices, f"on_failure={self.on_failure!r}: give one of {', '.join(choices)}.")
        require(
            not (self.tools and self.environment is not None),
            "tools= and environment= together: make the tools methods of the environment.",
        )
        require(
            isinstance(self.tools, list | tuple),
            f"tools={self.tools!r}: give a list of functions.",
        )
        if self.solve is not None:
            require(
                inspect.iscoroutinefunction(inspect.unwrap(self.solve)),
                f"run(solve={self.solve!r}): give a function `async def solve(row, model)`.",
            )
        if self.environment is not None:
            _check_environment(self.environment)

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
        return ToolLoop(tuple(self.tools), self.max_turns)

    def check(self, checkpoint: str, columns: Sequence[str]) -> None:
        """Errors: ConfigError and PromptError for what no trajectory could begin with."""
        what = "tools=" if self.tools else "environment=" if self.environment is not None else "run(...)"
        if not has_tokenizer(checkpoint):
            raise ConfigError(f"{what} talks with the model in texts, and {checkpoint} has no tokenizer. Add one.")
        schemas = self._schemas()
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
        if self.solve is None:
            _check_template(checkpoint, json.dumps(schemas), json.dumps(dict(self.chat_template_kwargs)))

    def _schemas(self) -> list[dict[str, Any]]:
        if self.tools:
            return [schema_of(tool) for tool in self.tools]
        made = getattr(self.environment, "environment", self.environment)  # the class that it makes, where it says so
        if not isinstance(made, type) or hasattr(made, "step"):
            return []
        methods = [getattr(made, name) for name in public_methods(made)]
        return [schema_of(types.MethodType(one, object())) for one in methods if isinstance(one, types.FunctionType)]

    def process(self, checkpoint: str) -> SessionProcess:
        stop_ids = tuple(stop_token_ids(Path(checkpoint)))
        return SessionProcess(self.act, checkpoint, stop_ids, self.timeout, dict(self.chat_template_kwargs))


AGENT_SETTINGS = tuple(one.name for one in fields(Agent))
"""Settings of a call that are not those of the sampling."""


def _check_environment(given: Any) -> None:
    """Errors: ConfigError for a class without the methods of an environment."""
    require(callable(given), f"environment={given!r}: give a class, or a function that makes an environment.")
    if not isinstance(given, type):
        return
    require(hasattr(given, "reset"), f"environment={given.__name__}: it has no reset(**row).")
    require(
        hasattr(given, "step") or hasattr(given, "get_reward"),
        f"environment={given.__name__}: it needs step(text) -> (observation, reward, done), or get_reward() beside "
        f"public methods, which are tools.",
    )


@lru_cache(maxsize=32)
def _check_template(checkpoint: str, schemas: str, options: str) -> None:
    _ = ChatRenderer(
        load_tokenizer(checkpoint), stop_token_ids(Path(checkpoint)), json.loads(schemas), json.loads(options)
    )


def _row_id(key: int) -> int:
    """Of the turns of a trajectory."""
    return -1 - key


class AgentTurns:
    """The agents of one call on the first rank of a replica: a RowSource of the model's turns.

    `sessions()` makes or finds the processes that run them, in the first poll, whose errors all ranks are given.
    `ended` has every trajectory by key, once the source has no more.
    """

    def __init__(
        self,
        sessions: Callable[[], Sessions],
        sampling: Sampling,
        rows: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        on_failure: str,
    ) -> None:
        self._begin, self._sampling = sessions, replace(sampling, n=1)
        self._rows, self._seeds = rows, seeds
        self._left = dict.fromkeys(range(len(rows)), (_ATTEMPTS if on_failure == "retry" else 1) - 1)
        self._asked: dict[str, Asked] = {}  # by the names of the rows under way
        self._past: dict[int, dict[int, list[int]]] = {}  # of each trajectory: tokens of the last row with an index
        self._done: list[str] = []
        self.ended: dict[int, EndedTrajectory] = {}
        self.prefilled: dict[int, int] = dict.fromkeys(range(len(rows)), 0)

    @cached_property
    def _sessions(self) -> Sessions:
        found = self._begin()
        for key, row in enumerate(self._rows):
            found.start(key, row, self._seeds[key])
        return found

    def poll(self, seconds: float) -> list[Row] | None:
        """The turns to sample next, waiting up to `seconds` for the first; None once all trajectories have ended."""
        asked = self._sessions.poll(seconds)
        for key, one in self._sessions.take().items():
            self._done += [f"{_row_id(key)}.{index}" for index in self._past.pop(key, ())]
            if one.failure is not None and self._left[key]:
                self._left[key] -= 1
                again = derived_seed(self._seeds[key], (1 << 40) + self._left[key])
                self._sessions.start(key, self._rows[key], again)
            else:
                self.ended[key] = one
        out = []
        for one in asked:
            try:
                sampling = replace(self._sampling, **one.sampling)
            except (HybridFlowError, TypeError) as error:
                self._sessions.refuse(one, str(error), full=False)
                continue
            row = Row(_row_id(one.key), self._index(one), one.ids, sampling, one.seed, kept=True)
            self._asked[row.name] = one
            out.append(row)
        return None if not out and len(self.ended) == len(self._rows) else out

    def finished(self, row: Row) -> None:
        """The engine has sampled this turn."""
        asked = self._asked.pop(row.name)
        if asked.key in self.ended:
            self._done.append(row.name)
        else:
            self._past.setdefault(asked.key, {})[row.index] = row.prompt_ids + row.token_ids
        self.prefilled[asked.key] += row.prefilled
        self._sessions.answer(asked, row.token_ids, row.log_probs, row.policy_version, row.end)

    def refused(self, row: Row, why: str, full: bool) -> None:
        """The engine cannot take this turn; `full`: its ids leave no room for a response."""
        self._sessions.refuse(self._asked.pop(row.name), why, full)

    def done(self) -> list[str]:
        """The names, since the last call, of rows that no further turn continues: their trajectories have ended."""
        found, self._done = self._done, []
        return [name for name in found if name not in self._asked]

    def _index(self, asked: Asked) -> int:
        """The index of a row whose KV cache holds most of what was asked, or of none."""
        past, row_id = self._past.get(asked.key, {}), _row_id(asked.key)
        free = {index: ids for index, ids in past.items() if f"{row_id}.{index}" not in self._asked}
        fitting = [index for index, ids in free.items() if asked.ids[: len(ids)] == ids]
        if fitting:
            return max(fitting, key=lambda index: len(free[index]))
        if len(free) >= _CONVERSATIONS:
            return next(iter(free))
        return next(index for index in count() if index not in past and f"{row_id}.{index}" not in self._asked)

    def report_failures(self, row_ids: Sequence[int], raises: bool) -> None:
        """Logs a warning with the first trajectories whose environment failed; `row_ids` by key.

        Errors: RewardError instead, where the call `raises`.
        """
        failed = [(key, one.failure) for key, one in sorted(self.ended.items()) if one.failure is not None]
        if not failed:
            return
        named = "; ".join(f"row {row_ids[key]}: {why}" for key, why in failed[:3])
        text = f"the environments of {len(failed)} of {len(self.ended)} trajectories failed: {named}."
        if raises:
            raise RewardError(f'{text} on_failure="mask" or "retry" would train on the others.')
        logger.warning("%s They are masked.", text)
